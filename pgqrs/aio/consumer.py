"""The async twin of `pgqrs.consumer`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.consumer import Consumer, Held, Holder
from pgqrs.retry import Retry
from pgqrs.stores.wakeups import SELDOM
from pgqrs.types import Duration, Message, WorkerStatus, seconds

if TYPE_CHECKING:
    from pgqrs.aio.buffer import AsyncBuffer

P = ParamSpec("P")
T = TypeVar("T")


class AsyncHolder(ABC):
    """What can be done with held messages. Those of a `_many` call that were lost do not hinder the
    others.
    """

    @abstractmethod
    async def _hold(
        self, method: Callable[Concatenate[Holder, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a method of the sync holder."""

    async def ack(self, message: Held, *, result: Any = None) -> None:
        """It is done: to the archive as completed, with its result. Repeating it is fine."""
        await self._hold(Holder.ack, message, result=result)

    async def ack_many(
        self, messages: Iterable[Held], *, results: Iterable[Any] | None = None
    ) -> None:
        """Many are done. `results`, if there are any, has one for each."""
        await self._hold(Holder.ack_many, messages, results=results)

    archive = ack
    archive_many = ack_many

    async def fail(
        self,
        message: Held,
        error: str | BaseException | None = None,
        *,
        delay: Duration = 0.0,
        dead: bool = False,
        retry: Retry | None = None,
    ) -> bool:
        """It went wrong: deliver it again after `delay`, or when `retry` says. Returns whether that
        will happen.
        """
        return await self._hold(Holder.fail, message, error, delay=delay, dead=dead, retry=retry)

    async def fail_many(
        self,
        messages: Iterable[Held],
        error: str | BaseException | None = None,
        *,
        delay: Duration = 0.0,
        dead: bool = False,
        retry: Retry | None = None,
    ) -> dict[int, bool]:
        """Many went wrong. Returns for each id whether it will be delivered again."""
        return await self._hold(
            Holder.fail_many, messages, error, delay=delay, dead=dead, retry=retry
        )

    async def release(
        self, message: Held, *, delay: Duration | None = None, eta: datetime | None = None
    ) -> None:
        """Give it back untried: the attempt does not count. It is delivered again at once, or after
        `delay`, or at `eta`.
        """
        await self._hold(Holder.release, message, delay=delay, eta=eta)

    async def release_many(
        self,
        messages: Iterable[Held],
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
    ) -> None:
        """Give many back untried."""
        await self._hold(Holder.release_many, messages, delay=delay, eta=eta)

    async def extend(self, message: Held, lease: Duration) -> None:
        """Hold it until so long from now."""
        await self._hold(Holder.extend, message, lease)

    async def extend_many(self, messages: Iterable[Held], lease: Duration) -> None:
        """Hold many until so long from now."""
        await self._hold(Holder.extend_many, messages, lease)

    async def delete(self, message: Held) -> None:
        """Remove it without a trace in the archive."""
        await self._hold(Holder.delete, message)

    async def delete_many(self, messages: Iterable[Held]) -> None:
        """Remove many without a trace in the archive."""
        await self._hold(Holder.delete_many, messages)


class AsyncConsumer(AsyncHolder, Facade):
    """Dequeues from one queue. It has a row among the workers, from its first dequeue until it is
    closed.
    """

    def __init__(self, bridge: Bridge, consumer: Consumer) -> None:
        super().__init__(bridge)
        self._sync = consumer
        self._buffers: set[AsyncBuffer] = set()
        self.queue = consumer.queue

    @property
    def worker_id(self) -> int | None:
        """The worker in whose name messages are held."""
        return self._sync.worker_id

    async def open(self) -> Self:
        """Register among the workers, unless that was done."""
        await self._bridge.run(self._sync.open)
        return self

    async def dequeue(
        self, n: int = 1, *, lease: Duration | None = None, wait: Duration | None = None
    ) -> list[Message]:
        """Claim up to `n` messages, for `lease` or what the consumer or else the queue says.

        With `wait` it returns as soon as there is something, or after that long; waiting needs no
        thread. Cancelled, it gives back what it got.
        """
        if wait is None:
            return await self._bridge.run_or_undo(
                partial(self._sync.dequeue, n, lease=lease), self._sync.release_many
            )
        loop, rung, life = asyncio.get_running_loop(), asyncio.Event(), self._sync._life
        deadline = loop.time() + seconds("wait", wait)
        with self._sync._doorbell(partial(loop.call_soon_threadsafe, rung.set)):
            while True:
                rung.clear()
                found, pause = await self._bridge.run_or_undo(
                    partial(self._sync._look, n, lease, life, within=seconds("wait", wait)),
                    lambda looked: self._sync.release_many(looked[0]),
                )
                remaining = deadline - loop.time()
                if found or remaining <= 0:
                    return found
                with suppress(TimeoutError):
                    await asyncio.wait_for(rung.wait(), min(pause, remaining))
                if self._sync._life != life:
                    return []

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages one by one as they come, until the consumer is closed."""
        life = self._sync._life
        while self._sync._life == life:
            for message in await self.dequeue(wait=SELDOM):
                yield message

    def buffer(
        self,
        n: int = 100,
        *,
        lease: Duration | None = None,
        ack_size: int | None = None,
        ack_every: Duration = 0.1,
        wait: Duration | None = None,
    ) -> AsyncBuffer:
        """Messages one by one, claimed up to `n` ahead, with leases that are renewed.

        Acks are sent when there are `ack_size` of them (half of `n`), or after `ack_every`. The
        iteration ends when the buffer is closed, or when nothing came for `wait`.
        """
        from pgqrs.aio.buffer import AsyncBuffer  # which is made of consumers

        buffer = self._sync.buffer(
            n, lease=lease, ack_size=ack_size, ack_every=ack_every, wait=wait
        )
        return AsyncBuffer(self._bridge, self, buffer)

    async def heartbeat(self) -> WorkerStatus:
        """A sign of life. Returns what this worker was told to be."""
        return await self._bridge.run(self._sync.heartbeat)

    async def close(self) -> None:
        """Take the row out of the workers. Messages still held come back when their leases lapse."""
        try:
            for buffer in tuple(self._buffers):
                await buffer.close()
        finally:
            await self._bridge.run(self._sync.close)

    async def _hold(
        self, method: Callable[Concatenate[Holder, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._bridge.run(method, self._sync, *args, **kwargs)
