"""Claims within limits, and what others commit while such a claim is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import pgqrs
from pgqrs.testing.postgres import local_postgres

LONG = 100
GATE = 4711
"""An advisory lock: who deletes a slot waits for it."""
TRIGGER = f"""
CREATE FUNCTION wait_at_the_gate() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({GATE});
    RETURN NULL;
END $$;
CREATE TRIGGER gate AFTER DELETE ON pgqrs_slots FOR EACH ROW EXECUTE FUNCTION wait_at_the_gate();
"""
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=LONG, max_in_flight_per_key=1)
        yield store


def test_a_message_that_is_given_back_while_slots_are_counted_is_not_parked_behind_itself(
    store: pgqrs.Store, postgres_database: str
) -> None:
    store.producer("tasks").enqueue_many(["a", "b"], keys=["a", "b"], unique=None)
    with (
        store.consumer("tasks") as consumer,
        store.consumer("tasks") as other,
        psycopg.connect(postgres_database, autocommit=True) as gate,
        ThreadPoolExecutor(1) as thread,
    ):
        a, b = consumer.dequeue(2)
        consumer.ack(b)
        gate.execute(TRIGGER)
        gate.execute("SELECT pg_advisory_lock(%s)", [GATE])
        claim = thread.submit(other.dequeue)
        deadline = time.monotonic() + LONG
        while gate.execute(WAITING).fetchone() == (0,):  # it has seen which slots have ended
            assert time.monotonic() < deadline
            time.sleep(0.01)
        consumer.release(a)
        gate.execute("SELECT pg_advisory_unlock(%s)", [GATE])
        claimed = claim.result(LONG) or other.dequeue() or other.dequeue()
        assert [message.payload for message in claimed] == ["a"]


def test_a_claim_is_on_the_disk_when_it_is_handed_out() -> None:
    """Though the claim itself does not wait for that: see `limits`."""
    with (
        local_postgres(durable=True) as server,
        pgqrs.Store(server.dsn, upgrade=True, retry_for=LONG) as store,
    ):
        store.admin().create_queue("tasks", lease=LONG, max_in_flight=10)
        store.producer("tasks").enqueue_many(range(3))
        with store.consumer("tasks") as consumer:
            for _ in range(3):
                (message,) = consumer.dequeue()
                server.restart(immediately=True)
                found = store.admin().get_message(message.id)
                assert (found.read_ct, found.consumer_worker_id) == (1, consumer.worker_id)
                consumer.ack(message)
