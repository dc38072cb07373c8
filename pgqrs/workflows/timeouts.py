"""`pgqrs.timeout`: a limit for a block of durable calls that lasts longer than a process."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import TracebackType
from typing import Self

from pgqrs.errors import InvalidArgument
from pgqrs.types import Duration, seconds
from pgqrs.workflows import flows
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import current
from pgqrs.workflows.failures import blame
from pgqrs.workflows.history import EXPIRED, Call
from pgqrs.workflows.interrupts import Expired

Kind = type[BaseException] | None


def timeout(duration: Duration) -> Timeout:
    """A limit for the durable calls of a block: `async with pgqrs.timeout(3600):`, or `with` in a sync
    workflow. When the time is over, the call that is being made is cut short, and the block raises
    `TimeoutError`.

    The time counts from when the block was first entered, however often the run is resumed meanwhile. In
    a sync workflow waits alone are cut short: nothing can end a step there but its own `timeout`.
    Outside of a run, `async with` is `asyncio.timeout`.
    """
    return Timeout(duration)


class Timeout:
    """The limit of a block."""

    def __init__(self, duration: Duration) -> None:
        self._seconds = seconds("duration", duration)
        self._is_over = False
        self._plain: asyncio.Timeout | None = None

    # In a sync workflow

    def __enter__(self) -> Self:
        context = current()
        if context is None or context.is_async:
            raise InvalidArgument("timeout", "`with` is for sync workflows; else use `async with`")
        call = context.take("pgqrs.timeout")
        deadline = context.perform(flows.limit(context, call, seconds=self._seconds), call)
        context.limits.append((deadline, self))
        self._limits, self._branch, self._id = context.limits, context.root, call.step_id
        return self

    def __exit__(
        self, kind: Kind, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limits.pop()
        if isinstance(error, Expired) and error.timer is self:
            self._is_over = True
            after = self._branch.position
            raise blame(TimeoutError(), self._id, after=after) from error

    # In an async one

    async def __aenter__(self) -> Self:
        context = current()
        if context is None:
            self._plain = asyncio.timeout(self._seconds)
            await self._plain.__aenter__()
            return self
        if not isinstance(context, AsyncContext):
            raise InvalidArgument("timeout", "`async with` is for async workflows; else use `with`")
        call = context.take("pgqrs.timeout")
        deadline = await context.perform(flows.limit(context, call, seconds=self._seconds), call)
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._id, end = call.step_id, context.history.take_end(call)
        self._watcher = asyncio.create_task(self._watch(context, end, deadline))
        return self

    async def _watch(self, context: AsyncContext, end: Call, deadline: datetime) -> None:
        await context.perform(flows.expire(context, end, deadline), end)
        self._is_over = True
        self._task.cancel()

    async def __aexit__(
        self, kind: Kind, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._plain is not None:
            await self._plain.__aexit__(kind, error, traceback)
            return
        self._watcher.cancel()
        if self._is_over:
            cancelling = self._task.uncancel()
            if cancelling <= self._cancelling and isinstance(error, asyncio.CancelledError):
                raise blame(TimeoutError(), self._id, self._id + EXPIRED) from error

    def expired(self) -> bool:
        """True if it was over before the block was left."""
        return self._plain.expired() if self._plain is not None else self._is_over
