"""The connection that a transactional step gets, and what the step may not do with it.

The transaction is committed with the record of the step, by whoever runs it. A step that ended it by
itself would have its effect without a record, and so once for each attempt. `commit`, `rollback` and
`close` of the connection are refused; a step that ends the transaction in another way fails for good.
Savepoints (`begin_nested`) are fine.

Code that runs cannot be stopped from outside. A time limit ends the statements that take too long, and
whatever comes of a step that took too long is rolled back when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

from sqlalchemy import Connection

from pgqrs.drivers import in_sqlite_transaction, join_transaction
from pgqrs.errors import StepTimedOut, TransactionEnded
from pgqrs.repositories.time_limits import limited

T = TypeVar("T")
REFUSED = ("commit", "rollback", "close")


def call_with(
    connection: Connection, call: Callable[[Connection], T], *, step_id: str, timeout: float | None
) -> T:
    """Call a step with its connection, for so long at most."""
    began = time.monotonic()

    def is_late() -> bool:
        return timeout is not None and time.monotonic() - began >= timeout

    try:
        with ExitStack() as stack:
            if timeout is not None:
                stack.enter_context(limited(connection, timeout))
            stack.enter_context(_lent(connection, step_id))
            value = call(connection)
    except Exception as exc:
        if is_late() and not isinstance(exc, TransactionEnded):
            raise StepTimedOut(step_id, timeout or 0.0) from exc
        raise
    if is_late():
        raise StepTimedOut(step_id, timeout or 0.0)
    return value


@contextmanager
def _lent(connection: Connection, step_id: str) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TransactionEnded(step_id)

    join_transaction(connection)  # so that SQLAlchemy refuses to begin another
    before: Any = connection.get_transaction()
    for name in REFUSED:
        setattr(connection, name, refuse)
    try:
        yield
    except Exception as exc:
        if not connection.invalidated and not _goes_on(connection, before):
            raise TransactionEnded(step_id) from exc
        raise
    finally:
        for name in REFUSED:
            delattr(connection, name)
    if not _goes_on(connection, before):
        raise TransactionEnded(step_id)


def _goes_on(connection: Connection, transaction: Any) -> bool:
    """True if the transaction that the step was called in has not ended."""
    if connection.closed or connection.invalidated:
        return False
    found: Any = connection.get_transaction()
    if found is not transaction or not transaction.is_active:
        return False
    return connection.dialect.name != "sqlite" or in_sqlite_transaction(connection)
