"""A task in a process of its own is told its message there."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqrs


@pgqrs.task(queue="tasks", process=True, timeout=60)
def whoami() -> tuple[int, int, str, bool]:
    here = pgqrs.current_message()
    assert here is not None
    return here.id, here.attempt, str(here.headers["tenant"]), here.deadline is not None


@pytest.mark.processes
def test_in_another_process(tmp_path: Path) -> None:
    with pgqrs.Store(f"sqlite:///{tmp_path / 'test.db'}", upgrade=True) as store:
        handle = whoami.options(store=store, headers={"tenant": "blue"}).enqueue()
        pgqrs.Worker(store, tasks=[whoami]).run(until_empty=True, signals=False)
        assert handle.result(60) == (handle.id, 1, "blue", True)
