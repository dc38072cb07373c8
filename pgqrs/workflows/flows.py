"""The durable calls, each written once as a generator (see `context`).

All follow one pattern: look at the record, if there is one, and decide (`decide.replay`); else do it,
write it down, and see at this boundary whether the run was told to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import Connection

from pgqrs.codecs import Signature
from pgqrs.current import outside, store_in
from pgqrs.error_texts import error_message, error_text
from pgqrs.errors import EventTimedOut, RecordUnreadable, StepFailed, TransactionEnded
from pgqrs.repositories.steps import NewStep, Recorded
from pgqrs.retry import Retry
from pgqrs.types import StepInfo, StepStatus
from pgqrs.workflows import decide, values
from pgqrs.workflows.context import (
    Context,
    Flow,
    Invoke,
    Park,
    _current,
    persist,
)
from pgqrs.workflows.failures import Escaped
from pgqrs.workflows.history import Call
from pgqrs.workflows.interrupts import Mismatch, Suspend
from pgqrs.workflows.journal import Received, RecordedBefore, StepError
from pgqrs.workflows.lending import call_with


class _Nothing:
    """Tells a default that was not given from one given as None."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Any = _Nothing()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is done."""

    function: Callable[..., Any]
    signature: Signature
    retry: Retry | None = None
    retry_on: decide.RetryOn | None = None
    timeout: float | None = None
    transactional: bool = False


