"""SQLite: locks held elsewhere, full disks, engines with other settings."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text

import pgqrs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(url) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        yield store


def pragma(connection: Any, name: str) -> Any:
    return connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()


def test_every_connection_has_its_pragmas(store: pgqrs.Store) -> None:
    with ExitStack() as held:
        for _ in range(8):
            connection = held.enter_context(store.engine.connect())
            assert pragma(connection, "journal_mode") == "wal"
            assert pragma(connection, "synchronous") == 2
            assert pragma(connection, "foreign_keys") == 1
            assert pragma(connection, "busy_timeout") == 5000


def test_the_pragmas_are_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQRS_SQLITE_JOURNAL_MODE", "delete")
    monkeypatch.setenv("PGQRS_SQLITE_SYNCHRONOUS", "normal")
    with (
        pgqrs.Store(f"sqlite:///{path}", sqlite_busy_timeout=1.5) as store,
        store.engine.connect() as connection,
    ):
        assert pragma(connection, "journal_mode") == "delete"
        assert pragma(connection, "synchronous") == 1
        assert pragma(connection, "busy_timeout") == 1500


def test_a_short_lock_elsewhere_is_waited_for(store: pgqrs.Store, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.execute, ["COMMIT"])
    release.start()
    store.producer("tasks").enqueue("waited")
    release.join()
    other.close()
    assert [message.payload for message in store.admin().peek("tasks")] == ["waited"]


def test_a_lock_that_stays_is_an_error_in_bounded_time(store: pgqrs.Store, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pgqrs.Store(f"sqlite:///{path}", sqlite_busy_timeout=0.05, retry_for=0.2) as impatient:
        with pytest.raises(pgqrs.StoreUnavailable, match="locked"):
            impatient.producer("tasks").enqueue(1)
        assert impatient.admin().peek("tasks") == []  # reading goes on
        other.execute("ROLLBACK")
        impatient.producer("tasks").enqueue(2)
    other.close()


def test_readers_are_not_held_up_by_a_writer(store: pgqrs.Store) -> None:
    store.producer("tasks").enqueue("committed")
    writing, read = threading.Event(), threading.Event()

    def write(connection: Connection) -> None:
        connection.execute(text("DELETE FROM pgqrs_messages"))
        writing.set()
        assert read.wait(100)

    writer = threading.Thread(target=store.write, args=(write,))
    writer.start()
    assert writing.wait(100)
    assert [message.payload for message in store.admin().peek("tasks")] == ["committed"]
    read.set()
    writer.join()
    assert store.admin().peek("tasks") == []


def leave_room_for(store: pgqrs.Store, pages: int) -> None:
    """Let the disk be full after so many pages more, for the connection that writes."""

    def limit(connection: Connection) -> None:
        used = pragma(connection, "page_count")
        connection.exec_driver_sql(f"PRAGMA max_page_count={used + pages}").close()

    store.write(limit)


def test_a_full_disk_refuses_what_does_not_fit_and_keeps_the_rest(store: pgqrs.Store) -> None:
    producer = store.producer("tasks")
    kept = producer.enqueue_many(range(10))
    leave_room_for(store, 2)
    with pytest.raises(pgqrs.StatementFailed, match="full") as caught:
        producer.enqueue_many(["x" * 10_000] * 10)
    assert caught.value.code == "SQLITE_FULL"
    assert [message.id for message in store.admin().peek("tasks", 100)] == kept
    leave_room_for(store, 1000)
    producer.enqueue_many(["x" * 10_000] * 10)
    assert store.admin().queue_stats("tasks").ready == 20


def test_works_that_fill_the_disk_do_not_fail_the_works_beside_them(store: pgqrs.Store) -> None:
    leave_room_for(store, 20)
    producer = store.producer("tasks")

    def enqueue(n: int) -> int | None:
        try:
            return producer.enqueue("x" * 500_000 if n % 4 == 0 else n)
        except pgqrs.StatementFailed:
            return None

    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(enqueue, range(64)))
    kept = {message.id for message in store.admin().peek("tasks", 1000)}
    assert kept == {id for id in results if id is not None}
    assert all(results[n] is not None for n in range(64) if n % 4)
    assert all(results[n] is None for n in range(64) if n % 4 == 0)


def test_exclusive_access_is_told(store: pgqrs.Store, url: str) -> None:
    store.verify_exclusive_access()
    store.producer("tasks").enqueue("still works")
    code = (
        f"import pgqrs; store = pgqrs.Store({url!r}); store.admin().stats(); print('in', flush=True); "
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(pgqrs.NotExclusive):
            store.verify_exclusive_access()
        other.communicate(b"\n")
    store.verify_exclusive_access()
    assert store.admin().queue_stats("tasks").ready == 1


def test_an_engine_of_the_applications_is_neither_changed_nor_disposed(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with pgqrs.Store(engine, upgrade=True) as store, pytest.raises(pgqrs.InvalidConfig):
        store.verify_exclusive_access()
    with engine.connect() as connection:
        before = [pragma(connection, name) for name in ("journal_mode", "foreign_keys")]
    with pgqrs.Store(engine) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        store.producer("tasks").enqueue(1)
    with engine.connect() as connection:
        assert [pragma(connection, name) for name in ("journal_mode", "foreign_keys")] == before
        assert connection.connection.dbapi_connection.isolation_level == ""  # type: ignore[union-attr]
        assert connection.execute(text("SELECT count(*) FROM pgqrs_messages")).scalar() == 1
    engine.dispose()


def test_an_engine_that_weakens_a_promise_is_warned_about_once(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF").close())
    with pytest.warns(UserWarning, match="synchronous"):
        store = pgqrs.Store(engine, upgrade=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.admin().create_queue("tasks")
    engine.dispose()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_an_engine_that_begins_by_itself(path: Path, begin: str) -> None:
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    with pgqrs.Store(engine, upgrade=True) as store:
        store.admin().create_queue("tasks")
        producer = store.producer("tasks")
        with ThreadPoolExecutor(8) as threads:
            ids = list(threads.map(producer.enqueue, range(100)))
        assert len(set(ids)) == 100
        assert store.admin().queue_stats("tasks").ready == 100
    engine.dispose()


def test_threads_share_a_database_in_memory() -> None:
    with pgqrs.Store("sqlite::memory:", upgrade=True) as store:
        store.admin().create_queue("tasks")
        producer = store.producer("tasks")
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(producer.enqueue, range(200)))
        assert store.admin().queue_stats("tasks").ready == 200


def test_a_pool_that_stays_empty_is_an_error_of_ours() -> None:
    with pgqrs.Store("sqlite::memory:", upgrade=True, retry_for=0.1) as store:
        with store.engine.connect(), pytest.raises(pgqrs.StoreUnavailable, match="pool"):
            store.admin().list_queues()
        assert store.admin().list_queues() == []


def test_two_databases_in_memory_are_two() -> None:
    with (
        pgqrs.Store("sqlite::memory:", upgrade=True) as one,
        pgqrs.Store("sqlite::memory:", upgrade=True) as two,
    ):
        one.admin().create_queue("only here")
        assert two.admin().list_queues() == []


def test_a_commit_that_finds_a_reader_in_its_way_is_repeated(path: Path, url: str) -> None:
    settings: Any = {"sqlite_journal_mode": "DELETE", "sqlite_busy_timeout": 0.05}
    with pgqrs.Store(url, upgrade=True, retry_for=60, **settings) as store:
        store.admin().create_queue("tasks")
        reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM pgqrs_queues").fetchall()
        leaves = threading.Timer(0.5, reader.execute, ["ROLLBACK"])
        leaves.start()
        store.producer("tasks").enqueue("waited")
        leaves.join()
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM pgqrs_queues").fetchall()
        with (
            pgqrs.Store(url, retry_for=0.3, **settings) as impatient,
            pytest.raises(pgqrs.StoreUnavailable, match=r"gave up after 0\.3 s: .*locked"),
        ):
            impatient.producer("tasks").enqueue("in vain")
        reader.close()
        assert [message.payload for message in store.admin().peek("tasks")] == ["waited"]


def test_a_commit_of_sqlalchemy_that_finds_a_reader_in_its_way_is_repeated(
    path: Path, url: str
) -> None:
    settings: Any = {"sqlite_journal_mode": "DELETE", "sqlite_busy_timeout": 0.05}
    rename = text("UPDATE pgqrs_queues SET queue_name = 'renamed'")
    with pgqrs.Store(url, upgrade=True, retry_for=60, **settings) as store:
        store.admin().create_queue("tasks")
        reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM pgqrs_queues").fetchall()
        tried = []

        def work(connection: Connection) -> None:
            tried.append(1)
            if len(tried) == 3:
                reader.execute("ROLLBACK")
            connection.execute(rename)

        store.write(work)
        reader.close()
        assert [queue.queue_name for queue in store.admin().list_queues()] == ["renamed"]
        assert len(tried) == 3


def test_sqlite_itself_waits_no_longer_than_a_call_may(path: Path) -> None:
    with (
        pgqrs.Store(f"sqlite:///{path}", retry_for=0.5) as store,
        store.engine.connect() as connection,
    ):
        assert pragma(connection, "busy_timeout") == 500


def test_a_file_that_is_no_database_is_told(path: Path, url: str) -> None:
    path.write_bytes(b"this is no database at all, but long enough to look like one" * 100)
    with pytest.raises(pgqrs.StoreDamaged):
        pgqrs.Store(url)


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(pgqrs.StoreUnavailable, match="unable to open") as caught:
        pgqrs.Store(f"sqlite:///{tmp_path}")  # a directory
    assert caught.value.address == str(tmp_path)
