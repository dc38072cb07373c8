"""Runs of workflows: waiting, ending, and what others may tell them.

A run has a message in a queue. Whoever holds the message runs it, and all it writes is fenced by that
claim. A run that waits is a message that nobody may claim yet: until its wake-up time, or until
somebody has news for it. News (a signal, a child that ended) raise `nudge_ct` and make the message
ready in one transaction. A run that is about to wait compares `nudge_ct` with what it saw when it
began, so no news can slip in between.

A run that ended stays as it ended; every change names the states it may start from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Text,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import LeaseLost, RunNotFound
from pgqrs.models import messages, queues, workflow_events, workflow_steps, workflows
from pgqrs.payloads import Batch
from pgqrs.repositories import messages as message_rows
from pgqrs.repositories import steps
from pgqrs.repositories.expressions import Holds, at, moment, per_dialect
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import FENCE_ONE, held_one
from pgqrs.repositories.starting import ActiveRun, Started, payload, start
from pgqrs.sqltypes import BigId, Flag, Json
from pgqrs.types import Message, RunInfo, RunStatus

FAR = datetime(9999, 1, 1, tzinfo=UTC)
"""The `vt` of a run that waits for news alone."""
WILLING = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED)
"""Those that run as soon as somebody holds their message."""
LIVE = (*WILLING, RunStatus.PAUSED, RunStatus.CANCELLING)

COLUMNS = (
    workflows.c.id,
    workflows.c.name,
    workflows.c.key,
    workflows.c.status,
    workflows.c.input,
    workflows.c.output,
    workflows.c.error,
    workflows.c.failed_step,
    workflows.c.version,
    queues.c.queue_name,
    workflows.c.message_id,
    workflows.c.parent_id,
    workflows.c.forked_from,
    workflows.c.created_at,
    workflows.c.started_at,
    workflows.c.updated_at,
    workflows.c.ended_at,
    workflows.c.wake_at,
    workflows.c.deadline_at,
)
"""In the order of the fields of `RunInfo`."""
_WITH_QUEUE = select(*COLUMNS).select_from(
    workflows.outerjoin(queues, workflows.c.queue_id == queues.c.id)
)
_run = bindparam("run", type_=BigId)


def _is(*states: RunStatus) -> ColumnElement[bool]:
    """Not by IN, whose list would be filled in anew each time."""
    return or_(*(workflows.c.status == state for state in states))


_IS_LIVE = _is(*LIVE)
_HOLDS = exists().where(*FENCE_ONE)


class Ended(NamedTuple):
    """How a run ended, who waits for that, and whose message became ready by it."""

    id: int
    status: RunStatus
    output: Any
    error: str | None
    is_wanted: bool = False
    ring: str | None = None


# What the holder of a run's message does

_ACTIVATE = Hot(
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), _HOLDS)
    .values(
        status=case((_is(*WILLING), RunStatus.RUNNING), else_=workflows.c.status),
        started_at=func.coalesce(workflows.c.started_at, moment("now")),
        updated_at=moment("now"),
        wake_at=null(),
    )
    .returning(
        workflows.c.id,
        workflows.c.name,
        workflows.c.status,
        workflows.c.input,
        workflows.c.parent_id,
        workflows.c.deadline_at,
        workflows.c.nudge_ct,
        workflows.c.forked_from,
        moment("now"),
    )
)


def activate(connection: Connection, hold: Holds, *, now: datetime | None) -> ActiveRun | None:
    """The run of a held message, which runs from now on, unless it was told otherwise."""
    found = _ACTIVATE.rows(connection, held_one(hold) | at(now=(now, 0.0)))
    return ActiveRun(*found[0]) if found else None


_SUSPEND = (
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), _HOLDS, _IS_LIVE)
    .values(
        status=case(
            (workflows.c.status == RunStatus.RUNNING, RunStatus.SUSPENDED),
            else_=workflows.c.status,
        ),
        wake_at=moment("wake"),
        updated_at=moment("now"),
    )
    .returning(workflows.c.status, workflows.c.nudge_ct, workflows.c.deadline_at)
)
_GIVE_BACK = (
    update(messages)
    .where(*FENCE_ONE)
    .values(
        vt=moment("back"),
        ready=bindparam("now_ready", type_=Flag()),
        # It came this far: what crashed before counts no more.
        released_ct=messages.c.read_ct,
        consumer_worker_id=None,
    )
    .returning(messages.c.id)
)


def suspend(
    connection: Connection,
    hold: Holds,
    *,
    wake_at: datetime | None,
    nudge_ct: int,
    now: datetime | None,
) -> RunStatus:
    """Let a run wait: give its message back until the wake-up time, or until there is news.

    A run that is being cancelled does not wait; its holder keeps the message, to end it.
    """
    bound = held_one(hold) | at(
        now=(now, 0.0), wake=(now, None) if wake_at is None else (wake_at, 0.0)
    )
    row = connection.execute(_SUSPEND, bound).first()
    if row is None:
        raise LeaseLost(list(hold.tokens))
    status, nudges, deadline_at = row
    if status is RunStatus.CANCELLING:
        return RunStatus.CANCELLING
    until = min(wake_at or FAR, deadline_at or FAR)
    if status is RunStatus.PAUSED:
        back = {"now_ready": False} | at(back=(FAR, 0.0))
    elif nudges != nudge_ct:
        back = {"now_ready": True} | at(back=(now, 0.0))
    else:
        back = {"now_ready": False} | at(back=(until, 0.0))
    if connection.execute(_GIVE_BACK, bound | back).first() is None:
        raise LeaseLost(list(hold.tokens))
    return RunStatus(status)


_END_VALUES: dict[str, Any] = {
    "status": case(
        (workflows.c.status == RunStatus.CANCELLING, RunStatus.CANCELLED),
        else_=bindparam("new_status", type_=workflows.c.status.type),
    ),
    "output": cast(bindparam("new_output", type_=Text()), Json()),
    "error": bindparam("new_error", type_=Text()),
    "failed_step": bindparam("new_failed_step", type_=Text()),
    "updated_at": moment("now"),
    "ended_at": moment("now"),
    "wake_at": null(),
}
_ENDED = (
    workflows.c.id,
    workflows.c.status,
    workflows.c.parent_id,
    select(func.coalesce(queues.c.results_wanted_until > moment("now"), false()))
    .where(queues.c.id == workflows.c.queue_id)
    .scalar_subquery(),
)
_gone = delete(messages).where(*FENCE_ONE).returning(messages.c.id).cte("gone")
_POSTGRES_END = Hot(
    update(workflows)
    .where(workflows.c.message_id == _gone.c.id, _IS_LIVE)
    .values(_END_VALUES)
    .returning(*_ENDED)
)
_SQLITE_END = Hot(
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), _HOLDS, _IS_LIVE)
    .values(_END_VALUES)
    .returning(*_ENDED)
)
_REMOVE = Hot(delete(messages).where(*FENCE_ONE).returning(messages.c.id))


def _end_sqlite(connection: Connection, bound: dict[str, Any]) -> list[Any]:
    ended = _SQLITE_END.rows(connection, bound)
    _REMOVE.rows(connection, bound)
    return ended


_end = per_dialect(postgresql=_POSTGRES_END.rows, sqlite=_end_sqlite)


def end(
    connection: Connection,
    hold: Holds,
    *,
    status: RunStatus,
    output: str | None = None,
    error: str | None = None,
    failed_step: str | None = None,
    has_parent: bool,
    now: datetime | None,
) -> Ended:
    """End a run and take its message away. One that is being cancelled ends as cancelled.

    Its parent may wait for this: it gets the news in the same transaction.
    """
    bound = held_one(hold) | {
        "new_status": status,
        "new_output": output,
        "new_error": error,
        "new_failed_step": failed_step,
    }
    found = _end(connection, bound | at(now=(now, 0.0)))
    if not found:
        raise LeaseLost(list(hold.tokens))
    id, became, parent_id, is_wanted = found[0]
    ring = nudge(connection, parent_id, now=now) if has_parent else None
    result = None if output is None else json.loads(output)
    return Ended(id, became, result, error, bool(is_wanted), ring)


def drop_message(connection: Connection, hold: Holds) -> None:
    """Take away the message of a run that ended without it."""
    _REMOVE.rows(connection, held_one(hold))


_END_LOST = (
    update(workflows)
    .where(workflows.c.message_id.in_(bindparam("ids", expanding=True)), _IS_LIVE)
    .values(_END_VALUES)
    .returning(*_ENDED)
)


def end_lost(
    connection: Connection, message_ids: Sequence[int], *, error: str | None, now: datetime | None
) -> None:
    """End the runs whose messages are no more: nobody will run them."""
    if not message_ids:
        return
    bound = {
        "ids": list(message_ids),
        "new_status": RunStatus.FAILED,
        "new_output": None,
        "new_error": error,
        "new_failed_step": None,
    } | at(now=(now, 0.0))
    for _, _, parent_id, _ in connection.execute(_END_LOST, bound).all():
        if parent_id is not None:
            nudge(connection, parent_id, now=now)


# What others tell a run

_NUDGE = (
    update(workflows)
    .where(workflows.c.id == _run, _IS_LIVE)
    .values(nudge_ct=workflows.c.nudge_ct + 1, updated_at=moment("now"))
    .returning(workflows.c.message_id, workflows.c.status)
)
_UNHELD = (
    messages.c.id == bindparam("message", type_=BigId),
    messages.c.consumer_worker_id.is_(None),
)
_MAKE_READY = (
    update(messages)
    .where(*_UNHELD, ~messages.c.ready, messages.c.blocked == 0)
    .values(ready=true(), vt=moment("now"))
    .returning(
        select(queues.c.queue_name).where(queues.c.id == messages.c.queue_id).scalar_subquery()
    )
)


def nudge(connection: Connection, run_id: int, *, now: datetime | None) -> str | None:
    """There is news for a run. Returns the queue that has its message ready now, if it has."""
    bound = {"run": run_id} | at(now=(now, 0.0))
    row = connection.execute(_NUDGE, bound).first()
    if row is None or row.status is RunStatus.PAUSED:
        return None
    return _make_ready(connection, row.message_id, now=now)


def _make_ready(
    connection: Connection, message_id: int | None, *, now: datetime | None
) -> str | None:
    bound = {"message": message_id} | at(now=(now, 0.0))
    return connection.execute(_MAKE_READY, bound).scalar()


_CANCEL = (
    update(workflows)
    .where(workflows.c.id == _run, _IS_LIVE)
    .values(status=RunStatus.CANCELLING, updated_at=moment("now"))
    .returning(workflows.c.message_id)
)
_CANCELLED = (
    update(workflows)
    .where(workflows.c.id == _run, workflows.c.status == RunStatus.CANCELLING)
    .values(
        status=RunStatus.CANCELLED, updated_at=moment("now"), ended_at=moment("now"), wake_at=null()
    )
    .returning(workflows.c.parent_id)
)
_TAKE_UNHELD = delete(messages).where(*_UNHELD).returning(messages.c.id)
_IS_THERE = select(messages.c.id).where(messages.c.id == bindparam("message", type_=BigId))
_CHILDREN = select(workflows.c.id).where(workflows.c.parent_id == _run, _IS_LIVE)


def cancel(connection: Connection, run_id: int, *, now: datetime | None) -> set[str]:
    """Cancel a run and its children: at once what nobody holds, the rest at its next boundary.

    Returns the queues that have something ready now.
    """
    bound = {"run": run_id} | at(now=(now, 0.0))
    row = connection.execute(_CANCEL, bound).first()
    ring: set[str] = set()
    if row is not None:
        if not _is_held(connection, row.message_id):
            parent_id = connection.execute(_CANCELLED, bound).scalar()
            woken = None if parent_id is None else nudge(connection, parent_id, now=now)
            ring |= {woken} if woken else set()
        for child in connection.execute(_CHILDREN, bound).scalars().all():
            ring |= cancel(connection, child, now=now)
    return ring


def _is_held(connection: Connection, message_id: int | None) -> bool:
    """Whether somebody runs the run of this message. If not, the message is gone now."""
    bound = {"message": message_id}
    if message_id is None or connection.execute(_TAKE_UNHELD, bound).first() is not None:
        return False
    return connection.execute(_IS_THERE, bound).first() is not None


_PAUSE = (
    update(workflows)
    .where(workflows.c.id == _run, _is(*WILLING))
    .values(status=RunStatus.PAUSED, updated_at=moment("now"))
    .returning(workflows.c.message_id)
)
_PUT_AWAY = update(messages).where(*_UNHELD).values(ready=false(), vt=moment("far"))
_RESUME = (
    update(workflows)
    .where(workflows.c.id == _run, workflows.c.status == RunStatus.PAUSED)
    .values(
        status=case(
            (workflows.c.started_at.is_(None), RunStatus.PENDING), else_=RunStatus.SUSPENDED
        ),
        updated_at=moment("now"),
        nudge_ct=workflows.c.nudge_ct + 1,
    )
    .returning(workflows.c.message_id)
)


def pause(connection: Connection, run_id: int, *, now: datetime | None) -> bool:
    """Let a run stop at its next boundary until it is resumed; whether it could."""
    row = connection.execute(_PAUSE, {"run": run_id} | at(now=(now, 0.0))).first()
    if row is not None and row.message_id is not None:
        connection.execute(_PUT_AWAY, {"message": row.message_id} | at(far=(FAR, 0.0)))
    return row is not None


def resume(connection: Connection, run_id: int, *, now: datetime | None) -> tuple[bool, str | None]:
    """Let a paused run go on; whether it was paused, and which queue has it ready now."""
    row = connection.execute(_RESUME, {"run": run_id} | at(now=(now, 0.0))).first()
    if row is None:
        return False, None
    return True, _make_ready(connection, row.message_id, now=now)


_REVIVE = (
    update(workflows)
    .where(workflows.c.id == _run, workflows.c.status == RunStatus.FAILED)
    .values(
        status=RunStatus.PENDING,
        error=null(),
        failed_step=null(),
        output=null(),
        ended_at=null(),
        deadline_at=null(),
        updated_at=moment("now"),
        message_id=bindparam("new_message", type_=BigId),
        nudge_ct=workflows.c.nudge_ct + 1,
    )
    .returning(workflows.c.id)
)


def _enqueue(connection: Connection, queue: str, name: str, *, now: datetime | None) -> int:
    enqueued = message_rows.enqueue(
        connection,
        queue,
        Batch(1, None, [payload(name)]),
        headers=None,
        priority=0,
        delay=0.0,
        eta=None,
        ttl=None,
        expires_at=None,
        producer=None,
        now=now,
    )
    return enqueued.ids[0]


def retry(connection: Connection, run_id: int, *, now: datetime | None) -> str | None:
    """Let a failed run go on from the step that failed; returns its queue, or None if it has not
    failed, or was driven by hand.
    """
    run = get(connection, run_id)
    if run.status is not RunStatus.FAILED or run.queue is None:
        return None
    message_id = _enqueue(connection, run.queue, run.name, now=now)
    steps.forget_failed(connection, run_id, since=run.failed_step)
    bound = {"run": run_id, "new_message": message_id} | at(now=(now, 0.0))
    if connection.execute(_REVIVE, bound).first() is None:  # somebody else was quicker
        connection.execute(delete(messages).where(messages.c.id == message_id))
        return None
    return run.queue


def fork(
    connection: Connection, run_id: int, *, before: str | None, input: str, now: datetime | None
) -> Started:
    """A new run that has done what this one did before a step."""
    run = get(connection, run_id)
    started = start(
        connection,
        name=run.name,
        queue=run.queue,
        input=input,
        version=run.version,
        forked_from=run_id,
        now=now,
    )
    steps.copy(connection, run_id, to=started.id, before=before)
    return started


_CLAIM = (
    update(messages)
    .where(
        messages.c.id
        == select(workflows.c.message_id).where(workflows.c.id == _run, _IS_LIVE).scalar_subquery(),
        or_(messages.c.ready, messages.c.vt <= moment("now")),
    )
    .values(
        ready=false(),
        vt=moment("lease"),
        read_ct=messages.c.read_ct + 1,
        dequeued_at=moment("now"),
        consumer_worker_id=bindparam("worker", type_=BigId),
    )
    .returning(*message_rows.COLUMNS)
)
_QUEUE_OF = (
    select(queues.c.queue_name, queues.c.lease)
    .join_from(workflows, queues, workflows.c.queue_id == queues.c.id)
    .where(workflows.c.id == _run)
)


def claim(
    connection: Connection, run_id: int, *, worker: int, now: datetime | None
) -> Message | None:
    """Claim the message of one run, if it is there to be claimed."""
    queue = connection.execute(_QUEUE_OF, {"run": run_id}).first()
    if queue is None:
        return None
    bound = {"run": run_id, "worker": worker} | at(now=(now, 0.0), lease=(now, queue.lease))
    row = connection.execute(_CLAIM, bound).first()
    return None if row is None else Message(queue.queue_name, *row)


# Driven by hand

_MOVE_BY_HAND = (
    update(workflows)
    .where(
        workflows.c.id == _run,
        workflows.c.message_id.is_(None),
        workflows.c.status.in_(bindparam("allowed", expanding=True)),
    )
    .values(
        status=bindparam("new_status", type_=workflows.c.status.type),
        output=cast(bindparam("new_output", type_=Text()), Json()),
        error=bindparam("new_error", type_=Text()),
        started_at=func.coalesce(workflows.c.started_at, moment("now")),
        ended_at=moment("ended"),
        updated_at=moment("now"),
    )
    .returning(workflows.c.parent_id)
)


def move_by_hand(
    connection: Connection,
    run_id: int,
    *,
    allowed: Sequence[RunStatus],
    status: RunStatus,
    has_ended: bool,
    output: str | None = None,
    error: str | None = None,
    now: datetime | None,
) -> bool:
    """Let a run that has no message go from one of these states to another; whether it could."""
    bound = {
        "run": run_id,
        "allowed": list(allowed),
        "new_status": status,
        "new_output": output,
        "new_error": error,
    } | at(now=(now, 0.0), ended=(now, 0.0 if has_ended else None))
    return connection.execute(_MOVE_BY_HAND, bound).first() is not None


# Looking

_GET = Hot(_WITH_QUEUE.where(workflows.c.id == _run))


def get(connection: Connection, run_id: int) -> RunInfo:
    """One run."""
    found = _GET.rows(connection, {"run": run_id})
    if not found:
        raise RunNotFound(run_id)
    return _info(found[0])


def find(
    connection: Connection,
    *,
    name: str | None,
    status: RunStatus | None,
    key: str | None,
    parent_id: int | None,
    before: int | None,
    limit: int,
) -> list[RunInfo]:
    """Runs, the newest first, a page at a time."""
    wanted = (
        (workflows.c.name, name),
        (workflows.c.status, status),
        (workflows.c.key, key),
        (workflows.c.parent_id, parent_id),
    )
    statement = _WITH_QUEUE.where(
        *(column == value for column, value in wanted if value is not None)
    )
    if before is not None:
        statement = statement.where(workflows.c.id < before)
    found = connection.execute(statement.order_by(workflows.c.id.desc()).limit(limit))
    return [_info(row) for row in found]


def purge(
    connection: Connection,
    *,
    statuses: Sequence[RunStatus],
    older_than: float,
    limit: int,
    now: datetime | None,
) -> int:
    """Forget up to `limit` runs that ended longer ago than this, with their steps and events.

    One whose parent, or child, goes on stays.
    """
    kin = workflows.alias("kin")
    is_live = kin.c.status.in_(LIVE)
    old = (
        select(workflows.c.id)
        .where(
            workflows.c.status.in_(statuses),
            workflows.c.ended_at <= moment("cutoff"),
            ~exists().where(kin.c.parent_id == workflows.c.id, is_live),
            ~exists().where(kin.c.id == workflows.c.parent_id, is_live),
        )
        .limit(limit)
    )
    ids = list(connection.execute(old, at(cutoff=(now, -older_than))).scalars())
    # Not left to the foreign keys: an application's SQLite engine may not look at them.
    for table in (workflow_steps, workflow_events):
        connection.execute(delete(table).where(table.c.workflow_id.in_(ids)))
    return connection.execute(delete(workflows).where(workflows.c.id.in_(ids))).rowcount


def _info(row: Sequence[Any]) -> RunInfo:
    return RunInfo(*row)
