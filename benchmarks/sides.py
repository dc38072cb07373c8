"""The two sides: pgqrs as its users call it, and the hand-written SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.driver import LEASE, QUEUE, Backend, Driver, Side
from benchmarks.raw import RawPostgres, RawSqlite
from pgqrs import Message, Store

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


def open_driver(side: Side, backend: Backend, dsn: str) -> Driver:
    """One side, with connections of its own."""
    if side == "pgqrs":
        return PgqrsDriver(dsn)
    return RawPostgres(dsn) if backend == "postgres" else RawSqlite(dsn)
