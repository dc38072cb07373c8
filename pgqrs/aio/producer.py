"""The async twin of `pgqrs.producer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.producer import Producer
from pgqrs.types import Duration


class AsyncProducer(Facade):
    """Enqueues into one queue. It needs no row of its own and no closing: as short-lived as you
    like.
    """

    def __init__(self, bridge: Bridge, producer: Producer) -> None:
        super().__init__(bridge)
        self._sync = producer
        self.queue = producer.queue

    async def enqueue(
        self,
        payload: Any,
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
    ) -> int:
        """Add one message. When this returns, it is durable. Returns its id."""
        return await self._bridge.run(
            self._sync.enqueue, payload, delay=delay, eta=eta, priority=priority, headers=headers
        )

    async def enqueue_many(
        self,
        payloads_: Iterable[Any],
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Add messages in order, all of them or none. Returns their ids."""
        return await self._bridge.run(
            self._sync.enqueue_many,
            payloads_,
            delay=delay,
            eta=eta,
            priority=priority,
            headers=headers,
        )
