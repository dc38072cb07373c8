"""What the holder of a run writes down. Each method is one transaction, and blocks.

All of it is safe to repeat, since it is fenced by the claim on the run's message and a final record
is never changed. So an answer that got lost is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from pgqrs.errors import ConstraintViolated, LeaseLost, QueueNotFound, RunNotFound
from pgqrs.producer import NewMessages
from pgqrs.queue_making import with_queue
from pgqrs.repositories import dequeue, events, queues, starting, steps, waits, workflows
from pgqrs.repositories.expressions import Holds
from pgqrs.repositories.messages import Enqueued
from pgqrs.repositories.starting import ActiveRun
from pgqrs.repositories.steps import NewStep, Recorded
from pgqrs.repositories.workflows import Ended, Ending
from pgqrs.stores import Database
from pgqrs.stores.wakeups import RESULTS
from pgqrs.types import (
    ArchiveReason,
    EventKind,
    Message,
    MessageId,
    RunInfo,
    RunStatus,
    StepInfo,
    StepStatus,
)
from pgqrs.workflows import cancelling
from pgqrs.workflows.values import dump_stored

MISSING = "missing"
"""On record instead of the status of a run that is no more."""


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
        return self.database.write(
            lambda c: workflows.activate(c, self.hold, now=self.database.now()),
            single=True,
            repeatable=True,
        )

    def history(self, run_id: int) -> list[StepInfo]:
        """All that is on record of a run."""
        return self.database.read(lambda c: steps.find(c, run_id))

    def record(
        self, run_id: int, step: NewStep, *, again: bool = False, is_first: bool = False
    ) -> Recorded:
        """Write down a step; `again` if there is a record of it that is not final, `is_first` if there
        is none as far as is known.
        """

        def work(connection: Connection) -> Recorded:
            now = self.database.now()
            if is_first:
                return steps.record_first(connection, run_id, step, hold=self.hold, now=now)
            return steps.record(connection, run_id, step, hold=self.hold, again=again, now=now)

        try:
            return self.database.write(work, single=True, repeatable=True)
        except ConstraintViolated:
            # At the same moment it was shown as being done; or it was recorded, and the answer got lost.
            again, is_first = True, False
            return self.database.write(work, single=True, repeatable=True)

    def show(self, run_id: int, step: NewStep, *, again: bool) -> None:
        """Let others see that an attempt at a step is being made."""
        with suppress(ConstraintViolated):  # it ended at the same moment
            self.database.write(
                lambda c: steps.show(
                    c, run_id, step, hold=self.hold, again=again, now=self.database.now()
                ),
                single=True,
                repeatable=True,
            )

    def record_cancelled(self, run_id: int, step: NewStep) -> Recorded:
        """Write down that the workflow cut a step short. A signal that it got is there again."""

        def work(connection: Connection) -> Recorded:
            now = self.database.now()
            given_back = events.give_back(connection, run_id, step_id=step.step_id)
            return steps.record_cancelled(
                connection, run_id, step, keeps=not given_back, hold=self.hold, now=now
            )

        return self.database.write(work, repeatable=True)

    def record_with(
        self,
        run_id: int,
        call: Callable[[Connection], NewStep],
        *,
        again: bool,
    ) -> Recorded:
        """Run a transactional step, and write it down in the same transaction.

        What `call` raises is `StepError`; then nothing of it remains. If that was a deadlock or a lost
        connection, which undid the transaction, it is called again.
        """

        def work(connection: Connection) -> Recorded:
            try:
                step = call(connection)
            except Exception as exc:
                raise StepError(exc) from exc
            now = self.database.now()
            recorded = steps.record(connection, run_id, step, hold=self.hold, again=again, now=now)
            if not recorded.is_new:
                raise RecordedBefore
            return recorded

        return self.database.write_once(work, again=True)

    def look(self, run_id: int) -> Recorded:
        """What the run was told while one of its steps goes on; `LeaseLost` if it is another's."""
        return self.database.read(
            lambda c: steps.look(c, run_id, hold=self.hold, now=self.database.now())
        )

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
        seq: int | None,
    ) -> Received | Recorded:
        """Get the next signal of this name and write that down, in its place `seq`; or else that
        the step waits.
        """

        def work(connection: Connection) -> Received | Recorded:
            now = self.database.now()
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
            got = step._replace(
                status=StepStatus.COMPLETED,
                output=payload_text(signal.payload),
                wake_in=None,
                wake_at=None,
                seq=seq,
            )
            recorded = steps.record(
                connection, run_id, got, hold=self.hold, again=found is not None, now=now
            )
            return Received(recorded, signal.payload)

        return self.database.write(work, repeatable=True)

    def start_child(
        self, run_id: int, arguments: dict[str, Any], step: NewStep, *, again: bool = False
    ) -> tuple[int, Recorded]:
        """Start a run as the child of this one, and write that down."""

        def work(connection: Connection) -> tuple[int, Recorded]:
            now = self.database.now()
            started = starting.start(connection, parent_id=run_id, now=now, **arguments)
            recorded = steps.record(
                connection,
                run_id,
                step._replace(output=str(started.id)),
                hold=self.hold,
                again=again,
                now=now,
            )
            if not recorded.is_new:
                raise RecordedBefore
            return started.id, recorded

        def attempt() -> tuple[int, Recorded]:
            return with_queue(
                self.database,
                arguments["queue"],
                lambda: self.database.write(work, repeatable=True),
            )

        try:
            begun = attempt()
        except ConstraintViolated:  # somebody else started a run of this key: now it is found
            begun = attempt()
        self.database.ring(arguments["queue"])
        return begun

    def enqueue(
        self, run_id: int, new: NewMessages, step: NewStep, *, again: bool = False
    ) -> tuple[list[MessageId], Recorded]:
        """Add messages, and write that down. `StepError` if their queue does not exist."""

        def work(connection: Connection) -> tuple[Enqueued, Recorded]:
            now = self.database.now()
            added = new.add(connection, now=now)
            existing = [place for place, id in enumerate(added.ids) if not id.created]
            output = dump_stored({"ids": list(map(int, added.ids)), "existing": existing})
            recorded = steps.record(
                connection,
                run_id,
                step._replace(output=output),
                hold=self.hold,
                again=again,
                now=now,
            )
            if not recorded.is_new:
                raise RecordedBefore
            return added, recorded

        def attempt() -> tuple[Enqueued, Recorded]:
            return self.database.write(work, repeatable=True)

        try:
            if new.creates_queue:
                added, recorded = with_queue(self.database, new.queue, attempt)
            else:
                added, recorded = attempt()
        except QueueNotFound as exc:
            raise StepError(exc) from exc
        self.database.ring(new.queue, elsewhere=added.waited_for)
        return added.ids, recorded

    def find_awaited(self, run_id: int, awaited_id: int) -> RunInfo | None:
        """Another run, if it has ended. If it has not, its end will wake this one."""

        def look(connection: Connection) -> tuple[RunInfo, bool]:
            run = workflows.get(connection, awaited_id)
            return run, not run.has_ended and waits.is_waiting(
                connection, run_id, awaited_id=awaited_id
            )

        run, is_waiting = self.database.read(look)
        if run.has_ended:
            return run
        if is_waiting or self.database.write(
            lambda c: waits.wait(c, run_id, awaited_id=awaited_id, now=self.database.now()),
            repeatable=True,
        ):
            return None
        return self.database.read(lambda c: workflows.get(c, awaited_id))

    def record_event(
        self, run_id: int, name: str, payload: str, step: NewStep, *, again: bool = False
    ) -> Recorded:
        """Let others know something, once."""

        def work(connection: Connection) -> Recorded:
            now = self.database.now()
            recorded = steps.record(connection, run_id, step, hold=self.hold, again=again, now=now)
            if recorded.is_new:
                events.add(
                    connection, run_id, kind=EventKind.EVENT, name=name, payload=payload, now=now
                )
            return recorded

        recorded = self.database.write(work, repeatable=True)
        self.database.wakeups.ring(RESULTS)
        return recorded

    def signal(
        self,
        run_id: int,
        told_id: int,
        name: str,
        payload: str,
        step: NewStep,
        *,
        again: bool = False,
    ) -> tuple[str | None, Recorded]:
        """Say something to another run, and write that down. Returns what the other is if it has
        ended, or is `MISSING`, and so was not told.
        """

        def work(connection: Connection) -> tuple[str | None, Recorded, str | None]:
            now, queue = self.database.now(), None
            try:
                told = workflows.get(connection, told_id)
                ended = told.status.value if told.has_ended else None
            except RunNotFound:
                ended = MISSING
            output = dump_stored(ended)
            recorded = steps.record(
                connection,
                run_id,
                step._replace(output=output),
                hold=self.hold,
                again=again,
                now=now,
            )
            if not recorded.is_new:
                raise RecordedBefore
            if ended is None:
                events.add(
                    connection,
                    told_id,
                    kind=EventKind.SIGNAL,
                    name=name,
                    payload=payload,
                    now=now,
                )
                queue = workflows.nudge(connection, told_id, now=now)
            return ended, recorded, queue

        ended, recorded, queue = self.database.write(work, repeatable=True)
        if queue is not None:
            self.database.ring(queue)
        return ended, recorded

    def cancel(self, run_id: int) -> RunInfo:
        """Let another run and its children end. Returns what it is then."""
        cancelling.cancel(self.database, [run_id])
        self.database.wakeups.ring(RESULTS)
        return self.find_run(run_id)

    def suspend(self, *, until: datetime | None, nudge_ct: int) -> RunStatus:
        """Let the run wait. Returns what it is then: a run that is being cancelled does not wait."""
        status = self.database.write(
            lambda c: workflows.suspend(
                c, self.hold, wake_at=until, nudge_ct=nudge_ct, now=self.database.now()
            ),
            repeatable=True,
        )
        if status is RunStatus.SUSPENDED:
            self.database.ring(self.queue)  # there may be news already
        return status

    def park(self, error: str) -> RunStatus:
        """Pause the run, which cannot go on with this code. Returns what it is then: a run that is
        being cancelled does not wait.
        """
        return self.database.write(
            lambda c: workflows.park(c, self.hold, error=error, now=self.database.now()),
            repeatable=True,
        )

    def end(self, run: ActiveRun, ending: Ending) -> Ended:
        """The run ends, and its message with it.

        Mostly that is one statement. What takes more is a run that others wait for, one that was told
        to cancel meanwhile, and one whose children end with it: those are told first, so that nothing
        is left behind should this process die in between.
        """
        ended = None if run.is_awaited else self._end(ending, tells_waiters=False)
        ended = ended or self._end(ending, tells_waiters=True)
        for _ in range(2):
            if ended is not None:
                break
            is_cancelled = self.find_run(run.id).status is RunStatus.CANCELLING
            cancelling.cancel_children(self.database, run.id, closing=not is_cancelled)
            ended = self._end(
                ending, tells_waiters=True, is_cancelled=is_cancelled, children_told=True
            )
        if ended is None:
            raise LeaseLost(list(self.hold.tokens))
        for queue in ended.ring:
            self.database.ring(queue)
        if ended.is_wanted:
            self.database.ring_of_results(self.queue)
        else:
            self.database.wakeups.ring(RESULTS)
        return ended

    def _end(self, ending: Ending, *, tells_waiters: bool, **expected: bool) -> Ended | None:
        return self.database.write(
            lambda c: workflows.end(
                c,
                self.hold,
                ending,
                tells_waiters=tells_waiters,
                now=self.database.now(),
                **expected,
            ),
            single=not tells_waiters,
            repeatable=True,
        )

    def find_run(self, run_id: int) -> RunInfo:
        """A run."""
        return self.database.read(lambda c: workflows.get(c, run_id))

    def forgive(self) -> None:
        """Crashes count no more if the run has finished steps since."""
        self.database.write(
            lambda c: workflows.forgive(c, list(self.hold.tokens), spared=1), repeatable=True
        )

    def refuse(self, error: str) -> bool:
        """The message is not of a run: to the archive as failed, and why. Returns False if it is
        another's by now.
        """
        refused = self.database.write(
            lambda c: dequeue.finish(
                c, self.hold, reason=ArchiveReason.FAILED, error=error, now=self.database.now()
            )
        )
        return bool(refused)

    def attempts_allowed(self) -> int:
        """How many attempts the queue of the run allows."""
        return self.database.read(lambda c: queues.get(c, self.queue)).max_read_ct

    def drop(self) -> None:
        """The message is of no use: its run has ended, or is no more."""
        self.database.write(
            lambda c: workflows.drop_message(c, self.hold), single=True, repeatable=True
        )
