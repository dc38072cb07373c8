"""Failed runs that are retried, and steps that are tried again."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest

import pgqrs
from pgqrs import EventTimedOut, Retry, RunFailed, RunStatus, StepFailed, StepStatus
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.conformance.harness import RUNS, Drain


class Shop:
    """Steps that fail while they are told to, and how often each was executed."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.executed: list[str] = []

        @pgqrs.step
        def do(name: str) -> str:
            self.executed.append(name)
            if name in self.broken:
                raise ValueError(f"{name} is broken")
            return name

        self.do = do


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_retry_keeps_failures_that_the_workflow_dealt_with(
    store: Any, drain: Drain, shop: Shop
) -> None:
    @pgqrs.workflow
    def order() -> str:
        try:
            paid = shop.do("charge")
        except StepFailed:
            paid = shop.do("invoice")
        if "code" in shop.broken:
            raise RuntimeError("a mistake in plain code")
        return paid

    shop.broken = {"charge", "code"}
    run = order.start(store=store)
    drain(order)
    assert (run.status(), run.refresh().failed_step) == (RunStatus.FAILED, None)
    shop.broken = set()
    run.retry()
    drain(order)
    assert run.result(timeout=0) == "invoice"
    assert shop.executed == ["charge", "invoice"]


@pytest.mark.parametrize("raised", ["as it is", "from it"])
def test_a_retry_repeats_the_failure_that_ended_the_run(
    store: Any, drain: Drain, shop: Shop, raised: str
) -> None:
    @pgqrs.workflow
    def order() -> list[str]:
        try:
            first = shop.do("first")
        except StepFailed:
            first = "none"
        try:
            return [first, shop.do("second"), shop.do("third")]
        except StepFailed as exc:
            if raised == "as it is":
                raise
            raise RuntimeError("no second") from exc

    shop.broken = {"first", "second"}
    run = order.start(store=store)
    drain(order)
    assert run.refresh().failed_step == "do#2"
    shop.broken = set()
    run.retry()
    drain(order)
    assert run.result(timeout=0) == ["none", "second", "third"]
    assert shop.executed == ["first", "second", "second", "third"]


def test_what_followed_from_the_failure_is_forgotten_with_it(
    store: Any, drain: Drain, shop: Shop
) -> None:
    @pgqrs.workflow
    def order() -> list[str]:
        try:
            return [shop.do("reserve"), shop.do("charge"), shop.do("ship")]
        except StepFailed:
            shop.do("undo")
            raise

    shop.broken = {"charge"}
    run = order.start(store=store)
    drain(order)
    shop.broken = set()
    run.retry()
    drain(order)
    assert run.result(timeout=0) == ["reserve", "charge", "ship"]
    assert shop.executed == ["reserve", "charge", "undo", "charge", "ship"]


def test_what_went_on_beside_the_failure_stays_done(store: Any, drain: Drain, shop: Shop) -> None:
    @pgqrs.workflow
    async def order() -> Any:
        async def branch(*names: str) -> list[str]:
            return [await shop.do.acall(name) for name in names]

        done = await asyncio.gather(branch("a", "b"), branch("c", "d"), return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException):
                raise each
        return done

    shop.broken = {"b"}
    run = order.start(store=store)
    drain(order)
    assert run.refresh().failed_step == "1/do#2"
    shop.broken = set()
    run.retry()
    drain(order)
    assert run.result(timeout=0) == [["a", "b"], ["c", "d"]]
    assert sorted(shop.executed) == ["a", "b", "b", "c", "d"]


def test_a_group_of_failures_is_repeated_together(store: Any, drain: Drain, shop: Shop) -> None:
    @pgqrs.workflow
    def mapped() -> Any:
        return pgqrs.map(shop.do, ["a", "b", "c"], concurrency=1)

    @pgqrs.workflow
    async def grouped() -> Any:
        async def one(name: str) -> Any:
            return await shop.do.acall(name)

        done = await asyncio.gather(*(one(name) for name in "abc"), return_exceptions=True)
        errors = [each for each in done if isinstance(each, Exception)]
        if errors:
            raise ExceptionGroup("some failed", errors)
        return done

    shop.broken = {"a", "c"}
    runs = [mapped.start(store=store), grouped.start(store=store)]
    drain(mapped, grouped)
    shop.broken = set()
    for run in runs:
        run.retry()
    drain(mapped, grouped)
    assert [run.result(timeout=0) for run in runs] == [["a", "b", "c"]] * 2
    assert sorted(shop.executed) == sorted("aabcc" * 2)


def test_the_retry_of_a_parent_sees_its_repaired_child(
    store: Any, drain: Drain, shop: Shop
) -> None:
    @pgqrs.workflow
    def child() -> str:
        return shop.do("child")

    @pgqrs.workflow
    def parent() -> Any:
        return child.start().result()

    shop.broken = {"child"}
    run = parent.start(store=store)
    drain(parent, child)
    with pytest.raises(RunFailed, match="child is broken"):
        run.result(timeout=0)
    (found,) = store.workflows.list_runs(name="child")
    run.retry()  # too early: the child has not been repaired
    drain(parent, child)
    assert run.status() is RunStatus.FAILED
    shop.broken = set()
    run.retry()
    store.workflows.retry(found.id)
    drain(parent, child)  # the parent may look before the child is done
    assert run.result(timeout=0) == "child"
    assert shop.executed == ["child", "child"]
    assert len(store.workflows.list_runs(name="child")) == 1


