"""Group commit: writers that wait for each other share one transaction, and so one fsync.

SQLite has one writer at a time, and a durable commit costs milliseconds of waiting for the disk. So
writers queue up, first come first served. Whoever finds nobody writing leads: it opens a
transaction, runs the works of all who wait by then, its own first, each in a savepoint of its own,
and commits once. Only then does anybody learn a result. Leadership then passes to the longest
waiting.

A work that raises is rolled back alone. If the transaction itself breaks before its commit, each
work of the group is run again by itself, so that one work that fills the disk does not fail the
others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from sqlalchemy import Connection

from pgqrs.repositories.hot import run

T = TypeVar("T")
MOST_AT_ONCE = 256


class Ticket:
    """One work in the queue, and what became of it."""

    __slots__ = ("_settled", "alone", "error", "leads", "result", "work")

    def __init__(self, work: Callable[[Connection], Any], *, alone: bool = False) -> None:
        self.work = work
        self.alone = alone
        self.result: Any = None
        self.error: BaseException | None = None
        self.leads = False
        self._settled = threading.Lock()
        self._settled.acquire()

    def wait(self) -> None:
        """Until this is done, or its owner is to lead."""
        self._settled.acquire()

    def wake(self) -> None:
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

    def __init__(self, transaction: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._transaction = transaction
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._somebody_leads = False

    def submit(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        """Run the work in a transaction, perhaps together with others; return after its commit.

        One that is `alone` shares its transaction with nobody, and is never run twice.
        """
        ticket = Ticket(work, alone=alone)
        with self._lock:
            self._waiting.append(ticket)
            ticket.leads = not self._somebody_leads
            self._somebody_leads = True
        if not ticket.leads:
            self._wait(ticket)
        if ticket.leads:
            self._lead()
        result: T = ticket.outcome()
        return result

    def _wait(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except BaseException:  # interrupted: leave the queue, and do not keep others waiting in it
            with self._lock:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
            if ticket.leads:
                self._hand_over()
            raise

    def _lead(self) -> None:
        with self._lock:
            group = [self._waiting.popleft()]
            while self._waiting and len(group) < MOST_AT_ONCE and not group[0].alone:
                if self._waiting[0].alone:
                    break
                group.append(self._waiting.popleft())
        try:
            self._commit(group)
        finally:
            for ticket in group[1:]:
                ticket.leads = False
                ticket.wake()
            self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].wake()
            else:
                self._somebody_leads = False

    def _commit(self, group: list[Ticket]) -> None:
        committing = False
        try:
            with self._transaction() as connection:
                if len(group) == 1:
                    group[0].run(connection)
                else:
                    for ticket in group:
                        ticket.run_guarded(connection)
                committing = True
        except BaseException as exc:
            if len(group) > 1 and not committing and isinstance(exc, Exception):
                for ticket in group:
                    self._commit([ticket])
                return
            for ticket in group:
                ticket.error = exc
            if not isinstance(exc, Exception):
                raise
