"""A session that has what the data source needs, and the same for one that exists already."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pgqrs.errors import InvalidConfig
from pgqrs.spark.java import java_home
from pgqrs.spark.packaging import package_zip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

DEFAULTS = {
    # Else a reader that can filter would have to be one that cannot.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Times are stored in UTC, and are to be seen so.
    "spark.sql.session.timeZone": "UTC",
}


REDACTION = "spark.sql.redaction.string.regex"
PASSWORDS = r"""://[^\s"@/]*:[^\s"@/]*@|[?&]password=[^&\s"]*"""
"""What Spark leaves out of plans, and so of its log of events and its pages: passwords in URLs. It
leaves out the option `url` by itself, but not on Connect, where options are part of the request.
"""


def session(app: str, **conf: Any) -> SparkSession:
    """A Spark session, the one there is or a new one.

    Settings are Spark's, with or without `spark.` in front and with `_` for dots:
    `session("nightly", master="local[4]", sql_shuffle_partitions=8)`. With `remote="sc://…"` it is
    one of Spark Connect, and no Java is needed here.
    """
    _require_pyspark()
    from pyspark.sql import SparkSession

    settings = DEFAULTS | {_setting(name): _text(value) for name, value in conf.items()}
    # Workers would take the first python on the path, which knows nothing of pgqrs. Not
    # PYSPARK_DRIVER_PYTHON: Spark prefers that one for data sources, also on executors, where the path
    # of this Python may not exist.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if "spark.remote" not in settings and "SPARK_REMOTE" not in os.environ:
        os.environ["JAVA_HOME"] = java_home()
    builder = SparkSession.builder.appName(app)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    _redact_passwords(spark)
    # Without, the cores of this host count. Not where these are all there are: Spark warns of it.
    if not is_connect(spark) and cores_of(spark) != os.cpu_count():
        _register_source(spark)
    return spark


def is_connect(spark: SparkSession) -> bool:
    """True if Java is on a server, and not here."""
    return getattr(spark, "sparkContext", None) is None


def _redact_passwords(spark: SparkSession) -> None:
    """Leave passwords out of plans and logs, unless the session has a pattern of its own."""
    if not any(spark.conf.get(name, None) for name in (REDACTION, "spark.redaction.string.regex")):
        spark.conf.set(REDACTION, PASSWORDS)


def current_session(app: str = "pgqrs") -> SparkSession:
    """The session of this thread or of this process; a new one if there is none."""
    _require_pyspark()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return session(app)


def activate(spark: SparkSession) -> None:
    """Make a session the one of this thread. Only the thread that made it has it, and by it Spark finds
    what `write.format("pgqrs")` is. A session of Connect belongs to all threads.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        java_class = getattr(jvm, "org.apache.spark.sql.classic.SparkSession")
        java_class.setActiveSession(spark._jsparkSession)


def register(spark: SparkSession) -> SparkSession:
    """Give a session that exists already what the data source needs. Returns it.

    Spark finds the format by itself where pgqrs is installed; a server of Spark Connect may not have
    it, and is sent this one. What pgqrs needs, SQLAlchemy for instance, must be installed there.
    """
    for name, value in DEFAULTS.items():
        spark.conf.set(name, value)
    _redact_passwords(spark)
    if is_connect(spark):
        with TemporaryDirectory() as directory:
            spark.addArtifacts(str(package_zip(Path(directory))), pyfile=True)
    _register_source(spark)
    return spark


def _register_source(spark: SparkSession) -> None:
    """Let a session use a data source that knows how many tasks run at a time. Only once: Spark warns
    of every other time.
    """
    cores = cores_of(spark)
    if _registered.get(spark) != cores:
        spark.dataSource.register(source_for(cores))
        _registered[spark] = cores


_registered: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


def source_for(cores: int) -> type[DataSource]:
    """The data source for a cluster that runs so many tasks at a time. A class that no module has, so
    that Spark sends it with its number.
    """
    from pyspark_pgqrs import DefaultSource

    return type("PgqrsSource", (DefaultSource,), {"cores": cores})


def cores_of(spark: SparkSession) -> int:
    """How many tasks the cluster runs at a time: as its settings say, since executors may still be
    starting, or else as many as there are.
    """
    context = None if is_connect(spark) else spark.sparkContext

    def setting(name: str) -> int:
        value = str(spark.conf.get(f"spark.{name}", None) or "")
        return int(value) if value.isdecimal() else 0

    known = (
        0 if context is None else int(context.defaultParallelism),
        setting("default.parallelism"),
        setting("cores.max"),
        setting("executor.instances") * (setting("executor.cores") or 1),
    )
    return max(known) or os.cpu_count() or 1


def _require_pyspark() -> None:
    if find_spec("pyspark") is None:
        raise InvalidConfig("Spark is not installed: `pip install 'pgqrs[spark]'`")


def _setting(name: str) -> str:
    dotted = name if "." in name else name.replace("_", ".")
    return dotted if dotted.startswith("spark.") else f"spark.{dotted}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
