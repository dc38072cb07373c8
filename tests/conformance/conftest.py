"""The backends that the conformance suite runs on, each sync and async.

`sqlite`, `sqlite-memory` and `postgres` are opened by URL; `…-engine` is a store on the
application's own engine, which has settings that pgqrs would not choose. `s3-durable` and `s3-local`
are objects on a moto server, and `s3-sharded` is a store of several; with `PGQRS_TEST_S3=seaweedfs`
on one of SeaweedFS.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import AsyncAdaptedQueuePool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

import pgqrs
from pgqrs.clock import Clock
from pgqrs.models import Base
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness
from pgqrs.testing.portal import Portal, Synced
from tests.conftest import create_database, s3_client

EMPTIED = [name for name in Base.metadata.tables if name != "pgqrs_schema_history"]


class SyncTransaction:
    """Through a session: the connection is tested by the session's using it."""

    def __init__(self, store: pgqrs.Store, session: Session) -> None:
        self.using = store.using(session)
        self._session = session

    def execute(self, sql: str) -> None:
        self._session.execute(text(sql))


class SyncHarness(Harness):
    def __init__(self, target: Any, cleanup: ExitStack) -> None:
        self.clock = ManualClock()
        self._target = target
        self._cleanup = cleanup

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        return self._cleanup.enter_context(pgqrs.Store(self._target, clock=clock, **settings))

    @contextmanager
    def transaction(self, store: Any) -> Iterator[SyncTransaction]:
        with Session(store.engine) as session, session.begin():
            yield SyncTransaction(store, session)

    def corrupt(self, message_id: int) -> bool:
        return corrupt(self.open(clock=self.clock), message_id)


class MemoryHarness(SyncHarness):
    """A database in memory is its store: there is only one."""

    def __init__(self, cleanup: ExitStack) -> None:
        super().__init__("sqlite::memory:", cleanup)
        self._store = super().open(clock=self.clock)
        self._store.admin().install()

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        return self._cleanup.enter_context(pgqrs.Store(self._store.engine, clock=clock, **settings))


class AsyncTransaction:
    def __init__(self, portal: Portal, using: Any, connection: AsyncConnection) -> None:
        self.using = portal.wrap(using)
        self._portal = portal
        self._connection = connection

    def execute(self, sql: str) -> None:
        self._portal.run(lambda: self._connection.execute(text(sql)))


class AsyncHarness(Harness):
    def __init__(self, target: Any, engine: AsyncEngine | None, cleanup: ExitStack) -> None:
        """`engine` is the application's, for its own transactions."""
        self.clock = ManualClock()
        self.portal = Portal()
        cleanup.callback(self.portal.close)
        self._target = target
        self._engine = engine
        self._cleanup = cleanup
        if engine is not None:
            cleanup.callback(lambda: self.portal.run(engine.dispose))

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        async def opened() -> pgqrs.AsyncStore:
            return await pgqrs.connect(self._target, clock=clock, **settings)

        return self._cleanup.enter_context(Synced(self.portal, self.portal.run(opened)))

    @contextmanager
    def transaction(self, store: Any) -> Iterator[AsyncTransaction]:
        connection: AsyncConnection = self._application(store).connect()
        self.portal.run(connection.start)
        try:
            using = store._wrapped.using(connection)
            yield AsyncTransaction(self.portal, using, connection)
            self.portal.run(connection.commit)
        finally:
            self.portal.run(connection.close)

    def _application(self, store: Any) -> AsyncEngine:
        assert self._engine is not None
        return self._engine

    def corrupt(self, message_id: int) -> bool:
        return corrupt(self.open(clock=self.clock), message_id)


