"""Runs of workflows: replay, retries, waiting, transactional steps, being resumed by others."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import pgqrs
from pgqrs import (
    EventTimedOut,
    InvalidArgument,
    ResultTimedOut,
    Retry,
    RunFailed,
    RunStatus,
    StepFailed,
    StepStatus,
)
from pgqrs.outcomes import GivenBack, Settled
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, RUNS, Crash, Drain, Harness, worker


def test_a_workflow_runs_and_has_a_result(store: Any, drain: Drain) -> None:
    @pgqrs.step
    def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    def calculate(n: int, *, plus: int = 0) -> dict[str, int]:
        return {"doubled": double(n), "twice": double(double(n)) + plus}

    run = calculate.start(4, plus=1, store=store)
    assert run.status() is RunStatus.PENDING
    with pytest.raises(ResultTimedOut):
        run.result(timeout=0)
    assert drain(calculate) == 1
    assert run.result(timeout=0) == {"doubled": 8, "twice": 17}
    found = run.refresh()
    assert (found.name, found.status, found.queue) == ("calculate", RunStatus.COMPLETED, RUNS)
    assert found.input == {"args": [4], "kwargs": {"plus": 1}}
    assert found.ended_at is not None
    assert [(step.step_id, step.output) for step in run.steps()] == [
        ("double", 8),
        ("double#2", 8),
        ("double#3", 16),
    ]
    assert store.admin().peek(RUNS) == []


def test_an_async_workflow_runs_and_has_a_result(store: Any, drain: Drain) -> None:
    @pgqrs.step
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    @pgqrs.step
    def halve(n: int) -> float:
        return n / 2

    @pgqrs.workflow
    async def calculate(n: int) -> list[float]:
        doubled = await asyncio.gather(*(double(i) for i in range(n)))
        return [*doubled, await halve(n)]  # type: ignore[misc]

    run = calculate.start(3, store=store)
    drain(calculate)
    assert run.result(timeout=0) == [0, 2, 4, 1.5]
    assert sorted(step.step_id for step in run.steps()) == [
        "double",
        "double#2",
        "double#3",
        "halve",
    ]


def test_outside_of_a_run_they_are_plain_functions() -> None:
    @pgqrs.step
    def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    def calculate(n: int) -> int:
        pgqrs.sleep(0)
        assert pgqrs.patched("anything")
        assert 0 <= pgqrs.random() < 1
        assert pgqrs.now().tzinfo is not None
        assert pgqrs.uuid() != pgqrs.uuid()
        return sum(pgqrs.map(double, range(n)))

    assert calculate(3) == 6
    with pytest.raises(InvalidArgument, match="only a workflow"):
        pgqrs.wait_for_event("x")


def test_a_key_names_one_run(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def once(n: int) -> int:
        return n

    first = once.start(1, key="a", store=store)
    assert once.start(2, key="a", store=store).id == first.id
    assert once.start(3, key="b", store=store).id != first.id
    assert drain(once) == 2
    assert once.start(4, key="a", store=store).result(timeout=0) == 1


def test_finished_steps_are_not_run_again(store: Any, drain: Drain, crash_once: Drain) -> None:
    effects: list[str] = []

    @pgqrs.step
    def effect(name: str) -> str:
        effects.append(name)
        if effects == ["a", "b"]:
            raise Crash
        return name.upper()

    @pgqrs.workflow
    def work() -> list[str]:
        return [effect("a"), effect("b"), effect("c")]

    run = work.start(store=store)
    crash_once(work)
    assert run.status() is RunStatus.RUNNING
    assert drain(work) == 1
    assert run.result(timeout=0) == ["A", "B", "C"]
    assert effects == ["a", "b", "b", "c"]


def test_what_is_replayed_is_what_was_returned(store: Any, drain: Drain, crash_once: Drain) -> None:
    seen: list[Any] = []

    @pgqrs.step
    def give() -> Any:
        return {"tuple": (1, 2), "float": 1.0, "none": None}

    @pgqrs.step
    def fail_once() -> None:
        if len(seen) == 1:
            raise Crash

    @pgqrs.workflow
    def work() -> None:
        seen.append(give())
        fail_once()

    work.start(store=store)
    crash_once(work)
    drain(work)
    assert seen[0] == seen[1] == {"tuple": [1, 2], "float": 1.0, "none": None}


@dataclass
class Order:
    id: UUID
    at: datetime
    amount: Decimal


def test_hints_say_what_values_are(
    store: Any, drain: Drain, crash_once: Drain, clock: ManualClock
) -> None:
    seen: list[Any] = []

    @pgqrs.step
    def place(order: Order) -> Order:
        return order

    @pgqrs.step
    def fail_once() -> None:
        if len(seen) == 1:
            raise Crash

    @pgqrs.workflow
    def work(order: Order) -> Order:
        seen.append(place(order))
        fail_once()
        return order

    @pgqrs.workflow
    def parent(order: Order) -> bool:
        return bool(work.start(order).result() == order)

    order = Order(UUID(int=1), clock.now(), Decimal("1.50"))
    run = work.start(order, store=store)
    crash_once(work)
    drain(work)
    assert seen == [order, order]
    assert run.result(timeout=0) == order
    assert work.run_inline(order, store=store) == order
    waiting = parent.start(order, store=store)
    drain(work, parent)
    assert waiting.result(timeout=0) is True
    with pytest.raises(InvalidArgument, match="missing a required argument"):
        work.start(store=store)


def test_a_failed_step_fails_the_run_the_same_way_each_time(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    errors: list[StepFailed] = []

    @pgqrs.step
    def break_down() -> None:
        raise ValueError("no such thing")

    @pgqrs.workflow
    def work() -> None:
        try:
            break_down()
        except StepFailed as exc:
            errors.append(exc)
            pgqrs.sleep(10)
            raise

    run = work.start(store=store)
    drain(work)
    clock.advance(10)
    drain(work)
    assert [(e.step, e.error_type, e.message) for e in errors] == [
        ("break_down", "ValueError", "no such thing")
    ] * 2
    assert run.status() is RunStatus.FAILED
    with pytest.raises(RunFailed, match="no such thing") as failed:
        run.result(timeout=0)
    assert "Traceback" in (failed.value.error or "")
    assert run.refresh().failed_step == "break_down"
    (step, _) = run.steps()
    assert (step.status, step.attempts) == (StepStatus.FAILED, 1)
    assert "ValueError: no such thing" in (step.error or "")


def test_a_step_is_tried_again_when_its_policy_says(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    attempts: list[int] = []

    @pgqrs.step(retry=Retry.fixed(60, max_attempts=3))
    def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("not yet")
        return "done"

    @pgqrs.workflow
    def work() -> str:
        return flaky()

    run = work.start(store=store)
    drain(work)
    assert run.status() is RunStatus.SUSPENDED
    (step,) = run.steps()
    assert (step.status, step.attempts) == (StepStatus.PENDING, 1)
    assert step.wake_at == run.refresh().wake_at == clock.now() + timedelta(seconds=60)
    clock.advance(59)
    assert drain(work) == 0
    clock.advance(1)
    assert drain(work) == 1
    clock.advance(60)
    drain(work)
    assert run.result(timeout=0) == "done"
    assert len(attempts) == 3
    (step,) = run.steps()
    assert (step.status, step.attempts) == (StepStatus.COMPLETED, 3)


def test_not_every_error_is_worth_another_attempt(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    class Busy(Exception):
        retry_after = 7

    @pgqrs.step(retry=Retry.fixed(60, max_attempts=3), retry_on=Busy)
    def call(error: str) -> None:
        raise Busy("later") if error == "busy" else KeyError("never")

    @pgqrs.workflow
    def work(error: str) -> None:
        call(error)

    busy, broken = work.start("busy", store=store), work.start("key", store=store)
    drain(work)
    assert broken.status() is RunStatus.FAILED
    assert busy.refresh().wake_at == clock.now() + timedelta(seconds=7)


def test_a_step_may_take_too_long(store: Any, drain: Drain) -> None:
    @pgqrs.step(timeout=0.05)
    def slow() -> None:
        time.sleep(0.5)

    @pgqrs.step(timeout=0.05)
    async def slow_too() -> None:
        await asyncio.sleep(30)

    @pgqrs.workflow
    def work() -> None:
        slow()

    @pgqrs.workflow
    async def work_too() -> None:
        await slow_too()

    runs = [work.start(store=store), work_too.start(store=store)]
    drain(work, work_too)
    for run in runs:
        with pytest.raises(RunFailed, match="took longer than"):
            run.result(timeout=0)


@pytest.mark.parametrize("how", ["sleep", "sleep_until"])
def test_a_run_sleeps_without_being_held(
    store: Any, drain: Drain, clock: ManualClock, how: str
) -> None:
    @pgqrs.workflow
    def nap() -> str:
        if how == "sleep":
            pgqrs.sleep(timedelta(hours=1))
        else:
            pgqrs.sleep_until(later)
        return "awake"

    later = clock.now() + timedelta(hours=1)
    run = nap.start(store=store)
    assert drain(nap) == 1
    found = run.refresh()
    assert (found.status, found.wake_at) == (RunStatus.SUSPENDED, later)
    (message,) = store.admin().peek(RUNS)
    assert (message.consumer_worker_id, message.attempt) == (None, 0)
    clock.advance(3599)
    assert drain(nap) == 0
    clock.advance(1)
    assert drain(nap) == 1
    assert run.result(timeout=0) == "awake"


def test_branches_sleep_at_the_same_time(store: Any, drain: Drain, clock: ManualClock) -> None:
    log: list[str] = []

    @pgqrs.step
    async def note(text: str) -> str:
        log.append(text)
        return text

    async def branch(name: str, seconds: int) -> str:
        await note(f"{name} before")
        await pgqrs.sleep(seconds)
        await note(f"{name} after")
        return await note(name)

    @pgqrs.workflow
    async def work() -> list[str]:
        each = await asyncio.gather(branch("slow", 60), branch("quick", 10), note("alone"))
        return list(each)

    run = work.start(store=store)
    drain(work)
    assert sorted(log) == ["alone", "quick before", "slow before"]
    assert run.refresh().wake_at == clock.now() + timedelta(seconds=10)
    clock.advance(10)
    drain(work)
    assert log[3:] == ["quick after", "quick"]
    clock.advance(50)
    drain(work)
    assert run.result(timeout=0) == ["slow", "quick", "alone"]
    assert len(log) == 7
    assert sorted(step.step_id for step in run.steps()) == [
        *("1/note", "1/note#2", "1/note#3", "1/pgqrs.sleep"),
        *("2/note", "2/note#2", "2/note#3", "2/pgqrs.sleep"),
        "note",
    ]


def test_a_signal_wakes_the_run_that_waits_for_it(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def order() -> list[Any]:
        return [pgqrs.wait_for_event("paid"), pgqrs.wait_for_event("paid", timeout=60)]

    run = order.start(store=store)
    drain(order)
    assert (run.status(), run.refresh().wake_at) == (RunStatus.SUSPENDED, None)
    clock.advance(86400 * 365)
    assert drain(order) == 0
    store.workflows.signal(run.id, "other", 0)
    store.workflows.signal(run.id, "paid", {"amount": 5})
    assert drain(order) == 1
    assert run.status() is RunStatus.SUSPENDED
    run.signal("paid", [1])
    drain(order)
    assert run.result(timeout=0) == [{"amount": 5}, [1]]
    with pytest.raises(pgqrs.RunEnded):
        run.signal("paid")


def test_signals_are_kept_until_somebody_waits_and_given_once(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def collect() -> list[Any]:
        return [pgqrs.wait_for_event("n", timeout=10, default="none") for _ in range(4)]

    run = collect.start(store=store)
    for n in (1, 2, None):
        run.signal("n", n)
    drain(collect)
    clock.advance(10)
    drain(collect)
    assert run.result(timeout=0) == [1, 2, None, "none"]


def test_waiting_for_an_event_ends_in_time(store: Any, drain: Drain, clock: ManualClock) -> None:
    @pgqrs.workflow
    def wait() -> str:
        try:
            pgqrs.wait_for_event("never", timeout=10)
        except EventTimedOut as exc:
            pgqrs.sleep(5)
            return exc.name
        return "came"

    run = wait.start(store=store)
    drain(wait)
    clock.advance(10)
    drain(wait)
    run.signal("never", "too late")
    clock.advance(5)
    drain(wait)
    assert run.result(timeout=0) == "never"


def test_a_signal_between_looking_and_waiting_is_not_lost(store: Any, drain: Drain) -> None:
    started: list[int] = []

    @pgqrs.step
    async def tell() -> None:
        await asyncio.to_thread(store.workflows.signal, started[0], "go", 1)

    @pgqrs.workflow
    async def wait() -> int:
        got, _ = await asyncio.gather(pgqrs.wait_for_event("go"), tell())
        return int(got)

    run = wait.start(store=store)
    started.append(run.id)
    drain(wait)
    assert run.result(timeout=0) == 1


def test_events_are_seen_from_outside_and_set_once(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def work() -> None:
        pgqrs.set_event("progress", 1)
        pgqrs.sleep(10)
        pgqrs.set_event("progress", 2)

    run = work.start(store=store)
    with pytest.raises(EventTimedOut):
        run.get_event("progress")
    drain(work)
    assert run.get_event("progress") == 1
    clock.advance(10)
    drain(work)
    assert store.workflows.get_event(run.id, "progress", timeout=1) == 2
    assert [(event.name, event.payload) for event in run.events()] == [
        ("progress", 1),
        ("progress", 2),
    ]
    assert run.get_event("nothing", default="x") == "x"


def test_children_are_started_once_and_waited_for(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def child(n: int) -> int:
        pgqrs.sleep(n)
        if n == 3:
            raise ValueError("three")
        return n * n

    @pgqrs.workflow
    def parent() -> list[Any]:
        children = [child.start(n) for n in (1, 2, 3)]
        results: list[Any] = [children[1].result(), children[0].result()]
        try:
            children[2].result()
        except RunFailed as exc:
            results.append("three" in str(exc))
        return results

    run = parent.start(store=store)
    drain(parent, child)
    assert run.status() is RunStatus.SUSPENDED
    children = store.workflows.list_runs(parent_id=run.id)
    assert [found.name for found in children] == ["child"] * 3
    for _ in range(3):
        clock.advance(1)
        drain(parent, child)
    assert run.result(timeout=0) == [4, 1, True]
    assert len(store.workflows.list_runs(name="child")) == 3


def test_children_of_async_workflows(store: Any, drain: Drain, clock: ManualClock) -> None:
    @pgqrs.workflow
    async def child(n: int) -> int:
        await pgqrs.sleep(n)
        return n * n

    @pgqrs.workflow
    async def parent() -> list[int]:
        children = [await child.start(n) for n in (1, 2)]
        return list(await asyncio.gather(*(each.result() for each in children)))

    run = parent.start(store=store)
    drain(parent, child)
    clock.advance(2)
    drain(parent, child)
    assert run.result(timeout=0) == [1, 4]


@pytest.mark.parametrize("mode", ["threads", "tasks"])
def test_map_keeps_the_order_and_what_is_done(
    store: Any, drain: Drain, clock: ManualClock, mode: str
) -> None:
    done: list[int] = []

    @pgqrs.step(retry=Retry.fixed(5, max_attempts=2))
    def square(n: int) -> int:
        done.append(n)
        if n == 3 and done.count(3) == 1:
            raise OSError("once more")
        return n * n

    @pgqrs.workflow
    def in_threads() -> list[int]:
        return list(pgqrs.map(square, range(8), concurrency=3))

    @pgqrs.workflow
    async def in_tasks() -> list[int]:
        return list(await pgqrs.map(square, range(8), concurrency=3))

    work: Any = in_threads if mode == "threads" else in_tasks
    run = work.start(store=store)
    drain(work)
    assert run.status() is RunStatus.SUSPENDED
    assert len(run.steps()) == 8
    clock.advance(5)
    drain(work)
    assert run.result(timeout=0) == [n * n for n in range(8)]
    assert sorted(done) == [0, 1, 2, 3, 3, 4, 5, 6, 7]


def test_what_is_not_the_same_each_time_is_remembered(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    seen: list[Any] = []

    @pgqrs.workflow
    def work() -> None:
        seen.append((pgqrs.now(), pgqrs.uuid(), pgqrs.random(), pgqrs.random()))
        pgqrs.sleep(10)

    work.start(store=store)
    drain(work)
    clock.advance(10)
    drain(work)
    assert seen[0] == seen[1]
    assert seen[0][2] != seen[0][3]


def test_transactional_steps_and_their_record_are_one_transaction(
    harness: Harness, store: Any, drain: Drain, crash_once: Drain
) -> None:
    with harness.transaction(store) as transaction:
        transaction.execute("CREATE TABLE IF NOT EXISTS effects (n INTEGER)")
        transaction.execute("DELETE FROM effects")
    tries: list[int] = []

    @pgqrs.step(transactional=True)
    def write(connection: Any, n: int) -> int:
        connection.exec_driver_sql(f"INSERT INTO effects VALUES ({n})")
        tries.append(n)
        if n == 2 and tries.count(2) == 1:
            raise Crash
        if n == 3:
            raise ValueError("not this")
        return n

    @pgqrs.workflow
    def work() -> list[int]:
        done = [write(1), write(2)]
        try:
            write(3)
        except StepFailed:
            done.append(0)
        return done

    def effects() -> list[int]:
        return store.shard(QUEUE).read(  # type: ignore[no-any-return]
            lambda c: list(c.exec_driver_sql("SELECT n FROM effects ORDER BY n").scalars())
        )

    run = work.start(store=store)
    crash_once(work)
    assert effects() == [1]
    drain(work)
    assert run.result(timeout=0) == [1, 2, 0]
    assert effects() == [1, 2]
    assert tries == [1, 2, 2, 3]


def test_who_lost_the_run_records_nothing(
    harness: Harness, store: Any, drain: Drain, clock: ManualClock
) -> None:
    """The worker freezes in the middle of a step; another finishes the run; then it wakes up."""
    log: list[str] = []
    with harness.transaction(store) as transaction:
        transaction.execute("CREATE TABLE IF NOT EXISTS effects (n INTEGER)")
        transaction.execute("DELETE FROM effects")

    @pgqrs.step
    def first() -> str:
        log.append("first")
        if log == ["first"]:
            clock.advance(31)
            drain(work)
            log.append("zombie")
            return "zombie"
        return "live"

    @pgqrs.step
    def second() -> str:
        log.append("second")
        return "second"

    @pgqrs.workflow
    def work() -> list[str]:
        try:
            return [first(), second()]
        except Exception:
            log.append("swallowed")
            raise

    run = work.start(store=store)
    with store.consumer(RUNS) as consumer:
        (message,) = consumer.dequeue()
        assert store.workflows.execute(message, [work]) == Settled()
    assert run.result(timeout=0) == ["live", "second"]
    assert log == ["first", "first", "second", "zombie"]


def test_a_run_whose_attempts_are_used_up_has_failed(
    store: Any, drain: Drain, crash_once: Drain
) -> None:
    @pgqrs.workflow
    def die() -> None:
        raise Crash

    @pgqrs.workflow
    def parent() -> str:
        try:
            die.start().result()
        except RunFailed as exc:
            return str(exc)
        return "nothing"

    run = parent.start(store=store)
    with store.consumer(RUNS) as consumer:
        (message,) = consumer.dequeue()
        store.workflows.execute(message, [parent, die])
    for _ in range(3):
        crash_once(die)
    assert drain(parent, die) == 1
    (child,) = store.workflows.list_runs(name="die")
    assert child.status is RunStatus.FAILED
    assert "last allowed attempt" in child.error
    assert "last allowed attempt" in run.result(timeout=0)


def test_waiting_starts_the_count_of_attempts_anew(
    store: Any, drain: Drain, crash_once: Drain, clock: ManualClock
) -> None:
    crashes: list[int] = []

    @pgqrs.step
    def crash(until: int) -> None:
        if len(crashes) < until:
            crashes.append(1)
            raise Crash

    @pgqrs.workflow
    def work() -> str:
        crash(2)
        pgqrs.sleep(1)
        crash(4)
        return "done"

    run = work.start(store=store)
    crash_once(work)
    crash_once(work)
    drain(work)
    clock.advance(1)
    crash_once(work)
    crash_once(work)
    drain(work)
    assert run.result(timeout=0) == "done"


def test_a_workflow_that_is_not_known_here_waits_for_another_worker(
    store: Any, drain: Drain
) -> None:
    @pgqrs.workflow
    def known_elsewhere() -> None: ...

    known_elsewhere.start(store=store)
    with store.consumer(RUNS) as consumer:
        (message,) = consumer.dequeue()
        outcome = store.workflows.execute(message, [])
        assert isinstance(outcome, GivenBack)


def test_what_cannot_be_kept_is_a_clear_error(store: Any, drain: Drain) -> None:
    @pgqrs.step
    def give() -> object:
        return object()

    @pgqrs.workflow
    def a_step() -> None:
        give()

    @pgqrs.workflow
    def the_run() -> object:
        return object()

    for work in (a_step, the_run):
        run = work.start(store=store)
        drain(work)
        with pytest.raises(RunFailed, match="object is not JSON"):
            run.result(timeout=0)

    @pgqrs.workflow
    def an_argument(value: Any) -> None: ...

    with pytest.raises(pgqrs.InvalidPayload):
        an_argument.start(object(), store=store)


def test_run_inline(store: Any, drain: Drain) -> None:
    @pgqrs.step
    def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    def calculate(n: int) -> int:
        return double(n) + 1

    @pgqrs.workflow
    async def calculate_too(n: int) -> int:
        return await double.acall(n) + 1

    assert calculate.run_inline(2, key="k", store=store) == 5
    assert calculate.run_inline(3, key="k", store=store) == 5
    assert calculate_too.run_inline(2, store=store) == 5
    assert drain(calculate, calculate_too) == 0
    assert [run.status for run in store.workflows.list_runs()] == [RunStatus.COMPLETED] * 2


def test_acall_is_awaited_inside_of_async_runs_and_outside_of_runs(store: Any) -> None:
    @pgqrs.step
    def double(n: int) -> int:
        return 2 * n

    @pgqrs.step
    async def triple(n: int) -> int:
        return 3 * n

    @pgqrs.workflow
    async def calculate(n: int) -> int:
        return await double.acall(n) + await triple.acall(n)

    @pgqrs.workflow
    def calculate_in_vain(n: int) -> None:
        double.acall(n)

    async def plainly() -> int:
        return await double.acall(2) + await triple.acall(2)

    assert calculate.run_inline(2, store=store) == 10
    assert asyncio.run(plainly()) == 10
    with pytest.raises(RunFailed, match="nothing to await it with"):
        calculate_in_vain.run_inline(2, store=store)


def test_swallowing_an_interrupt_does_not_help(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    log: list[str] = []

    @pgqrs.step
    def note(text: str) -> None:
        log.append(text)

    @pgqrs.workflow
    def work() -> str:
        try:
            pgqrs.sleep(10)
        except BaseException:
            note("swallowed")
        return "done"

    run = work.start(store=store)
    drain(work)
    assert (run.status(), log) == (RunStatus.SUSPENDED, [])
    clock.advance(10)
    drain(work)
    assert (run.result(timeout=0), log) == ("done", [])


# In a worker


def test_a_worker_runs_workflows(store: Any, clock: ManualClock) -> None:
    @pgqrs.step
    def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow(queue="sync runs")
    def plain(n: int) -> int:
        pgqrs.sleep(60)
        return double(n)

    @pgqrs.workflow
    async def coroutine(n: int) -> int:
        child = await plain.start(n)
        await pgqrs.sleep(30)
        return int(await child.result()) + 1

    def work() -> None:
        worker(store, workflows=[plain, coroutine], concurrency=3).run(until_empty=True)

    runs = [coroutine.start(n, store=store) for n in range(10)]
    work()
    assert {run.status() for run in runs} == {RunStatus.SUSPENDED}
    clock.advance(60)
    work()
    assert [run.result(timeout=0) for run in runs] == [2 * n + 1 for n in range(10)]


def test_a_worker_at_work_hears_of_signals(harness: Harness) -> None:
    store = harness.open(clock=None)

    @pgqrs.workflow
    def greet() -> str:
        return f"Hello, {pgqrs.wait_for_event('name')}"

    with worker(store, workflows=[greet]):
        run = greet.start(store=store)
        give_up_at = time.monotonic() + 60
        while run.status() is not RunStatus.SUSPENDED:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        run.signal("name", "you")
        assert run.result(timeout=60) == "Hello, you"
