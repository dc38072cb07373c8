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
