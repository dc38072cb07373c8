"""Consumers that stand still in the middle of a claim from a queue with limits: all others go on.

On PostgreSQL only: in SQLite a claim is over before its process could stop with the lock of another.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest

import pgqrs
from tests.acceptance.test_processes import Child, children

PATIENCE = 60.0
LIMIT = 8


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True, retry_for=PATIENCE) as store:
        store.admin().create_queue(
            "tasks", lease=600, max_in_flight=1000, max_in_flight_per_key=500, max_read_ct=1000
        )
        yield store


def in_time(call: Callable[[], Any]) -> Any:
    """What a call returns, or that it still waits."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert got, "it still waits"
    return got[0]


def go_on(store: pgqrs.Store) -> None:
    """All that may be done with a queue, by somebody else."""
    id = in_time(lambda: store.producer("tasks").enqueue("more", key="other", unique=None))
    with store.consumer("tasks") as consumer:
        (message,) = in_time(lambda: consumer.dequeue())
        in_time(lambda: consumer.extend(message, 600))
        in_time(lambda: consumer.release(message))
        (message,) = in_time(lambda: consumer.dequeue())
        in_time(lambda: consumer.ack(message))
        assert len(in_time(lambda: consumer.dequeue(3, wait=1))) == 3
    in_time(lambda: store.admin().configure_queue("tasks", max_in_flight=2000, lease=600))
    in_time(lambda: store.admin().configure_queue("tasks", max_in_flight=1000))
    in_time(lambda: store.admin().cancel(id))


@pytest.mark.parametrize("statements", [1, 2, 3])
@pytest.mark.parametrize("consumer", ["freeze", "freeze_on_engine"])
def test_one_that_stops_after_any_statement_of_its_claim(
    store: pgqrs.Store, postgres_database: str, consumer: str, statements: int
) -> None:
    store.producer("tasks").enqueue_many(range(40), keys=["k"] * 40, unique=None)
    with children(consumer, postgres_database) as (child,):
        assert child.answer() == "ready"
        child.tell(str(statements))
        said = child.answer()
        assert said in ("frozen", "done")
        go_on(store)
        if said == "frozen":
            child.signal(signal.SIGCONT)
            assert child.answer() == "done"
        child.tell("")


def test_one_that_does_not_read_what_it_claimed(store: pgqrs.Store, postgres_database: str) -> None:
    """The server can only send as much as fits on the way: then it stands still too."""
    large = "x" * 500_000
    store.producer("tasks").enqueue_many([large] * 60)
    with store.consumer("tasks") as consumer:
        consumer.dequeue()
        worker = consumer.worker_id
    # As a client does it, that sends the claim and never comes to reading the answer.
    with closing(psycopg.connect(postgres_database, autocommit=True)) as connection:
        store.write(_keep_worker(worker))
        arguments = f"'tasks', {worker}, 50, NULL, NULL, NULL, NULL"
        connection.pgconn.send_query(
            f"SELECT * FROM pgqrs_claim_within_limits({arguments})".encode()
        )
        time.sleep(1)
        go_on(store)


def _keep_worker(worker: int | None) -> Callable[[Any], None]:
    """Its row, which went with its consumer."""
    sql = (
        "INSERT INTO pgqrs_workers (id, hostname, port, status, last_heartbeat, created_at) "
        f"OVERRIDING SYSTEM VALUE VALUES ({worker}, 'here', 0, 'ready', now(), now())"
    )
    return lambda connection: connection.exec_driver_sql(sql).close()


def test_processes_that_are_stopped_again_and_again(
    store: pgqrs.Store, postgres_database: str, dice: random.Random
) -> None:
    """Consumers are stopped at random; the one that is not gets everything done, within the limits."""
    store.admin().configure_queue("tasks", max_in_flight=LIMIT, max_in_flight_per_key=3, lease=2)
    total = 600
    keys = [f"key {n % 4}" for n in range(total)]
    store.producer("tasks").enqueue_many(range(total), keys=keys, unique=None)
    with children("claim_forever", postgres_database, count=3) as others:
        for child in others:
            assert child.answer() == "ready"
        with store.consumer("tasks") as consumer:
            deadline = time.monotonic() + 4 * PATIENCE
            while store.admin().queue_stats("tasks").archived["completed"] < total:
                assert time.monotonic() < deadline, store.admin().queue_stats("tasks")
                stop_or_go_on(dice, others)
                claimed = in_time(lambda: consumer.dequeue(3))
                assert len(claimed) <= LIMIT
                with suppress(pgqrs.LeaseLost):  # this machine was slow
                    consumer.ack_many(claimed)
                assert store.admin().queue_stats("tasks").leased <= LIMIT
        for child in others:
            child.signal(signal.SIGCONT)
    stats = store.admin().queue_stats("tasks")
    assert (stats.ready, stats.leased, stats.blocked) == (0, 0, 0)


def stop_or_go_on(dice: random.Random, others: list[Child]) -> None:
    for child in others:
        child.signal(dice.choice([signal.SIGSTOP, signal.SIGCONT]))
