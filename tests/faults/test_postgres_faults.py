"""PostgreSQL restarts, disappears, loses answers, refuses: nothing is lost, doubled or hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DataError, OperationalError, ProgrammingError

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
    store = open_store(server.dsn, retry_for=240)  # on a busy machine servers start slowly
    clean(store)
    return store


@pytest.fixture
def proxy(server: LocalPostgres) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def through_proxy(server: LocalPostgres, store: Any, proxy: Proxy, open_store: Opener) -> Any:
    """A store on the same database whose answers can be lost."""
    url = make_url(server.dsn).set(port=proxy.port)
    return open_store(url.render_as_string(hide_password=False))


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


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("127.0.0.1:{port}/missing", "does not exist"),
        ("no-such-host.invalid:{port}/postgres", "no-such-host.invalid"),
    ],
)
def test_a_database_that_is_not_there_is_told_when_it_is_opened(
    server: LocalPostgres, open_store: Opener, where: str, said: str
) -> None:
    address, password = where.format(port=server.port), make_url(server.dsn).password
    with pytest.raises(pgqrs.StoreUnavailable, match=said) as caught:
        open_store(f"postgresql://postgres:{password}@{address}", retry_for=600)
    assert caught.value.address == address
    assert address in str(caught.value)
    assert str(password) not in str(caught.value)
    assert isinstance(caught.value.__cause__, OperationalError)


def test_a_database_that_is_dropped_later_is_told_as_well(
    server: LocalPostgres, open_store: Opener
) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE doomed")
        doomed = make_url(server.dsn).set(database="doomed")
        store = open_store(doomed, upgrade=True, retry_for=600)
        admin.execute("DROP DATABASE doomed WITH (FORCE)")
    with pytest.raises(pgqrs.StoreUnavailable, match="does not exist") as caught:
        store.admin().list_queues()
    assert caught.value.address == f"127.0.0.1:{server.port}/doomed"


@pytest.fixture
def locked(server: LocalPostgres, store: Any) -> Iterator[psycopg.Connection]:
    """The row of the queue, held by somebody who has stopped to move."""
    with psycopg.connect(server.dsn) as frozen:
        frozen.execute("SELECT 1 FROM pgqrs_queues FOR UPDATE")
        yield frozen
        frozen.rollback()


def test_no_call_waits_for_a_lock_longer_than_it_may(
    server: LocalPostgres, open_store: Opener, locked: psycopg.Connection
) -> None:
    store = open_store(server.dsn, retry_for=0.5)
    calls: list[Callable[[], object]] = [
        lambda: store.producer("tasks").enqueue(1),  # one statement
        lambda: store.producer("tasks").enqueue(1, key="a"),  # a transaction
        lambda: store.admin().configure_queue("tasks", lease=60),
    ]
    for call in calls:
        with pytest.raises(pgqrs.StoreUnavailable, match=r"gave up after 0\.5 s: .*lock timeout"):
            call()
    locked.rollback()
    store.producer("tasks").enqueue("goes on")
    assert payloads(store) == ["goes on"]


def test_a_lock_that_is_let_go_in_time_is_waited_for(
    server: LocalPostgres, open_store: Opener, locked: psycopg.Connection
) -> None:
    store = open_store(server.dsn, retry_for=60)
    threading.Timer(0.5, locked.rollback).start()
    store.producer("tasks").enqueue("waited")
    assert payloads(store) == ["waited"]


@pytest.mark.parametrize("isolation", [None, "AUTOCOMMIT", "REPEATABLE READ"])
def test_an_applications_engine_is_bounded_too_and_keeps_its_settings(
    server: LocalPostgres, locked: psycopg.Connection, isolation: str | None
) -> None:
    options = {} if isolation is None else {"isolation_level": isolation}
    engine = create_engine(parse_dsn(server.dsn), pool_size=1, max_overflow=0, **options)
    try:
        with pgqrs.Store(engine, retry_for=0.5) as store:
            for more in ({}, {"key": "a"}):
                with pytest.raises(pgqrs.StoreUnavailable, match="lock timeout"):
                    store.producer("tasks").enqueue(1, **more)
            locked.rollback()
            for more in ({}, {"key": "a"}):
                store.producer("tasks").enqueue(1, **more)
            with engine.connect() as connection:
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "0"
                driver: Any = connection.connection.dbapi_connection
                assert driver.autocommit is (isolation == "AUTOCOMMIT")
    finally:
        engine.dispose()


def test_a_transaction_of_the_applications_own_is_bounded_where_it_is_ours(
    server: LocalPostgres, locked: psycopg.Connection
) -> None:
    engine = create_engine(parse_dsn(server.dsn))
    try:
        with pgqrs.Store(engine, retry_for=0.5) as store:
            with engine.begin() as connection:
                connection.exec_driver_sql("SET LOCAL lock_timeout = '7s'")
                with pytest.raises(pgqrs.StatementFailed) as caught, connection.begin_nested():
                    store.using(connection).enqueue("tasks", 1)
                assert caught.value.code == "55P03"
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"
                with pytest.raises(pgqrs.QueueNotFound):
                    store.using(connection).enqueue("no such queue", 1)
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"
                locked.rollback()
                store.using(connection).enqueue("tasks", "after all")
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"
            assert payloads(store) == ["after all"]
    finally:
        engine.dispose()


def read_only(server: LocalPostgres, value: bool) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("SET default_transaction_read_only = off")
        admin.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        admin.execute("SELECT pg_reload_conf()")
    wanted, shown = ("on" if value else "off"), ""
    while shown != wanted:
        with psycopg.connect(server.dsn) as fresh:
            (shown,) = fresh.execute("SHOW default_transaction_read_only").fetchone() or ("",)


def test_a_server_that_became_writable_again_is_used_again(
    server: LocalPostgres, store: Any, open_store: Opener
) -> None:
    database = "postgres"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        # Of connections that are there already nothing changes: they have to be replaced.
        admin.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        try:
            impatient = open_store(server.dsn, retry_for=0.3)
            for more in ({}, {"key": "a"}):
                with pytest.raises(pgqrs.StoreUnavailable, match="read-only"):
                    impatient.producer("tasks").enqueue(1, **more)
        finally:
            admin.execute("SET default_transaction_read_only = off")
            admin.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    impatient.producer("tasks").enqueue("single")
    impatient.producer("tasks").enqueue("several", key="a")
    assert payloads(store) == ["single", "several"]


def test_after_a_failover_the_call_goes_on_elsewhere(
    server: LocalPostgres, store: Any, open_store: Opener
) -> None:
    with local_postgres() as other:
        with pgqrs.Store(other.dsn) as there:
            there.admin().install()
            there.admin().create_queue("tasks")
        password = make_url(server.dsn).password
        with psycopg.connect(other.dsn, autocommit=True) as admin:
            admin.execute(f"ALTER USER postgres PASSWORD '{password}'")
        other._password = str(password)
        read_only(other, True)
        hosts = f"127.0.0.1:{other.port},127.0.0.1:{server.port}"
        both = open_store(f"postgresql://postgres:{password}@{hosts}/postgres")
        both.producer("tasks").enqueue("before")
        try:
            read_only(server, True)
            read_only(other, False)
            both.producer("tasks").enqueue("single")
            both.producer("tasks").enqueue("several", key="a")
        finally:
            read_only(server, False)
        with pgqrs.Store(other.dsn) as there:
            assert payloads(there) == ["single", "several"]
    assert payloads(store) == ["before"]


def test_errors_of_the_database_are_ours_and_carry_facts(store: Any) -> None:
    store.write(lambda c: c.execute(text("ALTER TABLE pgqrs_messages RENAME TO hidden")))
    try:
        with pytest.raises(pgqrs.StatementFailed) as caught:
            store.producer("tasks").enqueue(1)
    finally:
        store.write(lambda c: c.execute(text("ALTER TABLE hidden RENAME TO pgqrs_messages")))
    assert caught.value.code == "42P01"
    assert "pgqrs_messages" in caught.value.problem
    assert isinstance(caught.value.__cause__, ProgrammingError)


def test_errors_of_an_applications_own_work_are_its_own(store: Any) -> None:
    for run in (store.read, store.write):
        with pytest.raises(DataError, match="division by zero"):
            run(lambda connection: connection.execute(text("SELECT 1 / 0")))


@pytest.mark.parametrize("pool_size", [1, 2, 3])
def test_a_small_pool_serves_everybody(
    server: LocalPostgres, store: Any, open_store: Opener, pool_size: int
) -> None:
    small = open_store(server.dsn, pool_size=pool_size, retry_for=5)
    threads = 4 * pool_size
    with ThreadPoolExecutor(threads) as pool:
        together = threading.Barrier(threads)

        def enqueue(n: int) -> None:
            together.wait(60)
            small.producer("tasks").enqueue(n)

        list(pool.map(enqueue, range(threads)))
        list(pool.map(lambda n: small.producer("tasks").enqueue(n, key=str(n)), range(threads)))
    assert small.admin().queue_stats("tasks").ready == 2 * threads


def test_kept_connections_are_given_up_when_the_pool_is_dry(
    server: LocalPostgres, store: Any
) -> None:
    with pgqrs.Store(server.dsn, pool_size=3, retry_for=1) as small, ExitStack() as held:
        database: Any = small._database
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda n: small.producer("tasks").enqueue(n), range(60)))
        assert len(database._kept) <= 2
        for _ in range(6):  # all that the pool may ever open
            held.enter_context(small.engine.connect())
        assert database._kept == []
        with pytest.raises(pgqrs.StoreUnavailable, match="pool"):
            small.producer("tasks").enqueue("none is left")


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
    with through_proxy.consumer("tasks", lease=600) as consumer:
        assert consumer.dequeue() == []  # from now on the first statement is the claim
        first, second = store.producer("tasks").enqueue_many([1, 2])
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
        ours = "FROM pg_stat_activity WHERE application_name = 'pgqrs'"
        admin.execute(f"SELECT pg_terminate_backend(pid) {ours}")
        # A process of the server says farewell before it is gone. Until then nobody could know.
        while admin.execute(f"SELECT count(*) {ours}").fetchone() != (0,):
            time.sleep(0.01)
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
