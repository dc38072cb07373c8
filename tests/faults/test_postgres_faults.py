"""PostgreSQL restarts, disappears, loses answers, refuses: nothing is lost, doubled or hidden."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, text

import pgqrs
from pgqrs.config import parse_dsn
from pgqrs.testing.portal import Portal, Synced
from pgqrs.testing.postgres import LocalPostgres, local_postgres
from tests.faults.proxy import Proxy

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    """A server of our own, to be stopped and started."""
    with local_postgres() as server:
        with pgqrs.Store(server.dsn) as store:
            store.admin().install()
        yield server


@pytest.fixture(params=["sync", "async"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Opener]:
    with ExitStack() as cleanup:
        if request.param == "sync":
            yield lambda dsn, **settings: cleanup.enter_context(pgqrs.Store(dsn, **settings))
            return
        portal = Portal()
        cleanup.callback(portal.close)

        def opened(dsn: str, **settings: Any) -> Any:
            store = portal.run(lambda: pgqrs.connect(dsn, **settings))
            return cleanup.enter_context(Synced(portal, store))

        yield opened


@pytest.fixture
def store(server: LocalPostgres, open_store: Opener) -> Any:
    store = open_store(server.dsn)
    clean(store)
    return store


@pytest.fixture
def proxy(server: LocalPostgres) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def through_proxy(store: Any, proxy: Proxy, open_store: Opener) -> Any:
    """A store on the same database whose answers can be lost."""
    return open_store(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres")


def clean(store: Any) -> None:
    admin = store.admin()
    for queue in admin.list_queues():
        admin.delete_queue(queue.queue_name, force=True)
    admin.create_queue("tasks")


def payloads(store: Any) -> list[Any]:
    return [message.payload for message in store.admin().peek("tasks", 1000)]


@pytest.mark.parametrize("immediately", [False, True], ids=["orderly", "crash"])
def test_a_restart_between_two_calls_is_not_noticed(
    server: LocalPostgres, store: Any, immediately: bool
) -> None:
    producer = store.producer("tasks")
    with store.consumer("tasks") as consumer:
        producer.enqueue("before")
        server.restart(immediately=immediately)
        producer.enqueue("after")
        server.restart(immediately=immediately)
        producer.enqueue_many(["later", "still"])
        server.restart(immediately=immediately)
        claimed = consumer.dequeue(10)
        assert [message.payload for message in claimed] == ["before", "after", "later", "still"]
        server.restart(immediately=immediately)
        consumer.ack_many(claimed)
    assert store.admin().queue_stats("tasks").archived["completed"] == 4


def test_a_server_that_is_away_for_a_moment_is_waited_for(
    server: LocalPostgres, store: Any
) -> None:
    server.stop()
    back = threading.Timer(0.5, server.start)
    back.start()
    store.producer("tasks").enqueue("waited")
    back.join()
    assert payloads(store) == ["waited"]


def test_a_server_that_stays_away_is_an_error_in_bounded_time(
    server: LocalPostgres, open_store: Opener
) -> None:
    store = open_store(server.dsn, retry_for=0.3)
    server.stop()
    try:
        with pytest.raises(pgqrs.StoreUnavailable) as caught:
            store.producer("tasks").enqueue(1)
        assert "gave up after 0.3 s" in str(caught.value)
        unopened = open_store(server.dsn, retry_for=0.3)  # opening it is fine, using it is not
        with pytest.raises(pgqrs.StoreUnavailable):
            unopened.admin().list_queues()
    finally:
        server.start()


def test_a_refused_login_is_not_waited_for(server: LocalPostgres) -> None:
    with pytest.raises(Exception, match="does not exist"):
        pgqrs.Store(f"postgresql://postgres@127.0.0.1:{server.port}/missing", retry_for=600)


def test_an_enqueue_whose_answer_is_lost_is_not_repeated_but_reported(
    store: Any, proxy: Proxy, through_proxy: Any
) -> None:
    producer = through_proxy.producer("tasks")
    producer.enqueue("first")
    proxy.lose_next_answer()
    with pytest.raises(pgqrs.CommitUncertain):
        producer.enqueue("perhaps")
    assert proxy.lost.is_set()
    assert payloads(store) == ["first", "perhaps"]  # it was committed: a retry would double it
    producer.enqueue("goes on")
    assert payloads(store) == ["first", "perhaps", "goes on"]


def test_a_transaction_whose_commit_answer_is_lost_is_reported(
    store: Any, proxy: Proxy, through_proxy: Any
) -> None:
    through_proxy.admin().list_queues()
    runs = []

    def work(connection: Connection) -> None:
        runs.append(1)
        connection.execute(text("UPDATE pgqrs_queues SET max_read_ct = max_read_ct + 1"))
        proxy.lose_next_answer()  # the next answer is that to COMMIT

    before = store.admin().get_queue("tasks").max_read_ct
    with pytest.raises(pgqrs.CommitUncertain):
        through_proxy.write(work)
    assert len(runs) == 1
    assert store.admin().get_queue("tasks").max_read_ct == before + 1


def test_a_transaction_broken_before_its_commit_is_repeated(
    store: Any, proxy: Proxy, through_proxy: Any
) -> None:
    through_proxy.admin().list_queues()
    runs = []

    def work(connection: Connection) -> None:
        runs.append(1)
        if len(runs) == 1:
            proxy.lose_next_answer()
        connection.execute(text("UPDATE pgqrs_queues SET max_read_ct = max_read_ct + 1"))

    before = store.admin().get_queue("tasks").max_read_ct
    through_proxy.write(work)
    assert len(runs) == 2
    assert store.admin().get_queue("tasks").max_read_ct == before + 1


def test_an_ack_whose_answer_is_lost_is_repeated_and_succeeds(
    store: Any, proxy: Proxy, through_proxy: Any
) -> None:
    id = store.producer("tasks").enqueue(1)
    with through_proxy.consumer("tasks") as consumer:
        (message,) = consumer.dequeue()
        proxy.lose_next_answer()
        consumer.ack(message)
        assert proxy.lost.is_set()
    assert store.admin().get_archived(id).archive_reason == "completed"


def test_a_dequeue_whose_answer_is_lost_claims_again(
    store: Any, proxy: Proxy, through_proxy: Any
) -> None:
    first, second = store.producer("tasks").enqueue_many([1, 2])
    with through_proxy.consumer("tasks", lease=600) as consumer:
        proxy.lose_next_answer()
        assert [message.id for message in consumer.dequeue()] == [second]
        assert proxy.lost.is_set()
    # The first is leased by a claim nobody heard of: like a holder that died.
    assert store.admin().get_message(first).read_ct == 1


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_serialization_failure_or_deadlock_is_repeated(store: Any, code: str) -> None:
    runs = []

    def work(connection: Connection) -> str:
        runs.append(1)
        if len(runs) < 3:
            raised = f"DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '{code}'; END $$"
            connection.execute(text(raised))
        return "done"

    assert store.write(work) == "done"
    assert len(runs) == 3


def test_another_error_is_not_repeated(store: Any) -> None:
    runs = []

    def work(connection: Connection) -> None:
        runs.append(1)
        connection.execute(text("SELECT 1 / 0"))

    with pytest.raises(Exception, match="division by zero"):
        store.write(work)
    assert len(runs) == 1


def test_terminated_connections_are_replaced(server: LocalPostgres, store: Any) -> None:
    producer = store.producer("tasks")
    producer.enqueue(1)
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgqrs'"
        )
        # Until the server's farewell has arrived, nobody could know.
        admin.execute("SELECT pg_sleep(0.2)")
    producer.enqueue(2)
    assert payloads(store) == [1, 2]


def test_prepared_statements_that_vanish_are_done_without(store: Any) -> None:
    producer = store.producer("tasks")
    for n in range(10):  # enough for the driver to prepare it
        producer.enqueue(n)
    # As behind a pooler: the session is another one than the driver thinks.
    store.read(lambda connection: connection.exec_driver_sql("DEALLOCATE ALL").close())
    for n in range(10, 20):
        producer.enqueue(n)
    assert payloads(store) == list(range(20))


def test_the_applications_engine_stays_open_and_as_it_was(server: LocalPostgres) -> None:
    engine = create_engine(parse_dsn(server.dsn))
    with pgqrs.Store(engine) as store:
        clean(store)
        store.producer("tasks").enqueue(1)
    with engine.begin() as connection:
        assert connection.get_isolation_level() == "READ COMMITTED"
        assert connection.connection.dbapi_connection.autocommit is False  # type: ignore[union-attr]
        assert connection.execute(text("SELECT count(*) FROM pgqrs_messages")).scalar() == 1
    engine.dispose()
