"""Runs of workflows: waiting, ending, and what others may tell them.

A run has a message in a queue. Whoever holds the message runs it, and all it writes is fenced by that
claim. A run that waits is a message that nobody may claim yet: until its wake-up time, or until
somebody has news for it. News (a signal, a child that ended) raise `nudge_ct` and make the message
ready in one transaction. A run that is about to wait compares `nudge_ct` with what it saw when it
began, so no news can slip in between.

A run that ended stays as it ended; every change names the states it may start from. Whoever waits for
its end is told in the same transaction (`repositories.waits`, also on the order of locks).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Text,
    and_,
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
from pgqrs.models import (
    messages,
    queues,
    waiting,
    workflow_events,
    workflow_steps,
    workflow_waits,
    workflows,
)
from pgqrs.payloads import Batch
from pgqrs.repositories import messages as message_rows
from pgqrs.repositories import steps, waits
from pgqrs.repositories.expressions import (
    Holds,
    at,
    by_own_clock,
    constant,
    instant,
    is_one_of,
    moment,
    per_dialect,
)
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import FENCE_ONE, FENCE_RUN, held_one
from pgqrs.repositories.starting import ActiveRun, Started, payload, start
from pgqrs.sqltypes import BigId, Flag, Json, json_from_text
from pgqrs.types import ENDED, Message, RunInfo, RunStatus, StepStatus

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
    return or_(*(workflows.c.status == constant(state.value) for state in states))


_IS_LIVE = _is(*LIVE)
_HOLDS = exists().where(*FENCE_ONE)


class Ended(NamedTuple):
    """How a run ended, whether somebody waits for that, and the queues that have runs ready by it."""

    id: int
    status: RunStatus
    output: Any
    error: str | None
    is_wanted: bool = False
    ring: frozenset[str] = frozenset()


# What the holder of a run's message does

_ACTIVATE = Hot(
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), exists().where(*FENCE_RUN))
    .values(
        status=case((_is(*WILLING), constant(RunStatus.RUNNING.value)), else_=workflows.c.status),
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
        workflows.c.waiter_ct,
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


_PARK = (
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), _HOLDS, _IS_LIVE)
    .values(
        status=case(
            (workflows.c.status == RunStatus.CANCELLING, RunStatus.CANCELLING),
            else_=RunStatus.PAUSED,
        ),
        error=bindparam("new_error", type_=Text()),
        wake_at=null(),
        updated_at=moment("now"),
    )
    .returning(workflows.c.status)
)


def park(connection: Connection, hold: Holds, *, error: str, now: datetime | None) -> RunStatus:
    """Pause a run that cannot go on with this code, and say why. Nothing of it is lost: it goes on
    when it is resumed.

    A run that is being cancelled does not wait; its holder keeps the message, to end it.
    """
    bound = held_one(hold) | {"new_error": error} | at(now=(now, 0.0))
    status = connection.execute(_PARK, bound).scalar()
    if status is None:
        raise LeaseLost(list(hold.tokens))
    if status is RunStatus.PAUSED:
        back = {"now_ready": False} | at(back=(FAR, 0.0))
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
    "failed_by": cast(bindparam("new_failed_by", type_=Text()), Json()),
    "updated_at": moment("now"),
    "ended_at": moment("now"),
    "wake_at": null(),
}
_ENDED = (
    workflows.c.id,
    workflows.c.status,
    workflows.c.waiter_ct,
    select(func.coalesce(waiting.c.results_wanted_until > moment("now"), false()))
    .where(waiting.c.queue_id == workflows.c.queue_id)
    .scalar_subquery(),
)
_child = workflows.alias("child")
_IS_OPEN = and_(*(_child.c.status != constant(state.value) for state in sorted(ENDED)))
_HAS_CHILDREN_TO_CLOSE = exists().where(
    _child.c.parent_id == workflows.c.id, _child.c.parent_close == constant("cancel"), _IS_OPEN
)
_MAY_END = (
    _IS_LIVE,
    (workflows.c.status == RunStatus.CANCELLING) == bindparam("is_cancelled", type_=Flag()),
    workflows.c.waiter_ct <= bindparam("most_waiters", type_=workflows.c.waiter_ct.type),
    or_(bindparam("children_told", type_=Flag()), ~_HAS_CHILDREN_TO_CLOSE),
)
"""What `end` was told to expect. If it is otherwise, the run does not end yet."""
MANY = 2**31 - 1
_locked = select(messages.c.id).where(*FENCE_ONE).with_for_update().cte("locked")
_postgres_ended = (
    update(workflows)
    .where(workflows.c.message_id == _locked.c.id, *_MAY_END)
    .values(_END_VALUES)
    .returning(
        *_ENDED[:3], _ENDED[3].label("is_wanted"), workflows.c.message_id.label("ended_message")
    )
    .cte("ended")
)
_gone = delete(messages).where(
    messages.c.id == select(_postgres_ended.c.ended_message).scalar_subquery()
)
_POSTGRES_END = Hot(select(*list(_postgres_ended.c)[:4]).add_cte(_gone.cte("gone")))
_SQLITE_END = Hot(
    update(workflows)
    .where(workflows.c.message_id == bindparam("held_id", type_=BigId), _HOLDS, *_MAY_END)
    .values(_END_VALUES)
    .returning(*_ENDED)
)
_REMOVE = Hot(delete(messages).where(*FENCE_ONE).returning(messages.c.id))


def _end_sqlite(connection: Connection, bound: dict[str, Any]) -> list[Any]:
    ended = _SQLITE_END.rows(connection, bound)
    if ended:
        _REMOVE.rows(connection, bound)
    return ended


_end = per_dialect(postgresql=_POSTGRES_END.rows, sqlite=_end_sqlite)


# Most runs return something, and concern no other run. With a fifth of the parameters their end takes
# the server and the driver a third less (benchmarks.workflows, `run_inline`).

_COMPLETED_VALUES: dict[str, Any] = {
    "status": constant(RunStatus.COMPLETED.value),
    "output": _END_VALUES["output"],
    "error": null(),
    "failed_step": null(),
    "failed_by": null(),
    "updated_at": instant(),
    "ended_at": instant(),
    "wake_at": null(),
}
_MAY_COMPLETE = (
    _is(*WILLING, RunStatus.PAUSED),
    workflows.c.waiter_ct == constant(0),
    ~_HAS_CHILDREN_TO_CLOSE,
)
_COMPLETED = (
    workflows.c.id,
    select(waiting.c.results_wanted_until > instant())
    .where(waiting.c.queue_id == workflows.c.queue_id)
    .scalar_subquery()
    .label("is_wanted"),
)
_held_run = select(messages.c.id).where(*FENCE_RUN).with_for_update().cte("locked")
_postgres_completed = (
    update(workflows)
    .where(workflows.c.message_id == _held_run.c.id, *_MAY_COMPLETE)
    .values(_COMPLETED_VALUES)
    .returning(*_COMPLETED, workflows.c.message_id.label("ended_message"))
    .cte("ended")
)
_POSTGRES_COMPLETE = Hot(
    select(*list(_postgres_completed.c)[:2]).add_cte(
        delete(messages)
        .where(messages.c.id == select(_postgres_completed.c.ended_message).scalar_subquery())
        .cte("gone")
    )
)
_SQLITE_COMPLETE = Hot(
    update(workflows)
    .where(
        workflows.c.message_id == bindparam("held_id", type_=BigId),
        exists().where(*FENCE_RUN),
        *_MAY_COMPLETE,
    )
    .values(_COMPLETED_VALUES)
    .returning(*_COMPLETED)
)
_REMOVE_HELD = Hot(delete(messages).where(messages.c.id == bindparam("held_id", type_=BigId)))


def _complete_sqlite(connection: Connection, bound: dict[str, Any]) -> list[Any]:
    completed = _SQLITE_COMPLETE.rows(connection, bound)
    if completed:
        _REMOVE_HELD.rows(connection, {"held_id": bound["held_id"]})
    return completed


_complete = per_dialect(postgresql=_POSTGRES_COMPLETE.rows, sqlite=_complete_sqlite)


def _complete_alone(
    connection: Connection, hold: Holds, output: str | None, *, now: datetime | None
) -> Ended | None:
    """End a run that returned this, if that concerns no other run."""
    bound = held_one(hold)
    bound["new_output"] = output
    if now is not None:
        bound["now_at"] = now
    found = _complete(connection, bound)
    if not found:
        return None
    id, is_wanted = found[0]
    return Ended(id, RunStatus.COMPLETED, json_from_text(output), None, bool(is_wanted))


class Ending(NamedTuple):
    """How a run is to end. `output` and `failed_by` are JSON texts."""

    status: RunStatus
    output: str | None = None
    error: str | None = None
    failed_step: str | None = None
    failed_by: str | None = None


def end(
    connection: Connection,
    hold: Holds,
    ending: Ending,
    *,
    tells_waiters: bool,
    is_cancelled: bool = False,
    children_told: bool = False,
    now: datetime | None,
) -> Ended | None:
    """End a run and take its message away. Returns None, and changes nothing, if somebody else holds
    the message, or if the run is not as expected:

    - it has waiters, and this does not tell them. Without that it is one statement;
    - it is being cancelled, which is not expected here, or the other way round;
    - it has children that are to be cancelled with it, and those were not told.
    """
    is_alone = not (tells_waiters or is_cancelled or children_told)
    if is_alone and ending.status is RunStatus.COMPLETED and by_own_clock(connection, now):
        return _complete_alone(connection, hold, ending.output, now=now)
    bound = held_one(hold) | {
        "new_status": ending.status,
        "new_output": ending.output,
        "new_error": ending.error,
        "new_failed_step": ending.failed_step,
        "new_failed_by": ending.failed_by,
        "most_waiters": MANY if tells_waiters else 0,
        "is_cancelled": is_cancelled,
        "children_told": children_told,
    }
    found = _end(connection, bound | at(now=(now, 0.0)))
    if not found:
        return None
    id, became, waiter_ct, is_wanted = found[0]
    ring = tell_waiters(connection, [id], now=now) if waiter_ct else frozenset[str]()
    result = None if ending.output is None else json.loads(ending.output)
    return Ended(id, became, result, ending.error, bool(is_wanted), ring)


def tell_waiters(
    connection: Connection, ended: Sequence[int], *, now: datetime | None
) -> frozenset[str]:
    """Wake the runs that wait for these, which have ended. Returns the queues that have them ready."""
    woken = [nudge(connection, id, now=now) for id in waits.waiters(connection, ended)]
    return frozenset(queue for queue in woken if queue is not None)


def drop_message(connection: Connection, hold: Holds) -> None:
    """Take away the message of a run that ended without it."""
    _REMOVE.rows(connection, held_one(hold))


_END_LOST = (
    update(workflows)
    .where(is_one_of(workflows.c.message_id, "ids"), _IS_LIVE)
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
        "new_failed_by": None,
    } | at(now=(now, 0.0))
    ended = connection.execute(_END_LOST, bound).all()
    awaited = sorted(row.id for row in ended if row.waiter_ct)
    if awaited:
        tell_waiters(connection, awaited, now=now)
    closing = children_of(connection, [row.id for row in ended], closing=True) if ended else []
    if closing:
        tell_to_cancel(connection, closing, now=now)


_finished = (
    select(func.count())
    .where(
        workflow_steps.c.workflow_id == workflows.c.id,
        or_(
            workflow_steps.c.status == StepStatus.COMPLETED,
            workflow_steps.c.status == StepStatus.FAILED,
        ),
    )
    .correlate(workflows)
    .scalar_subquery()
)
_MARK_PROGRESS = (
    update(workflows)
    .where(is_one_of(workflows.c.message_id, "ids"), _IS_LIVE, workflows.c.progress_ct < _finished)
    .values(progress_ct=_finished)
    .returning(workflows.c.message_id)
)
_FORGIVE = (
    update(messages)
    .where(is_one_of(messages.c.id, "ids"))
    .values(released_ct=messages.c.read_ct - bindparam("spared", type_=messages.c.read_ct.type))
)


def forgive(connection: Connection, message_ids: Sequence[int], *, spared: int = 0) -> set[int]:
    """Start the count of attempts anew for runs that have finished steps since that was done last.
    Returns the ids of their messages, which are locked or held. `spared` attempts still count.
    """
    found = connection.execute(_MARK_PROGRESS, {"ids": list(message_ids)}).scalars().all()
    if found:
        connection.execute(_FORGIVE, {"ids": found, "spared": spared})
    return {id for id in found if id is not None}


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


_LOCK_RUNS = (
    select(workflows.c.id, workflows.c.message_id)
    .where(is_one_of(workflows.c.id, "runs"))
    .order_by(workflows.c.id)
    .with_for_update()
)
_CANCEL = (
    update(workflows)
    .where(is_one_of(workflows.c.id, "runs"))
    .values(status=RunStatus.CANCELLING, updated_at=moment("now"))
)
_OFFER = (
    update(messages)
    .where(
        is_one_of(messages.c.id, "ids"),
        messages.c.consumer_worker_id.is_(None),
        ~messages.c.ready,
        messages.c.blocked == 0,
    )
    .values(ready=true(), vt=moment("now"))
)
_CANCELLED = (
    update(workflows)
    .where(is_one_of(workflows.c.id, "runs"))
    .values(
        status=RunStatus.CANCELLED, updated_at=moment("now"), ended_at=moment("now"), wake_at=null()
    )
)
_TAKE_UNHELD = delete(messages).where(
    is_one_of(messages.c.id, "ids"), messages.c.consumer_worker_id.is_(None)
)
_THERE = select(messages.c.id).where(is_one_of(messages.c.id, "ids"))
_CHILDREN = (
    select(workflows.c.id)
    .where(is_one_of(workflows.c.parent_id, "runs"), _IS_LIVE)
    .order_by(workflows.c.id)
)


def children_of(
    connection: Connection, run_ids: Sequence[int], *, closing: bool = False
) -> list[int]:
    """The live children that are cancelled together with these runs; those that are `closing` are so
    however the runs end.
    """
    close = workflows.c.parent_close
    wanted = close == "cancel" if closing else or_(close.is_(None), close != "leave")
    return list(connection.execute(_CHILDREN.where(wanted), {"runs": list(run_ids)}).scalars())


def tell_to_cancel(
    connection: Connection, run_ids: Sequence[int], *, now: datetime | None
) -> list[int]:
    """Let live runs be cancelled: by whoever runs them, at its next boundary. Returns their ids.

    What nobody runs is ended by `end_cancelled`. Should that never come, since the process died, any
    worker finds the message ready and does it.
    """
    bound = {"runs": list(run_ids)} | at(now=(now, 0.0))
    locked = connection.execute(_LOCK_RUNS.where(_IS_LIVE), bound).all()
    if locked:
        bound |= {"runs": [row.id for row in locked], "ids": [row.message_id for row in locked]}
        connection.execute(_CANCEL, bound)
        connection.execute(_OFFER, bound)
    return [row.id for row in locked]


def end_cancelled(
    connection: Connection, run_ids: Sequence[int], *, now: datetime | None
) -> frozenset[str]:
    """End those of these that are being cancelled and that nobody runs, and take their messages away.
    Their children were told. Returns the queues that have runs ready by it.
    """
    bound = {"runs": list(run_ids)} | at(now=(now, 0.0))
    told = workflows.c.status == RunStatus.CANCELLING
    locked = connection.execute(_LOCK_RUNS.where(told), bound).all()
    of_messages = {"ids": [row.message_id for row in locked if row.message_id is not None]}
    connection.execute(_TAKE_UNHELD, of_messages)
    held = set(connection.execute(_THERE, of_messages).scalars())
    ended = [row.id for row in locked if row.message_id not in held]
    if not ended:
        return frozenset()
    connection.execute(_CANCELLED, bound | {"runs": ended})
    return tell_waiters(connection, ended, now=now)


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
        error=null(),
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


def find_paused(
    connection: Connection,
    *,
    name: str | None,
    version: str | None,
    parked: bool | None,
    error: str | None,
    after: int,
    limit: int,
) -> list[int]:
    """Ids of paused runs that match all of this, a page after an id. A run is `parked` if it was
    paused because its code could not go on, which its error says.
    """
    statement = select(workflows.c.id).where(
        workflows.c.status == RunStatus.PAUSED, workflows.c.id > after
    )
    if name is not None:
        statement = statement.where(workflows.c.name == name)
    if version is not None:
        statement = statement.where(workflows.c.version == version)
    if parked is not None:
        has_error = workflows.c.error.is_not(None)
        statement = statement.where(has_error if parked else ~has_error)
    if error is not None:
        statement = statement.where(workflows.c.error.contains(error, autoescape=True))
    return list(connection.execute(statement.order_by(workflows.c.id).limit(limit)).scalars())


_REVIVE = (
    update(workflows)
    .where(workflows.c.id == _run, workflows.c.status == RunStatus.FAILED)
    .values(
        status=RunStatus.PENDING,
        error=null(),
        failed_step=null(),
        failed_by=null(),
        output=null(),
        ended_at=null(),
        deadline_at=moment("deadline"),
        time_limit=bindparam("new_limit", type_=workflows.c.time_limit.type),
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


_RETRIED = (
    select(
        workflows.c.failed_by,
        workflows.c.deadline_at,
        workflows.c.time_limit,
        workflows.c.created_at,
        moment("now").label("now"),
    )
    .where(workflows.c.id == _run)
    .with_for_update()
)


def retry(connection: Connection, run_id: int, *, now: datetime | None) -> str | None:
    """Let a failed run go on, and make the calls again that failed it; returns its queue, or None if it
    has not failed, or was driven by hand.

    A deadline that has passed gives the run once more the time that it had at first.
    """
    bound = {"run": run_id} | at(now=(now, 0.0))
    row = connection.execute(_RETRIED, bound).first()
    run = get(connection, run_id)
    if row is None or run.status is not RunStatus.FAILED or run.queue is None:
        return None
    failed = steps.Failures(**row.failed_by) if row.failed_by else steps.Failures()
    steps.forget(connection, run_id, failed)
    deadline, limit = row.deadline_at, row.time_limit
    if deadline is not None and limit is None:
        limit = (deadline - row.created_at).total_seconds()
    if deadline is not None and deadline <= row.now:
        deadline = row.now + timedelta(seconds=limit)
    bound |= {
        "new_message": _enqueue(connection, run.queue, run.name, now=now),
        "new_limit": limit,
    } | at(deadline=(row.now, None) if deadline is None else (deadline, 0.0))
    connection.execute(_REVIVE, bound).one()
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
    .returning(workflows.c.waiter_ct)
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
) -> frozenset[str] | None:
    """Let a run that has no message go from one of these states to another. Returns the queues that
    have runs ready by it, or None if it was in another state.
    """
    bound = {
        "run": run_id,
        "allowed": list(allowed),
        "new_status": status,
        "new_output": output,
        "new_error": error,
    } | at(now=(now, 0.0), ended=(now, 0.0 if has_ended else None))
    waiter_ct = connection.execute(_MOVE_BY_HAND, bound).scalar()
    if waiter_ct is None:
        return None
    if not has_ended or not waiter_ct:
        return frozenset()
    return tell_waiters(connection, [run_id], now=now)


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

    One whose parent, or child, goes on stays, and so does one that another waits for.
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
            ~exists().where(
                workflow_waits.c.awaited_id == workflows.c.id,
                workflow_waits.c.waiter_id == kin.c.id,
                is_live,
            ),
        )
        .limit(limit)
    )
    ids = list(connection.execute(old, at(cutoff=(now, -older_than))).scalars())
    # Not left to the foreign keys: an application's SQLite engine may not look at them.
    for table in (workflow_steps, workflow_events):
        connection.execute(delete(table).where(table.c.workflow_id.in_(ids)))
    waits.forget(connection, ids)
    # Children that are kept, since they ended later or others wait for them, do not go with it.
    orphaned = update(workflows).where(workflows.c.parent_id.in_(ids), workflows.c.id.not_in(ids))
    connection.execute(orphaned.values(parent_id=null()))
    return connection.execute(delete(workflows).where(workflows.c.id.in_(ids))).rowcount


def _info(row: Sequence[Any]) -> RunInfo:
    return RunInfo(*row)
