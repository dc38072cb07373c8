"""The async twin of `pgqrs.transaction`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from pgqrs.aio.consumer import AsyncHolder
from pgqrs.consumer import Holder
from pgqrs.errors import InvalidArgument
from pgqrs.stores import Database
from pgqrs.transaction import Transaction
from pgqrs.types import Duration, MessageId, UniqueFor

P = ParamSpec("P")
T = TypeVar("T")


class AsyncTransaction(AsyncHolder):
    """What can be done inside the caller's transaction."""

    def __init__(self, database: Database, owner: AsyncConnection | AsyncSession) -> None:
        if not isinstance(owner, AsyncConnection | AsyncSession):
            raise InvalidArgument(
                "using", f"expected an AsyncConnection or AsyncSession, got {type(owner).__name__}"
            )
        self._database = database
        self._owner = owner

    async def enqueue(
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
        return await self._run(
            Transaction.enqueue,
            queue,
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

    async def enqueue_many(
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
        return await self._run(
            Transaction.enqueue_many,
            queue,
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

    async def _hold(
        self, method: Callable[Concatenate[Holder, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._run(method, *args, **kwargs)

    async def _run(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        owner = self._owner
        connection = await owner.connection() if isinstance(owner, AsyncSession) else owner
        return await connection.run_sync(
            lambda sync: method(Transaction(self._database, sync), *args, **kwargs)
        )