class Company:
    """Stores on one object. One in local mode uploads later, and looks only now and then; in
    company it does both before each call of another.
    """

    def __init__(self) -> None:
        self._replicas: list[Any] = []

    def join(self, database: Any) -> None:
        self._replicas.append(database.replica)
        for name in ("read", "write"):
            setattr(database.replica, name, self._after_the_others(database.replica, name))

    def _after_the_others(self, replica: Any, name: str) -> Callable[..., Any]:
        method = getattr(replica, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.catch_up(replica)
            return method(*args, **kwargs)

        return call

    def catch_up(self, replica: Any = None) -> None:
        for other in self._replicas:
            if other is not replica and not other.closed and other.settings.mode == "local":
                other.flush()
        if replica is not None and len(self._replicas) > 1:
            replica.refresh()


class S3Harness(SyncHarness):
    def __init__(self, target: str, cleanup: ExitStack) -> None:
        super().__init__(target, cleanup)
        self._company = Company()

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        self._company.catch_up()
        store = super().open(clock=clock, **settings)
        self._company.join(store._database)
        return store


class AsyncS3Harness(AsyncHarness):
    def __init__(self, target: str, cleanup: ExitStack) -> None:
        super().__init__(target, None, cleanup)
        self._company = Company()

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        self._company.catch_up()

        async def opened() -> pgqrs.S3Store:
            return await pgqrs.S3Store(self._target, clock=clock, **settings)

        store = self._cleanup.enter_context(Synced(self.portal, self.portal.run(opened)))
        self._company.join(store._wrapped._database)
        return store

    def _application(self, store: Any) -> AsyncEngine:
        engine: AsyncEngine = store._wrapped.async_engine
        return engine


class ShardedHarness(SyncHarness):
    """A store of several objects. A transaction of the application's own is on the shard of `tasks`."""

    @contextmanager
    def transaction(self, store: Any) -> Iterator[SyncTransaction]:
        with Session(store.shard(QUEUE).engine) as session, session.begin():
            yield SyncTransaction(store, session)

    def corrupt(self, message_id: int) -> bool:
        return corrupt(self.open(clock=self.clock).shard(QUEUE), message_id)


class AsyncShardedHarness(AsyncHarness):
    def __init__(self, target: str, cleanup: ExitStack) -> None:
        super().__init__(target, None, cleanup)

    def open(self, *, clock: Clock | None, **settings: Any) -> Any:
        async def opened() -> pgqrs.S3Store:
            return await pgqrs.S3Store(self._target, clock=clock, **settings)

        return self._cleanup.enter_context(Synced(self.portal, self.portal.run(opened)))

    def _application(self, store: Any) -> AsyncEngine:
        engine: AsyncEngine = store._wrapped.shard(QUEUE).async_engine
        return engine

    def corrupt(self, message_id: int) -> bool:
        return corrupt(self.open(clock=self.clock).shard(QUEUE), message_id)


def corrupt(store: Any, message_id: int) -> bool:
    if store.backend_name == "postgres":
        return False
    sql = f"UPDATE pgqrs_messages SET payload = '{{broken' WHERE id = {message_id}"
    store.write(lambda connection: connection.exec_driver_sql(sql))
    return True


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed SQLite file to copy: quicker than installing for each test."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    with pgqrs.Store(f"sqlite:///{path}", sqlite_journal_mode="delete") as store:
        store.admin().install()
    return path


@pytest.fixture
def sqlite_file(sqlite_template: Path, tmp_path: Path) -> Path:
    path = tmp_path / "test.db"
    shutil.copy(sqlite_template, path)
    return path


@pytest.fixture(scope="session")
def installed_postgres(postgres: str) -> str:
    """A database with the schema installed, emptied before each test that uses it."""
    dsn = create_database(postgres)
    with pgqrs.Store(dsn) as store:
        store.admin().install()
    return dsn


@pytest.fixture
def empty_postgres(installed_postgres: str) -> str:
    with psycopg.connect(installed_postgres, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {', '.join(EMPTIED)} RESTART IDENTITY")
    return installed_postgres


def _with_driver(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


def _sync_sqlite(path: Path, cleanup: ExitStack) -> Harness:
    return SyncHarness(f"sqlite:///{path}", cleanup)


def _sync_sqlite_engine(path: Path, cleanup: ExitStack) -> Harness:
    # As most applications have it: a rollback journal, and a driver that begins lazily.
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 20})
    cleanup.callback(engine.dispose)
    return SyncHarness(engine, cleanup)


def _async_sqlite(path: Path, cleanup: ExitStack) -> Harness:
    application = create_async_engine(f"sqlite+aiosqlite:///{path}")
    return AsyncHarness(f"sqlite:///{path}", application, cleanup)


def _async_sqlite_engine(path: Path, cleanup: ExitStack) -> Harness:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"timeout": 20})
    return AsyncHarness(engine, engine, cleanup)


def _async_sqlite_memory(cleanup: ExitStack) -> Harness:
    engine = create_async_engine(
        "sqlite+aiosqlite://", poolclass=AsyncAdaptedQueuePool, pool_size=1, max_overflow=0
    )
    harness = AsyncHarness(engine, engine, cleanup)
    harness.open(clock=None).admin().install()
    return harness


def _sync_postgres_engine(dsn: str, cleanup: ExitStack) -> Harness:
    engine = create_engine(_with_driver(dsn, "psycopg"), isolation_level="REPEATABLE READ")
    cleanup.callback(engine.dispose)
    return SyncHarness(engine, cleanup)


def _async_postgres(dsn: str, cleanup: ExitStack) -> Harness:
    return AsyncHarness(dsn, create_async_engine(_with_driver(dsn, "psycopg")), cleanup)


def _async_postgres_engine(dsn: str, cleanup: ExitStack) -> Harness:
    engine = create_async_engine(_with_driver(dsn, "psycopg"))
    return AsyncHarness(engine, engine, cleanup)


@pytest.fixture
def s3_object(s3_server: str, sqlite_template: Path, tmp_path: Path) -> str:
    """The URL of an object of its own, with the schema installed."""
    key = f"{uuid.uuid4().hex}.sqlite"
    s3_client(s3_server).put_object(Bucket="bucket", Key=key, Body=sqlite_template.read_bytes())
    return f"s3://bucket/{key}?endpoint_url={s3_server}&cache={tmp_path}"


