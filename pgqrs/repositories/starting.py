"""New runs: a run comes into being together with its message.

On PostgreSQL that is one statement. A run may be begun by whoever starts it: then its message is held
from the start, as if it had been claimed, and the run is running already.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    Connection,
    Double,
    Text,
    bindparam,
    cast,
    insert,
    literal_column,
    select,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import QueueNotFound
from pgqrs.models import messages, queues, workflows
from pgqrs.repositories.expressions import at, moment, per_dialect
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import QUEUE, SHARED, shared
from pgqrs.sqltypes import BigId, Json, JsonText
from pgqrs.types import Message, ParentClose, RunStatus


class ActiveRun(NamedTuple):
    """A run as its holder finds it."""

    id: int
    name: str
    status: RunStatus
    input: Any
    parent_id: int | None
    deadline_at: datetime | None
    nudge_ct: int
    forked_from: int | None
    waiter_ct: int
    now: datetime

    @property
    def is_awaited(self) -> bool:
        """True if its end concerns other runs, as far as is known: more may come to wait for it."""
        return self.waiter_ct > 0

    @property
    def has_past(self) -> bool:
        """Whether it may have done something with another message: as another run, or before it was
        retried.
        """
        return self.forked_from is not None or self.nudge_ct > 0


class Begun(NamedTuple):
    """A run in the hands of who started it."""

    message: Message
    run: ActiveRun


class Started(NamedTuple):
    """A run, and whether it was there already."""

    id: int
    is_new: bool
    waited_for: bool = False
    begun: Begun | None = None


RUN_VALUES: dict[str, ColumnElement[Any]] = {
    "name": bindparam("new_name", type_=Text()),
    "key": bindparam("new_key", type_=Text()),
    "parent_id": bindparam("new_parent", type_=BigId),
    "version": bindparam("new_version", type_=Text()),
    "status": bindparam("new_status", type_=workflows.c.status.type),
    "input": cast(bindparam("new_input", type_=Text()), JsonText()),
    "created_at": moment("now"),
    "updated_at": moment("now"),
    "started_at": moment("begun"),
    "deadline_at": moment("deadline"),
    "forked_from": bindparam("new_fork", type_=BigId),
    "nudge_ct": bindparam("zero", 0, type_=workflows.c.nudge_ct.type),
    "parent_close": bindparam("new_parent_close", type_=Text()),
}
_BY_KEY = select(workflows.c.id).where(
    workflows.c.name == bindparam("new_name"), workflows.c.key == bindparam("new_key")
)


def _new_message(queue: CTE, vt: ColumnElement[Any]) -> Any:
    values = {
        "queue_id": queue.c.id,
        "payload": cast(bindparam("payload", type_=Text()), Json()),
        **SHARED,
        "vt": vt,
        "read_ct": bindparam("claims", type_=messages.c.read_ct.type),
        "dequeued_at": moment("begun"),
        "consumer_worker_id": bindparam("holder", type_=BigId),
    }
    chosen = select(*values.values()).select_from(queue)
    return (
        insert(messages)
        .from_select(list(values), chosen)
        .returning(messages.c.id, messages.c.queue_id, messages.c.vt, messages.c.enqueued_at)
    )


def _postgres_start() -> Any:
    queue = QUEUE.add_columns(queues.c.lease).cte("queue")
    lease = queue.c.lease * bindparam("leases", type_=Double())
    vt = moment("vt") + lease * literal_column("interval '1 second'")
    message = _new_message(queue, vt).cte("message")
    values = RUN_VALUES | {"message_id": message.c.id, "queue_id": message.c.queue_id}
    return (
        insert(workflows)
        .from_select(list(values), select(*values.values()).select_from(message))
        .returning(
            workflows.c.id,
            select(queue.c.waited_for).scalar_subquery(),
            workflows.c.message_id,
            select(message.c.vt).scalar_subquery(),
            workflows.c.created_at,
            workflows.c.deadline_at,
        )
    )


_POSTGRES_START = Hot(_postgres_start())
_LEASE = Hot(select(queues.c.lease).where(queues.c.queue_name == bindparam("queue")))
_MESSAGE = Hot(_new_message(QUEUE.cte("queue"), moment("vt")))
_RUN = Hot(
    insert(workflows)
    .values(
        **RUN_VALUES,
        message_id=bindparam("new_message", type_=BigId),
        queue_id=bindparam("new_queue", type_=BigId),
    )
    .returning(workflows.c.id, workflows.c.created_at, workflows.c.deadline_at)
)


class _Rows(NamedTuple):
    """What was written."""

    run_id: int
    waited_for: bool
    message_id: int
    vt: datetime
    now: datetime
    deadline_at: datetime | None


def _start_postgres(connection: Connection, bound: dict[str, Any], now: None) -> _Rows | None:
    found = _POSTGRES_START.rows(connection, bound)
    return _Rows(*found[0]) if found else None


def _start_sqlite(
    connection: Connection, bound: dict[str, Any], now: datetime | None
) -> _Rows | None:
    if bound["leases"]:
        found = _LEASE.rows(connection, {"queue": bound["queue"]})
        if not found:
            return None
        bound |= at(vt=(now, found[0][0]))
    found = _MESSAGE.rows(connection, bound)
    if not found:
        return None
    message_id, queue_id, vt, _ = found[0]
    bound |= {"new_message": message_id, "new_queue": queue_id}
    ((run_id, created_at, deadline_at),) = _RUN.rows(connection, bound)
    return _Rows(run_id, False, message_id, vt, created_at, deadline_at)


_start = per_dialect(postgresql=_start_postgres, sqlite=_start_sqlite)


def start(
    connection: Connection,
    *,
    name: str,
    queue: str | None,
    input: str,
    key: str | None = None,
    parent_id: int | None = None,
    parent_close: ParentClose | None = None,
    version: str | None = None,
    timeout: float | None = None,
    deadline: datetime | None = None,
    delay: float = 0.0,
    eta: datetime | None = None,
    priority: int = 0,
    headers: str | None = None,
    forked_from: int | None = None,
    holder: int | None = None,
    now: datetime | None,
) -> Started:
    """A new run and its message, or the run that has this key. Without a queue it has no message:
    somebody drives it by hand. A `holder` begins it at once.
    """
    is_begun = holder is not None
    values: dict[str, Any] = {
        "new_name": name,
        "new_key": key,
        "new_parent": parent_id,
        "new_parent_close": None if parent_id is None else parent_close,
        "new_version": version,
        "new_input": input,
        "new_fork": forked_from,
        "new_status": RunStatus.RUNNING if is_begun else RunStatus.PENDING,
    } | at(
        now=(now, 0.0),
        deadline=(now, timeout) if deadline is None else (deadline, 0.0),
        begun=(now, 0.0 if is_begun else None),
    )
    if key is not None:
        found = connection.execute(_BY_KEY, values).scalar()
        if found is not None:
            return Started(found, is_new=False)
    if queue is None:
        values |= {"new_message": None, "new_queue": None}
        return Started(_RUN.rows(connection, values)[0][0], is_new=True)
    values |= shared(
        queue,
        headers=headers,
        priority=priority,
        delay=0.0 if is_begun else delay,
        eta=None if is_begun else eta,
        ttl=None,
        expires_at=None,
        producer=None,
        now=now,
    )
    values |= {"payload": payload(name), "holder": holder}
    values |= {"claims": int(is_begun), "leases": float(is_begun)}
    values["ready"] = values["ready"] and not is_begun
    rows: _Rows | None = _start(connection, values, now)
    if rows is None:
        raise QueueNotFound(queue)
    begun = None if holder is None else _begun(rows, values, holder)
    return Started(rows.run_id, is_new=True, waited_for=bool(rows.waited_for), begun=begun)


def payload(name: str) -> str:
    """What the message of a run says, as JSON."""
    return json.dumps({"workflow": name}, ensure_ascii=False)


def _begun(rows: _Rows, values: dict[str, Any], holder: int) -> Begun:
    name, headers = values["new_name"], values["headers"]
    message = Message(
        queue=values["queue"],
        id=rows.message_id,
        payload={"workflow": name},
        headers=None if headers is None else json.loads(headers),
        codec=None,
        priority=values["priority"],
        vt=rows.vt,
        enqueued_at=rows.now,
        expires_at=None,
        read_ct=1,
        released_ct=0,
        dequeued_at=rows.now,
        producer_worker_id=None,
        consumer_worker_id=holder,
        key=None,
        group=None,
    )
    run = ActiveRun(
        id=rows.run_id,
        name=name,
        status=RunStatus.RUNNING,
        input=json.loads(values["new_input"]),
        parent_id=values["new_parent"],
        deadline_at=rows.deadline_at,
        nudge_ct=0,
        forked_from=values["new_fork"],
        waiter_ct=0,
        now=rows.now,
    )
    return Begun(message, run)
