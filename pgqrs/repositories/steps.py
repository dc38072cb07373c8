"""Steps of a run: what was done, so that it is never done again.

Recording is fenced like everything a holder does: the statement that writes the step also finds the
run's message held by this very claim, and keeps it from being claimed until it is done. It returns
what the run was told meanwhile, so that cancelling or pausing costs no query of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
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
    insert,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
    update,
)

from pgqrs.errors import LeaseLost
from pgqrs.models import messages, workflow_steps, workflows
from pgqrs.repositories.expressions import Holds, at, by_own_clock, instant, is_one_of, moment
from pgqrs.repositories.hot import Hot
from pgqrs.repositories.messages import FENCE_ONE, FENCE_RUN, held_one
from pgqrs.sqltypes import BigId, JsonText, Whole
from pgqrs.types import RunStatus, StepInfo, StepStatus

COLUMNS = (
    workflow_steps.c.workflow_id,
    workflow_steps.c.step_id,
    workflow_steps.c.position,
    workflow_steps.c.status,
    workflow_steps.c.attempts,
    workflow_steps.c.output,
    workflow_steps.c.error,
    workflow_steps.c.started_at,
    workflow_steps.c.completed_at,
    workflow_steps.c.wake_at,
    workflow_steps.c.seq,
    workflow_steps.c.digest,
)
"""In the order of the fields of `StepInfo`."""
FINAL = frozenset((StepStatus.COMPLETED, StepStatus.FAILED, StepStatus.CANCELLED))
"""How a step may stand that is not to be done any more."""


class NewStep(NamedTuple):
    """What is to be recorded of a step. `output` is JSON text."""

    step_id: str
    position: int
    status: StepStatus
    attempts: int = 1
    output: str | None = None
    error: str | None = None
    took: float = 0.0
    """Seconds since it began."""
    wake_in: float | None = None
    wake_at: datetime | None = None
    ends_then: bool = False
    """Whether it is complete at the time of its wake-up, as a sleep is."""
    seq: int | None = None
    """Its place among all that the run got to know; None while there is no end."""
    digest: int | None = None
    """Of the arguments of the call."""


class Recorded(NamedTuple):
    """A step is in the database, and this is what its run was told to be."""

    status: RunStatus
    overdue: bool
    wake_at: datetime | None
    is_new: bool = True
    """False if it was there already."""
    nudge_ct: int = 0
    """How often there was news for the run; only `look` asks for it."""


_run = bindparam("run", type_=BigId)
_step_id = bindparam("step", type_=Text())
_THIS = (workflow_steps.c.workflow_id == _run, workflow_steps.c.step_id == _step_id)
_VALUES: dict[str, Any] = {
    "status": bindparam("new_status", type_=workflow_steps.c.status.type),
    "attempts": bindparam("new_attempts", type_=workflow_steps.c.attempts.type),
    "output": cast(bindparam("new_output", type_=Text()), JsonText()),
    "error": bindparam("new_error", type_=Text()),
    "started_at": moment("started"),
    "completed_at": moment("completed"),
    "wake_at": moment("wake"),
    "seq": bindparam("new_seq", type_=BigId),
}
_FIRST_VALUES: dict[str, Any] = {
    "workflow_id": _run,
    "step_id": _step_id,
    "position": bindparam("new_position", type_=workflow_steps.c.position.type),
    "digest": bindparam("new_digest", type_=BigId),
    **_VALUES,
}
_TOLD = (
    select(workflows.c.status).where(workflows.c.id == _run).scalar_subquery(),
    select(func.coalesce(workflows.c.deadline_at <= moment("now"), false()))
    .where(workflows.c.id == _run)
    .scalar_subquery(),
    workflow_steps.c.wake_at,
)
_INSERT = Hot(
    insert(workflow_steps)
    .from_select(
        list(_FIRST_VALUES),
        select(*_FIRST_VALUES.values())
        .select_from(messages)
        .where(*FENCE_ONE, ~exists().where(*_THIS))
        .with_for_update(read=True, of=messages),
    )
    .returning(*_TOLD)
)
_OVERDUE, _status_text = "overdue ", type_coerce(workflows.c.status, Text())
_overdue = literal_column(f"'{_OVERDUE}'", Text())
_DONE_VALUES: dict[str, Any] = {
    **{name: _FIRST_VALUES[name] for name in ("workflow_id", "step_id", "position", "digest")},
    "status": literal_column(f"'{StepStatus.COMPLETED.value}'", Text()),
    "attempts": literal_column("1", Whole),
    "output": _VALUES["output"],
    "started_at": instant("started", later=True),
    "completed_at": instant(),
    "seq": _VALUES["seq"],
}


# Most steps return at their first attempt. With half the parameters and one look at the run, recording
# them takes the server and the driver a quarter less (benchmarks.workflows, `run_inline`).
def _insert_done(*others: Any) -> Hot:
    return Hot(
        insert(workflow_steps)
        .from_select(
            list(_DONE_VALUES),
            select(*_DONE_VALUES.values())
            .select_from(messages)
            .where(*FENCE_RUN, *others)
            .with_for_update(read=True, of=messages),
        )
        .returning(
            select(
                case(
                    (workflows.c.deadline_at <= instant(), _overdue + _status_text),
                    else_=_status_text,
                )
            )
            .where(workflows.c.id == _run)
            .scalar_subquery()
        )
    )


_INSERT_DONE = _insert_done(~exists().where(*_THIS))
# Where a statement may fail, a look at the steps that are there is not needed: 20 µs of the server.
_INSERT_FIRST = _insert_done()
_held = select(messages.c.id).where(*FENCE_ONE).with_for_update(read=True).cte("held")
_UPDATE = Hot(
    update(workflow_steps)
    .where(
        *_THIS,
        or_(
            workflow_steps.c.status == StepStatus.PENDING,
            workflow_steps.c.status == StepStatus.RUNNING,
            # The workflow did not cut it short again, as after a retry.
            workflow_steps.c.status == StepStatus.CANCELLED,
        ),
        exists(select(_held.c.id)),
    )
    .values(_VALUES)
    .returning(*_TOLD)
)
_CANCEL = (
    update(workflow_steps)
    .where(*_THIS, exists().where(*FENCE_ONE))
    .values(
        # What is complete stays so: it is not done again, should the workflow ask for it once more.
        status=case(
            (
                and_(
                    workflow_steps.c.status == StepStatus.COMPLETED,
                    bindparam("keeps", type_=Whole) == 1,
                ),
                StepStatus.COMPLETED,
            ),
            else_=StepStatus.CANCELLED,
        ),
        **{name: _VALUES[name] for name in ("error", "completed_at", "wake_at", "seq")},
    )
    .returning(*_TOLD)
)
_IS_HELD = select(
    *_TOLD[:2],
    select(messages.c.id).where(*FENCE_ONE).scalar_subquery(),
    select(workflows.c.nudge_ct).where(workflows.c.id == _run).scalar_subquery(),
)
_FIND = Hot(
    select(*COLUMNS).where(workflow_steps.c.workflow_id == _run).order_by(workflow_steps.c.id)
)
_GET = select(*COLUMNS).where(*_THIS)


def record(
    connection: Connection,
    run_id: int,
    step: NewStep,
    *,
    hold: Holds,
    again: bool,
    now: datetime | None,
) -> Recorded:
    """Write down a step; `again` if the run has a record of it that is not final.

    Safe to repeat: a final record stays as it is. Who lost the run's message records nothing, and
    gets `LeaseLost`.
    """
    if not again and _returned_at_once(step) and by_own_clock(connection, now):
        done = _INSERT_DONE.rows(connection, _bound_done(run_id, step, hold=hold, now=now))
        if done:
            return _told(done[0][0])
    bound = _bound(run_id, step, now=now) | held_one(hold)
    found = (_UPDATE if again else _INSERT).rows(connection, bound)
    if not found and not again and _is_shown(connection, bound):
        found = _UPDATE.rows(connection, bound)
    if found:
        return Recorded(*found[0])
    return _recorded_before(connection, bound, hold)


def record_first(
    connection: Connection, run_id: int, step: NewStep, *, hold: Holds, now: datetime | None
) -> Recorded:
    """Write down a step that is on record by accident only: then the statement fails, and with it the
    transaction it is part of.
    """
    if _returned_at_once(step) and by_own_clock(connection, now):
        done = _INSERT_FIRST.rows(connection, _bound_done(run_id, step, hold=hold, now=now))
        if done:
            return _told(done[0][0])
    return record(connection, run_id, step, hold=hold, again=False, now=now)


def _returned_at_once(step: NewStep) -> bool:
    """True if a step returned at its first attempt, and has nothing else to record."""
    return (
        step.status is StepStatus.COMPLETED
        and step.attempts == 1
        and step.error is None
        and step.wake_in is None
        and step.wake_at is None
    )


def _bound_done(run_id: int, step: NewStep, *, hold: Holds, now: datetime | None) -> dict[str, Any]:
    bound = held_one(hold)
    bound["run"] = run_id
    bound["step"] = step.step_id
    bound["new_position"] = step.position
    bound["new_digest"] = step.digest
    bound["new_output"] = step.output
    bound["new_seq"] = step.seq
    if now is None:
        bound["started_in"] = -step.took
    else:
        bound["now_at"], bound["started_at"] = now, now - timedelta(seconds=step.took)
    return bound


@cache
def _told(said: str) -> Recorded:
    """Returns what the answer of `_insert_done` says, one of a few."""
    overdue = said.startswith(_OVERDUE)
    return Recorded(RunStatus(said.removeprefix(_OVERDUE)), overdue, None)


def _is_shown(connection: Connection, bound: dict[str, Any]) -> bool:
    """True if all that is on record of a step is that it was being done."""
    found = get(connection, bound["run"], bound["step"])
    return found is not None and found.status is StepStatus.RUNNING


_SHOW_AGAIN = (
    update(workflow_steps)
    .where(
        *_THIS,
        workflow_steps.c.status != StepStatus.COMPLETED,
        workflow_steps.c.status != StepStatus.FAILED,
        # This attempt may have ended meanwhile.
        workflow_steps.c.attempts < bindparam("new_attempts", type_=workflow_steps.c.attempts.type),
        exists().where(*FENCE_ONE),
    )
    .values(
        status=StepStatus.RUNNING,
        attempts=_VALUES["attempts"],
        started_at=_VALUES["started_at"],
        wake_at=null(),
    )
)


def show(
    connection: Connection,
    run_id: int,
    step: NewStep,
    *,
    hold: Holds,
    again: bool,
    now: datetime | None,
) -> None:
    """Let others see that an attempt at a step is being made, unless it has ended by now."""
    bound = _bound(run_id, step, now=now) | held_one(hold)
    if again:
        connection.execute(_SHOW_AGAIN, bound)
    else:
        _INSERT.rows(connection, bound)


def record_cancelled(
    connection: Connection,
    run_id: int,
    step: NewStep,
    *,
    keeps: bool,
    hold: Holds,
    now: datetime | None,
) -> Recorded:
    """Write down that the workflow cut a step short, before it got to know of the record that may be
    there. It `keeps` the result of one that is complete.
    """
    bound = _bound(run_id, step, now=now) | held_one(hold) | {"keeps": int(keeps)}
    row = connection.execute(_CANCEL, bound).first()
    if row is not None:
        return Recorded(*row)
    return record(connection, run_id, step, hold=hold, again=False, now=now)


def _bound(run_id: int, step: NewStep, *, now: datetime | None) -> dict[str, Any]:
    wake = (now, step.wake_in) if step.wake_at is None else (step.wake_at, 0.0)
    ended = wake if step.ends_then else (now, 0.0)
    return {
        "run": run_id,
        "step": step.step_id,
        "new_position": step.position,
        "new_status": step.status.value,
        "new_attempts": step.attempts,
        "new_output": step.output,
        "new_error": step.error,
        "new_seq": step.seq,
        "new_digest": step.digest,
    } | at(
        now=(now, 0.0),
        started=(now, -step.took),
        completed=ended if step.status in FINAL else (now, None),
        wake=wake,
    )


def _recorded_before(connection: Connection, bound: dict[str, Any], hold: Holds) -> Recorded:
    """Nothing was written: this claim wrote it before, or it is no longer held."""
    found = connection.execute(_IS_HELD, bound).one()
    step = get(connection, bound["run"], bound["step"])
    if found[2] is None or step is None:
        raise LeaseLost(list(hold.tokens))
    return Recorded(found[0], found[1], step.wake_at, is_new=False)


def look(connection: Connection, run_id: int, *, hold: Holds, now: datetime | None) -> Recorded:
    """What a run was told; `LeaseLost` for who does not hold its message any more."""
    bound = {"run": run_id} | held_one(hold) | at(now=(now, 0.0))
    found = connection.execute(_IS_HELD, bound).one()
    if found[2] is None:
        raise LeaseLost(list(hold.tokens))
    return Recorded(found[0], found[1], None, nudge_ct=found[3])


def find(connection: Connection, run_id: int) -> list[StepInfo]:
    """The steps of a run in the order they were recorded."""
    return [StepInfo(*row) for row in _FIND.rows(connection, {"run": run_id})]


def get(connection: Connection, run_id: int, step_id: str) -> StepInfo | None:
    """One step."""
    row = connection.execute(_GET, {"run": run_id, "step": step_id}).first()
    return None if row is None else _step(row)


_MENTIONING = (
    select(workflow_steps.c.id, workflow_steps.c.output)
    .where(
        workflow_steps.c.id > bindparam("after", type_=BigId),
        cast(workflow_steps.c.output, Text).contains(bindparam("text", type_=Text())),
    )
    .order_by(workflow_steps.c.id)
    .limit(bindparam("limit"))
)


def mentioning(
    connection: Connection, text: str, *, after: int, limit: int
) -> list[tuple[int, Any]]:
    """Ids and outputs of steps of all runs in whose output this text occurs: a page after an id."""
    bound = {"text": text, "after": after, "limit": limit}
    return [(row.id, row.output) for row in connection.execute(_MENTIONING, bound)]


def _step(row: Sequence[Any]) -> StepInfo:
    return StepInfo(*row)


_other = workflow_steps.alias("other")
_ROW_OF = (
    select(_other.c.id)
    .where(_other.c.workflow_id == _run, _other.c.step_id == _step_id)
    .scalar_subquery()
)
_FORGET = delete(workflow_steps).where(
    workflow_steps.c.workflow_id == _run, is_one_of(workflow_steps.c.step_id, "steps")
)
_FORGET_AFTER = delete(workflow_steps).where(
    workflow_steps.c.workflow_id == _run,
    workflow_steps.c.position > bindparam("position", type_=workflow_steps.c.position.type),
)
_COPIED = [column.name for column in workflow_steps.c if column.name not in ("id", "workflow_id")]
_COPY = insert(workflow_steps).from_select(
    ["workflow_id", *_COPIED],
    select(
        bindparam("copy", type_=BigId).label("workflow_id"),
        *(workflow_steps.c[name] for name in _COPIED),
    )
    .where(
        workflow_steps.c.workflow_id == _run,
        workflow_steps.c.status.in_(sorted(FINAL)),
        workflow_steps.c.id < func.coalesce(_ROW_OF, workflow_steps.c.id + 1),
    )
    .order_by(workflow_steps.c.id),
)


class Failures(NamedTuple):
    """The calls whose failure ended a run, and how many calls it had made when that came up: all
    that followed, followed from it. Where branches run side by side that is not known.
    """

    steps: Sequence[str] = ()
    after: int | None = None


def forget(connection: Connection, run_id: int, failures: Failures) -> None:
    """Forget the failures that ended a run, so that those calls are made again.

    A failure that the workflow itself dealt with stays in its history.
    """
    connection.execute(_FORGET, {"run": run_id, "steps": list(failures.steps)})
    if failures.after is not None:
        connection.execute(_FORGET_AFTER, {"run": run_id, "position": failures.after})


def copy(connection: Connection, run_id: int, *, to: int, before: str | None) -> None:
    """Copy the finished steps of a run to another; `before` is the first that is left out."""
    connection.execute(_COPY, {"run": run_id, "copy": to, "step": before or ""})


# Steps of a run that is driven by hand: the attempt is the fence.

_LIVE_RUN = exists().where(workflows.c.id == _run, workflows.c.status == RunStatus.RUNNING)
_ACQUIRE_FIRST = insert(workflow_steps).from_select(
    ["workflow_id", "step_id", "status", "attempts", "position", "started_at"],
    select(
        _run,
        _step_id,
        bindparam("running", StepStatus.RUNNING, type_=workflow_steps.c.status.type),
        bindparam("one", 1, type_=workflow_steps.c.attempts.type),
        select(func.count()).where(workflow_steps.c.workflow_id == _run).scalar_subquery(),
        moment("now"),
    )
    .select_from(workflows)
    .where(workflows.c.id == _run, workflows.c.status == RunStatus.RUNNING)
    # Until this commits, nobody deletes the run.
    .with_for_update(read=True, key_share=True, of=workflows),
)
_ACQUIRE_AGAIN = (
    update(workflow_steps)
    .where(*_THIS, workflow_steps.c.status.in_((StepStatus.PENDING, StepStatus.RUNNING)), _LIVE_RUN)
    .values(
        status=StepStatus.RUNNING,
        attempts=workflow_steps.c.attempts + 1,
        started_at=moment("now"),
        wake_at=None,
        error=None,
    )
)
_LOCKED = _GET.add_columns(
    func.coalesce(workflow_steps.c.wake_at > moment("now"), false())
).with_for_update(of=workflow_steps)
_END_BY_HAND = (
    update(workflow_steps)
    .where(
        *_THIS,
        workflow_steps.c.status == StepStatus.RUNNING,
        workflow_steps.c.attempts == bindparam("token"),
    )
    .values(
        status=bindparam("new_status", type_=workflow_steps.c.status.type),
        output=cast(bindparam("new_output", type_=Text()), JsonText()),
        error=bindparam("new_error", type_=Text()),
        completed_at=moment("completed"),
        wake_at=moment("wake"),
    )
)


class Acquired(NamedTuple):
    """A step after somebody asked for it by hand."""

    step: StepInfo
    is_early: bool
    """Whether it waits for its next attempt."""


def acquire(
    connection: Connection, run_id: int, step_id: str, *, now: datetime | None
) -> Acquired | None:
    """Begin an attempt at a step, unless it is finished or waits; None if the run is not running."""
    bound = {"run": run_id, "step": step_id} | at(now=(now, 0.0))
    row = connection.execute(_LOCKED, bound).first()
    if row is None:
        if not connection.execute(_ACQUIRE_FIRST, bound).rowcount:
            return None
    else:
        found = Acquired(_step(row[:-1]), row[-1])
        if found.step.status in (StepStatus.COMPLETED, StepStatus.FAILED) or found.is_early:
            return found
        if not connection.execute(_ACQUIRE_AGAIN, bound).rowcount:
            return None
    step = get(connection, run_id, step_id)
    return None if step is None else Acquired(step, False)


def end_by_hand(
    connection: Connection,
    run_id: int,
    step_id: str,
    *,
    token: int,
    status: StepStatus,
    output: str | None,
    error: str | None,
    wake_in: float | None,
    now: datetime | None,
) -> bool:
    """End an attempt at a step; whether it was still the last one."""
    final = status in (StepStatus.COMPLETED, StepStatus.FAILED)
    bound = {
        "run": run_id,
        "step": step_id,
        "token": token,
        "new_status": status,
        "new_output": output,
        "new_error": error,
    } | at(completed=(now, 0.0 if final else None), wake=(now, wake_in))
    return connection.execute(_END_BY_HAND, bound).rowcount == 1
