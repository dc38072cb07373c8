"""Local mode: a write returns once it is in the local database, and is uploaded afterwards.

There is one local database, which everybody reads and writes. The sync task uploads it from time to
time, if there is anything to upload, and else looks whether somebody else did.

The slot says that there are local writes (`dirty`) before the first of them is committed, and stops
saying so when an upload contains all of them. So what a process that died has left behind is found,
and uploaded, by the next one.

Two who write locally to one object will meet: only one of them can upload. The other's writes are
not dropped, but kept aside in a file of their own; it goes on from what is in the bucket, and its
next write raises `ConflictError` once, so that it is not overlooked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine

from pgqrs.errors import CommitUncertain, ConflictError, StoreUnavailable
from pgqrs.repositories import uploads
from pgqrs.repositories.uploads import Upload, Verdict
from pgqrs.stores import images
from pgqrs.stores.application import application_engine
from pgqrs.stores.base import Work
from pgqrs.stores.group_commit import Ticket
from pgqrs.stores.objects import Fetched, Lost, Unreachable
from pgqrs.stores.replica import Replica, T, log
from pgqrs.stores.sqlite import SqliteDatabase, marks

MANY_WRITES = 200
"""Writes after which an upload does not wait for its time."""


class Gate:
    """Who writes is inside. Replacing the whole database needs everybody out."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._inside = 0
        self._shut = False
        self.writes = 0

    def enter(self, *, timeout: float) -> None:
        with self._moved:
            if not self._moved.wait_for(lambda: not self._shut, timeout):
                raise StoreUnavailable("the local database was being replaced for too long")
            self._inside += 1

    def leave(self) -> None:
        with self._moved:
            self._inside -= 1
            self._moved.notify_all()

    @contextmanager
    def passing(self, *, timeout: float) -> Iterator[None]:
        self.enter(timeout=timeout)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def shut(self, *, timeout: float) -> Iterator[bool]:
        """Whether everybody left in time."""
        with self._moved:
            self._shut = True
            empty = self._moved.wait_for(lambda: not self._inside, timeout)
        try:
            yield empty
        finally:
            with self._moved:
                self._shut = False
                self._moved.notify_all()

    def count(self) -> int | None:
        """How many writes there were, all of them committed; None while some may not be."""
        with self._moved:
            return None if self._inside else self.writes


class Trouble:
    """Local writes were set aside: the next write raises that once, so that it is not overlooked.

    A write that may be repeated (a heartbeat, a claim) is often made by a thread of the library, which
    goes on after an error. So one that may not be repeated is told in any case.
    """

    def __init__(self) -> None:
        self._error: ConflictError | None = None
        self._told = False

    def note(self, error: ConflictError) -> None:
        self._error, self._told = error, False

    def tell(self, *, repeatable: bool) -> None:
        error = self._error
        if error is None or (repeatable and self._told):
            return
        self._told = True
        if not repeatable:
            self._error = None
        raise error


