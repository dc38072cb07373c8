"""Group commit: writers that wait for each other share one transaction, and so one fsync.

SQLite has one writer at a time, and a durable commit costs milliseconds of waiting for the disk. So
writers queue up, first come first served. The writer at the head of the queue leads: it opens a
transaction, runs the works of all who wait by then, each in a savepoint of its own, and commits
once. Only then does anybody learn a result. Then the writer that is now at the head leads.

A work that raises is rolled back alone. If the transaction itself breaks before its commit, each
work of the group is run again by itself, so that one work that fills the disk does not fail the
others.

A signal handler may raise (a time limit, Ctrl-C) wherever Python calls something. That ends the call
it hits, and nothing else:

- To lead is to hold a lock by `with`, which Python takes and lets go without a gap.
- Works stay in the queue until they are done. A writer that is interrupted marks its ticket as
  abandoned, by a statement that calls nothing; the next leader drops it.
- Handlers run in the main thread. It leads for its own work alone, so that an exception there is
  never taken for another thread's.
- A wake-up that an interrupted writer owed is made up for: who waits looks again by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection

from pgqrs.errors import CommitUncertain, StoreUnavailable
from pgqrs.repositories.hot import run

T = TypeVar("T")
Body = Callable[[Connection], None]
MOST_AT_ONCE = 256
LOOK_AGAIN = 0.05
"""Seconds after which a waiting writer looks whether a wake-up was lost."""


class Ticket:
    """One work in the queue, and what became of it."""

    __slots__ = (
        *("_settled", "abandoned", "alone", "done", "error", "replays", "result", "taken", "until"),
        "work",
    )

    def __init__(
        self,
        work: Callable[[Connection], Any],
        *,
        alone: bool = False,
        replays: bool = False,
        until: float = float("inf"),
    ) -> None:
        self.work = work
        self.alone = alone
        self.replays = replays
        """True if the work may be run again after its upload lost a race (stores in S3)."""
        self.until = until
        """When, on the monotonic clock, its owner gives up (stores in S3)."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.taken = False
        """True from when a leader has begun with it."""
        self.done = False
        self.abandoned = False
        """True if its owner was interrupted: its work is not to be run any more."""
        self._settled = threading.Lock()
        self._settled.acquire()

    def wait(self, seconds: float = -1) -> None:
        """Wait until woken: this is done, or its owner is to lead."""
        self._settled.acquire(True, seconds)

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self._settled.release()

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result

    def run(self, connection: Connection) -> None:
        self.result, self.error = self.work(connection), None

    def run_guarded(self, connection: Connection) -> None:
        """In a savepoint: an error is this ticket's alone."""
        # Not SQLAlchemy's: those cost as much as a small work.
        run(connection, "SAVEPOINT pgqrs_work", {})
        try:
            self.run(connection)
        except Exception as exc:
            run(connection, "ROLLBACK TO pgqrs_work", {})
            self.error = exc
        run(connection, "RELEASE pgqrs_work", {})


