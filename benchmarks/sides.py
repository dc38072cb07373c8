"""The sides: pgqrs as its users call it, the same through a buffer and on a queue with limits, and the
hand-written SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from benchmarks.driver import LEASE, QUEUE, Backend, Driver, Side
from benchmarks.raw import RawPostgres, RawSqlite
from pgqrs import Buffer, Message, Store

SIDES: tuple[Side, Side] = ("raw", "pgqrs")


class PgqrsDriver:
    """One store with its defaults, one producer and one consumer."""

    def __init__(self, dsn: str) -> None:
        self._store = Store(dsn)
        self._producer = self._store.producer(QUEUE)
        self._consumer = self._store.consumer(QUEUE, lease=LEASE)

    def enqueue(self, payload: Any) -> int:
        return self._producer.enqueue(payload)

    def enqueue_many(self, payloads: list[Any]) -> list[int]:
        return self._producer.enqueue_many(payloads)

    def claim(self, n: int) -> list[Message]:
        return self._consumer.dequeue(n)

    def ack(self, claimed: Sequence[Message]) -> None:
        self._consumer.ack_many(claimed)

    def close(self) -> None:
        self._consumer.close()
        self._store.close()


class BufferDriver(PgqrsDriver):
    """Messages come one by one out of a buffer and are acked one by one. It is closed when there are
    no more: all acks are stored then, and it takes nothing from the next round.
    """

    _buffer: Buffer | None = None

    def claim(self, n: int) -> list[Message]:
        if self._buffer is None:
            self._buffer = self._consumer.buffer(2 * n, wait=0)
        found = list(islice(self._buffer, n))
        if not found:
            self._buffer.close()
            self._buffer = None
        return found

    def ack(self, claimed: Sequence[Message]) -> None:
        assert self._buffer is not None
        for message in claimed:
            self._buffer.ack(message)


def open_driver(side: Side, backend: Backend, dsn: str) -> Driver:
    """One side, with connections of its own."""
    if side in ("pgqrs", "limited"):
        return PgqrsDriver(dsn)
    if side == "buffer":
        return BufferDriver(dsn)
    return RawPostgres(dsn) if backend == "postgres" else RawSqlite(dsn)
