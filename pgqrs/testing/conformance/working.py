"""Workers: from a message to what came of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pgqrs import (
    ArchiveReason,
    Done,
    Failed,
    GivenBack,
    Handler,
    InvalidArgument,
    Message,
    ProcessBroken,
    Retry,
    RetryAfter,
    Settled,
)
from pgqrs.handlers import Delivery, Job
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness, worker

PATIENCE = 100.0
"""Seconds after which what is waited for does not happen any more."""


def until(condition: Callable[[], Any]) -> Any:
    """Wait until this is true. Returns what it says."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def work_off(store: Any, handler: Any, **options: Any) -> None:
    """Handle what there is now."""
    worker(store, handlers={QUEUE: handler}, **options).run(until_empty=True)


@contextmanager
def busy(store: Any, **options: Any) -> Iterator[tuple[Any, threading.Event, list[int]]]:
    """A worker whose handler waits until it may go on; also what it has begun."""
    go_on, begun = threading.Event(), list[int]()

    def handle(message: Message) -> None:
        begun.append(message.id)
        assert go_on.wait(PATIENCE)

    options = {"grace": PATIENCE, "prefetch": 0} | options
    with worker(store, handlers={QUEUE: handle}, **options) as working:
        try:
            yield working, go_on, begun
        finally:
            go_on.set()


async def double_slowly(message: Message) -> int:
    await asyncio.sleep(0)
    return 2 * int(message.payload)


@pytest.mark.parametrize("handler", [lambda message: 2 * message.payload, double_slowly])
def test_every_message_is_handled_and_its_result_kept(
    store: Any, admin: Any, producer: Any, handler: Any
) -> None:
    ids = producer.enqueue_many(range(25))
    work_off(store, handler, concurrency=3)
    assert [admin.get_archived(id).result for id in ids] == [2 * n for n in range(25)]
    assert {admin.get_archived(id).archive_reason for id in ids} == {"completed"}
    assert admin.list_workers() == []


def test_a_worker_serves_several_queues_and_creates_them(store: Any, admin: Any) -> None:
    worker(store, queues=["other"], handlers={QUEUE: str}).run(until_empty=True)
    assert [queue.queue_name for queue in admin.list_queues()] == ["other", QUEUE]
    ids = [store.producer(name).enqueue(name) for name in ("other", QUEUE)]
    handlers = {"other": lambda m: f"{m.payload}!", QUEUE: lambda m: f"{m.payload}?"}
    worker(store, handlers=handlers).run(until_empty=True)
    assert [admin.get_archived(id).result for id in ids] == ["other!", f"{QUEUE}?"]


def test_a_worker_needs_queues(store: Any) -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        worker(store)
    with pytest.raises(InvalidArgument, match="names"):
        worker(store, queues="tasks")
    with pytest.raises(InvalidArgument, match="concurrency"):
        worker(store, queues=["tasks"], concurrency=0)


def test_an_error_is_retried_by_the_policy_and_then_a_dead_letter(
    store: Any, admin: Any, producer: Any, clock: ManualClock
) -> None:
    attempts: list[int] = []

    def fail(message: Message) -> None:
        attempts.append(message.attempt)
        raise ZeroDivisionError(f"attempt {message.attempt}")

    id = producer.enqueue("work")
    handler = Handler(fail, retry=Retry(delay=10))
    for pause in (9, 1, 19, 1, 100):
        work_off(store, handler)
        clock.advance(pause)
    assert attempts == [1, 2, 3]
    ended = admin.get_archived(id)
    assert ended.archive_reason == "failed"
    assert "ZeroDivisionError: attempt 3" in ended.error
    assert "in fail" in ended.error


@pytest.mark.parametrize(
    ("error", "again_after"), [(RetryAfter(40), 40), (KeyboardInterrupt(), 1), (SystemExit(), 1)]
)
def test_whatever_a_handler_raises_the_worker_goes_on(
    store: Any,
    admin: Any,
    producer: Any,
    clock: ManualClock,
    error: BaseException,
    again_after: int,
) -> None:
    failing, fine = producer.enqueue_many(["fail", "fine"])

    def handle(message: Message) -> str:
        if message.payload == "fail" and message.attempt == 1:
            raise error
        return "handled"

    work_off(store, handle)
    assert admin.get_archived(fine).result == "handled"
    wait = admin.get_message(failing).vt - clock.now()
    assert timedelta() < wait <= timedelta(seconds=again_after)  # part of it may be random
    clock.advance(again_after)
    work_off(store, handle)
    assert admin.get_archived(failing).result == "handled"


