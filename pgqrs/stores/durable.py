"""Durable mode: a write returns once it is in the bucket, and reads see nothing else.

There are two local databases. `read_db` is the last state known to be in the bucket. `write_db` is
where the next one is prepared. Writers do not touch either: they hand in their work and wait. In
each turn the sync task takes all works that wait by then, brings `write_db` to the state of
`read_db`, runs the works there one after the other, each in a savepoint of its own, and uploads the
result. So an upload contains exactly the works whose writers it releases, works that come meanwhile
go into the next one, and any number of writers share one PUT. Nobody learns a result, or an error,
before the upload it depends on is decided. A turn that changes nothing uploads nothing.

Claims run first in a turn: what a dequeue can find is what was in the bucket before. One that finds
nothing to do in `read_db` does not even wait for a turn.

A turn ends in one of four ways. *Uploaded*: what was uploaded is copied to `read_db`. *Lost*: it is
somebody else's object by now; `read_db` is taken from there, every work of the turn fails with
`ConflictError`, and the next turn starts from the new state. *Lost, but ours is part of it*: the
answer to an upload was lost, and the works are done. *Given up*: the bucket cannot be reached.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine

from pgqrs.errors import CommitUncertain, ConflictError, StoreClosed, StoreUnavailable
from pgqrs.stores import images
from pgqrs.stores.application import application_engine
from pgqrs.stores.base import Work
from pgqrs.stores.group_commit import Ticket
from pgqrs.stores.objects import Lost
from pgqrs.stores.replica import Replica, T
from pgqrs.stores.slots import Base
from pgqrs.stores.sqlite import SqliteDatabase, marks

RECENTLY = 0.05
"""Seconds for which a turn trusts the last look at the object. A lost race costs more than a look,
and two looks in a row nothing but time.
"""
NOWHERE = object()
"""What `write_db` is the state of when it is the state of nothing."""


class DurableReplica(Replica):
    """Two local databases, and the works that wait for the next upload."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Neither is of use to another process, so neither needs to wait for the disk.
        self._write_db = self._database("write_db", sqlite_synchronous="OFF")
        self._read_db = self._database("read_db", sqlite_synchronous="OFF")
        if not self.slot.base.dirty:
            self._start_afresh()
        self._known = False
        self._staged: object = NOWHERE
        self._entered = ExitStack()
        self._entered_at: str | None = None
        self._uncertain: tuple[int, list[Any]] | None = None
        self._confirming = threading.Lock()
        self._pipeline = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._first: deque[Ticket] = deque()
        self._engine = application_engine(self._write_db, self)

    @property
    def interval(self) -> float:
        by_hand = self.settings.sync_interval == float("inf")
        return float("inf") if by_hand else threading.TIMEOUT_MAX  # nothing to do but when woken

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def databases(self) -> Sequence[SqliteDatabase]:
        return (self._write_db, self._read_db)

    def read(self, work: Work[T]) -> T:
        self.refresh(within=self.settings.max_staleness)
        return self._read_db.read(work, needs_schema=False)

    def write(self, work: Work[T], *, probe: bool = False) -> T:
        if probe:
            self.refresh(within=self.settings.max_staleness)
            changes, found = self._read_db.try_out(work)
            if not changes:
                return found
        ticket = Ticket(work)
        with self._lock:
            if self.closed:
                raise StoreClosed
            (self._first if probe else self._waiting).append(ticket)
        self.task.wake()
        try:
            ticket.wait()
        except BaseException:  # interrupted: if its turn has not begun, it never will
            self._withdraw(ticket)
            raise
        result: T = ticket.outcome()
        return result

    def write_alone(self, work: Work[T]) -> T:
        with self._one_at_a_time():
            etag, ticket = self._prepare(), Ticket(work)
            self._staged = NOWHERE
            if self._write_db.write_once(lambda c: self._run(c, [ticket], guarded=False)):
                self._publish(etag)
            else:
                self._staged = etag
            result: T = ticket.outcome()
            return result

    def step(self) -> None:
        try:
            with self._one_at_a_time():
                if tickets := self._take():
                    self._settle(tickets)
        except StoreUnavailable as exc:
            self._refuse(self._take(), exc)

    def refresh(self, *, within: float = 0.0) -> bool:
        asked = self._clock()
        with self._confirming:  # who waits here shares the answer, if the question came later
            if self._known and self._seen_at >= asked - within:
                return False
            return self._fetch()

    def flush(self) -> list[Any]:
        if self.task.by_hand:
            self.step()
        with self._one_at_a_time():
            deadline = self._clock() + self.config.retry_for
            while not self._try_operations():
                if self._clock() > deadline:
                    raise ConflictError(f"{self.remote}: lost every race; nothing was kept")
            done, self._done = self._done, []
            return done

    def has_changes(self) -> bool:
        return bool(self._waiting or self._first or self._operations)

    def close(self) -> None:
        self.closed = True
        self._hurry.set()
        self.task.stop()
        self.task.join()
        self._refuse(self._take(), StoreClosed())
        self.release()

    def release(self) -> None:
        super().release()
        if not self.slot.base.dirty:  # else it is what another process has left behind
            self.slot.discard("read_db", "write_db")

    # One turn

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """For a turn, or a transaction of the application's own."""
        if not self._pipeline.acquire(timeout=self.config.retry_for):
            raise StoreUnavailable("another transaction, or an upload, did not end in time")
        try:
            yield
        finally:
            self._pipeline.release()

    def _take(self) -> list[Ticket]:
        with self._lock:
            tickets = [*self._first, *self._waiting]
            self._first.clear()
            self._waiting.clear()
        return tickets

    def _withdraw(self, ticket: Ticket) -> None:
        with self._lock:
            for queue in (self._first, self._waiting):
                if ticket in queue:
                    queue.remove(ticket)

    @staticmethod
    def _refuse(tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in tickets:
            ticket.error = error
            ticket.wake()

    def _settle(self, tickets: Sequence[Ticket]) -> None:
        """One turn for these works; whatever happens, each of them learns of it."""
        try:
            self._turn(tickets)
        except BaseException as exc:
            for ticket in tickets:
                ticket.error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            for ticket in tickets:
                ticket.wake()

    def _try_operations(self) -> bool:
        """One turn for the operations. Returns False if it was lost: then they are run again."""
        self._find_uncertain()
        operations = list(self._operations)
        try:
            if operations:
                self._turn(operations)
        except ConflictError:
            return False
        except CommitUncertain:
            self._uncertain = (self.slot.base.number, self._outcomes(operations))
            raise
        self._finish_operations(self._outcomes(operations))
        return True

    def _find_uncertain(self) -> None:
        """Perhaps the operations of an upload that nobody answered are in the bucket after all."""
        if self._uncertain is not None:
            number, outcomes = self._uncertain
            self._patiently(self.refresh)
            if self._last_upload_in(self._read_db) >= number:
                self._finish_operations(outcomes)

    def _finish_operations(self, outcomes: list[Any]) -> None:
        del self._operations[: len(outcomes)]
        self._done += outcomes
        self._uncertain = None

    def _turn(self, tickets: Sequence[Ticket]) -> None:
        etag = self._prepare()
        self._staged = NOWHERE
        if self._write_db.write(lambda c: self._run(c, tickets), needs_schema=False):
            self._publish(etag)
        else:
            self._staged = etag

    def _run(
        self, connection: Connection, tickets: Sequence[Ticket], *, guarded: bool = True
    ) -> bool:
        """Run the works. Returns whether there is anything to upload."""
        before = marks(connection)
        for ticket in tickets:
            (ticket.run_guarded if guarded else ticket.run)(connection)
        if marks(connection) == before:
            return False
        self._begin_upload()
        self._record(connection)
        return True

    def _prepare(self) -> str | None:
        """Let `write_db` be what the bucket holds. Returns the ETag of that."""
        self._patiently(lambda: self.refresh(within=RECENTLY))
        with self._confirming:
            etag = self.slot.base.etag
            if self._staged != etag:
                self._load(self._write_db, self._dump(self._read_db))
                self._staged = etag
        return etag

    def _publish(self, replacing: str | None, data: bytes | None = None) -> None:
        """Upload what is prepared, and let reads see it."""
        if data is None:
            self._deflate(self._write_db)
            data = self._dump(self._write_db)
        begun = self._clock()
        try:
            etag = self._upload(data, replacing=replacing)
        except Lost as exc:
            self._accept_loss(exc)
        else:
            self._adopt(data, etag, replaced=replacing, begun=begun)

    def _adopt(self, data: bytes, etag: str, *, replaced: str | None, begun: float) -> None:
        with self._confirming:
            if self.slot.base.etag == replaced:  # else somebody has read it, or even newer, already
                self._load(self._read_db, data)
                self.slot.change(etag=etag, durably=False)
                self._seen_at = begun
            self._staged = etag

    def _accept_loss(self, loss: Lost) -> None:
        """Our upload is lost, unless it was applied and only the answer was."""
        number = self.slot.base.number
        try:
            self._patiently(self.refresh)
        except StoreUnavailable as exc:
            raise CommitUncertain(f"an upload was not answered, or lost: {exc}") from exc
        if self._last_upload_in(self._read_db) >= number:
            self._counters.uploads += 1
            return
        self._counters.conflicts += 1
        raise ConflictError(
            f"{self.remote} was changed by somebody else; nothing of this call was kept"
        ) from loss

    def _start_afresh(self) -> None:
        """Nothing that is kept here is to be trusted, by us or by who comes next."""
        self.slot.forget()
        self.slot.base = Base(writer=uuid.uuid4().hex)

    def _fetch(self) -> bool:
        """Look at the object, and take it over if it changed."""
        if self.slot.base.dirty:  # a process in local mode has left it behind
            self._upload_leftovers(self._write_db)
            self._start_afresh()
        begun = self._clock()
        fetched = self.remote.get(unless=self.slot.base.etag if self._known else None)
        if fetched is None or (self._known and fetched.etag == self.slot.base.etag):
            self._seen_at = begun
            return False
        self._load(self._read_db, fetched.data)
        self.slot.change(etag=fetched.etag, durably=False)
        self._known, self._seen_at = True, begun
        self._verify(self._read_db)
        self._changed()
        return True

    # Transactions of the application's own

    def enter(self) -> None:
        """An application's transaction begins: a turn of its own."""
        with ExitStack() as until_it_leaves:
            until_it_leaves.enter_context(self._one_at_a_time())
            self._entered_at = self._prepare()
            self._entered = until_it_leaves.pop_all()

    def before_commit(self, connection: Connection) -> None:
        self._staged = NOWHERE
        self._begin_upload()
        self._record(connection)

    def after_commit(self, driver: Any) -> None:
        """It is committed in `write_db`, by this connection: now it must go to the bucket."""
        self._publish(self._entered_at, None if driver is None else images.dump(driver))
        self._changed()

    def leave(self) -> None:
        self._entered.close()
