"""User code that exits, interrupts, cancels or hangs: its own failure, and nobody else's."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import pgqrs
from pgqrs import Handler, Message, Retry, RunStatus
from pgqrs.testing.conformance.harness import QUEUE, worker

PATIENCE = 60.0
"""Seconds after which what is waited for does not happen any more."""


def _exit() -> NoReturn:
    sys.exit(3)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _cancel() -> NoReturn:
    raise asyncio.CancelledError


def _close() -> NoReturn:
    raise GeneratorExit


class Strange(BaseException):
    """Nobody expects it."""


def _surprise() -> NoReturn:
    raise Strange("a surprise")


WAYS: dict[str, Callable[[], NoReturn]] = {
    "SystemExit": _exit,
    "KeyboardInterrupt": _interrupt,
    "CancelledError": _cancel,
    "GeneratorExit": _close,
    "Strange": _surprise,
}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_handler_raises_is_a_failure_that_counts(store: Any, kind: str) -> None:
    handled: list[str] = []

    def handle(message: Message) -> str:
        name = str(message.payload)
        handled.append(name)
        return WAYS[name]() if name in WAYS else name

    async def handle_async(message: Message) -> str:
        return handle(message)

    store.admin().create_queue(QUEUE)
    retry = Retry.fixed(0, max_attempts=2)
    call: Any = handle if kind == "sync" else handle_async
    store.producer(QUEUE).enqueue_many([*WAYS, "fine", "too"])
    handler = Handler(call, retry=retry)
    worker(store, handlers={QUEUE: handler}, concurrency=2).run(until_empty=True)
    assert {name: handled.count(name) for name in WAYS} == dict.fromkeys(WAYS, 2)
    ended = {found.payload: found for found in store.admin().list_archive(QUEUE, n=100)}
    for name in WAYS:
        assert (ended[name].archive_reason, ended[name].read_ct) == ("failed", 2)
        assert name in ended[name].error
    assert [ended[name].archive_reason for name in ("fine", "too")] == ["completed"] * 2


def _declare(kind: str, place: str) -> Any:
    """A workflow that misbehaves as it is told: in a step, or in its own code."""

    @pgqrs.step(name="misbehave")
    def misbehave(name: str) -> str:
        return WAYS[name]() if name in WAYS else name

    @pgqrs.step(name="misbehave")
    async def misbehave_async(name: str) -> str:
        return WAYS[name]() if name in WAYS else name

    @pgqrs.workflow(name=f"{place} misbehaves")
    def work(name: str) -> str:
        if place == "body" and name in WAYS:
            WAYS[name]()
        return misbehave(name)

    @pgqrs.workflow(name=f"{place} misbehaves")
    async def work_async(name: str) -> str:
        if place == "body" and name in WAYS:
            WAYS[name]()
        step: Any = misbehave_async if kind == "async" else misbehave
        result: str = await step(name)
        return result

    return work if kind == "sync" else work_async


@pytest.mark.parametrize("kind", ["sync", "async", "sync in async"])
def test_what_a_run_raises_is_a_failure_of_the_run(store: Any, kind: str) -> None:
    known = [_declare(kind, place) for place in ("step", "body")]
    with worker(store, workflows=known):
        for work in known:
            runs = {name: work.start(name, store=store) for name in (*WAYS, "fine")}
            for name in WAYS:
                with pytest.raises(pgqrs.RunFailed, match=name):
                    runs[name].result(timeout=PATIENCE)
            assert runs["fine"].result(timeout=PATIENCE) == "fine"


def test_steps_that_hang_beyond_their_time_limit_hold_up_no_other_run(store: Any) -> None:
    go_on = threading.Event()

    def hang() -> None:
        go_on.wait(PATIENCE)

    hangs: Any = pgqrs.step(timeout=0.05, name="hangs")(hang)
    fine: Any = pgqrs.step(name="fine")(lambda: 1)

    @pgqrs.workflow
    async def hanging() -> None:
        await asyncio.gather(*(hangs() for _ in range(40)))

    @pgqrs.workflow
    async def good() -> int:
        result: int = await fine()
        return result

    try:
        with worker(store, workflows=[hanging, good]):
            run = hanging.start(store=store)
            with pytest.raises(pgqrs.RunFailed, match="hangs"):
                run.result(timeout=PATIENCE)
            assert good.start(store=store).result(timeout=PATIENCE) == 1
    finally:
        go_on.set()


def test_a_run_that_is_executed_by_hand_keeps_its_lease(harness: Any) -> None:
    store = harness.open(clock=None)

    @pgqrs.step
    def long(id: int) -> None:
        seen, deadline = set[Any](), time.monotonic() + PATIENCE
        while len(seen) < 3:
            assert time.monotonic() < deadline, "nobody renewed the lease"
            seen.add(store.admin().get_message(id).vt)
            time.sleep(0.02)

    @pgqrs.workflow
    def work(id: int) -> None:
        long(id)

    store.admin().create_queue("workflows", lease=0.5, if_not_exists=True)
    run = work.start(0, store=store)
    with store.consumer("workflows", lease=0.5) as consumer:
        (message,) = consumer.dequeue(wait=PATIENCE)

        @pgqrs.workflow(name="work")
        def this(id: int) -> None:
            long(message.id)

        store.workflows.execute(message, [this])
    assert run.status() is RunStatus.COMPLETED
