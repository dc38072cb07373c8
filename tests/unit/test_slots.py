"""Slots: where handlers run."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pgqrs.handlers import Delivery, Handler, Load
from pgqrs.hooks import Hooks
from pgqrs.outcomes import Done, Failed, GivenBack, Outcome
from pgqrs.slots import SLICE, LoopSlots, ThreadSlots

LONG = 100
told: ContextVar[str] = ContextVar("told", default="nothing")


def load_of(call: Any, timeout: float | None = None) -> Load:
    now = datetime.now(UTC)
    message: Any = SimpleNamespace(id=1, vt=now, dequeued_at=now)
    nobody: Any = None
    delivery = Delivery(message, holder=nobody, database=nobody, claimed_at=0.0)
    return Load(Handler(call, timeout=timeout).job(), [delivery])


async def outcomes_of(
    *calls: Any, concurrency: int = 1, meanwhile: Any = lambda slots: None
) -> list[Outcome]:
    """What comes of these, one after the other as they end."""
    ended: list[Outcome] = []
    done = asyncio.Event()

    def report(load: Load, outcomes: list[Outcome]) -> None:
        ended.extend(outcomes)
        if len(ended) == len(calls):
            done.set()

    slots = LoopSlots(concurrency, report, Hooks([]))
    slots.use(asyncio.get_running_loop(), None)
    slots.start([load_of(call) for call in calls])
    await asyncio.sleep(0.01)
    meanwhile(slots)
    async with asyncio.timeout(100):
        await done.wait()
    return ended


def test_what_a_coroutine_leaves_in_its_context_is_not_seen_by_the_next() -> None:
    async def leave(message: Any) -> None:
        told.set("a secret")

    async def look(message: Any) -> str:
        return told.get()

    ended = asyncio.run(outcomes_of(look, leave, look))
    assert ended == [Done("nothing"), Done(None), Done("nothing")]


def test_short_coroutines_share_a_task_and_long_ones_do_not_keep_others_waiting() -> None:
    tasks: list[Any] = []

    async def quick(message: Any) -> None:
        tasks.append(asyncio.current_task())

    async def slow(message: Any) -> None:
        while len(tasks) < 5:
            await asyncio.sleep(0.001)

    asyncio.run(outcomes_of(slow, *[quick] * 5, concurrency=2))
    assert len(set(tasks)) == 1


def test_coroutines_that_never_wait_give_the_event_loop_a_turn() -> None:
    heard: list[str] = []

    async def hog(message: Any) -> None:
        heard.append("hog")
        asyncio.get_running_loop().call_soon(heard.append, "turn")
        time.sleep(2 * SLICE)

    asyncio.run(outcomes_of(hog, hog))
    assert heard == ["hog", "turn", "hog", "turn"]


def test_a_task_that_was_cancelled_is_not_used_again() -> None:
    async def wait(message: Any) -> None:
        await asyncio.sleep(3600)

    async def go_on(message: Any) -> int:
        async with asyncio.timeout(100):  # would raise in a task that still counts as cancelled
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    ended = asyncio.run(outcomes_of(wait, go_on, meanwhile=lambda slots: slots.cancel()))
    assert ended == [GivenBack(), Done(0)]


def test_losing_a_lease_cancels_that_coroutine_only() -> None:
    async def wait(message: Any) -> None:
        await asyncio.sleep(3600)

    losing: list[Load] = []

    async def answer(message: Any) -> str:
        while not losing:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return "fine"

    def lose(slots: LoopSlots) -> None:
        [first, _] = [load for load in slots._running.values() if load is not None]
        first.deliveries[0].lose()
        losing.append(first)

    ended = asyncio.run(outcomes_of(wait, answer, concurrency=2, meanwhile=lose))
    assert Done("fine") in ended
    assert GivenBack() in ended


async def _cancels_another(message: Any) -> None:
    task = asyncio.create_task(asyncio.sleep(LONG))
    task.cancel()
    await task


async def _cancels_itself(message: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(LONG)


async def _exits(message: Any) -> None:
    sys.exit(3)


async def _interrupts(message: Any) -> None:
    raise KeyboardInterrupt


async def _generator_exit(message: Any) -> None:
    raise GeneratorExit


async def _fine(message: Any) -> str:
    return "fine"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (_cancels_another, asyncio.CancelledError),
        (_cancels_itself, asyncio.CancelledError),
        (_exits, SystemExit),
        (_interrupts, KeyboardInterrupt),
        (_generator_exit, GeneratorExit),
    ],
)
def test_whatever_a_coroutine_raises_is_its_own_failure(
    call: Any, error: type[BaseException]
) -> None:
    failed, done = asyncio.run(outcomes_of(call, _fine))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, error)
    assert done == Done("fine")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_loop_of_its_own_goes_on_though_tasks_end_it(concurrency: int) -> None:
    async def exits_in_a_task(message: Any) -> None:
        await asyncio.create_task(_exits(message))

    async def stops_the_loop(message: Any) -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "stopped"

    calls = [exits_in_a_task, stops_the_loop, _fine]
    ended: list[Outcome] = []
    done = threading.Event()

    def report(load: Load, outcomes: list[Outcome]) -> None:
        ended.extend(outcomes)
        if len(ended) == len(calls):
            done.set()

    slots = LoopSlots(concurrency, report, Hooks([]))
    slots.start([load_of(call) for call in calls])
    assert done.wait(LONG)
    slots.close()
    assert Done("fine") in ended
    assert Done("stopped") in ended
    (failed,) = [outcome for outcome in ended if isinstance(outcome, Failed)]
    assert isinstance(failed.error, SystemExit)


def test_a_loop_that_is_blocked_is_left_behind() -> None:
    blocked, go_on = threading.Event(), threading.Event()

    async def blocks(message: Any) -> None:
        blocked.set()
        go_on.wait(LONG)

    slots = LoopSlots(1, lambda load, outcomes: None, Hooks([]))
    slots.start([load_of(blocks)])
    assert blocked.wait(LONG)
    slots.cancel()
    slots.close()
    go_on.set()


def test_a_thread_whose_handler_hangs_beyond_its_time_limit_gives_up_its_slot() -> None:
    hangs, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hang(message: Any) -> None:
        hangs.set()
        go_on.wait(LONG)

    def report(load: Load, outcomes: list[Outcome]) -> None:
        if outcomes == [Done("fine")]:
            done.set()

    slots = ThreadSlots(1, report, Hooks([]))
    hanging = load_of(hang, timeout=LONG)
    slots.start([hanging, load_of(lambda message: "fine")])
    assert hangs.wait(LONG)
    slots.abandon(hanging)
    assert done.wait(LONG)
    slots.close()
    go_on.set()


class Threads:
    """Thread slots, and what came of loads."""

    def __init__(self, concurrency: int) -> None:
        self.ended: list[Outcome] = []
        self._changed = threading.Condition()
        self.slots = ThreadSlots(concurrency, self._report, Hooks([]))

    def _report(self, load: Load, outcomes: list[Outcome]) -> None:
        with self._changed:
            self.ended += outcomes
            self._changed.notify_all()

    def run(self, *calls: Any) -> list[Outcome]:
        """Run these, and wait until all have ended."""
        wanted = len(self.ended) + len(calls)
        self.slots.start([load_of(call) for call in calls])
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) >= wanted, LONG)
        return self.ended[-len(calls) :]


def test_as_many_loads_run_at_a_time_as_there_are_slots_and_no_more() -> None:
    """Those of a barrier end only together; the counts of the others say how many ran."""
    together, counting = threading.Barrier(4), threading.Lock()
    running: list[int] = []
    most: list[int] = []

    def meet(message: Any) -> None:
        together.wait(LONG)

    def count(message: Any) -> None:
        with counting:
            running.append(1)
            most.append(len(running))
        time.sleep(0.001)
        with counting:
            running.pop()

    threads = Threads(4)
    for _ in range(3):  # with new threads, and with threads that sleep
        assert threads.run(*[meet] * 8) == [Done(None)] * 8
        assert threads.run(*[count] * 40) == [Done(None)] * 40
    assert max(most) <= 4
    threads.slots.close()


def test_a_load_that_blocks_keeps_none_behind_it_waiting() -> None:
    go_on = threading.Event()

    def block(message: Any) -> str:
        assert go_on.wait(LONG)
        return "blocked"

    def release(message: Any) -> None:
        go_on.set()

    threads = Threads(2)
    for _ in range(20):
        go_on.clear()
        assert Done("blocked") in threads.run(block, *[lambda message: None] * 5, release)
    threads.slots.close()


def test_a_thread_that_sleeps_hears_of_every_load() -> None:
    threads = Threads(3)
    for n in range(300):
        assert threads.run(lambda message, n=n: n) == [Done(n)]
    threads.slots.close()


def test_threads_end_when_their_slots_are_closed() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(message: Any) -> None:
        begun.set()
        go_on.wait(LONG)

    threads = Threads(3)
    threads.run(*[lambda message: None] * 10)
    threads.slots.start([load_of(wait)])
    assert begun.wait(LONG)
    running = list(threads.slots._threads)
    threads.slots.close()
    go_on.set()
    for thread in running:
        thread.join(LONG)
        assert not thread.is_alive()


def test_loads_that_have_not_started_can_be_taken_back() -> None:
    go_on = threading.Event()
    threads = Threads(1)
    first, *others = [load_of(lambda message: go_on.wait(LONG)) for _ in range(4)]
    threads.slots.start([first])
    while first.started_at is None:
        time.sleep(0.001)
    assert threads.slots.oldest() is None
    threads.slots.start(others)
    assert threads.slots.oldest() == others[0].given_at
    assert threads.slots.take_back() == others
    assert threads.slots.take_back() == []
    go_on.set()
    threads.slots.close()
