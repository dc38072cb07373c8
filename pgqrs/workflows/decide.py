"""What to do next, as values: nothing here touches a database, a clock or user code.

*Where a run may go* is `TRANSITIONS`. The SQL of `repositories.workflows` names the same states; a
test walks through all of them.

*What a step's record means* when a workflow asks for it (`replay`): a finished step returns or
raises what it did, one that waits for its next attempt waits, all others are executed. So is one that
the workflow cut short before: who asks for it here is a workflow that does not cut it short again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqrs.retry import Retry
from pgqrs.types import RunStatus, StepInfo, StepStatus

logger = logging.getLogger("pgqrs.workflows")
S = RunStatus
TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    S.PENDING: frozenset((S.RUNNING, S.PAUSED, S.CANCELLING, S.CANCELLED, S.FAILED)),
    S.RUNNING: frozenset((S.SUSPENDED, S.PAUSED, S.CANCELLING, S.CANCELLED, S.COMPLETED, S.FAILED)),
    S.SUSPENDED: frozenset((S.RUNNING, S.PAUSED, S.CANCELLING, S.CANCELLED, S.COMPLETED, S.FAILED)),
    S.PAUSED: frozenset(
        (S.PENDING, S.SUSPENDED, S.RUNNING, S.CANCELLING, S.CANCELLED, S.COMPLETED, S.FAILED)
    ),
    S.CANCELLING: frozenset((S.CANCELLED,)),
    S.CANCELLED: frozenset(),
    S.COMPLETED: frozenset(),
    S.FAILED: frozenset((S.PENDING,)),  # by `retry` alone
}
"""A paused or suspended run may complete: it was told to pause, or resumed, while it still ran."""


@dataclass(frozen=True, slots=True)
class Return:
    """It is done: return this."""

    output: Any


@dataclass(frozen=True, slots=True)
class Raise:
    """It failed for good: raise this."""

    error_type: str
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: at this time, or when there is news."""

    until: datetime | None


@dataclass(frozen=True, slots=True)
class Execute:
    """Do it; which attempt this is."""

    attempt: int


Decision = Return | Raise | Wait | Execute


def replay(record: StepInfo | None, *, now: datetime) -> Decision:
    """What to do about a step that the workflow asks for."""
    if record is None:
        return Execute(1)
    if record.status is StepStatus.COMPLETED:
        if record.completed_at is not None and record.completed_at > now:
            return Wait(record.completed_at)
        return Return(record.output)
    if record.status is StepStatus.FAILED:
        error = record.output if isinstance(record.output, dict) else {}
        return Raise(error.get("type", "Exception"), error.get("message", record.error or ""))
    if record.wake_at is not None and record.wake_at > now:
        return Wait(record.wake_at)
    return Execute(record.attempts + 1)


RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]


def retry_in(
    retry: Retry | None, retry_on: RetryOn | None, attempt: int, error: BaseException
) -> float | None:
    """Seconds until the next attempt at a step that failed; None for never again."""
    if retry is None or not _is_worth_it(retry_on, error):
        return None
    return retry.next_delay(attempt, error)


def _is_worth_it(retry_on: RetryOn | None, error: BaseException) -> bool:
    if retry_on is None:
        return True
    if isinstance(retry_on, type | tuple):
        return isinstance(error, retry_on)
    try:
        return retry_on(error)
    except Exception:
        # By its type: what an error says may be secret.
        logger.exception("retry_on failed for %s; the policy decides alone", name_of(error))
        return True


def name_of(error: BaseException) -> str:
    """The type of an error as it is recorded."""
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
