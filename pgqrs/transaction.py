"""The transactional outbox: pgqrs inside a transaction of the application's own.

`store.using(connection)` enqueues and ends claims on that connection. Nothing is committed here;
what the application commits, or rolls back, takes the messages with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgqrs.consumer import Holder
from pgqrs.errors import InvalidArgument
from pgqrs.producer import Producer
from pgqrs.stores import Database
from pgqrs.stores.base import BorrowedConnection
from pgqrs.types import Duration, MessageId, UniqueFor


class Transaction(Holder):
    """What can be done inside the caller's transaction."""

    def __init__(self, database: Database, connection: Connection) -> None:
        super().__init__(BorrowedConnection(database, connection))

    def enqueue(
        self,
        queue: str,
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
        """Add one message. It exists once the transaction is committed. Returns its id."""
        return Producer(self._database, queue).enqueue(
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

    def enqueue_many(
        self,
        queue: str,
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
        """Add messages in order. They exist once the transaction is committed. Returns their ids."""
        return Producer(self._database, queue).enqueue_many(
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


def connection_of(owner: Connection | Session) -> Connection:
    """The connection of a transaction, however the application holds it."""
    if isinstance(owner, Connection):
        return owner
    if isinstance(owner, Session):
        return owner.connection()
    raise InvalidArgument(
        "using", f"expected a SQLAlchemy Connection or Session, got {type(owner).__name__}"
    )
