"""The async twin of `pgqrs.transaction`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from pgqrs.aio.bridge import Bridge
from pgqrs.aio.consumer import AsyncHolder
from pgqrs.aio.workflows import AsyncRun
from pgqrs.codecs import Calls
from pgqrs.consumer import Holder
from pgqrs.errors import InvalidArgument
from pgqrs.stores import Database
from pgqrs.transaction import Transaction, TransactionWorkflows
from pgqrs.types import Duration, MessageId, UniqueFor
from pgqrs.workflows.context import current
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.effects import refuse_transaction
from pgqrs.workflows.runs import Run

P = ParamSpec("P")
T = TypeVar("T")
AsyncOwner = AsyncConnection | AsyncSession | async_scoped_session[Any]
"""Whatever holds an application's transaction."""


class AsyncTransaction(AsyncHolder):
    """What can be done inside the caller's transaction."""

    def __init__(self, bridge: Bridge, database: Database, owner: AsyncOwner) -> None:
        if isinstance(owner, async_scoped_session):
            owner = owner()
        if not isinstance(owner, AsyncConnection | AsyncSession):
            raise InvalidArgument(
                "using", f"expected an AsyncConnection or AsyncSession, got {type(owner).__name__}"
            )
        self._bridge = bridge
        self._database = database
        self._owner = owner

    @property
    def workflows(self) -> AsyncTransactionWorkflows:
        """Runs that start with the transaction."""
        return AsyncTransactionWorkflows(self)

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

    async def _within(self, call: Callable[[Database], T]) -> T:
        """Call this with what looks like a database, and is the connection of the transaction."""
        return await self._with(lambda transaction: call(transaction._database))

    async def _hold(
        self, method: Callable[Concatenate[Holder, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._run(method, *args, **kwargs)

    async def _run(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._with(lambda transaction: method(transaction, *args, **kwargs))

    async def _with(self, call: Callable[[Transaction], T]) -> T:
        if current() is not None:
            refuse_transaction(self, "using")
        owner = self._owner
        connection = await owner.connection() if isinstance(owner, AsyncSession) else owner
        return await connection.run_sync(lambda sync: call(Transaction(self._database, sync)))


class AsyncTransactionWorkflows:
    """The runs of a store, inside the caller's transaction."""

    def __init__(self, transaction: AsyncTransaction) -> None:
        self._transaction = transaction

    async def start(
        self,
        workflow: Workflow[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncRun[Any]:
        """Start a run. It exists once the transaction is committed. `workflow.start(…)` reads better."""
        return await self._run(lambda runs: runs.start(workflow, args, kwargs))

    async def start_many(
        self,
        workflow: Workflow[..., Any],
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
    ) -> list[AsyncRun[Any]]:
        """Start a run for each of these calls. They exist once the transaction is committed."""
        runs = await self._transaction._with(
            lambda inside: inside.workflows.start_many(workflow, calls, keys=keys)
        )
        return [AsyncRun(self._transaction._bridge, run) for run in runs]

    async def create(
        self,
        name: str,
        input: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        version: str | None = None,
    ) -> AsyncRun[Any]:
        """A run by the name of its workflow. It exists once the transaction is committed."""
        return await self._run(
            lambda runs: runs.create(name, input, key=key, queue=queue, version=version)
        )

    async def signal(self, run_id: int, name: str, payload: Any = None) -> None:
        """Say something to a run, once the transaction is committed."""
        await self._transaction._with(lambda inside: inside.workflows.signal(run_id, name, payload))

    async def _run(self, call: Callable[[TransactionWorkflows], Run[Any]]) -> AsyncRun[Any]:
        run = await self._transaction._with(lambda inside: call(inside.workflows))
        return AsyncRun(self._transaction._bridge, run)
