"""Slots: where handlers run."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from pgqrs.handlers import Delivery, Handler, Load
from pgqrs.hooks import Hooks
from pgqrs.outcomes import Done, GivenBack, Outcome
from pgqrs.slots import SLICE, LoopSlots

told: ContextVar[str] = ContextVar("told", default="nothing")


def load_of(call: Any) -> Load:
    now = datetime.now(UTC)
    message: Any = SimpleNamespace(id=1, vt=now, dequeued_at=now)
    nobody: Any = None
    delivery = Delivery(message, holder=nobody, database=nobody, claimed_at=0.0)
    return Load(Handler(call).job(), [delivery])


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
    slots.use(asyncio.get_running_loop())
    slots.start([load_of(call) for call in calls])
    await asyncio.sleep(0.01)
    meanwhile(slots)
    async with asyncio.timeout(30):
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
        async with asyncio.timeout(10):  # would raise in a task that still counts as cancelled
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
