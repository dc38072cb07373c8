"""What the holder of a run writes down. Each method is one transaction, and blocks.

All of it is safe to repeat, since it is fenced by the claim on the run's message and a final record
is never changed. So an answer that got lost is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from pgqrs.errors import LeaseLost
from pgqrs.repositories import events, starting, steps, workflows
from pgqrs.repositories.expressions import Holds
from pgqrs.repositories.starting import ActiveRun
from pgqrs.repositories.steps import NewStep, Recorded
from pgqrs.repositories.workflows import Ended
from pgqrs.stores import Database
from pgqrs.stores.wakeups import RESULTS
from pgqrs.types import EventKind, Message, RunInfo, RunStatus, StepInfo, StepStatus
from pgqrs.workflows.starting import with_queue


class StepError(Exception):
    """A transactional step raised; its transaction is rolled back."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class RecordedBefore(Exception):
    """A transactional step was committed by an earlier attempt, whose answer got lost."""


@dataclass(frozen=True, slots=True)
class Received:
    """A signal that a wait got."""

    recorded: Recorded
    payload: Any


class Journal:
    """The database, in the name of one claim on a run's message."""

    def __init__(self, database: Database, message: Message) -> None:
        assert message.consumer_worker_id is not None
        self.database = database
        self.hold = Holds(message.consumer_worker_id, {message.id: message.read_ct})
        self.queue = message.queue

    def activate(self) -> ActiveRun | None:
        """The run, which runs from now on; None if there is none, or the message is lost."""
        now = self.database.now()
        return self.database.write(
            lambda c: workflows.activate(c, self.hold, now=now), single=True, repeatable=True
        )

    def history(self, run_id: int) -> list[StepInfo]:
        """All that is on record of a run."""
        return self.database.read(lambda c: steps.find(c, run_id))

    def record(self, run_id: int, step: NewStep, *, again: bool = False) -> Recorded:
        """Write down a step; `again` if there is a record of it that is not final."""
        now = self.database.now()
        return self.database.write(
            lambda c: steps.record(c, run_id, step, hold=self.hold, again=again, now=now),
            single=True,
            repeatable=True,
        )

    def record_with(
        self,
        run_id: int,
        call: Callable[[Connection], NewStep],
        *,
        again: bool,
    ) -> Recorded:
        """Run a transactional step, and write it down in the same transaction.

        What `call` raises is `StepError`; then nothing of it remains.
        """
        now = self.database.now()

        def work(connection: Connection) -> Recorded:
            try:
                step = call(connection)
            except Exception as exc:
                raise StepError(exc) from exc
            recorded = steps.record(connection, run_id, step, hold=self.hold, again=again, now=now)
            if not recorded.is_new:
                raise RecordedBefore
            return recorded

        return self.database.write_once(work)

    def look(self, run_id: int) -> Recorded:
        """What the run was told while one of its steps goes on; `LeaseLost` if it is another's."""
        now = self.database.now()
        return self.database.read(lambda c: steps.look(c, run_id, hold=self.hold, now=now))

    def get_step(self, run_id: int, step_id: str) -> StepInfo:
        """A step that is on record."""
        found = self.database.read(lambda c: steps.get(c, run_id, step_id))
        if found is None:
            raise LeaseLost(list(self.hold.tokens))
        return found

    def receive(
        self,
        run_id: int,
        name: str,
        step: NewStep,
        *,
        payload_text: Callable[[Any], str],
        again: bool,
    ) -> Received | Recorded:
        """Get the next signal of this name and write that down, or else that the step waits."""
        now = self.database.now()

        def work(connection: Connection) -> Received | Recorded:
            found = steps.get(connection, run_id, step.step_id)
            if found is not None and found.status is StepStatus.COMPLETED:
                same = steps.record(connection, run_id, step, hold=self.hold, again=True, now=now)
                return Received(same, found.output)
            signal = events.next_signal(connection, run_id, name)
            if signal is None:
                return steps.record(
                    connection, run_id, step, hold=self.hold, again=found is not None, now=now
                )
            events.consume(connection, signal, step_id=step.step_id)
            got = NewStep(
                step.step_id,
                step.position,
                StepStatus.COMPLETED,
                output=payload_text(signal.payload),
            )
            recorded = steps.record(
                connection, run_id, got, hold=self.hold, again=found is not None, now=now
            )
            return Received(recorded, signal.payload)

        return self.database.write(work, repeatable=True)

    def start_child(
        self, run_id: int, arguments: dict[str, Any], step: NewStep
    ) -> tuple[int, Recorded]:
        """Start a run as the child of this one, and write that down."""
        now = self.database.now()

        def work(connection: Connection) -> tuple[int, Recorded]:
            started = starting.start(connection, parent_id=run_id, now=now, **arguments)
            recorded = steps.record(
                connection,
                run_id,
                step._replace(output=str(started.id)),
                hold=self.hold,
                again=False,
                now=now,
            )
            if not recorded.is_new:
                raise RecordedBefore
            return started.id, recorded

        begun = with_queue(
            self.database, arguments["queue"], lambda: self.database.write(work, repeatable=True)
        )
        self.database.ring(arguments["queue"])
        return begun

    def find_run(self, run_id: int) -> RunInfo:
        """Another run."""
        return self.database.read(lambda c: workflows.get(c, run_id))

    def record_event(self, run_id: int, name: str, payload: str, step: NewStep) -> Recorded:
        """Let others know something, once."""
        now = self.database.now()

        def work(connection: Connection) -> Recorded:
            recorded = steps.record(connection, run_id, step, hold=self.hold, again=False, now=now)
            if recorded.is_new:
                events.add(
                    connection, run_id, kind=EventKind.EVENT, name=name, payload=payload, now=now
                )
            return recorded

        recorded = self.database.write(work, repeatable=True)
        self.database.wakeups.ring(RESULTS)
        return recorded

    def suspend(self, *, until: datetime | None, nudge_ct: int) -> RunStatus:
        """Let the run wait. Returns what it is then: a run that is being cancelled does not wait."""
        now = self.database.now()
        status = self.database.write(
            lambda c: workflows.suspend(c, self.hold, wake_at=until, nudge_ct=nudge_ct, now=now),
            repeatable=True,
        )
        if status is RunStatus.SUSPENDED:
            self.database.ring(self.queue)  # there may be news already
        return status

    def end(
        self,
        run: ActiveRun,
        status: RunStatus,
        *,
        output: str | None = None,
        error: str | None = None,
        failed_step: str | None = None,
    ) -> Ended:
        """The run ends, and its message with it."""
        now, has_parent = self.database.now(), run.parent_id is not None
        ended = self.database.write(
            lambda c: workflows.end(
                c,
                self.hold,
                status=status,
                output=output,
                error=error,
                failed_step=failed_step,
                has_parent=has_parent,
                now=now,
            ),
            single=not has_parent,
            repeatable=True,
        )
        if ended.ring is not None:
            self.database.ring(ended.ring)
        if ended.is_wanted:
            self.database.ring_of_results(self.queue)
        else:
            self.database.wakeups.ring(RESULTS)
        return ended

    def drop(self) -> None:
        """The message is of no use: its run has ended, or is no more."""
        self.database.write(
            lambda c: workflows.drop_message(c, self.hold), single=True, repeatable=True
        )
