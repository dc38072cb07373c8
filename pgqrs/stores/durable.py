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

A turn goes through these phases::

              works wait                 looked, or alone            something changed
      IDLE ---------------> LOOKING -----------------------> STAGING ------------------> UPLOADING
       ^                       |                              |    ^                     |       |
       |  the object cannot be |              nothing changed |    | lost: works that    | an    | 412
       |  used: all are told   |                              |    | may be run again    | ETag  v
       |<----------------------+------------------------------+    +-------------- DECIDING      |
       |                                                                            |   ^--------+
       |<---------------------------- lost: the others get ConflictError -----------+    |
       |<---------------------------- cannot be told: CommitUncertain --------------+    |
       |                                                                                 |
       +<------------- uploaded: write_db is copied to read_db, all are released --------+

While it is LOOKING, works still come in: they are taken only afterwards, and after a short wait for as
many as the last turn released, which are likely to be back at once. A node that is alone skips the
look; if it was mistaken, the turn is run again on the state that it finds.

DECIDING looks at the object that is there instead: it may contain the upload, if only the answer to it
was lost. A PUT that may have been applied ends as a success or as `CommitUncertain`, and never as
another error.

The state of `read_db` is guarded by `_state`, which nobody holds while talking to the bucket. One look
(`Look`) is under way at a time; whoever comes meanwhile shares it. A look that meets the upload which is
under way does not download it, but lets its reader wait for its answer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy import Connection, Engine

from pgqrs.errors import CommitUncertain, ConflictError, StoreClosed, StoreUnavailable
from pgqrs.repositories.uploads import Upload, Verdict
from pgqrs.stores import images
from pgqrs.stores.application import application_engine
from pgqrs.stores.base import Work
from pgqrs.stores.fairness import Announcements, Fairness
from pgqrs.stores.group_commit import Ticket
from pgqrs.stores.objects import Fetched, Lost, Unreachable
from pgqrs.stores.replica import Replica, T, log
from pgqrs.stores.sqlite import SqliteDatabase, marks

TRUSTED = 1.0
"""Seconds for which a node that is alone trusts what it knows of the object."""
LINGER = 0.01
"""Seconds that a turn waits at most for those whom the last one released."""
REMEMBERED_ETAGS = 64
NOWHERE = object()
"""What `write_db` is the state of when it is the state of nothing."""


class Phase(Enum):
    """Where a turn is: see the drawing above."""

    IDLE = auto()
    LOOKING = auto()
    STAGING = auto()
    UPLOADING = auto()
    DECIDING = auto()


@dataclass(slots=True, eq=False)
class Look:
    """A look at the object that is under way."""

    begun: float
    ended: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Sending:
    """The upload that is under way."""

    upload: Upload
    replacing: str | None
    since: float
    """When its turn began to look at the object."""
    begun: float
    met_as: str | None = None
    """The ETag under which a look has met it in the bucket: it was applied."""
    met_at: float = float("-inf")
    took: float = 0.0
    """Seconds from the beginning of its turn to the answer that it has lost."""