def test_a_retry_waits_once_more_for_a_signal_that_did_not_come(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    def wait() -> Any:
        return pgqrs.wait_for_event("go", timeout=10)

    run = wait.start(store=store)
    drain(wait)
    clock.advance(11)
    drain(wait)
    with pytest.raises(RunFailed, match=EventTimedOut.__name__):
        run.result(timeout=0)
    run.retry()
    drain(wait)
    run.signal("go", 3)
    drain(wait)
    assert run.result(timeout=0) == 3


def test_a_deadline_survives_a_retry(
    store: Any, drain: Drain, shop: Shop, clock: ManualClock
) -> None:
    @pgqrs.workflow(timeout=60)
    def work() -> None:
        shop.do("x")
        pgqrs.wait_for_event("never")

    shop.broken = {"x"}
    run = work.start(store=store)
    deadline = run.refresh().deadline_at
    drain(work)
    clock.advance(30)
    shop.broken = set()
    run.retry()
    assert run.refresh().deadline_at == deadline
    drain(work)
    for days in (1, 30):
        clock.advance(60)
        drain(work)
        with pytest.raises(RunFailed, match="deadline"):
            run.result(timeout=0)
        clock.advance(days * 86_400)
        run.retry()
        assert run.refresh().deadline_at == clock.now() + timedelta(seconds=60)
        drain(work)
        assert run.status() is RunStatus.SUSPENDED


# Steps


def test_a_retry_without_a_limit_is_bounded_by_the_queue(
    store: Any, drain: Drain, shop: Shop
) -> None:
    @pgqrs.step(retry=Retry.fixed(0))
    def never() -> None:
        shop.do("x")

    @pgqrs.workflow
    def work() -> None:
        never()

    shop.broken = {"x"}
    run = work.start(store=store)  # the queue allows 3 attempts
    drain(work)
    assert run.status() is RunStatus.FAILED
    (step,) = run.steps()
    assert (step.status, step.attempts) == (StepStatus.FAILED, 3)


class TooMany(Exception):
    retry_after = "30"


@pytest.mark.parametrize("of", ["retry_on", "retry_after", "decide"])
def test_opinions_that_fail_do_not_count(
    store: Any, drain: Drain, of: str, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    def confused(*_: Any) -> Any:
        raise AttributeError("no such attribute")

    error: Exception = TooMany("429") if of == "retry_after" else ConnectionError("no route")
    policy = Retry.fixed(5, max_attempts=2)
    if of == "decide":
        policy = Retry(decide=confused, delay=5, max_attempts=2)

    @pgqrs.step(retry=policy, retry_on=confused if of == "retry_on" else None)
    def ask() -> None:
        raise error

    @pgqrs.workflow
    def work() -> Any:
        try:
            ask()
        except StepFailed as exc:
            return exc.message

    run = work.start(store=store)
    with caplog.at_level(logging.ERROR):
        drain(work)
    assert of in caplog.text
    assert run.refresh().wake_at == clock.now() + timedelta(seconds=5)
    clock.advance(5)
    drain(work)
    assert run.result(timeout=0) == str(error)


# Names


def test_names_of_events_are_told_apart(store: Any, drain: Drain) -> None:
    names = ["x", "x", "x#2", "x%232", "x#2"]

    @pgqrs.workflow
    def wait() -> list[Any]:
        for name in names:
            pgqrs.set_event(name, name)
        return [pgqrs.wait_for_event(name) for name in names]

    run = wait.start(store=store)
    drain(wait)
    for number, name in enumerate(names):
        run.signal(name, number)
    drain(wait)
    assert run.result(timeout=0) == [0, 1, 2, 3, 4]
    assert [event.name for event in run.events()] == names


def test_a_parameter_may_be_called_key(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def flow(name: str, key: str | None = "default", store: int = 0) -> list[Any]:
        return [name, key, store]

    bound = flow.options(store=store, key="a")
    run = bound.start("n", key="mine", store=3)
    drain(flow)
    assert (run.result(timeout=0), run.refresh().key) == (["n", "mine", 3], "a")
    with pgqrs.use(getattr(store, "_wrapped", store)):
        other = flow.options(key="b", store=store).start("n", key=None)
    drain(flow)
    assert other.result(timeout=0) == ["n", None, 0]
    third = flow.start("n", "by position", 3, key="c", store=store)
    drain(flow)
    assert (third.result(timeout=0), third.refresh().key) == (["n", "by position", 3], "c")


def test_a_child_may_return_as_much_as_a_run_may(harness: Any, drain: Drain) -> None:
    store = harness.open(clock=harness.clock, max_payload_bytes=10_000)

    @pgqrs.workflow
    def child() -> str:
        return "x" * 9990

    @pgqrs.workflow
    def parent() -> int:
        return len(child.start().result())

    run = parent.start(store=store)
    with store.consumer(RUNS) as consumer:
        while found := consumer.dequeue(10):
            for message in found:
                store.workflows.execute(message, [parent, child])
    assert run.result(timeout=0) == 9990


def test_a_message_of_no_run_says_so_in_the_archive(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def flow() -> None: ...

    with store.producer(RUNS) as producer:
        id = producer.enqueue({"workflow": "flow"})
    drain(flow)
    (archived,) = store.admin().list_archive(RUNS)
    assert archived.original_message_id == id
    assert "no run has this message" in archived.error


def test_one_of_many_gets_a_step(store: Any) -> None:
    run = store.workflows.create("by hand")
    run.start()
    guard = run.acquire_step("x")
    later = run.acquire_step("x")  # whoever began it is given up for dead
    assert (guard.attempt, later.attempt) == (1, 2)
    with pytest.raises(pgqrs.LeaseLost):
        guard.success(1)
    later.success(2)
    assert run.acquire_step("x").value == 2
