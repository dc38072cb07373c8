"""Worker processes that are killed, and a database that is restarted under them. Beside the tasks that
count, handlers and steps exit, interrupt, cancel, hang and block, in threads and in the event loop;
processes of tasks die, there are tasks that no worker knows, and a schedule has lost its queue.

By default a size that fits every run of the tests; `PGQRS_ACCEPTANCE=full` for the real one.
"""

from __future__ import annotations

import random
import select
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import pgqrs
from pgqrs import Handle, RunStatus
from pgqrs.testing.postgres import local_postgres
from tests.acceptance import misbehaving
from tests.acceptance.misbehaving import FULL, HANDLERS, PROCESSES, RUNS, TICKS, WAYS, WAYS_OF_STEPS
from tests.acceptance.test_processes import Child, children

TASKS = 20_000 if FULL else 900
TROUBLES = 40 if FULL else 3
RESTARTS = 3
WORKERS = 4
HANG = 1_500 if FULL else 240
"""Seconds after which this is not slow but stuck."""
pytestmark = pytest.mark.timeout(2 * HANG + 120)
QUEUES = ("tasks", *HANDLERS, RUNS, PROCESSES, TICKS)
NEIGHBOURS = 2
"""Tasks that run in processes beside one that kills its process."""


@pgqrs.task(name="of a later release", queue=PROCESSES)
def unknown() -> None:
    """No worker knows it."""


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        prepare(store)
        yield store


def prepare(store: pgqrs.Store) -> None:
    store.admin().install()
    for queue in (*QUEUES, "gone"):
        store.admin().create_queue(queue, max_read_ct=1000)
    store.schedules.create("ticking", every=1, queue=TICKS, payload=0, missed="all")
    store.schedules.create("lost its queue", every=1, queue="gone", payload=0)
    for sql in (
        "DELETE FROM pgqrs_queues WHERE queue_name = 'gone'",
        "CREATE TABLE effects (message_id BIGINT, attempt INTEGER)",
    ):
        store.write(lambda connection, sql=sql: connection.exec_driver_sql(sql).close())


