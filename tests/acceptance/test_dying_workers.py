"""Worker processes that are killed, and a database that is restarted under them.

By default a size that fits every run of the tests; `PGQRS_ACCEPTANCE=full` for the real one.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

import pgqrs
from pgqrs.testing.postgres import local_postgres
from tests.acceptance.test_processes import Child, children

FULL = os.environ.get("PGQRS_ACCEPTANCE") == "full"
TASKS = 20_000 if FULL else 1_500
DEADLINE = 1_500 if FULL else 240
WORKERS = 4
RESTARTS = 3


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        prepare(store)
        yield store


def prepare(store: pgqrs.Store) -> None:
    store.admin().install()
    store.admin().create_queue("tasks", max_read_ct=1000)
    sql = "CREATE TABLE effects (message_id BIGINT, attempt INTEGER)"
    store.write(lambda connection: connection.exec_driver_sql(sql).close())


def work_off(
    store: pgqrs.Store,
    url: str,
    *,
    trouble: Callable[[list[Child]], None],
    is_over: Callable[[], bool] = lambda: True,
) -> None:
    """Let workers finish all tasks, in trouble once a second, until that is over."""
    workers = [Child("work", url) for _ in range(WORKERS)]
    deadline, troubled_at = time.monotonic() + DEADLINE, time.monotonic() + 1
    try:
        while not (is_over() and done(store)):
            assert time.monotonic() < deadline, store.admin().stats()
            if time.monotonic() > troubled_at:
                trouble(workers)
                troubled_at = time.monotonic() + 1
            time.sleep(0.1)
        for worker in workers:
            worker.signal(signal.SIGTERM)
        # One that was started just now may not listen to signals yet.
        assert {worker.process.wait(60) for worker in workers} <= {0, -signal.SIGTERM}
    finally:
        for worker in workers:
            worker.end()


def done(store: pgqrs.Store) -> bool:
    stats = store.admin().queue_stats("tasks")
    return stats.ready == stats.delayed == stats.leased == 0


def check(store: pgqrs.Store, ids: list[int]) -> None:
    """Every result is there, and every effect belongs to an attempt that history knows of."""
    effects: dict[int, list[int]] = defaultdict(list)
    rows = store.read(
        lambda connection: connection.exec_driver_sql(
            "SELECT message_id, attempt FROM effects"
        ).all()
    )
    for id, attempt in rows:
        effects[id].append(attempt)
    ended = store.admin().list_archive("tasks", n=100_000)
    assert [
        found.original_message_id for found in sorted(ended, key=lambda e: e.original_message_id)
    ] == ids
    for found in ended:
        assert (found.archive_reason, found.result) == ("completed", 2 * found.payload)
        attempts = effects[found.original_message_id]
        assert len(attempts) == len(set(attempts)), "an attempt had its effect twice"
        assert found.read_ct in attempts, "completed, and without an effect"
        assert set(attempts) <= set(range(1, found.read_ct + 1))
    assert store.admin().dead_letters("tasks") == []


def kill_one(url: str) -> Callable[[list[Child]], None]:
    def trouble(workers: list[Child]) -> None:
        # Only one that works already: on a busy machine it takes seconds to start.
        working = [number for number, worker in enumerate(workers) if is_up(worker)]
        if working:
            victim = random.choice(working)
            workers[victim].end()
            workers[victim] = Child("work", url)

    return trouble


def is_up(worker: Child) -> bool:
    assert worker.process.stdout
    found, _, _ = select.select([worker.process.stdout], [], [], 0)
    return bool(found)  # it has said that it is ready, and nobody reads that


def test_every_task_is_done_though_workers_are_killed(database: str, store: pgqrs.Store) -> None:
    ids = store.producer("tasks").enqueue_many(range(TASKS))
    work_off(store, database, trouble=kill_one(database))
    check(store, ids)


def test_every_task_is_done_though_the_server_is_restarted() -> None:
    with local_postgres() as server, pgqrs.Store(server.dsn) as store:
        prepare(store)
        ids: list[int] = []
        kill, restarts = kill_one(server.dsn), 0

        def trouble(workers: list[Child]) -> None:
            nonlocal restarts
            kill(workers)
            if restarts < RESTARTS:
                # However fast the workers are, they have something to do then.
                ids.extend(store.producer("tasks").enqueue_many(range(TASKS // RESTARTS)))
                restarts += 1
                server.restart(immediately=restarts % 2 == 0)

        work_off(store, server.dsn, trouble=trouble, is_over=lambda: restarts == RESTARTS)
        check(store, ids)


def test_a_worker_leaves_on_sigterm_and_at_once_on_the_second(
    database: str, store: pgqrs.Store
) -> None:
    store.producer("tasks").enqueue_many(range(200))
    with children("work", database) as (worker,):
        deadline = time.monotonic() + 60
        while not store.admin().list_archive("tasks", n=1):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
    assert store.admin().list_workers() == []
    assert store.admin().queue_stats("tasks").leased == 0
