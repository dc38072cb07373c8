"""Sync tests for async objects: the same test body drives `Store` and `AsyncStore`.

An event loop runs in a thread of its own. `Portal.wrap` makes an async object look like its sync
twin: methods return results instead of coroutines, `async with` becomes `with`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from pgqrs.aio.bridge import Facade
from pgqrs.aio.consumer import AsyncHolder
from pgqrs.aio.transaction import AsyncTransactionWorkflows
from pgqrs.aio.worker import AsyncWorker
from pgqrs.aio.workflows import AsyncRun, AsyncStepGuard, AsyncWorkflows

T = TypeVar("T")
ASYNC = (
    Facade,
    AsyncHolder,
    AsyncWorkflows,
    AsyncTransactionWorkflows,
    AsyncRun,
    AsyncStepGuard,
)


class Portal:
    """An event loop in a thread, and the way into it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="portal", daemon=True)
        self._thread.start()

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Await in the loop what `make` returns, from outside of it."""

        async def awaited() -> T:
            return await make()

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result()

    def worker(self, store: Synced, **options: Any) -> Synced:
        """An async worker on a store of this portal."""

        async def made() -> AsyncWorker:
            return AsyncWorker(store._wrapped, **options)

        return Synced(self, self.run(made))

    def wrap(self, value: Any) -> Any:
        """The sync face of an async facade, also of those in a list; everything else as it is."""
        if isinstance(value, list):
            return [self.wrap(one) for one in value]
        return Synced(self, value) if isinstance(value, ASYNC) else value

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Synced:
    """An async facade that looks like its sync twin."""

    def __init__(self, portal: Portal, wrapped: Any) -> None:
        self._portal = portal
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._wrapped, name)
        if not callable(attribute):
            return self._portal.wrap(attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def called() -> Any:
                result = attribute(*args, **kwargs)
                return await result if inspect.iscoroutine(result) else result

            return self._portal.wrap(self._portal.run(called))

        return call

    def __enter__(self) -> Self:
        self._portal.run(self._wrapped.__aenter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self._portal.run(lambda: self._wrapped.__aexit__(*error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._portal.run(self._wrapped.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __repr__(self) -> str:
        return repr(self._wrapped)
