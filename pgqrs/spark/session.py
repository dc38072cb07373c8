"""A session that has what the data source needs, and the same for one that exists already."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pgqrs.errors import InvalidConfig
from pgqrs.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS = {
    # Else a reader that can filter would have to be one that cannot.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Times are stored in UTC, and are to be seen so.
    "spark.sql.session.timeZone": "UTC",
}


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
    return builder.getOrCreate()


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
    it, and is sent it.
    """
    from pyspark_pgqrs import DefaultSource

    for name, value in DEFAULTS.items():
        spark.conf.set(name, value)
    spark.dataSource.register(DefaultSource)
    return spark


def _require_pyspark() -> None:
    if find_spec("pyspark") is None:
        raise InvalidConfig("Spark is not installed: `pip install 'pgqrs[spark]'`")


def _setting(name: str) -> str:
    dotted = name if "." in name else name.replace("_", ".")
    return dotted if dotted.startswith("spark.") else f"spark.{dotted}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
