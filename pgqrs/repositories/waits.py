"""Runs that wait for other runs.

A run that asks for the result of another one says so in a row of its own, and raises `waiter_ct` of
the other in the same transaction. Whoever ends a run without waiters does that in one statement that
asks for `waiter_ct = 0`; where it is not, the run is ended in a transaction that also wakes those who
wait. Both change the row of the run that is awaited, so one of the two comes first: either the waiter
finds that the run has ended, or whoever ends it finds the waiter.

The rows stay as long as both runs do: a run that was retried ends once more.

*Locks.* A transaction that changes several runs locks the awaited run first, then its waiters by id.
Cancelling goes the other way, from parents to children, and so it takes a transaction for each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, exists, insert, or_, select, update

from pgqrs.models import workflow_waits, workflows
from pgqrs.repositories.expressions import at, is_one_of, moment
from pgqrs.sqltypes import BigId
from pgqrs.types import ENDED

_waiter = bindparam("waiter", type_=BigId)
_awaited = bindparam("awaited", type_=BigId)
_THIS = (workflow_waits.c.awaited_id == _awaited, workflow_waits.c.waiter_id == _waiter)
_IS_WAITING = select(exists().where(*_THIS))
_EXPECT = (
    update(workflows)
    .where(workflows.c.id == _awaited, workflows.c.status.not_in(sorted(ENDED)))
    .values(waiter_ct=workflows.c.waiter_ct + 1, updated_at=moment("now"))
    .returning(workflows.c.id)
)
_ADD = insert(workflow_waits).from_select(
    ["awaited_id", "waiter_id"], select(_awaited, _waiter).where(~exists().where(*_THIS))
)
_WAITERS = (
    select(workflow_waits.c.waiter_id)
    .distinct()
    .where(is_one_of(workflow_waits.c.awaited_id, "ids"))
    .order_by(workflow_waits.c.waiter_id)
)
_FORGET = delete(workflow_waits).where(
    or_(is_one_of(workflow_waits.c.awaited_id, "ids"), is_one_of(workflow_waits.c.waiter_id, "ids"))
)


def is_waiting(connection: Connection, waiter_id: int, *, awaited_id: int) -> bool:
    """True if the end of one run will wake the other."""
    bound = {"waiter": waiter_id, "awaited": awaited_id}
    return bool(connection.execute(_IS_WAITING, bound).scalar_one())


def wait(connection: Connection, waiter_id: int, *, awaited_id: int, now: datetime | None) -> bool:
    """Let a run be woken by the end of another. Returns False if that one has ended."""
    bound = {"waiter": waiter_id, "awaited": awaited_id} | at(now=(now, 0.0))
    if connection.execute(_EXPECT, bound).first() is None:
        return False
    connection.execute(_ADD, bound)
    return True


def waiters(connection: Connection, awaited_ids: Sequence[int]) -> list[int]:
    """The runs that wait for one of these, by id."""
    return list(connection.execute(_WAITERS, {"ids": list(awaited_ids)}).scalars())


def forget(connection: Connection, run_ids: Sequence[int]) -> None:
    """Forget who waits for these runs, and whom they wait for."""
    connection.execute(_FORGET, {"ids": list(run_ids)})