@dataclass
class Given:
    """What the workers were given to do."""

    tasks: list[int] = field(default_factory=list)
    doubled: list[Handle[int]] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def enqueue(self, store: pgqrs.Store) -> None:
        """One part more."""
        self.tasks += store.producer("tasks").enqueue_many(range(TASKS // TROUBLES))
        for queue in HANDLERS:
            store.producer(queue).enqueue_many(WAYS)
        with pgqrs.use(store):
            for workflow in misbehaving.WORKFLOWS:
                workflow.start_many([(way,) for way in WAYS_OF_STEPS])
            misbehaving.die.enqueue()
            self.unknown.append(unknown.enqueue().id)
            self.doubled += [misbehaving.double.enqueue(n) for n in range(NEIGHBOURS)]


def work_off(store: pgqrs.Store, url: str, *, trouble: Callable[[int, list[Child]], None]) -> Given:
    """Let workers finish all tasks, part after part. There is trouble as soon as they are at work on
    a part, however long that takes.
    """
    workers = [Child("work", url) for _ in range(WORKERS)]
    given = Given()
    try:
        for number in range(TROUBLES):
            before = effects(store)
            given.enqueue(store)
            until(lambda n=before: effects(store) > n, store)
            trouble(number, workers)
        until(lambda: done(store, given), store)
        store.schedules.pause("ticking")
        until(lambda: done(store, given), store)
        for worker in workers:
            worker.signal(signal.SIGTERM)
        # One that was started just now may not listen to signals yet.
        assert {worker.process.wait(HANG) for worker in workers} <= {0, -signal.SIGTERM}
    finally:
        for worker in workers:
            worker.end()
    return given


def until(condition: Callable[[], bool], store: pgqrs.Store) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, store.admin().stats()
        time.sleep(0.02)


def effects(store: pgqrs.Store) -> int:
    sql = "SELECT count(*) FROM effects"
    return store.read(lambda connection: int(connection.exec_driver_sql(sql).scalar_one()))


def done(store: pgqrs.Store, given: Given) -> bool:
    """True if nothing is left but what no worker knows."""
    left = [store.admin().queue_stats(queue) for queue in QUEUES]
    return sum(stats.ready + stats.delayed + stats.leased for stats in left) == len(given.unknown)


def check(store: pgqrs.Store, given: Given) -> None:
    """What behaves is done as promised, and what does not has failed."""
    check_tasks(store, given.tasks)
    check_misbehaving(store)
    check_processes(store, given)
    check_schedules(store)


def check_tasks(store: pgqrs.Store, ids: list[int]) -> None:
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


def check_misbehaving(store: pgqrs.Store) -> None:
    for queue in HANDLERS:
        reasons = Counter(
            found.archive_reason for found in store.admin().list_archive(queue, n=100_000)
        )
        assert reasons == {"failed": TROUBLES * len(WAYS)}
    statuses = Counter(run.status for run in store.workflows.list_runs(n=10_000))
    assert statuses == {
        RunStatus.FAILED: TROUBLES * len(misbehaving.WORKFLOWS) * len(WAYS_OF_STEPS)
    }


def check_processes(store: pgqrs.Store, given: Given) -> None:
    """Only tasks that killed their process have failed. What nobody knows is still there, for others."""
    results = [handle.result(HANG) for handle in given.doubled]
    assert results == [2 * n for n in range(NEIGHBOURS)] * TROUBLES
    dead = store.admin().dead_letters(PROCESSES, n=10_000)
    assert len(dead) == TROUBLES
    for id in given.unknown:
        kept = store.admin().get_message(id)
        assert kept.released_ct > 0
        assert kept.attempt <= 1 + TROUBLES, "given back, and counted"


def check_schedules(store: pgqrs.Store) -> None:
    """Each tick was enqueued once, though another schedule cannot tick."""
    lost, ticking = (store.schedules.get(name) for name in ("lost its queue", "ticking"))
    assert lost.error is not None
    assert ticking.error is None
    assert ticking.every is not None
    ticks = (ticking.next_at - ticking.starts_at).total_seconds() / ticking.every - 1
    assert len(store.admin().list_archive(TICKS, n=100_000)) == ticks > 0


def kill_one(workers: list[Child], url: str, dice: random.Random) -> None:
    # Only one that works already: on a busy machine it takes seconds to start.
    victim = dice.choice([number for number, worker in enumerate(workers) if is_up(worker)])
    process = workers[victim].process
    assert process.stdin
    assert process.stdout
    process.kill()
    process.wait()  # not for the processes of its tasks, which have its output open
    process.stdin.close()
    process.stdout.close()
    workers[victim] = Child("work", url)


def is_up(worker: Child) -> bool:
    assert worker.process.stdout
    found, _, _ = select.select([worker.process.stdout], [], [], 0)
    return bool(found)  # it has said that it is ready, and nobody reads that


def test_every_task_is_done_though_workers_are_killed(
    database: str, store: pgqrs.Store, dice: random.Random
) -> None:
    given = work_off(store, database, trouble=lambda _, workers: kill_one(workers, database, dice))
    check(store, given)


def test_every_task_is_done_though_the_server_is_restarted(dice: random.Random) -> None:
    with local_postgres() as server, pgqrs.Store(server.dsn) as store:
        prepare(store)

        def trouble(number: int, workers: list[Child]) -> None:
            kill_one(workers, server.dsn, dice)
            if number < RESTARTS:
                server.restart(immediately=number % 2 == 1)

        check(store, work_off(store, server.dsn, trouble=trouble))


def test_a_worker_leaves_on_sigterm_and_at_once_on_the_second(
    database: str, store: pgqrs.Store
) -> None:
    store.producer("tasks").enqueue_many(range(200))
    with children("work", database) as (worker,):
        until(lambda: bool(store.admin().list_archive("tasks", n=1)), store)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(HANG) == 0
    assert store.admin().list_workers() == []
    assert store.admin().queue_stats("tasks").leased == 0
