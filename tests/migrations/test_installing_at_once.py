"""Stores of one process can be installed at the same time, in threads and in tasks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import await_only, greenlet_spawn

import pgqrs
from pgqrs.migrating import one_at_a_time
from tests.conftest import create_database

STORES = 4


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def targets(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The URLs of some empty databases of one kind."""
    if request.param == "sqlite":
        return [f"sqlite:///{tmp_path / f'{number}.db'}" for number in range(STORES)]
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        return [create_database(server) for _ in range(STORES)]
    server, name = request.getfixturevalue("s3_server"), tmp_path.name
    place = f"endpoint_url={server}&cache={tmp_path}"
    return [f"s3://bucket/{name}-{number}.sqlite?{place}" for number in range(STORES)]


def test_threads_install_at_once(targets: list[str]) -> None:
    together = threading.Barrier(STORES)

    def install(target: str) -> None:
        together.wait(60)
        with pgqrs.Store(target, upgrade=True) as store:
            store.admin().verify()

    with ThreadPoolExecutor(STORES) as threads:
        list(threads.map(install, targets))


async def install(store: pgqrs.AsyncStore) -> None:
    async with store:
        await store.admin().install()
        await store.admin().verify()


def test_tasks_install_at_once(targets: list[str]) -> None:
    async def main() -> None:
        await asyncio.gather(*(install(pgqrs.AsyncStore(target)) for target in targets))

    asyncio.run(main())


def test_tasks_install_at_once_on_engines_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [
            create_async_engine(f"sqlite+aiosqlite:///{tmp_path / f'{number}.db'}")
            for number in range(STORES)
        ]
        await asyncio.gather(*(install(pgqrs.AsyncStore(engine)) for engine in engines))
        for engine in engines:
            await engine.dispose()

    asyncio.run(main())


def test_an_event_loop_that_would_wait_for_itself_is_told(tmp_path: Path) -> None:
    held, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        held.set()
        await go_on.wait()

    def migrate() -> None:
        with one_at_a_time():
            await_only(wait())

    async def main() -> None:
        migrating = asyncio.ensure_future(greenlet_spawn(migrate))
        await held.wait()
        with pytest.raises(pgqrs.StoreUnavailable, match="event loop"):
            pgqrs.Store(f"sqlite:///{tmp_path / 'sync.db'}", upgrade=True)
        go_on.set()
        await migrating
        pgqrs.Store(f"sqlite:///{tmp_path / 'sync.db'}", upgrade=True).close()

    asyncio.run(main())
