"""A local copy of the object in the bucket, and its ways there and back: what both modes share.

What is in the bucket counts. `etag` names the version that the local copy is based on; every upload
replaces exactly that version, or is *lost*. Each upload has a number, which is also written into
the database that is uploaded. So when the answer to an upload was lost, a look at the object tells
whether it was applied, even if somebody else has built on it since.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from pgqrs import schema
from pgqrs.config import Config, S3Settings
from pgqrs.errors import CommitUncertain, SchemaError, StoreUnavailable
from pgqrs.repositories import uploads
from pgqrs.stores import images
from pgqrs.stores.base import Work
from pgqrs.stores.group_commit import Ticket
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
    def read(self, work: Work[T]) -> T:
        """Run a work that changes nothing."""

    @abstractmethod
    def write(self, work: Work[T], *, probe: bool = False) -> T:
        """Run a work and keep what it changes, as durably as the mode says."""

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
        self.close()

    # What both share

    def _outcomes(self, tickets: Iterable[Ticket]) -> list[Any]:
        return [ticket.result if ticket.error is None else ticket.error for ticket in tickets]

    def submit(self, works: Iterable[Work[Any]]) -> int:
        """Operations for the next `flush`. Returns how many wait for it now."""
        self._operations += [Ticket(work) for work in works]
        return len(self._operations)

    def snapshot(self, path: Path) -> None:
        """Write what reads see to a file of its own."""
        self.refresh(within=self.settings.max_staleness)
        path.write_bytes(self._dump(self.databases[-1]))

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
        with self.databases[0].raw_connection() as connection:
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
        )

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
                database.read(schema.verify, needs_schema=False)
            except SchemaError:
                self.schema_is_there = False
                raise

    def _begin_upload(self) -> int:
        """The number of a new upload."""
        self.slot.change(number=self.slot.base.number + 1, durably=self.slot.base.dirty)
        return self.slot.base.number

    @property
    def _label(self) -> dict[str, str]:
        base = self.slot.base
        return {"pgqrs-writer": base.writer, "pgqrs-upload": str(base.number)}

    def _record(self, connection: Connection) -> None:
        uploads.record(connection, self.slot.base.writer, self.slot.base.number, now=self._now())

    def _upload(self, data: bytes, *, replacing: str | None) -> str:
        """Put until it is decided. Returns the new ETag, or raises `Lost`.

        Giving up, it says whether it may be stored nevertheless.
        """
        unanswered = False

        def attempt() -> str:
            nonlocal unanswered
            try:
                return self.remote.put(data, replacing=replacing, label=self._label)
            except Unanswered:
                unanswered = True
                raise

        try:
            etag = self._patiently(attempt)
        except StoreUnavailable as exc:
            if unanswered:
                raise CommitUncertain(
                    f"an upload was not answered; it may or may not be stored: {exc}"
                ) from exc
            raise
        self._counters.uploads += 1
        return etag

    def _last_upload_in(self, database: SqliteDatabase) -> int:
        """Which of our uploads a database contains."""
        writer = self.slot.base.writer
        return database.read(lambda c: uploads.last_of(c, writer), needs_schema=False)

    def _contains_last_upload(self, fetched: Fetched) -> bool:
        """Whether our last upload is part of the object, whoever has built on it since."""
        with closing(SqliteDatabase(Config(dsn="sqlite::memory:"))) as scratch:
            self._load(scratch, fetched.data)
            return self._last_upload_in(scratch) >= self.slot.base.number

    def _is_ours(self, fetched: Fetched) -> bool:
        """Whether the object is an upload of ours, and nobody has built on it."""
        return fetched.label.get("pgqrs-writer") == self.slot.base.writer

    def _is_our_last(self, fetched: Fetched) -> bool:
        """Whether the object is our last upload, and nobody has built on it."""
        return fetched.label == self._label

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Try again while the bucket cannot be reached, until it takes too long, or in a hurry once."""
        try:
            return Retrying(
                retry=retry_if_exception_type(Unreachable),
                stop=stop_after_delay(self.config.retry_for) | stop_when_event_set(self._hurry),
                wait=wait_random_exponential(multiplier=0.05, max=2.0),
                sleep=sleep_using_event(self._hurry),
                reraise=True,
            )(attempt)
        except Unreachable as exc:
            raise StoreUnavailable(f"gave up: {exc}") from exc

    def _upload_leftovers(self, database: SqliteDatabase) -> None:
        """Upload what another process has left behind; if it cannot be any more, keep it aside."""
        replacing = self.slot.base.etag
        found = self.remote.get(unless=replacing)
        if found is not None and found.etag != replacing:
            replacing = found.etag
        if found is None or found.etag == self.slot.base.etag or self._is_our_last(found):
            self._begin_upload()
            database.write(self._record, needs_schema=False)
            try:
                self._upload(self._dump(database), replacing=replacing)
            except Lost:
                found = self._patiently(lambda: self.remote.get(unless=None))
                if found is None or not self._contains_last_upload(found):
                    self._keep_aside(self._dump(database))
            else:
                log.warning("%s: uploaded what another process had left behind", self.remote)
        else:
            self._keep_aside(self._dump(database))

    @staticmethod
    def _dump(database: SqliteDatabase) -> bytes:
        with database.raw_connection() as connection:
            return images.dump(connection)

    def _load(self, database: SqliteDatabase, data: bytes) -> None:
        with database.raw_connection() as connection:
            images.load(connection, data, source=str(self.remote))

    def _deflate(self, database: SqliteDatabase) -> None:
        with database.raw_connection() as connection:
            self._counters.vacuums += images.deflate(connection)

    def _keep_aside(self, data: bytes) -> Path:
        path = self.slot.set_aside(data)
        self._set_aside.append(path)
        log.error("%s was changed by somebody else; local writes are kept in %s", self.remote, path)
        return path

    @staticmethod
    def _clock() -> float:
        return time.monotonic()
