"""Wake-ups from another process: two stores that share nothing but the database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event

import pgqrs
from pgqrs.stores import wakeups

LONG = 100


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears looks very seldom by himself, and who is deaf too: what arrives was heard of."""
    monkeypatch.setattr(wakeups, "SELDOM", LONG)
    monkeypatch.setattr(wakeups, "OFTEN", LONG)
    monkeypatch.setattr("pgqrs.consumer.SELDOM", LONG)  # so long producers know that he waits


@pytest.fixture
def here(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        yield store


@pytest.fixture
def elsewhere(database: str, here: pgqrs.Store) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        yield store


def start_waiting(
    store: pgqrs.Store, queue: str = "tasks"
) -> tuple[threading.Thread, list[pgqrs.Message]]:
    """A dequeue that waits, and whose sentry hears."""
    found: list[pgqrs.Message] = []
    consumer = store.consumer(queue).open()
    thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
    thread.start()
    until_expected(store, thread)
    return thread, found


def until_expected(store: pgqrs.Store, thread: threading.Thread) -> None:
    """Until producers elsewhere know that somebody waits; or the waiting is over already."""
    until(lambda: is_expected(store) or not thread.is_alive())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_expected(store: Any) -> bool:
    doorbells = store._database.wakeups._doorbells
    if not store.supports_notify:
        return bool(doorbells)
    with psycopg.connect(store.config.dsn) as connection:
        found = connection.execute("SELECT waiting_until FROM pgqrs_waiting").fetchone()
    return bool(doorbells) and found is not None and found[0] is not None


def test_an_enqueue_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    for n in range(5):
        thread, found = start_waiting(here)
        elsewhere.producer("tasks").enqueue(n)
        thread.join()
        assert [message.payload for message in found] == [n]


def test_names_may_begin_with_anything(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    for n, name in enumerate(("?x", "?", "%s", "'", "a.b", "*")):
        if n == 0:
            here.admin().delete_queue("tasks")  # `is_expected` looks at the only queue
        here.admin().create_queue(name)
        thread, found = start_waiting(here, name)
        elsewhere.producer(name).enqueue(n)
        thread.join()
        assert [message.payload for message in found] == [n]
        here.admin().delete_queue(name, force=True)


def test_a_commit_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    thread, found = start_waiting(here)
    with elsewhere.engine.begin() as connection:
        elsewhere.using(connection).enqueue_many("tasks", ["in a transaction"])
        assert found == []
    thread.join()
    assert [message.payload for message in found] == ["in a transaction"]


def test_a_release_elsewhere_wakes_who_waits(here: pgqrs.Store, elsewhere: pgqrs.Store) -> None:
    elsewhere.producer("tasks").enqueue("back")
    with elsewhere.consumer("tasks") as holder:
        (held,) = holder.dequeue(lease=LONG)
        thread, found = start_waiting(here)
        holder.release(held)
        thread.join()
    assert [message.id for message in found] == [held.id]


def test_a_delay_that_ends_sooner_elsewhere_wakes_who_waits(
    here: pgqrs.Store, elsewhere: pgqrs.Store
) -> None:
    elsewhere.producer("tasks").enqueue("later", delay=LONG)
    thread, found = start_waiting(here)
    elsewhere.producer("tasks").enqueue("sooner", delay=0.5)
    thread.join()
    assert [message.payload for message in found] == ["sooner"]


def test_a_queue_resumed_elsewhere_wakes_who_waits(
    here: pgqrs.Store, elsewhere: pgqrs.Store
) -> None:
    elsewhere.producer("tasks").enqueue("paused")
    elsewhere.admin().pause_queue("tasks")
    thread, found = start_waiting(here)
    elsewhere.admin().resume_queue("tasks")
    thread.join()
    assert [message.payload for message in found] == ["paused"]


@pytest.mark.parametrize("settings", [{"max_in_flight": 1}, {"max_in_flight_per_key": 1}], ids=str)
def test_room_made_elsewhere_wakes_who_waits(
    here: pgqrs.Store, elsewhere: pgqrs.Store, settings: dict[str, Any]
) -> None:
    here.admin().configure_queue("tasks", **settings)
    producer = elsewhere.producer("tasks")
    ids = [producer.enqueue(n, key="same", unique=None) for n in range(2)]
    with elsewhere.consumer("tasks") as holder:
        (held,) = holder.dequeue(2, lease=LONG)
        thread, found = start_waiting(here)
        holder.ack(held)
        thread.join()
    assert [message.id for message in found] == ids[1:]


def test_the_end_of_a_predecessor_elsewhere_wakes_who_waits(
    here: pgqrs.Store, elsewhere: pgqrs.Store
) -> None:
    ids = [elsewhere.producer("tasks").enqueue(n, group="one") for n in range(2)]
    with elsewhere.consumer("tasks") as holder:
        (held,) = holder.dequeue(2, lease=LONG)
        thread, found = start_waiting(here)
        holder.ack(held)
        thread.join()
    assert [message.id for message in found] == ids[1:]


def test_a_file_is_watched_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "a.db")
    link = f"sqlite:///{tmp_path / 'link.db'}"
    with pgqrs.Store(link, upgrade=True) as here, pgqrs.Store(link) as elsewhere:
        here.admin().create_queue("tasks")
        for n in range(3):
            thread, found = start_waiting(here)
            elsewhere.producer("tasks").enqueue(n)
            thread.join()
            assert [message.payload for message in found] == [n]


def test_writes_to_another_queue_make_nobody_claim(sqlite_database: str) -> None:
    with (
        pgqrs.Store(sqlite_database, upgrade=True) as here,
        pgqrs.Store(sqlite_database) as elsewhere,
    ):
        here.admin().create_queue("tasks")
        here.admin().create_queue("busy")
        claims: list[int] = []
        consumer = here.consumer("tasks").open()
        claim = consumer._claim
        consumer._claim = lambda *a: claims.append(1) or claim(*a)  # type: ignore[method-assign, func-returns-value]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
        thread.start()
        until_expected(here, thread)
        busy = elsewhere.producer("busy")
        for n in range(100):
            busy.enqueue(n)
            time.sleep(0.005)
        tried = len(claims)
        elsewhere.producer("tasks").enqueue("at last")
        thread.join()
        assert [message.payload for message in found] == ["at last"]
        assert tried <= 5


def test_async_consumers_are_woken_from_elsewhere(
    database: str, here: pgqrs.Store, elsewhere: pgqrs.Store
) -> None:
    async def main() -> list[Any]:
        async with pgqrs.AsyncStore(database) as store, store.consumer("tasks") as consumer:
            got: list[Any] = []
            threads = threading.active_count()

            async def collect() -> None:
                async for message in consumer:
                    got.append(message.payload)
                    await consumer.ack(message)
                    if len(got) == 3:
                        await consumer.close()

            task = asyncio.create_task(collect())
            for n in range(3):
                while not is_expected(store):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(elsewhere.producer("tasks").enqueue, n)
                while len(got) <= n:
                    await asyncio.sleep(0.01)
            await task
            assert threading.active_count() <= threads + 40
            return got

    assert asyncio.run(main()) == [0, 1, 2]


def test_nothing_is_notified_while_nobody_waits(postgres_database: str) -> None:
    with (
        pgqrs.Store(postgres_database, upgrade=True) as store,
        psycopg.connect(postgres_database, autocommit=True) as listener,
    ):
        store.admin().create_queue("tasks")
        listener.execute("LISTEN pgqrs")
        for n in range(20):
            store.producer("tasks").enqueue(n)
        assert heard(listener, postgres_database) == []
        thread, _ = start_waiting(store)  # finds the first at once, and waits no more
        thread.join()
        with store.consumer("tasks") as consumer:
            consumer.ack_many(consumer.dequeue(50))
        thread, _ = start_waiting(store)
        store.producer("tasks").enqueue_many(range(100))
        thread.join()
        # One for a hundred, and for all who wait.
        assert heard(listener, postgres_database) == ["tasks"]


def heard(listener: psycopg.Connection, url: str) -> list[str]:
    """Queues that were notified about until now."""
    now = "\nuntil now"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_notify('pgqrs', %s)", [now])
    found: list[str] = []
    for notify in listener.notifies(timeout=LONG):  # in the order of commits
        if notify.payload == now:
            return found
        if notify.payload[0] != "\n":  # listeners call out to themselves
            found.append(notify.payload)
    raise AssertionError("the listener is deaf")


def test_a_deaf_listener_is_noticed_and_made_up_for(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "OFTEN", 0.05)
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        sentry = store._database.wakeups._sentry
        # As behind a pooler: it listens, and hears nothing.
        monkeypatch.setattr(sentry, "_channel", "nobody calls here")
        monkeypatch.setattr(sentry, "_call_out", lambda: "\n?unheard")
        consumer = store.consumer("tasks").open()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(consumer.dequeue(wait=LONG)))
        thread.start()
        until(lambda: bool(store._database.wakeups._doorbells))
        assert not store._database.wakeups.hears
        with pgqrs.Store(postgres_database) as other:
            other.producer("tasks").enqueue("found by looking")
        thread.join()
        assert [message.payload for message in found] == ["found by looking"]


