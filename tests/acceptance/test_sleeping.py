"""Very many runs that sleep cost rows, and neither threads nor memory.

`PGQRS_ACCEPTANCE=full` (`nox -s acceptance`) lets ten thousand sleep.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgqrs
from pgqrs.testing import ManualClock

RUNS = 10_000 if os.environ.get("PGQRS_ACCEPTANCE") == "full" else 300
HOUR = 3600
MEGABYTES = 100


@pgqrs.workflow
def nap(n: int) -> int:
    pgqrs.sleep(HOUR)
    return n


@pgqrs.workflow
async def async_nap(n: int) -> int:
    await pgqrs.sleep(HOUR)
    return n


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(
        database, clock=ManualClock(), upgrade=True, sqlite_synchronous="off"
    ) as store:
        yield store


def memory() -> float:
    """What this process has in memory, in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def work(store: pgqrs.Store) -> None:
    worker = pgqrs.Worker(store, workflows=[nap, async_nap], concurrency=8)
    worker.run(until_empty=True, signals=False)


def counted(store: pgqrs.Store) -> dict[str, int]:
    sql = "SELECT status, count(*) FROM pgqrs_workflows GROUP BY status"
    return store.read(lambda connection: dict(map(tuple, connection.exec_driver_sql(sql))))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to measure memory")
def test_sleeping_runs_cost_rows_alone(store: pgqrs.Store) -> None:
    clock = store._database.clock
    assert isinstance(clock, ManualClock)
    warm = [nap.start(0, store=store), async_nap.start(0, store=store)]
    work(store)
    threads, before = threading.active_count(), memory()
    for n in range(RUNS - len(warm)):
        (async_nap if n % 10 == 0 else nap).start(n, store=store)
    work(store)
    assert counted(store) == {"suspended": RUNS}
    deadline = time.monotonic() + 100  # threads of a worker that has left end by themselves
    while threading.active_count() > threads + 2:  # and the event loop may keep one or two
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.05)
    assert memory() - before < MEGABYTES
    assert store.admin().queue_stats(nap.queue).delayed == RUNS
    clock.advance(HOUR)
    work(store)
    assert counted(store) == {"completed": RUNS}
    assert memory() - before < MEGABYTES
