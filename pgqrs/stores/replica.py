"""A local copy of the object in the bucket, and its ways there and back: what both modes share.

What is in the bucket counts. `etag` names the version that the local copy is based on; every upload
replaces exactly that version, or is *lost*. Each upload has a nonce, which is also written into the
database that is uploaded (`repositories/uploads`). So when the answer to an upload was lost, a look at
the object tells whether it was applied, even if another writer has built on it since. Until that is
known, an upload that may have been applied ends as `CommitUncertain`, whatever went wrong afterwards.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, StaticPool, create_engine
from sqlalchemy.exc import SQLAlchemyError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    wait_random_exponential,
)

from pgqrs import schema
from pgqrs.config import Config, S3Settings
from pgqrs.errors import CommitUncertain, SchemaError, StoreUnavailable
from pgqrs.repositories import uploads
from pgqrs.repositories.uploads import Upload, Verdict
from pgqrs.stores import images
from pgqrs.stores.base import Work
from pgqrs.stores.group_commit import Ticket
from pgqrs.stores.images import Body
from pgqrs.stores.objects import Fetched, Lost, RemoteObject, Unanswered, Unreachable
from pgqrs.stores.slots import Slot
from pgqrs.stores.sqlite import SqliteDatabase
from pgqrs.stores.sync_task import SyncTask
from pgqrs.types import S3State, S3Stats

T = TypeVar("T")
log = logging.getLogger("pgqrs.s3")


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    uploads: int = 0
    conflicts: int = 0
    vacuums: int = 0


TOLERATED: ContextVar[float] = ContextVar("pgqrs_s3_tolerated", default=0.0)
"""Seconds for which a look at the object counts, for the calls of one who looks again and again."""
OPEN: set[Replica] = set()
"""Every replica that was not released yet."""


class Replica(ABC):
    """The local side of one object."""

    def __init__(
        self,
        config: Config,
        settings: S3Settings,
        *,
        now: Callable[[], datetime],
        changed: Callable[[], object],
    ) -> None:
        """`changed` is called when somebody else's changes have arrived."""
        self.config = config
        self.settings = settings
        self.remote = RemoteObject(settings)
        self.slot = Slot.take(settings)
        self.slot.discard_incoming()
        self.writer = uuid.uuid4().hex
        """Names this store to those who look at the bucket. A store opened again has another name."""
        self.task = SyncTask(self.step, interval=self.interval, finish=self.close)
        self.schema_is_there = False
        self.closed = False
        self.pid = os.getpid()
        self._now = now
        self._changed = changed
        self._seen_at = float("-inf")
        self._counters = Counters()
        self._set_aside: list[Path] = []
        self._hurry = threading.Event()
        self._operations: list[Ticket] = []
        self._done: list[Any] = []
        OPEN.add(self)

    # What each mode does in its own way

    @property
    @abstractmethod
    def interval(self) -> float:
        """Seconds after which the sync task wakes by itself."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine for transactions of the application's own."""

    @property
    @abstractmethod
    def databases(self) -> Sequence[SqliteDatabase]:
        """The local databases; what reads see is the last of them."""

    @abstractmethod
    def read(self, work: Work[T], *, until: float | None = None) -> T:
        """Run a work that changes nothing. `until` is when the caller gives up; None: `retry_for`."""

    @abstractmethod
    def write(
        self,
        work: Work[T],
        *,
        probe: bool = False,
        replays: bool = False,
        until: float | None = None,
    ) -> T:
        """Run a work and keep what it changes, as durably as the mode says.

        `replays` allows running it again by itself if the upload lost a race.
        """

    def report(self, *, repeatable: bool) -> None:
        """Raise what a caller that writes has to know first. `repeatable` as in `Database.write`."""
        return

    @abstractmethod
    def write_alone(self, work: Work[T]) -> T:
        """Run a work that holds code of an application: once, and in a transaction of its own."""

    @abstractmethod
    def step(self) -> None:
        """One turn of the sync task."""

    @abstractmethod
    def refresh(self, *, within: float = 0.0) -> bool:
        """Take over what others uploaded, unless one looked so recently. Returns whether there was
        anything.
        """

    @abstractmethod
    def flush(self) -> list[Any]:
        """Upload what is to be uploaded, now. Operations that lose a race are run again.

        Returns what each operation returned, or the error that it raised.
        """

    @abstractmethod
    def has_changes(self) -> bool:
        """Whether there is anything that was not uploaded."""

    @abstractmethod
    def close(self) -> None:
        """Upload what the mode promises to, and let go of everything."""

    # What a transaction of the application's own does: see `application`

    @abstractmethod
    def enter(self) -> None:
        """It begins."""

    @abstractmethod
    def before_commit(self, connection: Connection) -> None:
        """It has changed something, and is about to be committed."""

    @abstractmethod
    def after_commit(self, driver: Any) -> None:
        """It is committed in the local database, by this connection."""

    @abstractmethod
    def leave(self) -> None:
        """It has ended."""

    def close_in_a_hurry(self) -> None:
        """At the end of the process."""
        self.remote.in_this_thread = True
        self.close()

    # What both share

    @property
    def staleness(self) -> float:
        """Seconds for which what was read counts as current."""
        return max(self.settings.max_staleness, TOLERATED.get())

    def _outcomes(self, tickets: Iterable[Ticket]) -> list[Any]:
        return [ticket.result if ticket.error is None else ticket.error for ticket in tickets]

    def submit(self, works: Iterable[Work[Any]]) -> int:
        """Operations for the next `flush`. Returns how many wait for it now."""
        self._operations += [Ticket(work) for work in works]
        return len(self._operations)

    def snapshot(self, path: Path) -> None:
        """Write what reads see to a file of its own."""
        self.refresh(within=self.settings.max_staleness)
        self._export(self.databases[-1], path)

    def state(self) -> S3State:
        """How the local copy and the object differ just now. Changes neither."""
        found, local = self.remote.etag(), self.has_changes()
        if found is None:
            return S3State.MISSING
        if found != self.slot.base.etag:
            return S3State.BOTH_CHANGED if local else S3State.REMOTE_CHANGED
        return S3State.LOCAL_CHANGED if local else S3State.IN_SYNC

    def stats(self) -> S3Stats:
        """What was sent and fetched so far, and how full the database is."""
        with self.databases[-1].raw_connection() as connection:
            dead, total = images.dead_pages(connection)
        traffic = self.remote.traffic
        return S3Stats(
            puts=traffic.puts,
            gets=traffic.gets,
            not_modified=traffic.not_modified,
            uploaded_bytes=traffic.uploaded_bytes,
            downloaded_bytes=traffic.downloaded_bytes,
            last_upload_bytes=traffic.last_upload_bytes,
            uploads=self._counters.uploads,
            conflicts=self._counters.conflicts,
            vacuums=self._counters.vacuums,
            pages=total,
            dead_pages=dead,
            set_aside=tuple(map(str, self._set_aside)),
            **self._standing(),
        )

    def _standing(self) -> dict[str, int]:
        """How this node stands among the others, for `stats`."""
        return {}

    def release(self) -> None:
        """Let go of the local databases, without uploading anything."""
        self.closed = True
        for database in self.databases:
            database.close()
        self.slot.release()
        OPEN.discard(self)

    def _database(self, name: str, **settings: Any) -> SqliteDatabase:
        dsn = f"sqlite:///{self.slot.path(name)}"
        return SqliteDatabase(self.config.with_(dsn=dsn, schema=None, upgrade=False, **settings))

    def _verify(self, database: SqliteDatabase) -> None:
        """What came from elsewhere must be what this pgqrs works with, if the last one was."""
        if self.schema_is_there:
            try:
                database.read(schema.check, needs_schema=False)
            except SchemaError:
                self.schema_is_there = False
                raise

    def _record(self, connection: Connection) -> Upload:
        """Write into the database that it is about to be uploaded."""
        return uploads.record(connection, uuid.uuid4().hex, now=self._now())

    def _record_ahead(self, database: SqliteDatabase) -> Upload:
        """The same for a local database that outlives the process: the slot knows of it first."""
        nonce = uuid.uuid4().hex
        self.slot.change(pending=(*self.slot.base.pending, nonce)[-uploads.REMEMBERED :])
        return database.write(
            lambda c: uploads.record(c, nonce, now=self._now()), needs_schema=False
        )

    def _upload(self, upload: Upload, body: Body, *, replacing: str | None, until: float) -> str:
        """Put until it is decided. Returns the new ETag, or raises `Lost`.

        Once the upload may have been applied, every other failure is `CommitUncertain`.
        """
        unanswered = False
        label = {"pgqrs-writer": self.writer, "pgqrs-upload": upload.nonce}

        def attempt() -> str:
            nonlocal unanswered
            try:
                return self.remote.put(body, replacing=replacing, label=label)
            except Unanswered:
                unanswered = True
                raise

        try:
            etag = self._patiently(attempt, until=until)
        except Lost as exc:
            exc.unanswered = unanswered
            raise
        except Exception as exc:
            if unanswered:
                raise CommitUncertain(
                    f"an upload was not answered; it may or may not be stored: {exc}"
                ) from exc
            raise
        self._counters.uploads += 1
        return etag

    def _verdict_in(self, database: SqliteDatabase, upload: Upload) -> Verdict:
        return database.read(lambda c: uploads.verdict(c, upload), needs_schema=False)

    def _last_in(self, database: SqliteDatabase) -> Upload | None:
        return database.read(uploads.last, needs_schema=False)

    def _looked_into(self, fetched: Fetched, look: Work[T]) -> T:
        """What a look into a downloaded object finds."""
        with images.opened(fetched.image, str(self.remote)) as image:
            return _with_sqlalchemy(image, look)

    def _patiently(self, attempt: Callable[[], T], *, until: float) -> T:
        """Try again while the bucket cannot be reached, until this time, or in a hurry once."""

        def give_up(_: RetryCallState) -> bool:
            return self._hurry.is_set() or self._clock() >= until

        try:
            return Retrying(
                retry=retry_if_exception_type(Unreachable),
                stop=give_up,
                wait=wait_random_exponential(multiplier=0.05, max=2.0),
                sleep=sleep_using_event(self._hurry),
                reraise=True,
            )(attempt)
        except Unreachable as exc:
            raise StoreUnavailable(f"gave up: {exc}") from exc

    def _soon(self) -> float:
        """When a call that begins now has to end."""
        return self._clock() + self.config.retry_for

    def _load(self, database: SqliteDatabase, fetched: Fetched) -> None:
        with database.raw_connection() as connection:
            images.load(connection, fetched.image, source=str(self.remote))

    @staticmethod
    def _export(database: SqliteDatabase, path: Path) -> None:
        with database.raw_connection() as connection:
            images.export(connection, path)

    def _deflate(self, connection: sqlite3.Connection) -> None:
        self._counters.vacuums += images.deflate(connection)

    def _file_of(self, database: SqliteDatabase) -> str | None:
        return None if database.in_memory else database.engine.url.database

    def _get(self, *, unless: str | None) -> Fetched | None:
        return self.remote.get(unless=unless, into=self.slot.directory)

    def _get_after_loss(self, replaced: str | None, *, until: float) -> Fetched:
        """The object that is there instead of the one that an upload was to replace.

        A bucket may still show the old one for a while; then this looks again.
        """

        def attempt() -> Fetched:
            fetched = self._get(unless=replaced)
            if fetched is None or (fetched.etag == replaced and replaced is not None):
                raise Unreachable(f"{self.remote} still shows what was replaced")
            return fetched

        return self._patiently(attempt, until=until)

    # What a process has left behind

    def _verify_copy(self, name: str) -> Path | None:
        """See that the copy in the slot is the state that the slot names; else start afresh.

        Returns where the copy was set aside, if it was not that state and may hold local writes.
        """
        base = self.slot.base
        if self.slot.directory is None or (base.known and self._is_as_named(name)):
            return None
        kept = self.slot.move_aside(name) if base.dirty or base.known else None
        if base.dirty or base.known:
            log.error(
                "%s: the local copy is not the one that was last used here%s",
                self.remote,
                f"; it is kept in {kept}" if kept else "",
            )
        if kept:
            self._set_aside.append(kept)
        self.slot.discard(name)
        self.slot.forget()
        return kept if base.dirty else None

    def _is_as_named(self, name: str) -> bool:
        base = self.slot.base
        try:
            with closing(sqlite3.connect(self.slot.path(name))) as copy:
                _, pages = images.dead_pages(copy)
                if not pages:
                    return base.etag is None and not (base.dirty or base.pending)
                if base.dirty and copy.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                    return False
                last = _with_sqlalchemy(copy, uploads.last)
        except (sqlite3.DatabaseError, SQLAlchemyError):
            return False
        return (last and last.nonce) in (base.upload, *base.pending)

    def _upload_leftovers(self, database: SqliteDatabase) -> None:
        """Upload what another process has left behind; if it cannot be any more, keep it aside."""
        base, until = self.slot.base, self._soon()
        found = self._get(unless=base.etag)
        if found is not None and found.etag != base.etag:
            replacing = found.etag
            found.discard()
            if found.label.get("pgqrs-upload") not in base.pending:
                self._keep_aside(database, "it was changed by another writer")
                return
        else:
            replacing = base.etag
        upload = self._record_ahead(database)
        try:
            with self._body(database) as body:
                self._upload(upload, body, replacing=replacing, until=until)
        except Lost:
            found = self._get_after_loss(replacing, until=until)
            verdict = self._looked_into(found, lambda c: uploads.verdict(c, upload))
            found.discard()
            if verdict is not Verdict.INCLUDED:
                self._keep_aside(database, "it was changed by another writer")
                return
        log.warning("%s: uploaded what another process had left behind", self.remote)

    @contextmanager
    def _body(self, database: SqliteDatabase) -> Iterator[Body]:
        with (
            database.raw_connection() as connection,
            images.body_of(connection, self._file_of(database)) as body,
        ):
            yield body

    # What cannot be uploaded is kept

    def _keep_aside(self, database: SqliteDatabase, why: str) -> Path:
        path = self.slot.place_aside()
        self._export(database, path)
        self._set_aside.append(path)
        log.error("%s: %s; the local copy is kept in %s", self.remote, why, path)
        return path

    def _keep_if_older(self, fetched: Fetched, database: SqliteDatabase) -> Path | None:
        """If the object vanished, or is an older one or another one, the local copy may be the last of
        its kind: set it aside. Returns where.
        """
        if self.slot.base.etag is None:
            return None
        if fetched.etag is None:
            return self._keep_aside(database, "the object was deleted")
        last = self._last_in(database)
        if last is None:
            return None
        found = self._looked_into(fetched, lambda c: (uploads.verdict(c, last), uploads.last(c)))
        if found[0] is Verdict.EXCLUDED or found[1] is None:
            return self._keep_aside(database, "the object was replaced by an older or another one")
        return None

    @staticmethod
    def _clock() -> float:
        return time.monotonic()


def _with_sqlalchemy(connection: sqlite3.Connection, look: Work[T]) -> T:
    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    with engine.connect() as wrapped:
        return look(wrapped)