def test_a_worker_that_is_broken_leaves_the_rest_to_others(
    store: Any, admin: Any, producer: Any, clock: ManualClock
) -> None:
    broken, left = producer.enqueue_many(["break", "fine"])

    def handle(message: Message) -> str:
        if message.payload == "break" and message.attempt == 1:
            raise ProcessBroken("the engine is gone")
        return "handled"

    with pytest.raises(ProcessBroken, match="engine"):
        worker(store, handlers={QUEUE: handle}, concurrency=1, prefetch=0).run()
    assert [admin.get_message(id).attempt for id in (broken, left)] == [1, 0]
    assert admin.list_workers() == []
    clock.advance(1)
    work_off(store, handle)
    assert {admin.get_archived(id).result for id in (broken, left)} == {"handled"}


def test_an_outcome_is_done_as_it_says(
    store: Any, admin: Any, producer: Any, clock: ManualClock
) -> None:
    eta = clock.now() + timedelta(hours=1)
    outcomes: dict[str, Any] = {
        "done": Done([1]),
        "dead": Failed("of this", dead=True),
        "delayed": GivenBack(delay=60),
        "until": GivenBack(eta=eta),
    }
    ids = {name: producer.enqueue(name) for name in outcomes}
    work_off(store, lambda message: outcomes[message.payload])
    assert admin.get_archived(ids["done"]).result == [1]
    assert admin.get_archived(ids["dead"]).error == "of this"
    for name, vt in (("delayed", clock.now() + timedelta(minutes=1)), ("until", eta)):
        given_back = admin.get_message(ids[name])
        assert (given_back.vt, given_back.read_ct, given_back.attempt) == (vt, 1, 0)


def test_a_route_finds_the_job_and_the_job_may_end_the_message_itself(
    store: Any, admin: Any, producer: Any
) -> None:
    def settle(delivery: Delivery) -> Settled:
        delivery.holder.ack(delivery.message, result="by itself")
        return Settled()

    async def settle_async(delivery: Delivery) -> Settled:
        return await asyncio.to_thread(settle, delivery)

    jobs = {
        "thread": Job(name="settle", run=settle),
        "task": Job(name="settle", run=settle_async, is_async=True),
    }
    ids = producer.enqueue_many(["thread", "task", "unknown"])
    worker(
        store,
        queues=[QUEUE],
        routes=[lambda message: None, lambda message: jobs.get(message.payload)],
    ).run(until_empty=True)
    assert [admin.get_archived(id).result for id in ids[:2]] == ["by itself"] * 2
    assert admin.get_message(ids[2]).attempt == 1  # tried again later, perhaps by who knows it


def test_a_message_nobody_knows_ends_as_a_dead_letter_that_says_so(
    store: Any, admin: Any, producer: Any, clock: ManualClock
) -> None:
    id = producer.enqueue("unknown")
    for _ in range(3):
        worker(store, queues=[QUEUE]).run(until_empty=True)
        clock.advance(1000)
    assert "HandlerNotFound: no handler" in admin.get_archived(id).error


@pytest.mark.parametrize("result", [{1, 2}, object(), {"x": float("nan")}, "x" * 2_000_000])
def test_a_result_that_cannot_be_kept_fails_the_message_once(
    store: Any, admin: Any, producer: Any, result: Any
) -> None:
    calls: list[int] = []

    def handle(message: Message) -> Any:
        calls.append(message.id)
        return result

    id = producer.enqueue("work")
    work_off(store, handle)
    assert calls == [id]
    ended = admin.get_archived(id)
    assert ended.archive_reason == "failed"
    assert "result" in ended.error


def test_a_handler_of_batches_gets_many_at_once(store: Any, admin: Any, producer: Any) -> None:
    sizes: list[int] = []

    def handle(messages: list[Message]) -> list[int]:
        sizes.append(len(messages))
        return [message.payload + 1 for message in messages]

    async def fail_all(messages: list[Message]) -> None:
        raise ZeroDivisionError

    ids = producer.enqueue_many(range(25))
    work_off(store, Handler(handle, batch=10), concurrency=1)
    assert sum(sizes) == 25
    assert max(sizes) == 10
    assert [admin.get_archived(id).result for id in ids] == list(range(1, 26))
    more = producer.enqueue_many(range(5))
    work_off(store, Handler(fail_all, batch=10))
    assert [admin.get_message(id).attempt for id in more] == [1] * 5


