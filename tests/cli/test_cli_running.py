"""`pgqrs worker MODULE`, `task`, `schedule` and `top`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULE = """
import pgqrs

@pgqrs.task(queue="tasks")
def add(a: int, b: int = 1) -> int:
    return a + b

@pgqrs.task(queue="tasks", retry=pgqrs.Retry(max_attempts=1))
def fail():
    raise LookupError("nothing there")

some = [fail]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sums", raising=False)


@pytest.fixture
def says(run: Any) -> Callable[..., str]:
    """What a command that succeeds prints."""

    def says(*arguments: str) -> str:
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        output: str = result.stdout
        return output

    return says


def test_a_task_from_the_command_line(run: Any, run_json: Any, says: Any) -> None:
    call = ("sums:add", "40", "--kwargs", '{"b": 2}', "--queue", "tasks")
    id = str(run_json("task", "enqueue", *call)["id"])
    assert says("task", "status", id) == "queued\n"
    assert "no result after 0.01 s" in run("task", "result", id, "--timeout", "10ms").output
    says("worker", "sums", "--until-empty")
    assert json.loads(says("task", "result", id, "--timeout", "10")) == 42
    assert "done already" in says("task", "cancel", id)
    cancelled = str(run_json("task", "enqueue", *call)["id"])
    assert "is cancelled" in says("task", "cancel", cancelled)


def test_a_failed_task_and_a_part_of_a_module(run: Any, says: Any) -> None:
    says("task", "enqueue", "sums:fail", "--queue", "tasks")
    says("task", "enqueue", "sums:add", "1", "--queue", "tasks")
    says("worker", "run", "sums:some", "--until-empty")
    assert "nothing there" in run("task", "result", "1", "--timeout", "10").output
    assert says("task", "status", "2") == "delayed\n"  # for a worker that knows it


def test_what_is_no_module_of_tasks(run: Any) -> None:
    assert "cannot be imported" in run("worker", "nowhere").output
    assert "cannot be imported" in run("worker", "sums:nothing").output
    assert "declare no tasks" in run("worker", "json").output


def test_schedules(run: Any, run_json: Any, says: Any) -> None:
    payload = json.dumps({"task": "sums:add", "args": [1], "kwargs": {}})
    options = ("--cron", "0 3 * * *", "--queue", "tasks", "--payload", payload)
    says("schedule", "create", "daily", *options)
    assert "daily" in says("schedule", "list")
    assert run_json("schedule", "list")[0]["cron"] == "0 3 * * *"
    assert "rests" in says("schedule", "pause", "daily")
    assert "ticks at" in says("schedule", "resume", "daily")
    assert "message 1" in says("schedule", "trigger", "daily")
    past = ("--from", "2020-01-01T00:00Z", "--to", "2020-01-03T00:00Z")
    assert "2 message(s)" in says("schedule", "backfill", "daily", *past)
    says("worker", "sums", "--until-empty")
    assert json.loads(says("task", "result", "3")) == 2
    assert "forgotten" in says("schedule", "delete", "daily")
    assert "does not exist" in run("schedule", "delete", "daily").output


def test_a_schedule_of_a_workflow(run: Any, run_json: Any, says: Any) -> None:
    say = ("schedule", "create", "nightly", "--cron", "0 3 * * *")
    assert "one of them" in run(*say).output
    assert "--payload needs a --queue" in run(*say, "--payload", "1").output
    assert "no JSON list" in run(*say, "--workflow", "ingest", "--args", "{}").output
    assert (
        "expected 5 fields, got 6"
        in run(
            *("schedule", "create", "often", "--cron", "* * * * * *", "--workflow", "ingest")
        ).output
    )
    says(*say, "--workflow", "ingest", "--args", "[1]", "--kwargs", '{"by": 2}')
    assert "Started run 1." in says("schedule", "trigger", "nightly")
    past = ("--from", "2020-01-01T00:00Z", "--to", "2020-01-03T00:00Z")
    assert "2 run(s)" in says("schedule", "backfill", "nightly", *past)
    (listed,) = run_json("schedule", "list")
    assert (listed["workflow"], listed["queue"]) == ("ingest", "workflows")
    assert "schedule(s) nightly" in run("queue", "delete", "workflows").output
    says("queue", "delete", "workflows", "--force", "--yes")
    assert "error" in says("schedule", "list")


def test_top(says: Any) -> None:
    says("enqueue", "tasks", "1", "2")
    shown = says("top", "--every", "10ms", "--looks", "2")
    assert "tasks" in shown
    assert "workers" in shown