SHARDS = 2
"""On which `tasks` and `workflows` are together, and other queues elsewhere. What becomes of effects on
another shard is in tests/s3/test_shards.py.
"""


@pytest.fixture(scope="session")
def shard_templates(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The objects of a store of several shards, with the schema installed."""
    cache = tmp_path_factory.mktemp("shards")
    client, prefix = s3_client(s3_server), uuid.uuid4().hex
    url = f"s3://bucket/{prefix}?shards={SHARDS}&endpoint_url={s3_server}&cache={cache}"
    with pgqrs.Store(url) as store:
        store.admin().install()
    keys = [f"{prefix}/{number:03}.sqlite" for number in range(SHARDS)]
    return [client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys]


@pytest.fixture
def s3_shards(s3_server: str, shard_templates: list[bytes], tmp_path: Path) -> str:
    """The URL of a store of several shards of its own."""
    client, prefix = s3_client(s3_server), uuid.uuid4().hex
    for number, body in enumerate(shard_templates):
        client.put_object(Bucket="bucket", Key=f"{prefix}/{number:03}.sqlite", Body=body)
    return f"s3://bucket/{prefix}?shards={SHARDS}&endpoint_url={s3_server}&cache={tmp_path}"


def _s3(make: Callable[..., Harness], mode: str) -> Callable[..., Harness]:
    return lambda target, cleanup: make(f"{target}&mode={mode}", cleanup)


MAKERS: dict[tuple[str, str], tuple[str | None, Callable[..., Harness]]] = {
    ("sqlite", "sync"): ("sqlite_file", _sync_sqlite),
    ("sqlite", "async"): ("sqlite_file", _async_sqlite),
    ("sqlite-memory", "sync"): (None, MemoryHarness),
    ("sqlite-memory", "async"): (None, _async_sqlite_memory),
    ("sqlite-engine", "sync"): ("sqlite_file", _sync_sqlite_engine),
    ("sqlite-engine", "async"): ("sqlite_file", _async_sqlite_engine),
    ("postgres", "sync"): ("empty_postgres", SyncHarness),
    ("postgres", "async"): ("empty_postgres", _async_postgres),
    ("postgres-engine", "sync"): ("empty_postgres", _sync_postgres_engine),
    ("postgres-engine", "async"): ("empty_postgres", _async_postgres_engine),
    ("s3-durable", "sync"): ("s3_object", _s3(S3Harness, "durable")),
    ("s3-durable", "async"): ("s3_object", _s3(AsyncS3Harness, "durable")),
    ("s3-local", "sync"): ("s3_object", _s3(S3Harness, "local")),
    ("s3-local", "async"): ("s3_object", _s3(AsyncS3Harness, "local")),
    ("s3-sharded", "sync"): ("s3_shards", ShardedHarness),
    ("s3-sharded", "async"): ("s3_shards", AsyncShardedHarness),
}


TELLING = {
    ("sqlite", "sync"),
    ("sqlite", "async"),
    ("postgres", "sync"),
    ("postgres", "async"),
    ("s3-durable", "async"),
}
"""Together they use nearly every line: `nox` runs these, and `nox -s full` the others."""
LOGIC = frozenset(
    f"test_{name}"
    for name in (
        *("payloads", "hostile", "results", "sending_many", "errors_kept"),
        *("workflows", "replaying", "effects", "controlling", "awaiting_runs", "retrying"),
        *("crashing", "long_steps", "scheduling"),
        *("tasking", "working", "misbehaving", "draining", "message_logs", "current_messages"),
    )
)
"""Modules of what is built on the calls that all others test. They are marked `logic`."""
TELLING_OF_LOGIC = ("sqlite-sync", "postgres-async")
TWINS = (
    *("sqlite-async", "sqlite-memory-sync", "sqlite-engine-async", "postgres-sync"),
    *("postgres-engine-async", "s3-durable-sync", "s3-local-async", "s3-sharded-sync"),
)
"""Variants on which `logic` runs by hand only, `nox -s twins`: each backend has it sync or async."""


def _variant(backend: str, face: str) -> Any:
    """A parameter that is marked with its database, and with `telling` if it is."""
    marks = [getattr(pytest.mark, backend.partition("-")[0])]
    if (backend, face) in TELLING:
        marks.append(pytest.mark.telling)
    return pytest.param((backend, face), id=f"{backend}-{face}", marks=marks)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in LOGIC:
            _mark_logic(item, item.name.partition("[")[2])


def _mark_logic(item: pytest.Item, variant: str) -> None:
    item.add_marker("logic")
    if not variant.startswith(TELLING_OF_LOGIC):
        item.own_markers = [mark for mark in item.own_markers if mark.name != "telling"]
    if variant.startswith(TWINS):
        item.add_marker("twin")


@pytest.fixture(params=[_variant(*key) for key in MAKERS])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    needs, make = MAKERS[request.param]
    arguments = [] if needs is None else [request.getfixturevalue(needs)]
    with ExitStack() as cleanup:
        yield make(*arguments, cleanup)
