"""Steps by hand: for code that is not a decorated function.

`run.acquire_step(name)` begins an attempt at a step, or says that it is done and with which value. Each
attempt has a number, and only the last one can end the step: one that was given up for dead and wakes
up again changes nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from pgqrs.error_texts import error_message, error_text
from pgqrs.errors import (
    ConstraintViolated,
    InvalidArgument,
    LeaseLost,
    RunEnded,
    StepFailed,
    StepNotReady,
)
from pgqrs.repositories import steps, workflows
from pgqrs.stores import Database
from pgqrs.types import Duration, StepInfo, StepStatus, seconds
from pgqrs.workflows import decide, values


class StepGuard:
    """An attempt at a step; or, if `skipped`, the `value` that it had.

    As a context manager it fails the step if the block raises.
    """

    def __init__(self, database: Database, step: StepInfo) -> None:
        self._database = database
        self._step = step
        self.name = step.step_id
        self.attempt = step.attempts
        self._is_over = step.status is StepStatus.COMPLETED
        self.value: Any = step.output if self._is_over else None

    @property
    def skipped(self) -> bool:
        """Whether there is nothing left to do."""
        return self._is_over

    def success(self, value: Any = None) -> None:
        """It is done; `value` is kept."""
        text = values.dump(value, self._database.config)
        self._end(StepStatus.COMPLETED, output=text)

    def fail(self, error: str | BaseException) -> None:
        """It failed for good."""
        kind = decide.name_of(error) if isinstance(error, BaseException) else "Error"
        config = self._database.config
        facts = {"type": kind, "message": error_message(error, config)}
        text = values.dump(facts, config)
        self._end(StepStatus.FAILED, output=text, error=error_text(error, config))

    def fail_transient(
        self, code: str, message: str = "", retry_after: Duration | None = None
    ) -> None:
        """It failed for a passing reason: it may be acquired again, after so long."""
        wait = None if retry_after is None else seconds("retry_after", retry_after)
        text = error_text(f"{code}: {message}", self._database.config)
        self._end(StepStatus.PENDING, error=text, wake_in=wait)

    def _end(
        self,
        status: StepStatus,
        *,
        output: str | None = None,
        error: str | None = None,
        wake_in: float | None = None,
    ) -> None:
        if self.skipped:
            raise InvalidArgument("step", f"{self.name} is done, and was skipped")
        ended = self._database.write(
            lambda c: steps.end_by_hand(
                c,
                self._step.run_id,
                self.name,
                token=self.attempt,
                status=status,
                output=output,
                error=error,
                wake_in=wake_in,
                now=self._database.now(),
            ),
            single=True,
        )
        if not ended:
            raise LeaseLost([self._step.run_id])
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not self.skipped:
            self.fail(error)


def acquire_step(database: Database, run_id: int, name: str) -> StepGuard:
    """Begin an attempt at a step of a run that is driven by hand."""
    try:
        acquired = database.write(lambda c: steps.acquire(c, run_id, name, now=database.now()))
    except ConstraintViolated:  # somebody else began it at the same moment
        raise StepNotReady(name, None) from None
    if acquired is None:
        status = database.read(lambda c: workflows.get(c, run_id)).status
        raise RunEnded(run_id, status, "begin a step")
    step = acquired.step
    if acquired.is_early:
        raise StepNotReady(name, step.wake_at)
    if step.status is StepStatus.FAILED:
        failed = decide.replay(step, now=step.completed_at)  # type: ignore[arg-type]
        assert isinstance(failed, decide.Raise)
        raise StepFailed(name, failed.error_type, failed.message)
    return StepGuard(database, step)
