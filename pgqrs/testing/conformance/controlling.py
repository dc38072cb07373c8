"""Telling runs what to do: cancel, pause, retry, fork, deadlines; and changed workflows."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import pgqrs
from pgqrs import (
    InvalidArgument,
    LeaseLost,
    RunCancelled,
    RunEnded,
    RunFailed,
    RunNotFound,
    RunStatus,
    StepFailed,
    StepNotReady,
    StepStatus,
)
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.conformance.harness import RUNS, Drain


@pgqrs.workflow
def nap(seconds: float = 60) -> str:
    pgqrs.sleep(seconds)
    return "awake"


def version_of(body: Any) -> Any:
    """A version of the workflow called `changing`."""
    return pgqrs.workflow(name="changing")(body)


@pgqrs.step
def a() -> str:
    return "a"


@pgqrs.step
def b() -> str:
    return "b"


@pgqrs.step
def c() -> str:
    return "c"


# Cancelling


def test_a_run_that_nobody_runs_is_cancelled_at_once(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    fresh, asleep = nap.start(store=store), nap.start(store=store)
    assert fresh.cancel() is RunStatus.CANCELLED
    drain(nap)
    assert asleep.cancel() is RunStatus.CANCELLED
    assert asleep.cancel() is RunStatus.CANCELLED
    for run in (fresh, asleep):
        with pytest.raises(RunCancelled):
            run.result(timeout=0)
    clock.advance(3600)
    assert drain(nap) == 0


def test_a_run_that_goes_on_is_cancelled_at_its_next_step(store: Any, drain: Drain) -> None:
    log: list[str] = []

    @pgqrs.step
    def note(text: str) -> None:
        log.append(text)
        if text == "one":
            assert store.workflows.cancel(run_id) is RunStatus.CANCELLING

    @pgqrs.workflow
    def work() -> str:
        try:
            note("one")
            note("two")
        except Exception:
            log.append("swallowed")
        return "done"

    run = work.start(store=store)
    run_id = run.id
    drain(work)
    assert (run.status(), log) == (RunStatus.CANCELLED, ["one"])
    assert [step.status for step in run.steps()] == [StepStatus.COMPLETED]


def test_what_completes_while_it_is_cancelled_is_cancelled(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def work() -> str:
        store.workflows.cancel(run_id)
        return "done"

    run = work.start(store=store)
    run_id = run.id
    drain(work)
    assert run.status() is RunStatus.CANCELLED


def test_what_is_about_to_wait_is_cancelled(store: Any, drain: Drain) -> None:
    resumed: list[int] = []

    @pgqrs.workflow
    def work() -> None:
        resumed.append(1)
        if len(resumed) == 2:
            store.workflows.cancel(run_id)
        pgqrs.sleep(60)

    run = work.start(store=store)
    run_id = run.id
    drain(work)
    run.signal("wake up")
    drain(work)
    assert (run.status(), len(resumed)) == (RunStatus.CANCELLED, 2)


def test_children_are_cancelled_with_their_parent(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        return nap.start(3600).result()

    run = parent.start(store=store)
    drain(parent, nap)
    run.cancel()
    drain(parent, nap)
    assert [found.status for found in store.workflows.list_runs()] == [RunStatus.CANCELLED] * 2


def test_a_cancelled_child_is_an_error_for_its_parent(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> str:
        child = nap.start(3600)
        try:
            child.result()
        except RunCancelled as exc:
            return f"{exc.id == child.id}"
        return ""

    run = parent.start(store=store)
    drain(parent, nap)
    (child,) = store.workflows.list_runs(name="nap")
    store.workflows.cancel(child.id)
    drain(parent, nap)
    assert run.result(timeout=0) == "True"


def test_runs_without_a_message_are_not_left_behind(store: Any, drain: Drain) -> None:
    purged, deleted = nap.start(store=store), nap.options(queue="other").start(store=store)
    assert store.admin().purge_queue(RUNS) == 1
    with pytest.raises(RunFailed, match="purged"):
        purged.result(timeout=0)
    store.admin().delete_queue("other", force=True)
    with pytest.raises(RunFailed, match="deleted"):
        deleted.result(timeout=0)


# Pausing


def test_a_paused_run_goes_on_when_it_is_resumed(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    fresh, asleep = nap.start(1, store=store), nap.start(store=store)
    fresh.pause()
    fresh.pause()
    drain(nap)
    assert (fresh.status(), asleep.status()) == (RunStatus.PAUSED, RunStatus.SUSPENDED)
    asleep.pause()
    clock.advance(3600)
    assert drain(nap) == 0
    fresh.resume()
    asleep.resume()
    asleep.resume()
    assert drain(nap) == 2
    clock.advance(1)
    drain(nap)
    assert (fresh.result(timeout=0), asleep.result(timeout=0)) == ("awake", "awake")
    for call in (fresh.pause, fresh.resume):
        with pytest.raises(RunEnded):
            call()


def test_a_run_that_goes_on_pauses_at_its_next_step(store: Any, drain: Drain) -> None:
    log: list[str] = []

    @pgqrs.step
    def note(text: str) -> None:
        log.append(text)
        if log == ["one"]:
            store.workflows.pause(run_id)
            store.workflows.signal(run_id, "go")

    @pgqrs.workflow
    def work() -> str:
        note("one")
        note("two")
        pgqrs.wait_for_event("go")
        return "done"

    run = work.start(store=store)
    run_id = run.id
    drain(work)
    assert (run.status(), log) == (RunStatus.PAUSED, ["one"])
    assert drain(work) == 0
    run.resume()
    drain(work)
    assert (run.result(timeout=0), log) == ("done", ["one", "two"])


# Deadlines


def test_a_run_fails_at_its_deadline(store: Any, drain: Drain, clock: ManualClock) -> None:
    soon = clock.now() + timedelta(seconds=30)
    runs = [
        nap.options(timeout=30).start(store=store),
        nap.options(deadline=soon).start(store=store),
    ]
    drain(nap)
    clock.advance(29)
    assert drain(nap) == 0
    clock.advance(1)
    drain(nap)
    for run in runs:
        with pytest.raises(RunFailed, match="deadline"):
            run.result(timeout=0)


def test_a_deadline_is_seen_between_steps(store: Any, drain: Drain, clock: ManualClock) -> None:
    log: list[str] = []

    @pgqrs.step
    def slow(n: int) -> None:
        log.append(str(n))
        clock.advance(6)

    @pgqrs.workflow(timeout=10)
    def work() -> None:
        for n in range(5):
            slow(n)

    run = work.start(store=store)
    drain(work)
    with pytest.raises(RunFailed, match="RunOverdue"):
        run.result(timeout=0)
    assert log == ["0", "1"]


# Retrying and forking


def test_a_failed_run_is_retried_from_the_step_that_failed(store: Any, drain: Drain) -> None:
    log: list[str] = []
    broken = True

    @pgqrs.step
    def note(text: str) -> str:
        log.append(text)
        if text in ("two", "caught") and broken:
            raise ValueError(text)
        return text

    @pgqrs.workflow
    def work() -> list[str]:
        try:
            note("caught")
        except StepFailed:
            note("dealt with")
        return [note("one"), note("two")]

    run = work.start(store=store)
    drain(work)
    assert run.status() is RunStatus.FAILED
    assert run.refresh().failed_step == "note#4"
    broken = False
    run.retry()
    assert run.status() is RunStatus.PENDING
    drain(work)
    assert run.result(timeout=0) == ["one", "two"]
    assert log == ["caught", "dealt with", "one", "two", "two"]
    with pytest.raises(RunEnded, match="completed"):
        run.retry()


def test_a_run_is_forked_from_a_step(store: Any, drain: Drain) -> None:
    log: list[str] = []

    @pgqrs.step
    def note(text: str) -> str:
        log.append(text)
        return text

    @pgqrs.workflow
    def work(last: str) -> list[str]:
        return [note("one"), note("two"), note(last)]

    run = work.start("three", store=store)
    drain(work)
    log.clear()
    fork, copy = run.fork("note#2"), store.workflows.fork(run.id)
    drain(work)
    assert fork.result(timeout=0) == copy.result(timeout=0) == ["one", "two", "three"]
    assert log == ["two", "three"]
    assert fork.refresh().forked_from == run.id
    with pytest.raises(InvalidArgument, match="no step"):
        run.fork("unheard of")


# Looking


def test_runs_are_listed_newest_first(store: Any, drain: Drain) -> None:
    runs = [nap.start(n, store=store, key=f"k{n}") for n in range(5)]
    runs[0].cancel()
    ids = [run.id for run in runs]
    listed = store.workflows.list_runs
    assert [found.id for found in listed()] == ids[::-1]
    assert [found.id for found in listed(n=2, before=ids[3])] == [ids[2], ids[1]]
    assert [found.id for found in listed(status="cancelled")] == [ids[0]]
    assert [found.id for found in listed(key="k3", name="nap")] == [ids[3]]
    assert listed(name="other") == []
    with pytest.raises(InvalidArgument):
        listed(status="asleep")
    with pytest.raises(RunNotFound):
        store.workflows.get(10**6)


def test_old_runs_are_forgotten(store: Any, drain: Drain, clock: ManualClock) -> None:
    done, other = nap.start(0, store=store), nap.start(10**6, store=store)
    drain(nap)
    drain(nap)
    assert done.status() is RunStatus.COMPLETED
    clock.advance(100)
    assert store.workflows.purge(older_than=101) == 0
    assert store.workflows.purge(older_than=100, status="failed") == 0
    assert store.workflows.purge(older_than=100) == 1
    assert [found.id for found in store.workflows.list_runs()] == [other.id]
    assert done.steps() == []


# Changed workflows


def suspended(store: Any, drain: Drain, version: Any) -> Any:
    run = version.start(store=store)
    drain(version)
    assert run.status() is RunStatus.SUSPENDED
    return run


def test_an_unrelated_change_strands_nothing(store: Any, drain: Drain, clock: ManualClock) -> None:
    @version_of
    def old() -> list[str]:
        found = [a()]
        pgqrs.sleep(10)
        return [*found, b()]

    @version_of
    def new() -> list[str]:
        """Another text, another shape, one more step at the end."""
        first = a()
        for _ in range(3):
            pass
        pgqrs.sleep(99)  # what it was asked to sleep counts
        return [first, b(), c()]

    run = suspended(store, drain, old)
    clock.advance(10)
    drain(new)
    assert run.result(timeout=0) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("steps", "asked", "recorded"),
    [
        ((b, a), "step b", "step a"),
        ((a, b, c), "step b", "step pgqrs.sleep"),
        ((), "its end", "step a"),
        ((a, a), "step a#2", "step pgqrs.sleep"),
    ],
    ids=["another", "inserted", "removed", "repeated"],
)
def test_a_change_that_contradicts_history_is_named(
    store: Any, drain: Drain, clock: ManualClock, steps: Any, asked: str, recorded: str
) -> None:
    @version_of
    def old() -> str:
        a()
        pgqrs.sleep(10)
        return "done"

    @version_of
    def new() -> None:
        try:
            for step in steps:
                step()
        except Exception:
            pytest.fail("this is none of the workflow's")

    run = suspended(store, drain, old)
    clock.advance(10)
    drain(new)
    found = run.refresh()
    assert found.status is RunStatus.PAUSED
    assert f"asks for {asked} where its history has {recorded}" in found.error
    run.resume()
    drain(old)
    assert run.result(timeout=0) == "done"


def test_patched_tells_old_runs_from_new_ones(store: Any, drain: Drain, clock: ManualClock) -> None:
    @version_of
    def old() -> list[str]:
        found = [a()]
        pgqrs.sleep(10)
        return found

    @version_of
    def patched() -> list[str]:
        found = [b()] if pgqrs.patched("b first") else []
        found.append(a())
        pgqrs.sleep(10)
        return found

    @version_of
    def later() -> list[str]:
        found = [b(), a()]
        pgqrs.sleep(10)
        return found

    before = suspended(store, drain, old)
    after = suspended(store, drain, patched)
    both = suspended(store, drain, patched)
    with store.consumer(RUNS) as consumer:
        clock.advance(10)
        known = {before.id: patched, after.id: patched, both.id: later}
        for message in consumer.dequeue(10):
            (run,) = [
                found for found in store.workflows.list_runs() if found.message_id == message.id
            ]
            store.workflows.execute(message, [known[run.id]])
    assert before.result(timeout=0) == ["a"]
    assert after.result(timeout=0) == ["b", "a"]
    assert both.result(timeout=0) == ["b", "a"]


# By hand


def test_a_run_is_driven_by_hand(store: Any, clock: ManualClock) -> None:
    run = store.workflows.create("import", {"url": "x"}, key="k")
    assert store.workflows.create("import", key="k").id == run.id
    with pytest.raises(RunEnded, match="pending"):
        run.acquire_step("fetch")
    run.start()
    guard = run.acquire_step("fetch")
    assert (guard.skipped, guard.attempt) == (False, 1)
    guard.success([1, 2])
    again = run.acquire_step("fetch")
    assert (again.skipped, again.value) == (True, [1, 2])
    with pytest.raises(InvalidArgument):
        again.success(3)
    run.pause()
    with pytest.raises(RunEnded, match="paused"):
        run.acquire_step("more")
    run.start()
    run.complete({"rows": 2})
    assert run.result(timeout=0) == {"rows": 2}
    assert run.refresh().input == {"url": "x"}
    for call in (run.start, run.complete, lambda: run.fail("late")):
        with pytest.raises(RunEnded, match="completed"):
            call()
    assert store.workflows.get(run.id).output == {"rows": 2}


def test_attempts_at_a_step_by_hand(store: Any, clock: ManualClock) -> None:
    run = store.workflows.create("import")
    run.start()
    run.acquire_step("fetch").fail_transient("503", "busy", retry_after=30)
    with pytest.raises(StepNotReady) as early:
        run.acquire_step("fetch")
    assert early.value.retry_at == clock.now() + timedelta(seconds=30)
    clock.advance(30)
    first = run.acquire_step("fetch")
    second = run.acquire_step("fetch")
    assert (first.attempt, second.attempt) == (2, 3)
    with pytest.raises(LeaseLost):
        first.success("a zombie's")
    second.fail(ValueError("no"))
    with pytest.raises(StepFailed, match="ValueError: no"):
        run.acquire_step("fetch")
    run.fail("it is of no use")
    with pytest.raises(RunFailed, match="of no use"):
        run.result(timeout=0)


def test_runs_of_workers_are_not_driven_by_hand(store: Any, drain: Drain) -> None:
    run = nap.start(store=store)
    for call in (run.start, run.complete):
        with pytest.raises(InvalidArgument, match="by workers"):
            call()


def test_pausing_lets_steps_in_flight_end(store: Any, drain: Drain) -> None:
    log: list[str] = []

    @pgqrs.step
    async def slow() -> str:
        log.append("begin")
        try:
            while "quick 3" not in log:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # the other branch hears of the pause
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        log.append("end")
        return "slow"

    @pgqrs.step
    def quick(n: int) -> int:
        log.append(f"quick {n}")
        if n == 3:
            pause.pop()()
        return n

    @pgqrs.workflow
    async def work() -> Any:
        async def branch() -> int:
            while "begin" not in log:
                await asyncio.sleep(0.01)
            for n in (1, 2, 3, 4):
                await quick.acall(n)
            return 4

        return await asyncio.gather(slow(), branch())

    run = work.start(store=store)
    pause = [run.pause]
    drain(work)
    assert log == ["begin", "quick 1", "quick 2", "quick 3", "end"]
    assert run.status() is RunStatus.PAUSED
    run.resume()
    drain(work)
    assert run.result(timeout=0) == ["slow", 4]
    assert log[5:] == ["quick 4"]