def test_a_lost_listener_comes_back(postgres_database: str) -> None:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        thread, found = start_waiting(store)
        with psycopg.connect(postgres_database, autocommit=True) as admin:
            until(lambda: store._database.wakeups.hears)
            before = listeners(admin)
            for pid in before:
                admin.execute("SELECT pg_terminate_backend(%s)", [pid])
            until(lambda: listeners(admin).isdisjoint(before) and bool(listeners(admin)))
            until(lambda: store._database.wakeups.hears)
        until_expected(store, thread)
        with pgqrs.Store(postgres_database) as other:
            other.producer("tasks").enqueue("heard again")
        thread.join()
        assert [message.payload for message in found] == ["heard again"]


def listeners(connection: psycopg.Connection) -> set[int]:
    """The processes of the server that serve listeners of this database."""
    query = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE application_name = 'pgqrs-listener' AND datname = current_database()"
    )
    return {pid for (pid,) in connection.execute(query)}


def test_who_waits_hardly_asks(
    database: str, here: pgqrs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # as patient as it really is
    statements: list[str] = []

    def listen(_c: Any, _k: Any, statement: str, _p: Any, _x: Any, _m: Any) -> None:
        statements.append(statement)

    with here.consumer("tasks") as consumer:
        event.listen(Engine, "before_cursor_execute", listen)
        assert consumer.dequeue(wait=3) == []
        event.remove(Engine, "before_cursor_execute", listen)
    asked = [sql for sql in statements if not sql.startswith(("BEGIN", "PRAGMA"))]
    assert 0 < len(asked) <= 15


def test_a_long_schema_has_a_channel_of_its_own(postgres_database: str) -> None:
    names = ["ä" * 31, "ä" * 30 + "o"]
    channels = set()
    for name in names:
        with pgqrs.Store(postgres_database, schema=name, upgrade=True) as store:
            store.admin().create_queue("tasks")
            found: list[Any] = []
            consumer = store.consumer("tasks").open()

            def wait(consumer: Any = consumer, found: list[Any] = found) -> None:
                found.extend(consumer.dequeue(wait=LONG))

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: store._database.wakeups.hears)
            with store.engine.begin() as connection:
                store.using(connection).enqueue("tasks", name)
            thread.join()
            assert [message.payload for message in found] == [name]
            channels.add(store._database.channel)  # type: ignore[attr-defined]
    assert len(channels) == 2
