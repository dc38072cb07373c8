"""One SQLite database as one object in a bucket, shared by any number of hosts.

The database of a store is a *replica* of the object, in one of two modes: see `durable` and
`local`. This module makes it look like any other database, and sees to its end: the replica knows
nothing of the store, so a store that nobody uses any more is garbage collected, and takes its
replica, with its thread and its files, along. In local mode what was not uploaded by then still is,
also when the interpreter exits.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from pgqrs.clock import Clock, SystemClock
from pgqrs.config import Config, S3Settings
from pgqrs.errors import ConflictError, InvalidConfig
from pgqrs.stores import placement
from pgqrs.stores.application import async_application_engine
from pgqrs.stores.base import Database, T, Work
from pgqrs.stores.durable import DurableReplica
from pgqrs.stores.forks import abandon, watch
from pgqrs.stores.local import LocalReplica
from pgqrs.stores.objects import RemoteObject, Unreachable
from pgqrs.stores.previous import restore
from pgqrs.stores.replica import OPEN, TOLERATED, Replica
from pgqrs.stores.wakeups import Sentry, Wakeups
from pgqrs.types import ConcurrencyModel, S3State, S3Stats, S3Version

_CHECKED: set[tuple[str | None, str]] = set()
"""Servers and buckets that were found to honour `If-Match`."""
MODES: dict[str, type[Replica]] = {"durable": DurableReplica, "local": LocalReplica}


class S3Database(Database):
    """A database that is an object in a bucket."""

    backend_name = "s3"
    concurrency_model = ConcurrencyModel.MULTI_PROCESS
    uploads_every_write = True
    bridge_threads = 256  # they only wait, and who waits together shares an upload

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        write_lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        if engine is not None:
            raise InvalidConfig("a store in S3 is opened by URL, not by an engine")
        if config.schema is not None:
            raise InvalidConfig("SQLite has no schemas; use another key instead")
        self._settings = S3Settings.of(config)
        self._replica: Replica | None = None
        self._opening = threading.Lock()
        self._sentry = ObjectSentry()
        self._opened_at = time.monotonic()
        super().__init__(config, clock=clock, sleep=sleep, write_lock=write_lock)
        self.wakeups = Wakeups(self._sentry)
        self._async_engine: AsyncEngine | None = None
        self._url = URL.create("s3", host=self._settings.bucket, database=self._settings.key)
        self._open_replica()
        watch(self)

    @property
    def replica(self) -> Replica:
        """The local side of the object. A process that was forked makes one of its own."""
        return self._open_replica() if self._replica is None else self._replica

    def _open_replica(self) -> Replica:
        with self._opening:
            if self._replica is None:
                wakeups = self.wakeups
                replica = MODES[self._settings.mode](
                    self.config,
                    self._settings,
                    now=(self.clock or SystemClock()).now,
                    changed=lambda: wakeups.ring(None),
                )
                self._sentry.refresh = replica.refresh
                self._end = weakref.finalize(self, _abandon, replica, self._sentry, os.getpid())
                self._end.atexit = False
                self._replica = replica
            return self._replica

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._end.detach()
        abandon((self._replica, self._async_engine))
        self._replica = self._async_engine = None
        self._opening = threading.Lock()
        self._sentry.refresh = lambda: self.replica.refresh()

    @property
    def url(self) -> URL:
        return self._url

    @property
    def engine(self) -> Engine:
        return self.replica.engine

    @property
    def async_engine(self) -> AsyncEngine:
        """The same for asyncio; needs aiosqlite."""
        if self._async_engine is None:
            database = self.replica.databases[0]
            self._async_engine = async_application_engine(database, self.replica)
        return self._async_engine

    def is_reached_by(self, connection: Connection) -> bool:
        """True if the application has this connection from an engine of this database."""
        engines = [self.engine]
        if self._async_engine is not None:
            engines.append(self._async_engine.sync_engine)
        return any(connection.engine.pool is engine.pool for engine in engines)

    def now(self) -> datetime:
        return (self.clock or SystemClock()).now()

    def write(
        self,
        work: Work[T],
        *,
        single: bool = False,
        repeatable: bool = False,
        needs_schema: bool = True,
        probe: bool = False,
    ) -> T:
        self._check(needs_schema)
        self.replica.report(repeatable=repeatable)
        until = time.monotonic() + self.config.retry_for
        return self._persist(
            lambda: self.replica.write(work, probe=probe, replays=repeatable, until=until),
            repeatable=repeatable,
        )

    def read(self, work: Work[T], *, needs_schema: bool = True) -> T:
        self._check(needs_schema)
        until = time.monotonic() + self.config.retry_for
        return self._persist(lambda: self.replica.read(work, until=until), repeatable=True)

    def _read(self, work: Work[T]) -> T:
        return self.replica.read(work)

    def _write(self, work: Work[T], single: bool) -> T:
        self.replica.report(repeatable=False)
        return self.replica.write(work)

    def _write_alone(self, work: Work[T]) -> T:
        self.replica.report(repeatable=False)
        return self.replica.write_alone(work)

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, ConflictError):
            return self.config.s3_retry_conflicts
        return isinstance(error, Unreachable)

    @contextmanager
    def tolerating(self, seconds: float) -> Iterator[None]:
        token = TOLERATED.set(seconds)
        try:
            yield
        finally:
            TOLERATED.reset(token)

    @property
    def address(self) -> str:
        return str(self.replica.remote)

    @property
    def _schema_is_there(self) -> bool:
        return self.replica.schema_is_there

    @_schema_is_there.setter
    def _schema_is_there(self, found: bool) -> None:
        if found:
            self.replica.schema_is_there = True

    # What is special about an object in a bucket

    @property
    def remote(self) -> Self:
        return self

    def pull(self) -> bool:
        return self._remotely(self.replica.refresh)

    def submit(self, operations: Iterable[Work[Any]]) -> int:
        self._check(needs_schema=False)
        return self.replica.submit(operations)

    def flush(self) -> list[Any]:
        return self._remotely(self.replica.flush)

    def state(self) -> S3State:
        return self._remotely(self.replica.state)

    def stats(self) -> S3Stats:
        self._check(needs_schema=False)
        return replace(self.replica.stats(), seconds=time.monotonic() - self._opened_at)

    def snapshot(self, path: Path) -> None:
        self._remotely(lambda: self.replica.snapshot(path))

    def versions(self, limit: int) -> list[S3Version]:
        return self._remotely(lambda: self.replica.remote.versions(limit))

    def restore(self, version: str) -> None:
        self._remotely(lambda: restore(self.replica.remote, version))
        self.pull()

    @classmethod
    def kind_for(cls, config: Config) -> type[Database]:
        if S3Settings.of(config).shards is None:
            return cls
        from pgqrs.stores.shards import ShardedDatabase  # it is made of these

        return ShardedDatabase

    def open(self) -> None:
        """Refuse a server that would let several writers overwrite each other."""
        self._check_conditions()
        super().open()
        if not self._schema_is_there:
            with suppress(Unreachable):  # then the first use of an empty store, its install, looks
                self._check_layout()

    def install(self) -> None:
        if not self._schema_is_there:
            self._remotely(self._check_layout)
        super().install()

    def _check_layout(self) -> None:
        """Refuse to begin a store where there is one of several shards."""
        first = shard_key(self._settings.key, 0)
        if exists(replace(self._settings, key=first)):
            raise InvalidConfig(
                f"{self.address} is a store of several shards: open it with ?shards= as it was made"
            )

    def _check_schema(self, connection: Connection) -> None:
        place = placement.recorded(connection)
        if place is not None:
            raise InvalidConfig(
                f"{self.address} is shard {place.number} of a store: open the whole store, "
                f"with ?shards={place.count}"
            )
        super()._check_schema(connection)

    def _check_conditions(self) -> None:
        remote = self.replica.remote
        place = (self._settings.endpoint_url, self._settings.bucket)
        if place in _CHECKED or remote.is_amazons:
            return
        honoured = remote.honours_conditions()
        if honoured is False:
            raise InvalidConfig(
                f"{remote}: the server ignores If-Match, so that writers would overwrite each other"
            )
        if honoured:
            _CHECKED.add(place)

    def _remotely(self, call: Callable[[], T]) -> T:
        self._check(needs_schema=False)
        return self._persist(call, repeatable=False)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._end.detach()
        self.wakeups.close()
        if self._replica is not None:
            self._replica.close()


def shard_key(key: str, number: int) -> str:
    """The key of an object of a store of several shards."""
    return f"{key.rstrip('/')}/{number:03}.sqlite"


def exists(settings: S3Settings) -> bool:
    """True if there is such an object. One that the bucket does not let this process see counts as
    missing.
    """
    try:
        return RemoteObject(settings).etag() is not None
    except InvalidConfig:
        return False


class ObjectSentry(Sentry):
    """Looks at the object from time to time; a look that finds nothing new is a conditional GET."""

    EVERY = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.refresh: Callable[[], bool] = lambda: False

    @property
    def hears(self) -> bool:
        return True

    def run(self) -> None:
        while not self._stop.wait(self.EVERY):
            self._wanted.wait()
            try:
                self.refresh()  # rings by itself
            except Exception:  # who waits also looks by itself, and gets the error
                continue


def _abandon(replica: Replica, sentry: Sentry, pid: int) -> None:
    """Nobody uses the store any more. This may run in any thread: it must not wait."""
    if pid != os.getpid():
        return
    sentry.stop_soon()
    if replica.task.runs:
        replica.task.stop(finish=True)
    else:
        replica.release()


@atexit.register
def _close_all() -> None:
    for replica in list(OPEN):
        if replica.pid == os.getpid() and not replica.closed:
            replica.close_in_a_hurry()