class DurableReplica(Replica):
    """Two local databases, and the works that wait for the next upload."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slot.discard("read_db")
        if not self.slot.base.dirty:
            self.slot.discard("write_db")  # of a process that died
            self.slot.forget()
        else:
            self._verify_copy("write_db")
        # Neither is of use to another process, so neither needs to wait for the disk.
        self._write_db = self._database("write_db", sqlite_synchronous="OFF")
        self._read_db = self._database("read_db", sqlite_synchronous="OFF")
        self.phase = Phase.IDLE
        # One turn, or transaction of the application's own, at a time: they use `write_db`.
        self._pipeline = threading.Lock()
        # The state of `read_db`.
        self._state = threading.Condition()
        self._known = False
        self._look: Look | None = None
        self._sending: Sending | None = None
        self._ours: deque[str] = deque(maxlen=REMEMBERED_ETAGS)
        self._adopted_at = float("-inf")
        self._staged: object = NOWHERE
        # Works that wait, claims first.
        self._queue = threading.Condition()
        self._first: deque[Ticket] = deque()
        self._waiting: deque[Ticket] = deque()
        self._released = 0
        self._turn_begun = 0.0
        self._fairness = Fairness(self.writer, clock=self._clock)
        self._announcements = Announcements(self.settings)
        # Operations of the application's own loop, and transactions.
        self._uncertain: list[tuple[Sending, list[Any]]] = []
        self._entered = ExitStack()
        self._entered_at: str | None = None
        self._entered_upload: Upload | None = None
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

    def read(self, work: Work[T], *, until: float | None = None) -> T:
        self.refresh(within=self.staleness, until=until)
        return self._read_db.read(work, needs_schema=False)

    def write(
        self,
        work: Work[T],
        *,
        probe: bool = False,
        replays: bool = False,
        until: float | None = None,
    ) -> T:
        until = self._soon() if until is None else until
        if probe:
            self.refresh(within=self.staleness, until=until)
            changes, found = self._read_db.try_out(work)
            if not changes:
                return found
        ticket = Ticket(work, replays=replays or self.config.s3_retry_conflicts, until=until)
        with self._queue:
            if self.closed:
                raise StoreClosed
            (self._first if probe else self._waiting).append(ticket)
            self._queue.notify_all()
        self.task.wake()
        try:
            self._await(ticket)
        except BaseException:  # interrupted: if its turn has not begun, it never will
            ticket.abandoned = True
            raise
        result: T = ticket.outcome()
        return result

    def write_alone(self, work: Work[T]) -> T:
        until = self._soon()
        with self._one_at_a_time(until):
            etag, ticket = self._prepare(until), Ticket(work)
            self._staged = NOWHERE
            upload = self._write_db.write_once(lambda c: self._run(c, [ticket], guarded=False))
            self._publish(upload, etag, until=until)
            result: T = ticket.outcome()
            return result

    def step(self) -> None:
        """Serve those who wait. After an error that passes, those who still wait are served again."""
        while self.has_waiting() and not self.task.stopping.is_set():
            try:
                with self._one_at_a_time(self._soon()):
                    self._serve()
                return
            except StoreUnavailable as exc:
                self._refuse(self._take(late=not self.task.by_hand), exc)
            except Exception as exc:
                self._refuse(self._take(), exc)

    def refresh(self, *, within: float = 0.0, until: float | None = None) -> bool:
        return self._refresh(within=within, until=self._soon() if until is None else until)

    def flush(self) -> list[Any]:
        if self.task.by_hand:
            self.step()
        until = self._soon()
        with self._one_at_a_time(until):
            while not self._try_operations(until):
                if self._clock() > until:
                    raise ConflictError(f"{self.remote}: lost every race; nothing was kept")
            done, self._done = self._done, []
            return done

    def has_changes(self) -> bool:
        return self.has_waiting() or bool(self._operations)

    def has_waiting(self) -> bool:
        """Whether works wait for a turn."""
        return bool(self._waiting or self._first)

    def close(self) -> None:
        self.closed = True
        self._hurry.set()
        self.task.stop()
        self.task.join()
        self._refuse(self._take(), StoreClosed())
        self._announcements.close()
        self.release()

    def release(self) -> None:
        super().release()
        if not self.slot.base.dirty:  # else it is what another process has left behind
            self.slot.discard("read_db", "write_db")

    def _standing(self) -> dict[str, int]:
        fairness = self._fairness
        return {
            "losses_in_a_row": fairness.losses,
            "announcements": fairness.announced,
            "pauses": fairness.pauses,
        }

    # Waiting for a turn

    def _await(self, ticket: Ticket) -> None:
        """Wait for what becomes of a work, but not longer than `retry_for` and one request."""
        if self.task.by_hand:
            return ticket.wait()
        ticket.wait(max(0.0, ticket.until - self._clock()))
        if ticket.done:
            return None
        with self._queue:
            if not ticket.taken:
                ticket.abandoned = True
                raise StoreUnavailable(
                    f"gave up after {self.config.retry_for:g} s: the bucket does not answer, or "
                    "other writes of this store did not end",
                    address=str(self.remote),
                )
        ticket.wait(self.settings.timeout)
        if not ticket.done:
            raise CommitUncertain("an upload takes too long; it may or may not be stored")
        return None

    @contextmanager
    def _one_at_a_time(self, until: float) -> Iterator[None]:
        """For a turn, or a transaction of the application's own."""
        if not self._pipeline.acquire(timeout=max(0.0, until - self._clock())):
            raise StoreUnavailable("another transaction, or an upload, did not end in time")
        try:
            yield
        finally:
            self.phase = Phase.IDLE
            self._pipeline.release()

    def _take(self, *, late: bool = False) -> list[Ticket]:
        """The works that wait; only those that are too late, if so asked."""
        now = self._clock()
        with self._queue:
            tickets = [t for t in (*self._first, *self._waiting) if not t.abandoned]
            taken = [t for t in tickets if t.until <= now] if late else tickets
            for ticket in taken:
                ticket.taken = True
            for queue in (self._first, self._waiting):
                left = [t for t in queue if not (t.taken or t.abandoned)]
                queue.clear()
                queue.extend(left)
        return taken

    @staticmethod
    def _refuse(tickets: Sequence[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            ticket.error = error
        _settle(tickets)

    # One turn

    def _serve(self) -> None:
        """One turn for those who wait."""
        self._leave_room()
        self.phase, self._turn_begun = Phase.LOOKING, self._clock()
        until = self._soon()
        looked = not self._may_skip_look()
        if looked:
            self._patiently(lambda: self.refresh(until=until), until=until)
        self._linger()
        tickets = self._take()
        self._released = len(tickets)
        self._turns(tickets, looked=looked)

    def _may_skip_look(self) -> bool:
        """True if nobody else writes, as far as this node can know."""
        recent = self._clock() - self._seen_at < TRUSTED
        return self._known and recent and self._fairness.is_alone

    def _linger(self) -> None:
        """Wait a moment for those whom the last turn released: they are likely to come again."""
        if not self.task.by_hand:
            with self._queue:
                self._queue.wait_for(
                    lambda: len(self._waiting) + len(self._first) >= self._released, LINGER
                )

    def _leave_room(self) -> None:
        """Leave the object to a node that has announced itself."""
        if (announcement := self._announcements.take()) is not None:
            self._fairness.heard(announcement)
        if pause := self._fairness.pause():
            self._hurry.wait(min(pause, self.config.retry_for / 4))

    def _turns(self, tickets: Sequence[Ticket], *, looked: bool) -> None:
        """A turn for these works, and more for those that lost and may be run again. Whatever happens,
        each of them learns of it.
        """
        try:
            while tickets:
                try:
                    self._turn(tickets)
                    break
                except ConflictError as exc:
                    now, stale = self._clock(), not looked
                    again = [t for t in tickets if (t.replays or stale) and t.until > now]
                    self._refuse([t for t in tickets if t not in again], exc)
                    tickets, looked = again, True
        except BaseException as exc:
            for ticket in tickets:
                ticket.error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            _settle(tickets)

    def _turn(self, tickets: Sequence[Ticket]) -> None:
        """One turn on the state that is known."""
        until = self._soon()
        etag = self._stage()
        self._staged = NOWHERE
        upload = self._write_db.write(lambda c: self._run(c, tickets), needs_schema=False)
        self._publish(upload, etag, until=until)

    def _run(
        self, connection: Connection, tickets: Sequence[Ticket], *, guarded: bool = True
    ) -> Upload | None:
        """Run the works. Returns the upload that is to follow, if anything has changed."""
        before = marks(connection)
        for ticket in tickets:
            (ticket.run_guarded if guarded else ticket.run)(connection)
        return None if marks(connection) == before else self._record(connection)

    def _prepare(self, until: float) -> str | None:
        """Let `write_db` be what the bucket holds. Returns the ETag of that."""
        self.phase, self._turn_begun = Phase.LOOKING, self._clock()
        self._patiently(lambda: self.refresh(until=until), until=until)
        return self._stage()

    def _stage(self) -> str | None:
        """Let `write_db` be the state of `read_db`. Returns its ETag."""
        self.phase = Phase.STAGING
        with self._state:
            if not self._known:  # it could not be copied after the last upload
                raise Unreachable(f"{self.remote} must be downloaded again")
            etag = self.slot.base.etag
            if self._staged != etag:
                with (
                    self._read_db.raw_connection() as source,
                    self._write_db.raw_connection() as target,
                ):
                    images.copy(source, target)
                self._staged = etag
        return etag

    def _publish(
        self,
        upload: Upload | None,
        replacing: str | None,
        *,
        until: float,
        driver: sqlite3.Connection | None = None,
    ) -> None:
        """Upload what is prepared, and let reads see it. `driver` is the connection that prepared it, if
        that was an application's.
        """
        if upload is None:
            self._staged = replacing
            return
        if self._fairness.should_look():
            self._announcements.begin_look()
        self.phase = Phase.UPLOADING
        sending = Sending(upload, replacing, since=self._turn_begun, begun=self._clock())
        with self._state:
            self._sending = sending
        try:
            with ExitStack() as open_until_adopted:
                if driver is None:
                    driver = open_until_adopted.enter_context(self._write_db.raw_connection())
                    self._deflate(driver)
                self._adopt(driver, self._send(driver, sending, until), sending)
        finally:
            with self._state:
                self._sending = None
                self._state.notify_all()

    def _send(self, driver: sqlite3.Connection, sending: Sending, until: float) -> str | None:
        """Upload until it is decided. Returns what `_decide` does."""
        try:
            with images.body_of(driver, self._file_of(self._write_db)) as body:
                return self._upload(sending.upload, body, replacing=sending.replacing, until=until)
        except Lost as loss:
            return self._decide(sending, loss, until)
        except CommitUncertain:
            if sending.met_as is not None:
                return sending.met_as
            raise

    def _adopt(self, driver: sqlite3.Connection, etag: str | None, sending: Sending) -> None:
        """The upload is in the bucket: let reads see it."""
        self._fairness.won(self._clock() - sending.since)
        if etag is None:
            return  # reads see even more, which `write_db` does not contain
        with self._state:
            self._ours.append(etag)
            self._adopted_at = self._clock()
            self._staged = etag
            if not self._known or self.slot.base.etag != sending.replacing:
                return  # somebody has read it, or even newer, already
            try:
                with self._read_db.raw_connection() as target:
                    images.copy(driver, target)
            except (
                Exception
            ) as exc:  # it is stored; whatever is wrong here is not the caller's error
                self._known = False
                log.warning("%s: stored, but the local copy was not updated: %s", self.remote, exc)
                return
            self.slot.change(etag=etag, durably=False)
            self._seen_at = max(sending.begun, sending.met_at)

    def _decide(self, sending: Sending, loss: Lost, until: float) -> str | None:
        """The object is not what the upload was to replace: that may be the upload's own doing.

        Returns the ETag of the upload, if it is what is there; None if another writer has built on it,
        and `read_db` is that state.
        """
        self.phase = Phase.DECIDING
        self._turn_begun = self._clock()  # of the next one, if this one is run again
        sending.took = self._turn_begun - sending.since
        uncertain = CommitUncertain(
            f"an upload of {self.remote} was not answered; it may or may not be stored"
        )
        try:
            self._patiently(lambda: self._look_past(sending, until), until=until)
            if sending.met_as is not None:
                self._counters.uploads += 1
                return sending.met_as
            verdict = self._verdict_in(self._read_db, sending.upload)
        except Exception as exc:
            if loss.unanswered:
                raise uncertain from exc
            verdict = Verdict.EXCLUDED  # it was answered, and refused
            log.warning("%s: %s", self.remote, exc)
        if verdict is Verdict.INCLUDED:
            self._counters.uploads += 1
            return None
        if verdict is Verdict.FORGOTTEN and loss.unanswered:
            raise uncertain from loss
        self._lose(sending)
        raise ConflictError(
            f"{self.remote} was changed by somebody else; nothing of this call was kept"
        ) from loss

    def _look_past(self, sending: Sending, until: float) -> None:
        """Look until the object is not the one that the upload was to replace."""
        self._refresh(until=until, deciding=sending)
        if sending.met_as is None and self.slot.base.etag == sending.replacing:
            raise Unreachable(f"{self.remote} still shows what was replaced")

    def _lose(self, sending: Sending) -> None:
        self._counters.conflicts += 1
        last = self._last_in(self._read_db) if self._known else None
        behind = 1
        if last is not None and last.position and sending.upload.position:
            behind = last.position - sending.upload.position + 1
        announcement = self._fairness.lost(sending.took, behind=behind)
        if announcement is not None:
            self._announcements.announce(announcement)

    # Looking at the object

    def _refresh(
        self, *, within: float = 0.0, until: float, deciding: Sending | None = None
    ) -> bool:
        """Look at the object, unless another look has seen it since. A turn that is `deciding` whether
        its upload was applied is content with meeting it.
        """
        since, changed = self._clock() - within, False
        while (look := self._join_look(since, until, deciding)) is not None:
            try:
                changed = self._take_a_look(look) or changed
            except Exception as exc:
                look.error = exc
                raise
            finally:
                with self._state:
                    look.ended, self._look = True, None
                    self._state.notify_all()
        return changed

    def _join_look(self, since: float, until: float, deciding: Sending | None) -> Look | None:
        """A look of one's own; None if what is known by now was seen since then."""
        with self._state:
            while not (self._known and self._seen_at >= since):
                if deciding is not None and deciding.met_as is not None:
                    return None
                other = self._look
                if other is None and not self._is_met():
                    self._look = Look(begun=self._clock())
                    return self._look
                if not self._state.wait(max(0.0, until - self._clock())):
                    raise StoreUnavailable("a look at the object did not end in time")
                if other is not None and other.ended and other.error is not None:
                    raise other.error
            return None

    def _is_met(self) -> bool:
        """True if the upload under way was met in the bucket, and its turn has yet to take note."""
        return self._sending is not None and self._sending.met_as is not None

    def _take_a_look(self, look: Look) -> bool:
        """Look at the object, and take it over if it changed. Returns whether it did."""
        if self.slot.base.dirty:  # a process in local mode has left it behind
            self._upload_leftovers(self._write_db)
            self.slot.forget()
            self._staged = NOWHERE
        etag = self.slot.base.etag if self._known else None
        look.begun = self._clock()
        fetched = self.remote.get(unless=etag, into=self.slot.directory, wants=self._is_news)
        try:
            with self._state:
                if fetched is None or not self._is_new(fetched):
                    self._seen_at = max(self._seen_at, look.begun)
                    return False
                if not fetched.wanted:
                    return self._meet(fetched, look)
                self._take_over(fetched, look.begun)
        finally:
            if fetched is not None:
                fetched.discard()
        self._verify(self._read_db)
        self._changed()
        return True

    def _is_news(self, found: Fetched) -> bool:
        """Whether to download what is in the bucket: not if it was prepared here."""
        return self._is_new(found) and not self._is_sent(found)

    def _is_new(self, found: Fetched) -> bool:
        if not self._known:
            return True
        # A look that began before our last upload was answered may show the one before. A later one
        # does so only if somebody has brought the older object back.
        is_late = self._look is not None and self._look.begun <= self._adopted_at
        return found.etag != self.slot.base.etag and not (is_late and found.etag in self._ours)

    def _is_sent(self, found: Fetched) -> bool:
        sending = self._sending
        return (
            sending is not None
            and self._known
            and found.label.get("pgqrs-upload") == sending.upload.nonce
        )

    def _meet(self, fetched: Fetched, look: Look) -> bool:
        """The upload that is under way, or was until now, is in the bucket."""
        sending = self._sending
        if sending is None or not self._is_sent(fetched):
            raise Unreachable(f"{self.remote} changed while it was looked at")
        sending.met_as, sending.met_at = fetched.etag, look.begun
        return False

    def _take_over(self, fetched: Fetched, begun: float) -> None:
        if self._known:
            self._keep_if_older(fetched, self._read_db)
            self._fairness.met()
        self._known = False  # until it is loaded
        self._load(self._read_db, fetched)
        self.slot.change(etag=fetched.etag, durably=False)
        self._known, self._seen_at = True, begun

    # Operations of the application's own loop

    def _try_operations(self, until: float) -> bool:
        """One turn for the operations. Returns False if it was lost: then they are run again."""
        self._find_uncertain(until)
        operations = list(self._operations)
        if not operations:
            return True
        etag = self._prepare(until)
        self._staged = NOWHERE
        upload = self._write_db.write(lambda c: self._run(c, operations), needs_schema=False)
        try:
            self._publish(upload, etag, until=until)
        except ConflictError:
            return False
        except CommitUncertain:
            assert upload is not None
            sent = Sending(upload, etag, since=0.0, begun=0.0)
            self._uncertain.append((sent, self._outcomes(operations)))
            raise
        self._finish_operations(self._outcomes(operations))
        return True

    def _find_uncertain(self, until: float) -> None:
        """Perhaps the operations of an upload that nobody answered are in the bucket after all.

        Several such uploads may have been made on the same state; the bucket accepts only one of them.
        """
        if not self._uncertain:
            return
        self._patiently(lambda: self.refresh(until=until), until=until)
        may_come: list[tuple[Sending, list[Any]]] = []
        for sent, outcomes in self._uncertain:
            verdict = self._verdict_in(self._read_db, sent.upload)
            if verdict is Verdict.INCLUDED:
                return self._finish_operations(outcomes)
            if verdict is Verdict.FORGOTTEN:
                lost: list[Any] = [CommitUncertain("it may or may not be stored") for _ in outcomes]
                return self._finish_operations(lost)
            if self.slot.base.etag == sent.replacing:
                may_come.append((sent, outcomes))
        self._uncertain = may_come
        return None

    def _finish_operations(self, outcomes: list[Any]) -> None:
        del self._operations[: len(outcomes)]
        self._done += outcomes
        self._uncertain = []

    # Transactions of the application's own

    def enter(self) -> None:
        """An application's transaction begins: a turn of its own."""
        until = self._soon()
        with ExitStack() as until_it_leaves:
            until_it_leaves.enter_context(self._one_at_a_time(until))
            self._entered_at = self._prepare(until)
            self._entered = until_it_leaves.pop_all()

    def before_commit(self, connection: Connection) -> None:
        self._staged = NOWHERE
        self._entered_upload = self._record(connection)

    def after_commit(self, driver: Any) -> None:
        """It is committed in `write_db`, by this connection: now it must go to the bucket."""
        upload = self._entered_upload
        self._publish(upload, self._entered_at, until=self._soon(), driver=driver)
        self._changed()

    def leave(self) -> None:
        self._entered.close()


def _settle(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.done = True
        ticket.wake()
