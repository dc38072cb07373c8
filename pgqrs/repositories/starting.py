"""New runs: a run comes into being together with its message.

On PostgreSQL that is one statement. A run may be begun by whoever starts it: then its message is held
from the start, as if it had been claimed, and the run is running already.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    Connection,
    Double,
    Text,
    bindparam,
    cast,
    false,
    insert,
    literal_column,
    null,
    select,
    true,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import QueueNotFound
from pgqrs.models import messages, queues, waiting, workflows
from pgqrs.repositories.expressions import (
    SECOND,
    at,
    by_own_clock,
    constant,
    instant,
    moment,
    per_dialect,
)
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import QUEUE, SHARED, shared
from pgqrs.sqltypes import BigId, Json, JsonText, json_from_text
from pgqrs.types import Message, ParentClose, RunStatus, make_message


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


# Most runs have nothing but a name and an input. Where most values are part of the statement, the
# server and the driver take a third less to start one (benchmarks.workflows, `run_inline`).


def _plain_message(*, held: bool, lease: ColumnElement[Any] | None = None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "payload": cast(bindparam("payload", type_=Text()), Json()),
        "priority": bindparam("priority", type_=messages.c.priority.type),
        "ready": false() if held else true(),
        "vt": instant("vt") if lease is None else instant() + lease * SECOND,
        "enqueued_at": instant(),
        "read_ct": constant(int(held)),
        "released_ct": constant(0),
    }
    if held:
        values["dequeued_at"] = instant()
        values["consumer_worker_id"] = bindparam("holder", type_=BigId)
    return values


def _plain_run(*, held: bool) -> dict[str, Any]:
    return {
        "name": RUN_VALUES["name"],
        "version": RUN_VALUES["version"],
        "status": constant((RunStatus.RUNNING if held else RunStatus.PENDING).value),
        "input": RUN_VALUES["input"],
        "created_at": instant(),
        "updated_at": instant(),
        "started_at": instant() if held else null(),
        "nudge_ct": constant(0),
    }


def _plain_postgres(*, held: bool) -> Hot:
    queue = _QUEUE.cte("queue")
    lease = queue.c.lease if held else constant(0)
    chosen = {"queue_id": queue.c.id} | _plain_message(held=held, lease=lease)
    message = (
        insert(messages)
        .from_select(list(chosen), select(*chosen.values()).select_from(queue))
        .returning(messages.c.id, messages.c.queue_id, messages.c.vt)
        .cte("message")
    )
    values = _plain_run(held=held) | {"message_id": message.c.id, "queue_id": message.c.queue_id}
    return Hot(
        insert(workflows)
        .from_select(list(values), select(*values.values()).select_from(message))
        .returning(
            workflows.c.id,
            select(queue.c.waited_for).scalar_subquery(),
            workflows.c.message_id,
            select(message.c.vt).scalar_subquery(),
            workflows.c.created_at,
        )
    )


def _plain_sqlite(*, held: bool) -> tuple[Hot, Hot]:
    queue = _QUEUE.cte("queue")
    chosen = {"queue_id": queue.c.id} | _plain_message(held=held)
    new = {"message_id": bindparam("new_message", type_=BigId)}
    new["queue_id"] = bindparam("new_queue", type_=BigId)
    return (
        Hot(
            insert(messages)
            .from_select(list(chosen), select(*chosen.values()).select_from(queue))
            .returning(messages.c.id, messages.c.queue_id)
        ),
        Hot(insert(workflows).values(**_plain_run(held=held), **new).returning(workflows.c.id)),
    )


_QUEUE = (
    select(
        queues.c.id,
        queues.c.lease,
        select(waiting.c.waiting_until > instant())
        .where(waiting.c.queue_id == queues.c.id)
        .scalar_subquery()
        .label("waited_for"),
    )
    .where(queues.c.queue_name == bindparam("queue"))
    .with_for_update(read=True, key_share=True, of=queues)
)
_PLAIN_POSTGRES = {held: _plain_postgres(held=held) for held in (False, True)}
_PLAIN_SQLITE = {held: _plain_sqlite(held=held) for held in (False, True)}


class _Rows(NamedTuple):
    """What was written."""

    run_id: int
    waited_for: bool
    message_id: int
    vt: datetime
    now: datetime
    deadline_at: datetime | None = None


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


def _start_plainly_postgres(
    connection: Connection, bound: dict[str, Any], held: bool, now: None
) -> _Rows | None:
    found = _PLAIN_POSTGRES[held].rows(connection, bound)
    return _Rows(*found[0]) if found else None


def _start_plainly_sqlite(
    connection: Connection, bound: dict[str, Any], held: bool, now: datetime
) -> _Rows | None:
    vt = now
    if held:
        leases = _LEASE.rows(connection, {"queue": bound["queue"]})
        if not leases:
            return None
        vt = now + timedelta(seconds=leases[0][0])
    message, run = _PLAIN_SQLITE[held]
    bound |= {"now_at": now, "vt_at": vt}
    found = message.rows(connection, bound)
    if not found:
        return None
    bound["new_message"], bound["new_queue"] = found[0]
    ((run_id,),) = run.rows(connection, bound)
    return _Rows(run_id, False, found[0][0], vt, now)


_start_plainly = per_dialect(postgresql=_start_plainly_postgres, sqlite=_start_plainly_sqlite)


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
    special = (key, parent_id, timeout, deadline, eta, headers, forked_from)
    is_plain = queue is not None and not delay and special == (None,) * len(special)
    if is_plain and by_own_clock(connection, now):
        bound = {
            "queue": queue,
            "priority": priority,
            "payload": payload(name),
            "new_name": name,
            "new_version": version,
            "new_input": input,
            "holder": holder,
        }
        return _started(_start_plainly(connection, bound, is_begun, now), bound)
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
    return _started(_start(connection, values, now), values)


def _started(rows: _Rows | None, values: dict[str, Any]) -> Started:
    """The run that was written; `QueueNotFound` if nothing was."""
    if rows is None:
        raise QueueNotFound(values["queue"])
    begun = None if values["holder"] is None else _begun(rows, values)
    return Started(rows.run_id, is_new=True, waited_for=bool(rows.waited_for), begun=begun)


@lru_cache(maxsize=1000)
def payload(name: str) -> str:
    """What the message of a run says, as JSON."""
    return json.dumps({"workflow": name}, ensure_ascii=False)


def _begun(rows: _Rows, values: dict[str, Any]) -> Begun:
    name, headers = values["new_name"], values.get("headers")
    message = make_message(
        values["queue"],
        rows.message_id,
        {"workflow": name},
        None if headers is None else json.loads(headers),
        None,  # codec
        values["priority"],
        rows.vt,
        rows.now,  # enqueued
        None,  # never expires
        1,  # claimed once
        0,  # and not released
        rows.now,  # dequeued
        None,  # no producer
        values["holder"],
        None,  # no key
        None,  # no group
    )
    run = ActiveRun(
        id=rows.run_id,
        name=name,
        status=RunStatus.RUNNING,
        input=json_from_text(values["new_input"]),
        parent_id=values.get("new_parent"),
        deadline_at=rows.deadline_at,
        nudge_ct=0,
        forked_from=values.get("new_fork"),
        waiter_ct=0,
        now=rows.now,
    )
    return Begun(message, run)