class GroupCommit:
    """The queue of writers before one database."""

    def __init__(
        self, transaction: Callable[[Body], None], *, patience: float = threading.TIMEOUT_MAX
    ) -> None:
        """`transaction` runs what it is given in a transaction, and commits it or rolls it back.

        `patience` is for how many seconds a writer waits for its work to be begun.
        """
        self._transaction = transaction
        self._patience = patience
        self._lock = threading.Lock()
        self._leading = threading.Lock()
        self._waiting: deque[Ticket] = deque()

    def submit(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        """Run the work in a transaction, perhaps together with others; return after its commit.

        One that is `alone` shares its transaction with nobody, and is run by its own thread.
        """
        if not self._waiting and not self._leading.locked():
            return self._submit_at_once(work)
        return self._submit_in_turn(work, alone=alone)

    def _submit_in_turn(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        ticket = Ticket(work, alone=alone)
        try:
            with self._lock:
                self._waiting.append(ticket)
            if self._is_next(ticket) and not self._leading.locked():
                self._lead(ticket)
            if not ticket.done:
                self._wait(ticket)
        except BaseException:
            ticket.abandoned = True  # calls nothing, so nothing can come between
            self._pass_on()
            raise
        result: T = ticket.outcome()
        return result

    def _submit_at_once(self, work: Callable[[Connection], T]) -> T:
        """No other writer is there, so there is nothing to share: without a ticket, which takes as long
        as a small statement (benchmarks.workflows, `run_inline` on SQLite).
        """
        results: list[T] = []
        try:
            with self._leading:
                self._transaction(lambda connection: results.append(work(connection)))
        finally:
            self._pass_on()
        return results[0]

    def pause(self, seconds: float) -> bool:
        """Keep all writers waiting until `resume`. Returns False if one does not end in time."""
        return self._leading.acquire(timeout=seconds)

    def resume(self) -> None:
        self._leading.release()
        self._pass_on()

    def _is_next(self, ticket: Ticket) -> bool:
        try:
            return self._waiting[0] is ticket
        except IndexError:  # it was the last, and is done
            return False

    def _wait(self, ticket: Ticket) -> None:
        """Until it is done: by another writer, or by this one when its time has come."""
        deadline = time.monotonic() + self._patience
        while not ticket.done:
            ticket.wait(LOOK_AGAIN)
            if ticket.done:
                return
            if not self._leading.locked():
                self._lead(ticket)
            elif time.monotonic() > deadline:
                self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.taken:
                return  # somebody is at it: its end decides
            ticket.abandoned = True
        raise StoreUnavailable(
            f"gave up after {self._patience:g} s: another write of this process did not end"
        )

    def _lead(self, own: Ticket) -> None:
        with self._leading:
            if not own.done and (group := self._take(own)):
                self._commit(group, own)
                self._settle(group, own)
        self._pass_on()

    def _take(self, own: Ticket) -> list[Ticket]:
        """The tickets to run now. They stay in the queue until they are done."""
        with self._lock:
            self._drop_ended()
            if own.alone or threading.current_thread() is threading.main_thread():
                group = [own]
            else:
                group = []
                for ticket in islice(self._waiting, MOST_AT_ONCE):
                    if ticket.alone:
                        break
                    if not (ticket.done or ticket.abandoned):
                        group.append(ticket)
            for ticket in group:
                ticket.taken = True
            return group

    def _settle(self, group: list[Ticket], own: Ticket) -> None:
        for ticket in group:
            ticket.done = True
            if ticket is not own:
                ticket.wake()
        with self._lock:
            self._drop_ended()

    def _drop_ended(self) -> None:
        while self._waiting and (self._waiting[0].done or self._waiting[0].abandoned):
            self._waiting.popleft()

    def _pass_on(self) -> None:
        """Wake the writer that is to lead next."""
        if self._waiting:
            with suppress(IndexError):  # it was done meanwhile
                self._waiting[0].wake()

    def _commit(self, group: list[Ticket], own: Ticket) -> bool:
        """Run and commit. Errors are those of the tickets; raises what only ends this thread.

        Returns False if the transaction could not even begin.
        """
        begun = committing = False

        def works(connection: Connection) -> None:
            nonlocal begun, committing
            begun = True
            if len(group) == 1:
                group[0].run(connection)
            else:
                for ticket in group:
                    ticket.run_guarded(connection)
            committing = True

        try:
            self._transaction(works)
        except Exception as exc:
            if len(group) > 1 and begun and not committing:
                self._commit_one_by_one(group, own)
                return True
            for ticket in group:
                ticket.error = exc
        except BaseException:
            if committing:
                self._leave_uncertain(group, own)
            raise
        return begun

    def _commit_one_by_one(self, group: list[Ticket], own: Ticket) -> None:
        for index, ticket in enumerate(group):
            if not self._commit([ticket], own):  # the others would wait just as long, for nothing
                for other in group[index + 1 :]:
                    other.error = ticket.error
                return

    def _leave_uncertain(self, group: list[Ticket], own: Ticket) -> None:
        """The thread ends in the middle of a COMMIT: the others must not be run again."""
        for ticket in group:
            if ticket is not own:
                ticket.error = CommitUncertain(
                    "the thread that committed was ended; the change may or may not be stored"
                )
        self._settle([ticket for ticket in group if ticket is not own], own)
