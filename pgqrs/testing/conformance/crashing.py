"""Runs whose workers die again and again: progress counts, and what makes none fails in the end."""

from __future__ import annotations

from typing import Any

import pytest

import pgqrs
from pgqrs import RunFailed, RunStatus
from pgqrs.testing.conformance.harness import RUNS, Crash, Drain


def test_a_run_that_makes_progress_outlives_any_number_of_crashes(
    store: Any, drain: Drain, crash_once: Drain
) -> None:
    executed: list[int] = []

    @pgqrs.step
    def part(n: int) -> int:
        executed.append(n)
        return n

    @pgqrs.workflow
    def work() -> int:
        total = 0
        for n in range(10):
            total += part(n)
            if executed == list(range(n + 1)) and n not in crashed:
                crashed.append(n)
                raise Crash
        return total

    crashed: list[int] = []
    run = work.start(store=store)  # its queue allows 3 attempts
    for _ in range(10):
        crash_once(work)
    drain(work)
    assert run.result(timeout=0) == 45
    assert executed == list(range(10))


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_progress_in_any_life_starts_the_count_anew(
    store: Any, drain: Drain, crash_once: Drain, lives: int
) -> None:
    """Three attempts are allowed: the step is finished in one of them, and the run crashes in all."""
    life = 0

    @pgqrs.step
    def part() -> int:
        if life < lives:
            raise Crash
        return 1

    @pgqrs.workflow
    def work() -> int:
        value = part()
        if life <= 3:
            raise Crash
        return value

    run = work.start(store=store)
    for life in (1, 2, 3):  # noqa: B007 (read by the workflow)
        crash_once(work)
    life = 4
    drain(work)
    assert run.result(timeout=0) == 1


def test_a_run_that_makes_no_progress_fails_after_its_attempts(
    store: Any, drain: Drain, crash_once: Drain
) -> None:
    @pgqrs.step
    def part() -> int:
        return 1

    @pgqrs.workflow
    def work() -> None:
        part()
        raise Crash

    run = work.start(store=store)
    for _ in range(4):  # the first has made progress
        crash_once(work)
    assert run.status() is RunStatus.RUNNING
    drain(work)
    with pytest.raises(RunFailed, match="lease lapsed"):
        run.result(timeout=0)


def test_failing_counts_progress_too(store: Any, drain: Drain) -> None:
    @pgqrs.step
    def part(n: int) -> int:
        return n

    @pgqrs.workflow
    def work() -> int:
        total = 0
        for n in range(3):
            total += part(n)
            if n == life:
                raise Crash
        return total

    run = work.start(store=store)
    with store.consumer(RUNS) as consumer:
        # In the third life, which is the last allowed, the third step is finished.
        for life in (0, 0, 2):  # noqa: B007 (read by the workflow)
            (message,) = consumer.dequeue(1)
            with pytest.raises(Crash):
                store.workflows.execute(message, [work])
            assert consumer.fail(message, "as if the database had been away")
        life = 3
        drain(work)
    assert run.result(timeout=0) == 3