class LocalReplica(Replica):
    """One local database, ahead of the object in the bucket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        kept = self._verify_copy("write_db")
        self._db = self._database("write_db")
        self._gate = Gate()
        self._marking = threading.Lock()
        self._stepping = threading.Lock()
        self._looked = False
        self._unsent = 0
        self._trouble = Trouble()
        if kept is not None:
            self._trouble.note(ConflictError(f"local writes could not be used; they are in {kept}"))
        self._engine = application_engine(self._db, self)
        _exit_by_sigterm()

    @property
    def interval(self) -> float:
        return self.settings.sync_interval

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def databases(self) -> Sequence[SqliteDatabase]:
        return (self._db,)

    def read(self, work: Work[T], *, until: float | None = None) -> T:
        self._look_once()
        return self._db.read(work, needs_schema=False)

    def write(
        self,
        work: Work[T],
        *,
        probe: bool = False,
        replays: bool = False,
        until: float | None = None,
    ) -> T:
        self._look_once()
        return self._write(work)

    def report(self, *, repeatable: bool) -> None:
        self._trouble.tell(repeatable=repeatable)

    def write_alone(self, work: Work[T]) -> T:
        self._look_once()
        with self._gate.passing(timeout=self.config.retry_for):
            return self._db.write_once(self._noting(work))

    def step(self) -> None:
        with self._stepping:
            try:
                self._turn()
            except ConflictError as exc:
                self._trouble.note(exc)

    def refresh(self, *, within: float = 0.0) -> bool:
        self._look_once()
        with self._stepping:
            if self.slot.base.dirty or self._seen_at >= self._clock() - within:
                return False
            return self._pull()

    def flush(self) -> list[Any]:
        self._look_once()
        with self._stepping:
            if self.slot.base.dirty:
                self._push()
            deadline = self._clock() + self.config.retry_for
            while self._operations and not self._try_operations():
                if self._clock() > deadline:
                    raise ConflictError(f"{self.remote}: lost every race; nothing was kept")
            done, self._done = self._done, []
            return done

    def has_changes(self) -> bool:
        return self.slot.base.dirty or bool(self._operations)

    def close(self) -> None:
        if self.closed:
            return
        self._hurry.set()  # for a turn that is under way
        self.task.stop()
        self.task.join()
        self._hurry.clear()
        try:
            self._upload_the_rest()
        finally:
            self.release()

    def close_in_a_hurry(self) -> None:
        """At the end of the process: one attempt."""
        self.remote.in_this_thread = True
        self._hurry.set()
        self.task.stop()
        self.task.join()
        if self.closed:
            return
        try:
            self._upload_the_rest()
        except Exception as exc:
            log.warning("%s", exc)
        self.release()

    def _upload_the_rest(self) -> None:
        with self._stepping:
            if not self.slot.base.dirty:
                return
            try:
                self._push()
            except (StoreUnavailable, CommitUncertain) as exc:
                if self._db.in_memory:
                    self._keep_aside(self._db, "the bucket cannot be reached")
                    raise
                log.warning(
                    "%s: local writes stay in %s: %s", self.remote, self.slot.directory, exc
                )

    # Writing

    def _write(self, work: Work[T]) -> T:
        with self._gate.passing(timeout=self.config.retry_for):
            return self._db.write(self._noting(work), needs_schema=False)

    def _noting(self, work: Work[T]) -> Work[T]:
        """The work, and a note if it changes anything."""

        def noted(connection: Connection) -> T:
            before = marks(connection)
            result = work(connection)
            if marks(connection) != before:
                self._mark()
            return result

        return noted

    def _mark(self) -> None:
        """Something is about to be committed that is not in the bucket."""
        with self._marking:
            self._gate.writes += 1
            self._unsent += 1
            if not self.slot.base.dirty:
                self.slot.change(dirty=True)
        if self._unsent >= MANY_WRITES:
            self.task.wake()
        else:
            self.task.start()

    # One turn

    def _look_once(self) -> None:
        """The first use needs a copy, if there is none from earlier times."""
        if self._looked:
            return
        with self._stepping:
            if self._looked:
                return
            self._hurry.set()
            try:
                self._turn()
            except ConflictError as exc:
                self._trouble.note(exc)
            except (Unreachable, StoreUnavailable, CommitUncertain) as exc:
                if not self.slot.base.known:
                    raise
                log.warning("%s; going on with the local copy", exc)
            finally:
                self._hurry.clear()
            self._looked = True
        self.task.start()

    def _turn(self) -> None:
        if self.slot.base.dirty:
            self._push()
        elif self._seen_at < self._clock() - self.settings.max_staleness:
            self._pull()

    def _pull(self) -> bool:
        """Take over what somebody else uploaded."""
        begun, base = self._clock(), self.slot.base
        fetched = self._get(unless=base.etag if base.known else None)
        if fetched is not None and (fetched.etag != base.etag or not base.known):
            try:
                with self._gate.shut(timeout=self.config.sqlite_busy_timeout) as empty:
                    if not empty or self.slot.base.dirty:
                        return False
                    if base.known and (kept := self._keep_if_older(fetched, self._db)):
                        self._trouble.note(
                            ConflictError(f"{self.remote} is not what it was; see {kept}")
                        )
                    self._take_over(fetched)
            finally:
                fetched.discard()
            self._seen_at = begun
            self._arrived()
            return True
        self._seen_at = begun
        return False

    def _push(self, *, operations_only: int | None = None) -> None:
        """Upload. `operations_only` is the count of writes if all that are new can be repeated."""
        count, unsent, until = self._gate.count(), self._unsent, self._soon()
        upload = self._record_ahead(self._db)
        begun, replacing = self._clock(), self.slot.base.etag
        try:
            etag = self._send(upload, replacing, until)
        except Lost as exc:
            self._accept_loss(exc, upload, count=count, operations_only=operations_only)
        else:
            self._uploaded(upload, etag, count=count)
            self._seen_at = begun
        self._unsent = max(0, self._unsent - unsent)

    def _send(self, upload: Upload, replacing: str | None, until: float) -> str:
        """Upload a snapshot: others go on writing meanwhile."""
        with self._db.raw_connection() as connection:
            self._deflate(connection)
            file = self._file_of(self._db)
            if file is None or Path(file).stat().st_size <= images.SMALL:
                return self._upload(
                    upload, images.dump(connection), replacing=replacing, until=until
                )
            snapshot = Path(file).with_name("snapshot.sqlite")
            snapshot.unlink(missing_ok=True)
            images.export(connection, snapshot)
        body = images.FileBody(snapshot)
        try:
            return self._upload(upload, body, replacing=replacing, until=until)
        finally:
            body.close()
            snapshot.unlink(missing_ok=True)

    def _uploaded(self, upload: Upload, etag: str | None, *, count: int | None) -> None:
        """All writes up to this count are in the bucket; if there are no others, all are."""
        with self._marking:
            self.slot.change(
                known=True,
                etag=etag,
                dirty=count is None or count != self._gate.writes,
                upload=upload.nonce if upload.position is not None else None,
                pending=(),
            )

    def _accept_loss(
        self, loss: Lost, upload: Upload, *, count: int | None, operations_only: int | None
    ) -> None:
        """Our upload is lost, unless it was applied and only the answer was."""
        try:
            fetched = self._get_after_loss(self.slot.base.etag, until=self._soon())
        except Exception as exc:
            if loss.unanswered:
                raise CommitUncertain(f"it may or may not be stored: {exc}") from exc
            raise
        try:
            self._face(fetched, loss, upload, count=count, operations_only=operations_only)
        finally:
            fetched.discard()

    def _face(
        self,
        fetched: Fetched,
        loss: Lost,
        upload: Upload,
        *,
        count: int | None,
        operations_only: int | None,
    ) -> None:
        """Go on from what is in the bucket instead."""
        nonce = fetched.label.get("pgqrs-upload")
        if nonce == upload.nonce:
            return self._uploaded(upload, fetched.etag, count=count)
        if (
            nonce in self.slot.base.pending
        ):  # an earlier one, that was not answered: we are ahead of it
            self.slot.change(etag=fetched.etag, upload=nonce)
            return self._push(operations_only=operations_only)
        is_part = fetched.etag is not None and self._looked_into(
            fetched, lambda c: uploads.verdict(c, upload) is Verdict.INCLUDED
        )
        with self._gate.shut(timeout=self.config.sqlite_busy_timeout) as empty:
            if not empty:
                raise StoreUnavailable("a transaction is open; the local copy is replaced later")
            writes = self._gate.writes
            nothing_lost = (is_part and count == writes) or operations_only == writes
            nothing_lost = nothing_lost and fetched.etag is not None  # else it was deleted
            why = "it was changed by another writer"
            kept = None if nothing_lost else self._keep_aside(self._db, why)
            self._take_over(fetched)
        self._arrived()
        if not is_part or kept:
            self._counters.conflicts += 1
            raise ConflictError(
                f"{self.remote} was changed by somebody else; "
                + (f"local writes are kept in {kept}" if kept else "nothing was kept")
            ) from loss
        return None

    def _take_over(self, fetched: Fetched) -> None:
        # A process that dies in between leaves a copy of which nothing is known.
        self.slot.change(known=False, dirty=False, pending=())
        self._load(self._db, fetched)
        last = self._last_in(self._db)
        self.slot.change(known=True, etag=fetched.etag, upload=last and last.nonce)

    def _arrived(self) -> None:
        self._verify(self._db)
        self._changed()

    def _try_operations(self) -> bool:
        """Run the operations and upload. Returns False if that was lost: then they are run again."""
        operations = list(self._operations)

        def run(connection: Connection) -> None:
            for ticket in operations:
                ticket.run_guarded(connection)

        before = self._gate.count()
        self._write(run)
        try:
            if self.slot.base.dirty:
                self._push(operations_only=None if before is None else before + 1)
        except ConflictError:
            return False
        except (StoreUnavailable, CommitUncertain):
            self._finish(operations)  # they are local writes now, and will be uploaded as such
            raise
        self._finish(operations)
        return True

    def _finish(self, operations: Sequence[Ticket]) -> None:
        del self._operations[: len(operations)]
        self._done += self._outcomes(operations)

    # Transactions of the application's own

    def enter(self) -> None:
        """An application's transaction begins: it may write."""
        self._look_once()
        self._gate.enter(timeout=self.config.retry_for)

    def before_commit(self, connection: Connection) -> None:
        self._mark()

    def after_commit(self, driver: Any) -> None:
        self._changed()

    def leave(self) -> None:
        self._gate.leave()


def _exit_by_sigterm() -> None:
    """Let SIGTERM end the interpreter as `sys.exit` does, so that what was not uploaded is uploaded.

    Only if nothing else handles it, and from the main thread, which is the only one that may ask.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        with suppress(ValueError):  # an interpreter inside another program
            signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + number)
