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
from typing import Any, TypeVar

from sqlalchemy import Connection

from pgqrs.codecs import Signature
from pgqrs.errors import EventTimedOut, LeaseLost, StepFailed
from pgqrs.payloads import error_text
from pgqrs.repositories.steps import NewStep, Recorded
from pgqrs.retry import Retry
from pgqrs.types import StepStatus
from pgqrs.workflows import decide, values
from pgqrs.workflows.context import Context, Flow, Invoke, Park, Persist, outside
from pgqrs.workflows.history import PATCH, Call
from pgqrs.workflows.interrupts import Broken, Lost
from pgqrs.workflows.journal import Received, RecordedBefore, StepError

T = TypeVar("T")


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
    options: StepOptions
    began: float = field(default_factory=time.monotonic)

    @property
    def again(self) -> bool:
        return self.call.record is not None

    def record(self, status: StepStatus, **values: Any) -> NewStep:
        return NewStep(
            self.call.step_id,
            self.call.position,
            status,
            attempts=self.number,
            took=time.monotonic() - self.began,
            **values,
        )


def run_step(
    context: Context,
    call: Call,
    options: StepOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Flow[Any]:
    """A step: what it returned if it is done, else do it."""
    decision = decide.replay(call.record, now=context.now)
    if not isinstance(decision, decide.Execute):
        return options.signature.decode_result((yield from _follow(call, decision)))
    attempt = _Attempt(context, call, decision.attempt, options)
    do = _do_in_transaction if options.transactional else _do
    return (yield from do(attempt, args, kwargs))


def _follow(call: Call, decision: decide.Decision) -> Flow[Any]:
    if isinstance(decision, decide.Raise):
        raise StepFailed(call.step_id, decision.error_type, decision.message)
    if isinstance(decision, decide.Wait):
        yield Park(decision.until)
    assert isinstance(decision, decide.Return)
    return decision.output


def _do(attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow[Any]:
    options, context = attempt.options, attempt.context
    try:
        value = yield Invoke(options.function, args, kwargs, attempt.call.step_id, options.timeout)
        text = values.dump_result(options.signature, value, context.journal.database.config)
    except Exception as exc:
        return (yield from _failed(attempt, exc))
    yield from _record(
        context, attempt.record(StepStatus.COMPLETED, output=text), again=attempt.again
    )
    return values.as_replayed(options.signature, value, text)


def _do_in_transaction(
    attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Flow[Any]:
    """The step's function has the connection; its record is committed with what it wrote there."""
    context, journal = attempt.context, attempt.context.journal
    config, signature = journal.database.config, attempt.options.signature
    returned: list[tuple[Any, str]] = []

    def call(connection: Connection) -> NewStep:
        with outside():
            value = attempt.options.function(connection, *args, **kwargs)
        text = values.dump_result(signature, value, config)
        returned.append((value, text))
        return attempt.record(StepStatus.COMPLETED, output=text)

    work = partial(journal.record_with, context.id, call, again=attempt.again)
    try:
        recorded: Recorded = yield from persist(work)
    except StepError as exc:
        return (yield from _failed(attempt, exc.error))
    except RecordedBefore:
        record = yield from persist(partial(journal.get_step, context.id, attempt.call.step_id))
        return signature.decode_result(record.output)
    context.check(recorded)
    return values.as_replayed(signature, *returned[-1])


def _failed(attempt: _Attempt, error: Exception) -> Flow[Any]:
    """Write down that it failed, and wait for the next attempt, or let the workflow know."""
    step_id, options = attempt.call.step_id, attempt.options
    delay = decide.retry_in(options.retry, options.retry_on, attempt.number, error)
    if delay is not None:
        waiting = attempt.record(StepStatus.PENDING, error=error_text(error), wake_in=delay)
        recorded = yield from _record(attempt.context, waiting, again=attempt.again)
        yield Park(recorded.wake_at)
    kind, message = decide.name_of(error), error_text(str(error)) or ""
    config = attempt.context.journal.database.config
    facts = values.dump({"type": kind, "message": message[:10_000]}, config)
    failed = attempt.record(StepStatus.FAILED, output=facts, error=error_text(error))
    yield from _record(attempt.context, failed, again=attempt.again)
    raise StepFailed(step_id, kind, message[:10_000]) from error


def _record(context: Context, step: NewStep, *, again: bool = False) -> Flow[Recorded]:
    recorded: Recorded = yield from persist(
        partial(context.journal.record, context.id, step, again=again)
    )
    context.check(recorded)
    return recorded


def persist(call: Callable[[], T]) -> Flow[T]:
    """Call the database. Its errors are none of the workflow's: they end the run here."""
    try:
        result: T = yield Persist(call)
    except (StepError, RecordedBefore):
        raise
    except LeaseLost as exc:
        raise Lost from exc
    except Exception as exc:
        raise Broken(exc) from exc
    return result


# Waiting


def sleep(
    context: Context, call: Call, *, seconds: float | None, until: datetime | None
) -> Flow[None]:
    """A step that is complete at a time known before."""
    decision = decide.replay(call.record, now=context.now)
    if isinstance(decision, decide.Execute):
        step = NewStep(
            call.step_id,
            call.position,
            StepStatus.COMPLETED,
            wake_in=seconds,
            wake_at=until,
            ends_then=True,
        )
        recorded = yield from _record(context, step)
        yield Park(recorded.wake_at)
    yield from _follow(call, decision)


def wait_for_event(
    context: Context, call: Call, name: str, *, timeout: float | None, default: Any
) -> Flow[Any]:
    """The payload of the next signal of this name, or the end of patience."""
    record = call.record
    if record is not None and record.status is not StepStatus.PENDING:
        decision = decide.replay(record, now=context.now)
        if isinstance(decision, decide.Raise):
            return _nothing_came(name, default)
        return (yield from _follow(call, decision))
    waits = NewStep(
        call.step_id,
        call.position,
        StepStatus.PENDING,
        wake_in=timeout if record is None else None,
        wake_at=None if record is None else record.wake_at,
    )
    config = context.journal.database.config
    got: Received | Recorded = yield from persist(
        partial(
            context.journal.receive,
            context.id,
            name,
            waits,
            payload_text=lambda payload: values.dump(payload, config),
            again=record is not None,
        )
    )
    if isinstance(got, Received):
        context.check(got.recorded)
        return got.payload
    context.check(got)
    if got.wake_at is None or got.wake_at > context.now:
        yield Park(got.wake_at)
    yield from _record(
        context,
        NewStep(call.step_id, call.position, StepStatus.FAILED, error="nothing came in time"),
        again=True,
    )
    return _nothing_came(name, default)


def _nothing_came(name: str, default: Any) -> Any:
    if default is NOTHING:
        raise EventTimedOut(name)
    return default


def set_event(context: Context, call: Call, name: str, value: Any) -> Flow[None]:
    """Let others know something."""
    if call.record is not None:
        return
    text = values.dump(value, context.journal.database.config)
    step = NewStep(call.step_id, call.position, StepStatus.COMPLETED)
    recorded = yield from persist(
        partial(context.journal.record_event, context.id, name, text, step)
    )
    context.check(recorded)


# Values that are not the same each time


def remember(context: Context, call: Call, make: Callable[[], Any]) -> Flow[Any]:
    """A value that is made once, as JSON."""
    if call.record is not None:
        return call.record.output
    value = yield from persist(make)
    text = values.dump(value, context.journal.database.config)
    yield from _record(
        context, NewStep(call.step_id, call.position, StepStatus.COMPLETED, output=text)
    )
    return value


def patched(context: Context, name: str) -> Flow[bool]:
    """Whether this run is to take the new way of a changed workflow.

    It is, unless it has been past this place before the change.
    """
    branch, history = context.branch(), context.history
    if history.is_behind(branch) and not history.has_patch(branch, name):
        return False
    call = context.take(PATCH + name)
    yield from remember(context, call, lambda: True)
    return True
