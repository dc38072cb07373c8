"""The async twin of `pgqrs.buffer`: the same steps, in a task instead of a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.aio.consumer import AsyncConsumer, AsyncHolder
from pgqrs.aio.thread_access import keeper_for
from pgqrs.buffer import Buffer
from pgqrs.consumer import Held, Holder
from pgqrs.errors import PgqrsError
from pgqrs.types import Message

P = ParamSpec("P")
T = TypeVar("T")


class AsyncBuffer(AsyncHolder, Facade):
    """Messages of one consumer, handed out one by one; acks are sent later, several at a time.

    An async iterator. `ack` only takes note. That a lease was lost, or that the database stayed
    away, is raised by the next step of the iteration, by `flush` or by `close`, whichever comes
    first; iterating may go on after that. Everything else (`fail`, `release`, `extend`, `delete`) is
    done at once, as by the consumer.
    """

    def __init__(self, bridge: Bridge, consumer: AsyncConsumer, buffer: Buffer) -> None:
        super().__init__(bridge)
        self._consumer = consumer
        self._sync = buffer
        self._rung = asyncio.Event()
        self._readers: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Begin to read ahead, unless that was done. The first step of the iteration does it too."""
        if self._task is None and not self._sync._closed:
            await self._consumer.open()  # meanwhile another reader may have come as far
        if self._task is None and not self._sync._closed:
            loop = asyncio.get_running_loop()
            self._sync._wake = partial(_call_soon, loop, self._rung.set)
            self._sync._heard = partial(_call_soon, loop, self._tell_readers)
            self._sync._leases = keeper_for(self._sync._database, self._bridge)
            self._task = asyncio.create_task(self._run(), name="pgqrs-buffer")
            self._consumer._buffers.add(self)
            self._sync._opened = True
        return self

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        """The next message; waits for one. Ends when closed, or when nothing came for `wait`."""
        await self.open()
        asked = self._sync._ask()
        while (message := self._sync._take()) is None:
            if self._sync._is_over(asked):
                raise StopAsyncIteration
            await self._change(self._sync._patience(asked))
        return message

    async def ack(self, message: Held, *, result: Any = None) -> None:
        """It is done: noted, and sent with the next batch."""
        await self.ack_many([message], results=None if result is None else [result])

    async def ack_many(
        self, messages: Iterable[Held], *, results: Iterable[Any] | None = None
    ) -> None:
        """Many are done: noted, and sent with the next batch. `results` has one for each."""
        if self._sync._closed or not self._sync._opened:
            await self._bridge.run(self._sync.ack_many, messages, results=results)
        else:
            self._sync.ack_many(messages, results=results)  # reaches no database

    archive = ack
    archive_many = ack_many

    async def flush(self) -> None:
        """Send the acks that were noted so far, and wait until they are stored."""
        mark = self._sync._want_flush()
        while not self._sync._is_settled(mark):
            await self._change(None)

    async def close(self) -> None:
        """Send the acks, give back what was not handed out, and stop.

        What was handed out and not acked stays held until its lease lapses; it can still be acked.
        """
        if self._sync._end():
            self._consumer._buffers.discard(self)
            if self._task is not None:
                await asyncio.wait([self._task])
            await self._bridge.run(self._sync._finish)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except PgqrsError:
            if error is None:  # else what went wrong first is what counts
                raise

    async def _run(self) -> None:
        with self._sync._doorbell():
            while not self._sync._closed:
                self._rung.clear()
                pause = await self._bridge.run(self._sync._step)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._rung.wait(), pause)

    async def _change(self, patience: float | None) -> None:
        """Until something has changed, or for so long."""
        told = asyncio.get_running_loop().create_future()
        self._readers.add(told)
        try:
            await asyncio.wait([told], timeout=patience)
        finally:
            self._readers.discard(told)

    def _tell_readers(self) -> None:
        for told in self._readers:
            if not told.done():
                told.set_result(None)

    async def _hold(
        self, method: Callable[Concatenate[Holder, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._bridge.run(method, self._sync, *args, **kwargs)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call this in the loop, from any thread; not any more if the loop was closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
