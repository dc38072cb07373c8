"""Drivers are killed, and so is the Java process of one: what was done stays done, the rest is done
by another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from pgqrs.spark import sweep
from tests.spark import stepping
from tests.spark.stepping import ROWS, nightly, notes

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
LEASE = 6
"""Seconds: a driver that is slow, and not dead, keeps its run."""
RESULT = {"raw": ROWS, "clean": ROWS, "total": ROWS * (ROWS - 1)}


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue(nightly.queue, lease=LEASE)
        yield store


@pytest.fixture(autouse=True)
def _spark_of_the_tests(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process the driver uses what is there."""
    for step in (stepping.extract, stepping.transform):
        monkeypatch.setattr(step, "_session", lambda: spark)
    monkeypatch.setattr(stepping, "here", lambda: spark)


@contextmanager
def driver(url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.stepping", url],
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None
) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up_at
        assert process is None or process.poll() is None, process.returncode
        time.sleep(0.05)


def finish(store: pgqrs.Store, run: Any) -> Any:
    """Another worker goes on."""
    with pgqrs.Worker(store, workflows=[nightly]):
        return run.result(timeout=PATIENCE)


def completed(run: Any) -> list[str]:
    return [step.step_id for step in run.steps() if step.status is pgqrs.StepStatus.COMPLETED]


def java_of(process: subprocess.Popen[bytes]) -> int:
    """The Java process that a driver started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = [
        int(pid)
        for path in children.parent.parent.glob("*/children")
        for pid in path.read_text().split()
    ]
    (java,) = (pid for pid in pids if Path(f"/proc/{pid}/exe").resolve().name == "java")
    return java


def test_a_driver_is_killed_during_a_write_and_another_between_steps(
    store: pgqrs.Store, postgres_database: str, tmp_path: Path
) -> None:
    log, data = tmp_path / "log", tmp_path / "data"
    (tmp_path / "slow").touch()
    (tmp_path / "hold").touch()
    run = nightly.start(str(tmp_path), store=store)

    with driver(postgres_database, log) as first:
        wait_until((tmp_path / "writing").exists, first)
        first.kill()
    (orphan,) = data.glob("run-*/step-transform/*")
    assert not (orphan / "_SUCCESS").exists()
    assert completed(run) == ["extract"]

    (tmp_path / "slow").unlink()
    with driver(postgres_database, log) as second:
        wait_until((tmp_path / "between").exists, second)
        second.kill()
    assert completed(run) == ["extract", "transform"]

    (tmp_path / "hold").unlink()
    assert finish(store, run) == RESULT
    assert notes(tmp_path) == ["extract", "transform", "transform", "total"]
    swept = sweep(store, data)
    assert swept.removed == (str(orphan.relative_to(data)),)
    assert swept.recorded == 2
    assert len(list(data.glob("run-*/step-*/*"))) == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the process")
def test_when_java_dies_the_process_ends_and_another_goes_on(
    store: pgqrs.Store, postgres_database: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    (tmp_path / "slow").touch()
    run = nightly.start(str(tmp_path), store=store)
    with driver(postgres_database, log) as process:
        wait_until((tmp_path / "writing").exists, process)
        os.kill(java_of(process), signal.SIGKILL)
        assert process.wait(PATIENCE) == 1
    assert "SparkDied: the Java process of Spark was killed by signal 9" in log.read_text()
    assert run.status() is pgqrs.RunStatus.RUNNING
    (tmp_path / "slow").unlink()
    assert finish(store, run) == RESULT
    assert notes(tmp_path) == ["extract", "transform", "transform", "total"]
