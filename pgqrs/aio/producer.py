"""The async twin of `pgqrs.producer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Self

from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.current import run_here
from pgqrs.producer import NewMessages, Producer
from pgqrs.types import Duration, MessageId, UniqueFor


class AsyncProducer(Facade):
    """Enqueues into one queue. As short-lived as you like: it needs no row of its own.

    With `register` it has a row among the workers until it is closed, and its messages say whose
    they are.
    """

    def __init__(self, bridge: Bridge, producer: Producer) -> None:
        super().__init__(bridge)
        self._sync = producer
        self.queue = producer.queue

    @property
    def worker_id(self) -> int | None:
        """The worker its messages are from; None if it is not registered."""
        return self._sync.worker_id

    async def open(self) -> Self:
        """Register among the workers, if that was asked for. The first enqueue does it too."""
        await self._bridge.run(self._sync.open)
        return self

    async def close(self) -> None:
        """Leave the workers, if registered."""
        await self._bridge.run(self._sync.close)

    async def enqueue(
        self,
        payload: Any,
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        key: str | None = None,
        unique: UniqueFor = "unfinished",
        group: str | None = None,
    ) -> MessageId:
        """Add one message. When this returns, it is durable. Returns its id."""
        make = partial(
            self._sync._one,
            payload,
            delay=delay,
            eta=eta,
            ttl=ttl,
            expires_at=expires_at,
            priority=priority,
            headers=headers,
            key=key,
            unique=unique,
            group=group,
        )
        return (await self._send(make))[0]

    async def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        keys: Iterable[str | None] | None = None,
        unique: UniqueFor = "unfinished",
        groups: Iterable[str | None] | None = None,
    ) -> list[MessageId]:
        """Add messages in order, all of them or none. Returns their ids."""
        make = partial(
            self._sync._many,
            payloads,
            delay=delay,
            eta=eta,
            ttl=ttl,
            expires_at=expires_at,
            priority=priority,
            headers=headers,
            keys=keys,
            unique=unique,
            groups=groups,
        )
        return await self._send(make)

    async def _send(self, make: Callable[[], NewMessages]) -> list[MessageId]:
        run = run_here.get()
        if run is None:
            return await self._bridge.run(lambda: self._sync._send(make()))
        recorded: list[MessageId] = await run.enqueue_async(
            self._sync._database, make(), sender=self._sync._sender, call=self._bridge.run
        )
        return recorded
