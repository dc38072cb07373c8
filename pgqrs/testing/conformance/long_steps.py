"""Steps that take long are shown while they are being done."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import pgqrs
from pgqrs import Retry, StepStatus
from pgqrs.testing.conformance.harness import worker

LIMIT = 60.0
"""Seconds: far more than anything here takes."""


def until_shown(run: Any, attempts: int) -> Any:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = [step for step in run.steps() if step.status is StepStatus.RUNNING]
        if found and found[0].attempts == attempts:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"not shown: {run.steps()}")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_long_step_is_shown_with_its_attempt(harness: Any, kind: str) -> None:
    store = harness.open(clock=None)
    may_end, tried = threading.Event(), []

    def attempt() -> int:
        tried.append(1)
        if len(tried) == 2:
            return 7
        raise ValueError("the first attempt")

    @pgqrs.step(retry=Retry.fixed(0, max_attempts=2), name="long")
    def long() -> int:
        may_end.wait(LIMIT)
        return attempt()

    @pgqrs.step(retry=Retry.fixed(0, max_attempts=2), name="long")
    async def long_too() -> int:
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        return attempt()

    @pgqrs.step
    def quick() -> int:
        return 1

    @pgqrs.workflow(name="work")
    def work() -> int:
        return quick() + long()

    @pgqrs.workflow(name="work")
    async def work_too() -> int:
        return await quick.acall() + await long_too.acall()

    flow: Any = work if kind == "sync" else work_too
    with worker(store, workflows=[flow]):
        run = flow.start(store=store)
        shown = until_shown(run, 1)
        assert (shown.step_id, shown.completed_at) == ("long", None)
        may_end.set()
        assert run.result(timeout=LIMIT) == 8
    steps = {step.step_id: step for step in run.steps()}
    assert (steps["long"].status, steps["long"].attempts) == (StepStatus.COMPLETED, 2)
    assert steps["quick"].attempts == 1


def test_a_step_that_goes_on_when_its_run_ends_was_cancelled(harness: Any) -> None:
    run = harness.open(clock=None).workflows.create("by hand")
    run.start()
    run.acquire_step("long")
    assert [step.status for step in run.steps()] == [StepStatus.RUNNING]
    run.fail("no time")
    assert [step.status for step in run.steps()] == [StepStatus.CANCELLED]


def test_a_long_step_of_an_inline_run_is_shown(harness: Any) -> None:
    store = harness.open(clock=None)
    shown: list[Any] = []

    @pgqrs.step
    def long() -> int:
        (run,) = store.workflows.list_runs(name="work")
        shown.append(until_shown(store.workflows.handle(run.id), 1))
        return 5

    @pgqrs.workflow
    def work() -> int:
        return long()

    assert work.run_inline(store=store) == 5
    assert [step.step_id for step in shown] == ["long"]