@dataclass(slots=True)
class _Attempt:
    """One attempt at a step."""

    context: Context
    call: Call
    number: int
    again: bool
    """Whether there is a record of the step already."""
    options: StepOptions
    began: float = field(default_factory=time.monotonic)
    is_shown: bool = False

    def record(self, status: StepStatus, **values: Any) -> NewStep:
        return self.context.step(
            self.call, status, attempts=self.number, took=time.monotonic() - self.began, **values
        )

    def running(self) -> NewStep:
        """What others see while it is being made."""
        return self.record(StepStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class _Later:
    """An attempt failed; the next one is due at this time."""

    due: datetime | None


def run_step(
    context: Context,
    call: Call,
    options_for: Callable[[Call], StepOptions],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Flow[Any]:
    """A step: what it returned if it is done, else do it, as often as its policy says."""
    options, decision = options_for(call), decide.replay(call.record, now=context.time())
    if isinstance(decision, decide.Return):
        return decode(options.signature, call, decision.output)
    if isinstance(decision, decide.Raise):
        failed = StepFailed(call.step_id, decision.error_type, decision.message)
        raise context.blame(failed, call)
    if isinstance(decision, decide.Wait):
        yield Park(decision.until)
    number = 1 if call.record is None else call.record.attempts + 1
    again = call.record is not None
    do = _do_in_transaction if options.transactional else _do
    while True:
        attempt = _Attempt(context, call, number, again, options)
        outcome = yield from do(attempt, args, kwargs)
        if not isinstance(outcome, _Later):
            return outcome
        yield Park(outcome.due)
        last = StepInfo(
            context.id, call.step_id, call.position, StepStatus.PENDING, number, *[None] * 5
        )
        number, again, options = number + 1, True, options_for(call._replace(record=last))


def run_directly(
    context: Context,
    call: Call,
    options: StepOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The first attempt at a plain step in a sync run, which most steps are, without a generator and
    who answers it: that takes as long as the database does (benchmarks.workflows, `run_inline`).
    """
    attempt = _Attempt(context, call, 1, False, options)
    failed: BaseException | None = None
    token = _current.set(None)
    context.in_flight[call.step_id] = attempt
    try:
        try:
            value = options.function(*args, **kwargs)
        finally:
            del context.in_flight[call.step_id]
        returned, text = values.as_recorded(
            options.signature, value, context.journal.database.config
        )
    except BaseException as exc:
        if not isinstance(exc, Exception) and not context.is_failure(exc):
            raise
        failed = exc
    finally:
        _current.reset(token)
    if failed is not None:
        later = context.drive(_failed(attempt, failed))
        raise Suspend(later.due)
    context.record(
        NewStep(
            call.step_id,
            call.position,
            StepStatus.COMPLETED,
            output=text,
            took=time.monotonic() - attempt.began,
            seq=context.order(call),
            digest=call.digest,
        ),
        is_first=not attempt.is_shown,
    )
    return returned


def decode(signature: Signature, call: Call, found: Any) -> Any:
    """What is on record as the result of a call. If this code cannot read it, that is no failure of the
    step which the workflow could take for one.
    """
    try:
        return signature.decode_result(found)
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise Mismatch(RecordUnreadable(f"the result of {call.step_id}", reason)) from exc


def _do(attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow[Any]:
    options, context, step_id = attempt.options, attempt.context, attempt.call.step_id
    context.in_flight[step_id] = attempt
    try:
        try:
            value = yield Invoke(options.function, args, kwargs, step_id, options.timeout)
        finally:
            del context.in_flight[step_id]
        returned, text = values.as_recorded(
            options.signature, value, context.journal.database.config
        )
    except Escaped as exc:
        return (yield from _failed(attempt, exc.error))
    except Exception as exc:
        return (yield from _failed(attempt, exc))
    yield from write_down(
        context,
        attempt.record(StepStatus.COMPLETED, output=text),
        again=attempt.again,
        is_first=not (attempt.again or attempt.is_shown),
    )
    return returned


def _do_in_transaction(
    attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Flow[Any]:
    """The step's function has the connection; its record is committed with what it wrote there."""
    context, journal = attempt.context, attempt.context.journal
    config, signature = journal.database.config, attempt.options.signature
    returned: list[Any] = []

    def call(connection: Connection) -> NewStep:
        # What it enqueues or starts is part of the transaction, too.
        with outside(store_in(journal.database, connection)):
            value = call_with(
                connection,
                lambda lent: context.invoke(attempt.options.function, lent, *args, **kwargs),
                step_id=attempt.call.step_id,
                timeout=attempt.options.timeout,
            )
        again, text = values.as_recorded(signature, value, config)
        returned.append(again)
        return attempt.record(StepStatus.COMPLETED, output=text)

    work = partial(journal.record_with, context.id, call, again=attempt.again)
    try:
        recorded: Recorded = yield from persist(work, holds_user_code=True)
    except StepError as exc:
        error = exc.error.error if isinstance(exc.error, Escaped) else exc.error
        return (yield from _failed(attempt, error))
    except RecordedBefore:
        record = yield from persist(partial(journal.get_step, context.id, attempt.call.step_id))
        return decode(signature, attempt.call, record.output)
    context.check(recorded)
    return returned[-1]


def _failed(attempt: _Attempt, error: BaseException) -> Flow[_Later]:
    """Write down that it failed. Returns when it is tried again, or lets the workflow know."""
    step_id, options = attempt.call.step_id, attempt.options
    config = attempt.context.journal.database.config
    delay = decide.retry_in(options.retry, options.retry_on, attempt.number, error)
    if isinstance(error, TransactionEnded):  # what it has committed must not be done once more
        delay = None
    if delay is not None and options.retry is not None and options.retry.max_attempts is None:
        most = yield from persist(attempt.context.journal.attempts_allowed)
        delay = delay if attempt.number < most else None
    if delay is not None:
        text = error_text(error, config)
        waiting = attempt.record(StepStatus.PENDING, error=text, wake_in=delay)
        recorded = yield from write_down(attempt.context, waiting, again=attempt.again)
        return _Later(recorded.wake_at)
    kind, message = decide.name_of(error), error_message(error, config)
    facts = values.dump({"type": kind, "message": message}, config)
    failed = attempt.record(StepStatus.FAILED, output=facts, error=error_text(error, config))
    yield from write_down(attempt.context, failed, again=attempt.again)
    raise attempt.context.blame(StepFailed(step_id, kind, message), attempt.call) from error


def write_down(
    context: Context, step: NewStep, *, again: bool = False, is_first: bool = False
) -> Flow[Recorded]:
    """Write down a call, and see whether the run was told to stop."""
    recorded: Recorded = yield from persist(
        partial(context.journal.record, context.id, step, again=again, is_first=is_first)
    )
    context.check(recorded)
    return recorded


# Waiting


def sleep(
    context: Context, call: Call, *, seconds: float | None, until: datetime | None
) -> Flow[None]:
    """A step that is complete at a time known before.

    In a sync run nothing else happens meanwhile, so it can be on record as complete at that time. In
    an async run its end has a place among those of other calls, which is recorded then.
    """
    record, is_async = call.record, context.is_async
    if record is None or record.status is StepStatus.CANCELLED:
        step = context.step(
            call,
            StepStatus.PENDING if is_async else StepStatus.COMPLETED,
            wake_in=seconds,
            wake_at=until,
            ends_then=not is_async,
        )
        recorded = yield from write_down(context, step, again=record is not None)
        wake_at = recorded.wake_at
        if not is_async:
            yield Park(wake_at)
    else:
        wake_at = record.wake_at or record.completed_at
    while wake_at is not None and wake_at > context.time():
        yield Park(wake_at)
    if record is None or record.status is not StepStatus.COMPLETED:
        yield from write_down(
            context, context.step(call, StepStatus.COMPLETED, wake_at=wake_at), again=True
        )


def wait_for_event(
    context: Context, call: Call, name: str, *, timeout: float | None, default: Any
) -> Flow[Any]:
    """The payload of the next signal of this name, or the end of patience."""
    record = call.record
    if record is not None and record.status is StepStatus.COMPLETED:
        return record.output
    if record is not None and record.status is StepStatus.FAILED:
        return _nothing_came(context, call, name, default)
    is_first = record is None or record.status is StepStatus.CANCELLED
    patience = timeout if is_first else None
    wake_at = None if is_first or record is None else record.wake_at
    config = context.journal.database.config
    while True:
        waits = context.step(call, StepStatus.PENDING, wake_in=patience, wake_at=wake_at)
        got: Received | Recorded = yield from persist(
            partial(
                context.journal.receive,
                context.id,
                name,
                waits,
                payload_text=lambda payload: values.dump(payload, config),
                seq=context.order(call),
            )
        )
        if isinstance(got, Received):
            context.check(got.recorded)
            return got.payload
        context.release(call)
        context.check(got)
        patience, wake_at = None, got.wake_at
        if wake_at is not None and wake_at <= context.time():
            break
        yield Park(wake_at, for_news=True)
    yield from write_down(
        context, context.step(call, StepStatus.FAILED, error="nothing came in time"), again=True
    )
    return _nothing_came(context, call, name, default)


def limit(context: Context, call: Call, *, seconds: float) -> Flow[datetime]:
    """The time at which a timeout that begins now is over."""
    record = call.record
    if record is not None and is_done(call) and record.wake_at is not None:
        return record.wake_at
    step = context.step(call, StepStatus.COMPLETED, wake_in=seconds)
    recorded = yield from write_down(context, step, again=record is not None)
    assert recorded.wake_at is not None
    return recorded.wake_at


def expire(context: Context, end: Call, deadline: datetime) -> Flow[None]:
    """A timeout comes to its end, which has a place among the ends of calls."""
    if end.record is not None:
        return
    while deadline > context.time():
        yield Park(deadline)
    yield from write_down(context, context.step(end, StepStatus.COMPLETED))


def _nothing_came(context: Context, call: Call, name: str, default: Any) -> Any:
    if default is NOTHING:
        raise context.blame(EventTimedOut(name), call)
    return default


def set_event(context: Context, call: Call, name: str, value: Any) -> Flow[None]:
    """Let others know something."""
    if is_done(call):
        return
    text = values.dump(value, context.journal.database.config)
    step = context.step(call, StepStatus.COMPLETED)
    recorded = yield from persist(
        partial(
            context.journal.record_event,
            context.id,
            name,
            text,
            step,
            again=call.record is not None,
        )
    )
    context.check(recorded)


def is_done(call: Call) -> bool:
    """Whether a call that does not wait is on record, and was not cut short."""
    return call.record is not None and call.record.status is not StepStatus.CANCELLED


# Values that are not the same each time


def remember(context: Context, call: Call, make: Callable[[], Any]) -> Flow[Any]:
    """A value that is made once, as JSON."""
    if call.record is not None and is_done(call):
        return call.record.output
    value = yield from persist(make)
    text = values.dump(value, context.journal.database.config)
    step = context.step(call, StepStatus.COMPLETED, output=text)
    yield from write_down(context, step, again=call.record is not None)
    return value


def patched(context: Context, call: Call | None) -> Flow[bool]:
    """Whether this run is to take the new way of a changed workflow.

    It is, unless it has been past this place before the change: then there is no call.
    """
    if call is None:
        return False
    yield from remember(context, call, lambda: True)
    return True
