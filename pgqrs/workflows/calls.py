"""The durable calls that pgqrs brings along: waiting, telling, and what is not the same each time.

In a sync workflow they return; in an async workflow they are awaited. Outside of a run they are what
their names say: `sleep` sleeps, `now` tells the time.
"""

from __future__ import annotations

import asyncio
import random as random_numbers
import time
import uuid as uuids
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar, overload

from pgqrs.errors import InvalidArgument
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.types import Duration, aware, seconds, whole
from pgqrs.workflows import flows
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import Context, Flow, _slot, current, in_event_loop
from pgqrs.workflows.decorators import Step
from pgqrs.workflows.failures import blame_all
from pgqrs.workflows.flows import NOTHING
from pgqrs.workflows.history import Call, escaped
from pgqrs.workflows.interrupts import Expired, Suspend

R = TypeVar("R")
X = TypeVar("X")
MAX_CONCURRENCY = 1000


def sleep(duration: Duration) -> Any:
    """Let the run wait for so long. It needs no thread meanwhile, and survives restarts."""
    length, context = seconds("duration", duration), current()
    if context is None:
        return asyncio.sleep(length) if in_event_loop() else time.sleep(length)
    call = context.take("pgqrs.sleep")
    return context.perform(flows.sleep(context, call, seconds=length, until=None), call)


def sleep_until(when: datetime) -> Any:
    """Let the run wait until a time."""
    then, context = aware("when", when), current()
    if context is None:
        return sleep(max(0.0, (then - datetime.now(UTC)).total_seconds()))
    call = context.take("pgqrs.sleep")
    return context.perform(flows.sleep(context, call, seconds=None, until=then), call)


def wait_for_event(name: str, timeout: Duration | None = None, *, default: Any = NOTHING) -> Any:
    """Let the run wait for a signal of this name. Returns its payload.

    One that came before is not lost, and each is given to one wait only. When nothing came within
    `timeout`, this returns the `default`, or raises `EventTimedOut` if there is none.
    """
    context = _inside("wait_for_event")
    patience = None if timeout is None else seconds("timeout", timeout)
    call = context.take(f"pgqrs.wait_for_event:{escaped(name)}")
    flow = flows.wait_for_event(context, call, name, timeout=patience, default=default)
    return context.perform(flow, call)


def set_event(name: str, value: Any = None) -> Any:
    """Let others know something of this run: progress, a first result. They read it by `get_event`."""
    context = _inside("set_event")
    call = context.take(f"pgqrs.set_event:{escaped(name)}", ((value,), {}))
    return context.perform(flows.set_event(context, call, name, value), call)


def now() -> Any:
    """The time, the same when the run is replayed."""
    context = current()
    if context is None:
        return datetime.now(UTC)
    database, call = context.journal.database, context.take("pgqrs.now")

    def flow() -> Flow[datetime]:
        text = yield from flows.remember(
            context, call, lambda: (database.now() or datetime.now(UTC)).isoformat()
        )
        return datetime.fromisoformat(text)

    return context.perform(flow(), call)


def uuid() -> Any:
    """A random UUID, the same when the run is replayed."""
    context = current()
    if context is None:
        return uuids.uuid4()
    call = context.take("pgqrs.uuid")

    def flow() -> Flow[uuids.UUID]:
        text = yield from flows.remember(context, call, lambda: str(uuids.uuid4()))
        return uuids.UUID(text)

    return context.perform(flow(), call)


def random() -> Any:
    """A random number from 0 up to 1, the same when the run is replayed."""
    context = current()
    if context is None:
        return random_numbers.random()
    call = context.take("pgqrs.random")
    return context.perform(flows.remember(context, call, random_numbers.random), call)


def patched(name: str) -> Any:
    """Whether to take the new way of a workflow that was changed on purpose.

    Runs that were past this place before the change get False, all others True.
    """
    context = current()
    if context is None:
        return True
    call = context.take_patch(escaped(name))
    return context.perform(flows.patched(context, call), call)


if TYPE_CHECKING:

    class Results(list[R], Awaitable[list[R]]):
        """What `map` of a sync step returns, to type checkers: a list; or, awaited, a list."""


@overload
def map(  # type: ignore[overload-overlap]
    step: Step[Concatenate[X, ...], Coroutine[Any, Any, R]],
    items: Iterable[X],
    *,
    concurrency: int = 8,
) -> Awaitable[list[R]]: ...
@overload
def map(
    step: Step[Concatenate[X, ...], R], items: Iterable[X], *, concurrency: int = 8
) -> Results[R]: ...
def map(step: Any, items: Iterable[Any], *, concurrency: int = 8) -> Any:
    """The results of a step for each of many items, in their order, some at the same time.

    In a sync workflow in threads, in an async one as tasks, which is awaited. All are done, or have
    failed, before the first error is raised.
    """
    if not isinstance(step, Step):
        raise InvalidArgument("step", f"expected a step, got {step!r}")
    whole("concurrency", concurrency, low=1, high=MAX_CONCURRENCY)
    context = current()
    if context is None:
        return _plain_map(step, list(items), concurrency)
    each = [step.flow(context, (item,), {}) for item in items]
    if isinstance(context, AsyncContext):
        slots = asyncio.Semaphore(concurrency)
        return _all_of([_in_slot(slots, partial(context.perform, *flow)) for flow in each])
    return context.perform(_map_in_threads(context, each, concurrency))


def _map_in_threads(
    context: Context, each: list[tuple[Flow[Any], Call]], concurrency: int
) -> Flow[list[Any]]:
    stopped = False

    def drive(flow: tuple[Flow[Any], Call]) -> tuple[Any, BaseException | None]:
        nonlocal stopped
        if stopped:
            return None, None
        try:
            return context.drive_call(*flow), None
        except BaseException as exc:
            stopped = stopped or not isinstance(exc, Exception | Suspend | Expired)
            return None, exc

    # Not those of Python's own pool: one that hangs would keep the process from ending.
    threads = DaemonThreads("pgqrs-map", limit=concurrency)
    try:
        waiting = [threads.submit(copy_context().run, drive, flow) for flow in each]
        outcomes = [future.result() for future in waiting]
    finally:
        stopped = True
        threads.shutdown()
    raise_first([error for _, error in outcomes if error is not None])
    yield from ()
    return [value for value, _ in outcomes]


def raise_first(errors: list[BaseException]) -> None:
    """The error that counts: what stops the run, then that it has to wait, then the first failure."""
    for error in errors:
        if not isinstance(error, Exception | Suspend):
            raise error
    waits = [error.until for error in errors if isinstance(error, Suspend)]
    if waits:
        raise Suspend(min((until for until in waits if until is not None), default=None))
    if errors:
        blame_all(errors[0], errors[1:])
        raise errors[0]


async def _in_slot(slots: asyncio.Semaphore, call: Callable[[], Awaitable[Any]]) -> Any:
    _slot.set(slots)  # the call takes its place itself
    return await call()


async def _all_of(calls: list[Awaitable[Any]]) -> list[Any]:
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    raise_first([outcome for outcome in outcomes if isinstance(outcome, BaseException)])
    return outcomes


def _plain_map(step: Step[..., Any], items: list[Any], concurrency: int) -> Any:
    if not step.is_async:
        return [step(item) for item in items]
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Any) -> Any:
        async with slots:
            return await step(item)

    return _all_of([one(item) for item in items])


def _inside(what: str) -> Context:
    context = current()
    if context is None:
        raise InvalidArgument(what, "only a workflow can, and not from inside of a step")
    return context
