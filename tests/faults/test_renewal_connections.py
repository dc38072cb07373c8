"""Renewing leases takes one connection to PostgreSQL, and waits for none of the pool."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import make_url

import pgqrs

LONG = 60
LEASE = 1.5


def prepare(dsn: str) -> int:
    """Returns the id of the only message."""
    with pgqrs.Store(dsn, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=LEASE)
        return int(store.producer("tasks").enqueue(1))


def until_renewed(dsn: str, id: int, *, times: int = 3) -> None:
    with pgqrs.Store(dsn) as observer:
        for _ in range(times):
            vt = observer.admin().get_message(id).vt
            until(partial(is_renewed, observer, id, since=vt))
        assert observer.admin().get_message(id).read_ct == 1


def is_renewed(store: pgqrs.Store, id: int, *, since: datetime) -> bool:
    return store.admin().get_message(id).vt > since


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connections(dsn: str) -> int:
    """How many there are for leases."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqrs-leases'"
        ).fetchone()
    assert found is not None
    return int(found[0])


def test_leases_of_a_worker_are_renewed_while_handlers_have_all_connections(
    postgres_database: str,
) -> None:
    id = prepare(postgres_database)
    begun, go_on = threading.Event(), threading.Event()
    with pgqrs.Store(postgres_database, pool_size=2) as store:

        def handle(message: pgqrs.Message) -> None:
            taken = [store.engine.connect() for _ in range(4)]
            begun.set()
            go_on.wait(LONG)
            for connection in taken:
                connection.close()

        with pgqrs.Worker(store, handlers={"tasks": handle}):
            assert begun.wait(LONG)
            until_renewed(postgres_database, id)
            go_on.set()
            until(lambda: store.admin().queue_stats("tasks").leased == 0)
    until(lambda: connections(postgres_database) == 0)


def test_leases_of_a_buffer_are_renewed_while_the_application_has_all_connections(
    postgres_database: str,
) -> None:
    id = prepare(postgres_database)
    with pgqrs.Store(postgres_database, pool_size=2) as store, store.consumer("tasks") as consumer:
        buffer = consumer.buffer(1)
        message = next(buffer)
        taken = [store.engine.connect() for _ in range(4)]
        until_renewed(postgres_database, id)
        for connection in taken:
            connection.close()
        buffer.ack(message)
        buffer.close()
        assert store.admin().get_archived(id).read_ct == 1
    until(lambda: connections(postgres_database) == 0)


def test_an_async_buffer_renews_by_one_connection(postgres_database: str) -> None:
    id = prepare(postgres_database)

    async def main() -> None:
        async with (
            pgqrs.AsyncStore(postgres_database) as store,
            store.consumer("tasks") as consumer,
            consumer.buffer(1) as buffer,
        ):
            message = await anext(buffer)
            await asyncio.to_thread(until_renewed, postgres_database, id)
            assert connections(postgres_database) == 1
            await buffer.ack(message)

    asyncio.run(main())
    until(lambda: connections(postgres_database) == 0)


def test_an_async_worker_renews_by_one_connection(postgres_database: str) -> None:
    id = prepare(postgres_database)

    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handle(message: pgqrs.Message) -> None:
            begun.set()
            await go_on.wait()

        async with pgqrs.AsyncStore(postgres_database) as store:
            worker = pgqrs.AsyncWorker(store, handlers={"tasks": handle})
            async with worker:
                await begun.wait()
                await asyncio.to_thread(until_renewed, postgres_database, id)
                assert connections(postgres_database) == 1
                go_on.set()

    asyncio.run(main())
    until(lambda: connections(postgres_database) == 0)
    assert_archived(postgres_database, id)


def test_renewal_goes_on_if_the_server_has_no_connection_left(postgres_database: str) -> None:
    """Then by a connection of the store."""
    id = prepare(postgres_database)
    role = f"limited_{uuid.uuid4().hex}"
    url = make_url(postgres_database).set(username=role, password="secret")
    with psycopg.connect(postgres_database, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
        admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        admin.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
        try:
            with pgqrs.Store(url) as store, store.consumer("tasks") as consumer:
                buffer = consumer.buffer(1)
                message = next(buffer)
                admin.execute(f"ALTER ROLE {role} CONNECTION LIMIT 1")
                until_renewed(postgres_database, id)
                buffer.ack(message)
                buffer.close()
            assert_archived(postgres_database, id)
        finally:
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")


def assert_archived(dsn: str, id: int) -> None:
    with pgqrs.Store(dsn) as store:
        assert store.admin().get_archived(id).read_ct == 1