def test_a_handler_that_takes_too_long_fails(store: Any, admin: Any, producer: Any) -> None:
    never = threading.Event()

    async def sleep(message: Message) -> None:
        await asyncio.sleep(PATIENCE)

    for handle in (sleep, lambda message: never.wait(PATIENCE)):
        id = producer.enqueue("slow")
        handler = Handler(handle, timeout=0.05, retry=Retry(max_attempts=1))
        with worker(store, handlers={QUEUE: handler}, grace=0):
            until(partial(_ended, admin, id))
        assert "took longer than 0.05 s" in admin.get_archived(id).error
    never.set()


def _ended(admin: Any, id: int) -> bool:
    return any(found.original_message_id == id for found in admin.list_archive(QUEUE))


def test_no_more_is_claimed_than_there_are_slots(store: Any, admin: Any, producer: Any) -> None:
    ids = producer.enqueue_many(range(10))
    with busy(store, concurrency=3) as (_, go_on, begun):
        until(lambda: len(begun) == 3)
        stats = admin.queue_stats(QUEUE)
        assert (stats.leased, stats.ready) == (3, 7)
        go_on.set()
        until(lambda: len(begun) == 10)
    assert sorted(begun) == ids  # threads begin in any order


def test_leases_are_renewed_while_handlers_block(
    store: Any, admin: Any, producer: Any, rival: Any, clock: ManualClock
) -> None:
    """The worker renews by the time of its own; when a lease lapses, the clock says."""
    id = producer.enqueue("work")
    with busy(store, lease=1) as (_, go_on, begun):
        until(lambda: begun)
        for _ in range(4):
            clock.advance(0.9)
            until(lambda: admin.get_message(id).vt == clock.now() + timedelta(seconds=1))
            assert rival.dequeue() == []
        go_on.set()
    assert begun == [id]
    assert admin.get_archived(id).read_ct == 1


