"""Workers are killed while they run workflows, at any moment and between an effect and its record.

`PGQRS_ACCEPTANCE=full` (`nox -s acceptance`) runs the large size.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

import pgqrs
from tests.acceptance import crashing
from tests.acceptance.crashing import STEPS, work

ROOT = Path(__file__).parents[2]
FULL = os.environ.get("PGQRS_ACCEPTANCE") == "full"
RUNS = 500 if FULL else 40
WORKERS = 3
KILL_EVERY = 25
"""Steps. By the clock, a busy machine might never get beyond starting processes."""
PATIENCE = 1800.0 if FULL else 300.0


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue(work.queue, lease=2, max_read_ct=1000)
        for table in crashing.TABLES:
            store.write(lambda connection, table=table: connection.exec_driver_sql(table))
        yield store


class Fleet:
    """Workers that are killed and replaced."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seeds = iter(range(10**6))
        self._workers = [self._start() for _ in range(WORKERS)]
        self.killed_themselves = self.killed = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.crashing", self._url, str(next(self._seeds))],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )

    def replace_the_dead(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.poll() is not None:
                assert worker.returncode == -signal.SIGKILL, worker.returncode
                self.killed_themselves += 1
                self._workers[place] = self._start()

    def kill_one(self) -> None:
        place = random.randrange(WORKERS)
        self._workers[place].kill()
        self._workers[place].wait()
        self._workers[place] = self._start()
        self.killed += 1

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


def test_killed_workers_lose_and_repeat_nothing(store: pgqrs.Store, database: str) -> None:
    for n in range(RUNS):
        work.start(str(n), key=str(n), store=store)
    fleet = Fleet(database)
    try:
        give_up_at = time.monotonic() + PATIENCE
        kill_at = KILL_EVERY
        while counted(store) != {"completed": RUNS}:
            assert time.monotonic() < give_up_at, counted(store)
            fleet.replace_the_dead()
            (done,) = rows(store, "SELECT count(*) FROM pgqrs_workflow_steps")[0]
            if int(done) >= kill_at:
                fleet.kill_one()
                kill_at = int(done) + KILL_EVERY
            time.sleep(random.uniform(0.01, 0.1))
    finally:
        fleet.end()
    assert fleet.killed_themselves + fleet.killed > 0
    effects = Counter(rows(store, "SELECT run, step FROM effects"))
    assert len(effects) == RUNS * STEPS
    twice = [found for found, count in effects.items() if count > 1]
    assert [found for found in twice if found[1].startswith("transactional")] == []
    assert rows(store, "SELECT run, step FROM wrongs") == []
    print(
        f"{RUNS} runs, {fleet.killed} killed, {fleet.killed_themselves} killed themselves, "
        f"{len(twice)} plain effects repeated"
    )


def counted(store: pgqrs.Store) -> dict[str, int]:
    return dict(rows(store, "SELECT status, count(*) FROM pgqrs_workflows GROUP BY status"))


def rows(store: pgqrs.Store, sql: str) -> list[tuple[str, ...]]:
    return store.read(lambda connection: [tuple(row) for row in connection.execute(text(sql))])
