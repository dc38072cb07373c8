"""What is said to runs (signals), and by them (events).

A signal is kept until a step waits for it, and given to one wait only: the same transaction marks it
and records the step that got it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, bindparam, cast, insert, select, update

from pgqrs.models import workflow_events
from pgqrs.repositories.expressions import at, moment
from pgqrs.sqltypes import BigId, Json
from pgqrs.types import EventKind, RunEvent

COLUMNS = (
    workflow_events.c.id,
    workflow_events.c.workflow_id,
    workflow_events.c.name,
    workflow_events.c.payload,
    workflow_events.c.created_at,
)
"""In the order of the fields of `RunEvent`."""
_run = bindparam("run", type_=BigId)
_ADD = insert(workflow_events).values(
    workflow_id=_run,
    kind=bindparam("new_kind", type_=workflow_events.c.kind.type),
    name=bindparam("new_name"),
    payload=cast(bindparam("new_payload", type_=Text()), Json()),
    created_at=moment("now"),
)
_NEXT_SIGNAL = (
    select(workflow_events.c.id, workflow_events.c.payload)
    .where(
        workflow_events.c.workflow_id == _run,
        workflow_events.c.kind == EventKind.SIGNAL,
        workflow_events.c.name == bindparam("name"),
        workflow_events.c.consumed_by.is_(None),
    )
    .order_by(workflow_events.c.id)
    .limit(1)
    .with_for_update()
)
_CONSUME = (
    update(workflow_events)
    .where(workflow_events.c.id == bindparam("signal"))
    .values(consumed_by=bindparam("step"))
)
_GIVE_BACK = (
    update(workflow_events)
    .where(
        workflow_events.c.workflow_id == _run,
        workflow_events.c.kind == EventKind.SIGNAL,
        workflow_events.c.consumed_by == bindparam("step"),
    )
    .values(consumed_by=None)
)
_EVENTS = (
    select(*COLUMNS)
    .where(workflow_events.c.workflow_id == _run, workflow_events.c.kind == EventKind.EVENT)
    .order_by(workflow_events.c.id)
)


class Signal(NamedTuple):
    """A signal that nobody has got yet."""

    id: int
    payload: Any


def add(
    connection: Connection,
    run_id: int,
    *,
    kind: EventKind,
    name: str,
    payload: str | None,
    now: datetime | None,
) -> None:
    """Keep what was said; `payload` is JSON text."""
    bound = {"run": run_id, "new_kind": kind, "new_name": name, "new_payload": payload}
    connection.execute(_ADD, bound | at(now=(now, 0.0)))


def next_signal(connection: Connection, run_id: int, name: str) -> Signal | None:
    """The oldest signal of this name that nobody has got."""
    row = connection.execute(_NEXT_SIGNAL, {"run": run_id, "name": name}).first()
    return None if row is None else Signal(*row)


def consume(connection: Connection, signal: Signal, *, step_id: str) -> None:
    """This step got it."""
    connection.execute(_CONSUME, {"signal": signal.id, "step": step_id})


def give_back(connection: Connection, run_id: int, *, step_id: str) -> bool:
    """A step was cut short: a signal that it got is for the next one that waits. True if it got one."""
    return connection.execute(_GIVE_BACK, {"run": run_id, "step": step_id}).rowcount > 0


def find(connection: Connection, run_id: int, *, name: str | None = None) -> list[RunEvent]:
    """What a run let others know, in order."""
    statement = _EVENTS if name is None else _EVENTS.where(workflow_events.c.name == name)
    return [RunEvent(*row) for row in connection.execute(statement, {"run": run_id})]