def test_who_lost_its_lease_ends_nothing(
    store: Any,
    admin: Any,
    producer: Any,
    rival: Any,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a process was frozen: nobody renewed."""
    id = producer.enqueue("work")
    with busy(store, concurrency=1) as (_, go_on, begun):
        until(lambda: begun)
        # Again if the worker has renewed just in between.
        (message,) = until(lambda: clock.advance(31) and rival.dequeue())
        rival.ack(message, result="by the rival")
        with caplog.at_level(logging.WARNING, logger="pgqrs.worker"):
            go_on.set()
            until(lambda: "lease lost" in caplog.text)
    ended = admin.get_archived(id)
    assert (ended.result, ended.read_ct) == ("by the rival", 2)


def test_a_handler_can_learn_that_its_lease_is_lost(store: Any, admin: Any, producer: Any) -> None:
    lost: list[str] = []

    def wait(delivery: Delivery) -> Settled:
        told = threading.Event()
        delivery.when_lost(told.set)
        assert told.wait(PATIENCE)
        assert delivery.is_lost
        lost.append("thread")
        return Settled()

    async def wait_async(delivery: Delivery) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            lost.append("task")
            raise

    jobs = {
        "thread": Job(name="wait", run=wait),
        "task": Job(name="wait", run=wait_async, is_async=True),
    }
    options = {"queues": [QUEUE], "routes": [lambda message: jobs[message.payload]]}
    with worker(store, lease=0.3, **options):
        producer.enqueue_many(["thread", "task"])
        until(lambda: admin.queue_stats(QUEUE).leased == 2)
        admin.purge_queue(QUEUE)
        until(lambda: sorted(lost) == ["task", "thread"])


def test_stopping_finishes_what_was_begun_and_gives_back_the_rest(
    store: Any, admin: Any, producer: Any
) -> None:
    ids = producer.enqueue_many(range(6))
    begun, go_on = list[int](), threading.Event()

    def handle(message: Message) -> None:
        begun.append(message.id)
        assert go_on.wait(PATIENCE)

    batches = Handler(lambda messages: handle(messages[0]), batch=2)  # as many as fit, and more
    with worker(store, handlers={QUEUE: batches}, concurrency=1) as working:
        until(lambda: begun)
        working.stop()
        until(lambda: admin.queue_stats(QUEUE).ready == 4)
        go_on.set()
    assert [found.original_message_id for found in admin.list_archive(QUEUE)] == ids[:2]
    assert [message.attempt for message in admin.peek(QUEUE)] == [0] * 4


def test_stopping_now_gives_back_everything(store: Any, admin: Any, producer: Any) -> None:
    (id,) = producer.enqueue_many([1])
    with busy(store) as (working, _, begun):
        until(lambda: begun)
        working.stop(now=True)
        until(lambda: admin.queue_stats(QUEUE).ready == 1)
    assert admin.get_message(id).attempt == 0


def test_a_task_that_is_not_done_in_time_is_cancelled_and_given_back(
    store: Any, admin: Any, producer: Any
) -> None:
    cancelled, begun = threading.Event(), threading.Event()

    async def handle(message: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cancelled.set()

    id = producer.enqueue("work")
    with worker(store, handlers={QUEUE: handle}, grace=0.01):
        assert begun.wait(PATIENCE)
    assert cancelled.wait(PATIENCE)
    assert admin.get_message(id).attempt == 0


def test_a_worker_is_controlled_by_its_row(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None, heartbeat=0.05)
    admin, producer = store.admin(), store.producer(QUEUE)
    handled: list[int] = []
    with worker(store, handlers={QUEUE: lambda message: handled.append(message.id)}) as working:
        id = until(lambda: working.worker_id)
        admin.suspend_worker(id)
        until(lambda: [found.status for found in admin.list_workers()] == ["suspended"])
        first = producer.enqueue("first")
        time.sleep(0.2)
        assert handled == []
        admin.resume_worker(id)
        until(lambda: handled == [first])
        admin.stop_worker(id)
        until(lambda: admin.list_workers() == [])
        last = producer.enqueue("last")
    assert handled == [first]
    assert admin.get_message(last).read_ct == 0


def test_a_purged_worker_registers_anew(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    admin, producer = store.admin(), store.producer(QUEUE)
    handled: list[int] = []
    with worker(store, handlers={QUEUE: lambda message: handled.append(message.id)}) as working:
        id = until(lambda: working.worker_id)
        assert admin.purge_workers(silent_for=0) == 1
        sent = producer.enqueue("work")
        until(lambda: handled == [sent])
        assert until(lambda: working.worker_id) != id


def test_an_idle_worker_hears_of_a_message_at_once(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    producer = store.producer(QUEUE)
    handled = threading.Event()
    with worker(store, handlers={QUEUE: lambda message: handled.set()}):
        for _ in range(3):
            handled.clear()
            producer.enqueue("work")
            assert handled.wait(PATIENCE)
        late = producer.enqueue("later", delay=0.2)
        until(lambda: _ended(store.admin(), late))


def test_a_worker_can_run_again(store: Any, admin: Any, producer: Any) -> None:
    handled: list[int] = []
    again = worker(store, handlers={QUEUE: lambda message: handled.append(message.id)})
    for _ in range(3):
        producer.enqueue("work")
        again.run(until_empty=True)
    assert len(handled) == 3


def test_what_was_claimed_ahead_is_given_back_if_its_slot_is_long_in_coming(
    store: Any, admin: Any, producer: Any, rival: Any
) -> None:
    """Handlers were quick, so the worker has claimed ahead; and then one blocks the only slot."""
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.payload == "block":
            begun.set()
            assert go_on.wait(PATIENCE)

    quick = producer.enqueue_many(["quick"] * 20)
    with worker(store, handlers={QUEUE: handle}, concurrency=1, grace=PATIENCE):
        until(lambda: admin.queue_stats(QUEUE).archived[ArchiveReason.COMPLETED] == len(quick))
        producer.enqueue_many(["block", *["other"] * 10])
        try:
            assert begun.wait(PATIENCE)
            others = [until(rival.dequeue)[0] for _ in range(10)]
        finally:
            go_on.set()
    assert {(message.payload, message.attempt) for message in others} == {("other", 1)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_worker_that_gave_messages_back_has_not_worked_off_its_queue(
    store: Any, admin: Any, producer: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.worker.LATE", 0.02)

    def handle(message: Message) -> None:
        time.sleep(0.1 if message.payload == "slow" else 0)

    async def handle_async(message: Message) -> None:
        handle(message)

    quick, slow = ["quick"] * 20, ["slow", "quick", "quick"]
    producer.enqueue_many([*quick, *slow, *slow, *quick])
    work_off(store, handle_async if is_async else handle, concurrency=1)
    stats = admin.queue_stats(QUEUE)
    assert (stats.ready, stats.leased) == (0, 0)
    assert stats.archived[ArchiveReason.COMPLETED] == 2 * len(quick) + 2 * len(slow)
