"""Tasks that need more than a store: processes, and very many waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

import pgqrs
from pgqrs import task

WAITS = 10_000


@task(queue="tasks")
def double(n: int) -> int:
    return 2 * n


@task(queue="tasks", process=True)
def where(n: int) -> tuple[int, int]:
    return n, os.getpid()


@task(queue="tasks", process=True, retry=pgqrs.Retry(max_attempts=1))
def unsendable() -> object:
    raise LookupError("from the other process")


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        yield store


def test_ten_thousand_waits_need_no_thread_each(store: pgqrs.Store) -> None:
    url = store.engine.url.render_as_string(hide_password=False)

    async def main() -> None:
        async with pgqrs.AsyncStore(url) as waiting:
            ids = store.producer("tasks").enqueue_many([double.payload(n) for n in range(WAITS)])
            handles = [double.ahandle(id, store=waiting) for id in ids]
            before = threading.active_count()
            waits = [asyncio.ensure_future(handle.result()) for handle in handles]
            while (watch := waiting._database.result_watch) is None or len(watch._waiting) < WAITS:
                await asyncio.sleep(0.01)
            assert threading.active_count() < before + 40
            worker = asyncio.to_thread(
                pgqrs.Worker(store, queues=["tasks"]).run, until_empty=True, signals=False
            )
            results, _ = await asyncio.gather(asyncio.gather(*waits), worker)
            assert results == [2 * n for n in range(WAITS)]

    asyncio.run(main())


def test_a_task_can_have_a_process_of_its_own(store: pgqrs.Store) -> None:
    handles = [where.options(store=store).enqueue(n) for n in range(4)]
    failing = unsendable.options(store=store).enqueue()
    pgqrs.Worker(store, queues=["tasks"]).run(until_empty=True)
    results = [handle.result(100) for handle in handles]
    assert [n for n, _ in results] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid in results}
    with pytest.raises(pgqrs.TaskFailed, match="from the other process"):
        failing.result(100)
