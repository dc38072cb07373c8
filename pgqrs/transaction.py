"""The transactional outbox: pgqrs inside a transaction of the application's own.

`store.using(connection)` enqueues, starts runs and ends claims on that connection. Nothing is committed
here; what the application commits, or rolls back, takes the messages and runs with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from pgqrs.codecs import Calls
from pgqrs.consumer import Holder
from pgqrs.drivers import commits_each_statement
from pgqrs.errors import InvalidArgument
from pgqrs.producer import Producer
from pgqrs.stores import Database
from pgqrs.stores.base import BorrowedConnection
from pgqrs.types import Duration, MessageId, UniqueFor
from pgqrs.workflows.context import current
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.effects import refuse_transaction
from pgqrs.workflows.runs import Run, Workflows

Owner = Connection | Session | scoped_session[Any]
"""Whatever holds an application's transaction."""


class Transaction(Holder):
    """What can be done inside the caller's transaction."""

    def __init__(self, database: Database, connection: Connection) -> None:
        if commits_each_statement(connection):
            raise InvalidArgument(
                "using",
                "this connection is in AUTOCOMMIT, so there is no transaction to be part of; use one "
                'of engine.execution_options(isolation_level="READ COMMITTED"), or store.producer()',
            )
        super().__init__(BorrowedConnection(database.of_connection(connection), connection))

    @property
    def workflows(self) -> TransactionWorkflows:
        """Runs that start with the transaction."""
        return TransactionWorkflows(self._database)

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


class TransactionWorkflows:
    """The runs of a store, inside the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        if current() is not None:
            refuse_transaction(self, "workflows")

    def start(
        self,
        workflow: Workflow[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run[Any]:
        """Start a run. It exists once the transaction is committed. `workflow.start(…)` reads better."""
        return Workflows(self._database).start(workflow, args, kwargs)

    def start_many(
        self,
        workflow: Workflow[..., Any],
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
    ) -> list[Run[Any]]:
        """Start a run for each of these calls. They exist once the transaction is committed."""
        return Workflows(self._database).start_many(workflow, calls, keys=keys)

    def create(
        self,
        name: str,
        input: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        version: str | None = None,
    ) -> Run[Any]:
        """A run by the name of its workflow. It exists once the transaction is committed."""
        return Workflows(self._database).create(name, input, key=key, queue=queue, version=version)

    def signal(self, run_id: int, name: str, payload: Any = None) -> None:
        """Say something to a run, once the transaction is committed."""
        run: Run[Any] = Run(self._database.of_run(run_id), run_id)
        run.signal(name, payload)


def connection_of(owner: Owner) -> Connection:
    """The connection of a transaction, however the application holds it."""
    if isinstance(owner, scoped_session):
        owner = owner()
    if isinstance(owner, Connection):
        return owner
    if isinstance(owner, Session):
        return owner.connection()
    raise InvalidArgument(
        "using", f"expected a SQLAlchemy Connection or Session, got {type(owner).__name__}"
    )
