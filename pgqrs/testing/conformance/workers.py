"""Workers: their rows, signs of life, and remote control."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pgqrs import WorkerNotFound, WorkerStopped
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE


def test_a_consumer_has_a_row_while_it_is_open(store: Any, admin: Any, clock: ManualClock) -> None:
    with store.consumer(QUEUE, hostname="host-7", port=8080) as consumer:
        (worker,) = admin.list_workers()
        assert worker.id == consumer.worker_id
        assert (worker.queue, worker.hostname, worker.port) == (QUEUE, "host-7", 8080)
        assert (worker.status, worker.pid) == ("ready", os.getpid())
        assert worker.last_heartbeat == worker.created_at == clock.now()
    assert admin.list_workers() == []


def test_producers_leave_no_rows(admin: Any, producer: Any) -> None:
    producer.enqueue(1)
    assert admin.list_workers() == []


def test_a_registered_producer_has_a_row_and_signs_its_messages(
    store: Any, admin: Any, consumer: Any
) -> None:
    with store.producer(QUEUE, register=True, hostname="host-8", port=9) as producer:
        id = producer.enqueue(1)
        worker = next(found for found in admin.list_workers() if found.id == producer.worker_id)
        assert (worker.hostname, worker.port) == ("host-8", 9)
    assert [found.id for found in admin.list_workers()] == [consumer.worker_id]
    (message,) = consumer.dequeue()
    assert message.producer_worker_id == worker.id
    consumer.ack(message)
    assert admin.get_archived(id).producer_worker_id == worker.id


def test_heartbeats_tell_the_living_from_the_dead(
    admin: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    clock.advance(100)
    assert consumer.heartbeat() == "ready"
    alive, dead = admin.list_workers()
    assert (alive.silent_for, dead.silent_for) == (0, 100)
    assert alive.is_alive()
    assert not dead.is_alive()
    assert dead.is_alive(within=100)
    assert admin.purge_workers(silent_for=60) == 1
    assert [worker.id for worker in admin.list_workers()] == [alive.id]


def test_a_purged_worker_that_lives_comes_back(
    admin: Any, producer: Any, consumer: Any, rival: Any, clock: ManualClock
) -> None:
    producer.enqueue_many(range(3))
    (held,) = consumer.dequeue()
    before = consumer.worker_id
    clock.advance(10)
    assert admin.purge_workers(silent_for=5) == 2
    consumer.ack(held)
    assert len(consumer.dequeue()) == 1
    assert consumer.worker_id != before
    assert rival.heartbeat() == "ready"
    assert len(admin.list_workers()) == 2


def test_a_suspended_worker_claims_nothing_until_resumed(
    admin: Any, producer: Any, consumer: Any, rival: Any
) -> None:
    producer.enqueue_many(range(3))
    (held,) = consumer.dequeue()
    admin.suspend_worker(consumer.worker_id)
    assert consumer.dequeue() == []
    assert consumer.heartbeat() == "suspended"
    consumer.ack(held)
    assert len(rival.dequeue()) == 1
    admin.resume_worker(consumer.worker_id)
    assert len(consumer.dequeue()) == 1


def test_a_stopped_worker_is_told_so_and_may_finish(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue_many(range(2))
    (held,) = consumer.dequeue()
    admin.stop_worker(consumer.worker_id)
    with pytest.raises(WorkerStopped) as caught:
        consumer.dequeue()
    assert caught.value.id == consumer.worker_id
    assert consumer.heartbeat() == "stopped"
    consumer.ack(held)
    assert admin.list_workers()[0].status == "stopped"


def test_unknown_workers_are_named(admin: Any) -> None:
    for tell in (admin.suspend_worker, admin.resume_worker, admin.stop_worker):
        with pytest.raises(WorkerNotFound) as caught:
            tell(4711)
        assert caught.value.id == 4711


def test_closing_twice_and_using_again_is_fine(store: Any, admin: Any, producer: Any) -> None:
    consumer = store.consumer(QUEUE)
    consumer.close()
    producer.enqueue(1)
    assert len(consumer.dequeue()) == 1
    consumer.close()
    consumer.close()
    assert admin.list_workers() == []
