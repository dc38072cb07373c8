"""`pgqrs demo`, with its real processes and its real kill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

import pgqrs
from pgqrs.cli import demo


def summary(output: str) -> dict[str, int]:
    rows = re.findall(r"^ +([a-z ]+?) +(\d+) *$", output, re.MULTILINE)
    return {name: int(count) for name, count in rows}


LEASE = 6.0
"""Seconds: who hangs and renews does not lose it, and who is killed is seen before it lapses, also
on a busy machine.
"""
RUN = f"from pgqrs.cli import demo, main; demo.LEASE = {LEASE}; main()"


@pytest.mark.slow
def test_demo_loses_nothing(tmp_path: Any) -> None:
    # What the environment names is somebody's real database, and stays out of it.
    environment = os.environ | {"PGQRS_DSN": f"sqlite:///{tmp_path / 'real.db'}"}
    result = subprocess.run(
        [sys.executable, "-c", RUN, "demo"],
        capture_output=True,
        encoding="utf-8",
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    counts = summary(result.stdout)
    assert counts["produced"] == counts["completed"] == 500
    assert counts["lost"] == 0
    assert counts["duplicates acked"] == 0
    assert counts["redelivered"] >= 1

    killed = re.search(r"Killed (consumer-\d) ", result.stdout)
    back = re.search(
        r"Message (\d+) came back: same id, read_ct 2, now with (consumer-\d)", result.stdout
    )
    assert killed is not None
    assert back is not None
    assert killed[1] != back[2]
    assert f"Message {back[1]} is still leased by the dead {killed[1]}" in result.stdout
    assert not (tmp_path / "real.db").exists()


@pytest.mark.slow
def test_demo_in_a_given_database_leaves_no_rows(
    run: Any, store: pgqrs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MESSAGES", 40)
    monkeypatch.setattr(demo, "HANGS", 20)
    monkeypatch.setattr(demo, "LEASE", LEASE)
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert summary(result.stdout)["completed"] == 40
    assert [queue.queue_name for queue in store.admin().list_queues()] == ["tasks"]
    assert store.admin().list_workers() == []


def test_demo_fails_if_a_message_was_lost(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = demo.Outcome(produced=2, completed=1, redelivered=0, lost=1, duplicates=0)
    monkeypatch.setattr(demo, "perform", lambda *_: outcome)
    result = run("demo")
    assert result.exit_code == 1
    assert summary(result.stdout)["lost"] == 1


def test_demo_needs_a_database_that_processes_can_share() -> None:
    command = [sys.executable, "-m", "pgqrs.cli", "--dsn", "sqlite::memory:", "demo"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "in memory" in result.stderr
