"""Engines and sessions of applications, as they really are: in AUTOCOMMIT, scoped, small."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pgqrs
from pgqrs.config import parse_dsn


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    dsn: str = request.getfixturevalue("postgres_database")
    return parse_dsn(dsn).render_as_string(hide_password=False)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(engine, upgrade=True) as store:
        store.admin().create_queue("q")
        yield store


def autocommitting(url: str, how: str) -> Engine:
    if how == "engine":
        return create_engine(url, isolation_level="AUTOCOMMIT", pool_size=10)
    if how == "options":
        return create_engine(url, pool_size=10).execution_options(isolation_level="AUTOCOMMIT")
    return create_engine(url, pool_size=10, connect_args={"autocommit": True})


HOW = ["engine", "options", "driver"]


@pytest.mark.parametrize("how", HOW)
def test_an_engine_in_autocommit_gets_real_transactions(postgres_database: str, how: str) -> None:
    url = parse_dsn(postgres_database).render_as_string(hide_password=False)
    engine = autocommitting(url, how)
    try:
        with pgqrs.Store(engine, upgrade=True) as store:
            store.admin().create_queue("q", max_in_flight=5)
            store.producer("q").enqueue_many(range(100))
            together = threading.Barrier(8)

            def claim(_: int) -> int:
                together.wait(60)
                return len(store.consumer("q").dequeue(5))

            with ThreadPoolExecutor(8) as threads:
                assert sum(threads.map(claim, range(8))) == 5

            def half_done(connection: Any) -> None:
                connection.execute(text("UPDATE pgqrs_queues SET max_read_ct = 17"))
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                store.write(half_done)
            assert store.admin().get_queue("q").max_read_ct != 17
            with engine.connect() as connection:
                driver: Any = connection.connection.dbapi_connection
                assert driver.autocommit is True  # as the application has it
    finally:
        engine.dispose()


@pytest.mark.parametrize("how", HOW)
def test_using_a_connection_in_autocommit_is_refused(url: str, how: str) -> None:
    if how == "driver" and url.startswith("sqlite"):
        how = "engine"  # its driver has no such switch
    engine = autocommitting(url, how)
    try:
        with pgqrs.Store(engine, upgrade=True) as store:
            store.admin().create_queue("q")
            with (
                engine.begin() as connection,
                pytest.raises(pgqrs.InvalidArgument, match="AUTOCOMMIT"),
            ):
                store.using(connection)
            with (
                Session(engine) as session,
                pytest.raises(pgqrs.InvalidArgument, match="AUTOCOMMIT"),
            ):
                store.using(session)
            store.write(lambda c: store.using(c).enqueue("q", "in a transaction of the store's"))
            assert store.admin().queue_stats("q").ready == 1
    finally:
        engine.dispose()


def test_an_async_engine_in_autocommit_too(postgres_database: str) -> None:
    async def main() -> None:
        engine = create_async_engine(parse_dsn(postgres_database), isolation_level="AUTOCOMMIT")
        async with pgqrs.AsyncStore(engine, upgrade=True) as store:
            await store.admin().create_queue("q", max_in_flight=5)
            await store.producer("q").enqueue_many(range(100))
            consumers = [store.consumer("q") for _ in range(8)]
            claimed = await asyncio.gather(*(consumer.dequeue(5) for consumer in consumers))
            assert sum(map(len, claimed)) == 5
            async with engine.begin() as connection:
                with pytest.raises(pgqrs.InvalidArgument, match="AUTOCOMMIT"):
                    await store.using(connection).enqueue("q", 1)
        await engine.dispose()

    asyncio.run(main())


def test_a_scoped_session_is_as_good_as_its_session(engine: Engine, store: pgqrs.Store) -> None:
    session = scoped_session(sessionmaker(engine))
    store.using(session).enqueue("q", "committed")
    session.commit()
    store.using(session).enqueue("q", "rolled back")
    session.rollback()
    session.remove()
    assert [message.payload for message in store.admin().peek("q")] == ["committed"]


def test_an_async_scoped_session_too(url: str) -> None:
    async def main() -> None:
        async_url = url.replace("sqlite:", "sqlite+aiosqlite:")
        engine = create_async_engine(async_url)
        session: async_scoped_session[AsyncSession] = async_scoped_session(
            async_sessionmaker(engine), scopefunc=asyncio.current_task
        )
        async with pgqrs.AsyncStore(engine, upgrade=True) as store:
            await store.admin().create_queue("q")
            await store.using(session).enqueue("q", "committed")
            await session.commit()
            await store.using(session).enqueue("q", "rolled back")
            await session.rollback()
            await session.remove()
            found = await store.admin().peek("q")
            assert [message.payload for message in found] == ["committed"]
        await engine.dispose()

    asyncio.run(main())


def test_errors_inside_an_applications_transaction_are_ours(
    engine: Engine, store: pgqrs.Store
) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE pgqrs_messages RENAME TO hidden"))
        with pytest.raises(pgqrs.StatementFailed) as caught:
            store.using(connection).enqueue("q", 1)
        connection.rollback()
    assert caught.value.code in ("42P01", "SQLITE_ERROR")
    assert caught.value.__cause__ is not None
