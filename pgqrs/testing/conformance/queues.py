"""Queues: creating, configuring, pausing, purging, deleting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgqrs import (
    InvalidArgument,
    LeaseLost,
    QueueExists,
    QueueNotEmpty,
    QueueNotFound,
)
from pgqrs.testing.conformance.harness import QUEUE, Harness


def test_a_created_queue_is_found(store: Any) -> None:
    admin = store.admin()
    created = admin.create_queue("mail", lease=timedelta(minutes=1), max_read_ct=7, retention=60)
    assert (created.lease, created.max_read_ct, created.retention) == (60.0, 7, 60.0)
    assert not created.paused
    assert admin.get_queue("mail") == created
    admin.create_queue("alpha")
    assert [queue.queue_name for queue in admin.list_queues()] == ["alpha", "mail"]


def test_creating_it_twice_is_an_error_unless_allowed(admin: Any) -> None:
    before = admin.get_queue(QUEUE)
    with pytest.raises(QueueExists) as caught:
        admin.create_queue(QUEUE)
    assert caught.value.name == QUEUE
    assert admin.create_queue(QUEUE, lease=99, if_not_exists=True) == before


@pytest.mark.parametrize("name", ["", "   ", "a\0b", "line\nbreak", "x" * 256, None, 7])
def test_a_bad_name_is_refused(store: Any, name: Any) -> None:
    with pytest.raises(InvalidArgument):
        store.admin().create_queue(name)
    assert store.admin().list_queues() == []


@pytest.mark.parametrize(
    "settings",
    [{"lease": 0}, {"lease": -1}, {"lease": "soon"}, {"max_read_ct": 0}, {"max_read_ct": True}],
)
def test_a_bad_setting_is_refused(store: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        store.admin().create_queue("mail", **settings)


def test_names_are_text_of_any_script(store: Any) -> None:
    store.admin().create_queue("очередь 注文")
    store.producer("очередь 注文").enqueue(1)
    with store.consumer("очередь 注文") as consumer:
        assert [message.queue for message in consumer.dequeue()] == ["очередь 注文"]


def test_settings_change_one_by_one(admin: Any) -> None:
    assert admin.configure_queue(QUEUE, lease=5).lease == 5.0
    changed = admin.configure_queue(QUEUE, retention=10)
    assert (changed.lease, changed.max_read_ct, changed.retention) == (5.0, 3, 10.0)
    assert admin.configure_queue(QUEUE, retention=None).retention is None
    assert admin.configure_queue(QUEUE) == admin.get_queue(QUEUE)


def test_a_paused_queue_takes_in_and_gives_nothing_out(
    admin: Any, producer: Any, consumer: Any
) -> None:
    assert admin.pause_queue(QUEUE).paused
    producer.enqueue("later")
    assert consumer.dequeue() == []
    assert not admin.resume_queue(QUEUE).paused
    assert [message.payload for message in consumer.dequeue()] == ["later"]


def test_purging_deletes_all_messages_also_held_ones(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue_many(range(2500))
    (held,) = consumer.dequeue()
    assert admin.purge_queue(QUEUE) == 2500
    assert consumer.dequeue() == []
    assert admin.list_archive(QUEUE) == []
    with pytest.raises(LeaseLost):
        consumer.ack(held)


def test_a_queue_with_messages_is_not_deleted_unless_forced(
    admin: Any, producer: Any, consumer: Any
) -> None:
    producer.enqueue_many([1, 2])
    consumer.ack_many(consumer.dequeue(1))
    with pytest.raises(QueueNotEmpty) as caught:
        admin.delete_queue(QUEUE)
    assert caught.value.messages == 1
    admin.delete_queue(QUEUE, force=True)
    assert admin.list_queues() == []
    with pytest.raises(QueueNotFound):
        producer.enqueue(3)
    with pytest.raises(QueueNotFound):
        consumer.dequeue()


def test_a_new_queue_of_an_old_name_starts_empty(admin: Any, producer: Any, consumer: Any) -> None:
    producer.enqueue(1)
    consumer.ack_many(consumer.dequeue())
    admin.delete_queue(QUEUE)
    admin.create_queue(QUEUE)
    assert admin.list_archive(QUEUE) == []
    producer.enqueue(2)
    assert [message.payload for message in consumer.dequeue()] == [2]


def test_queues_do_not_mix(store: Any, admin: Any, producer: Any, consumer: Any) -> None:
    admin.create_queue("other")
    store.producer("other").enqueue("other")
    producer.enqueue("own")
    assert [message.payload for message in consumer.dequeue(10)] == ["own"]


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.producer("missing").enqueue(1),
        lambda store: store.producer("missing").enqueue_many([1, 2]),
        lambda store: store.consumer("missing").dequeue(),
        lambda store: store.admin().get_queue("missing"),
        lambda store: store.admin().configure_queue("missing", lease=1),
        lambda store: store.admin().pause_queue("missing"),
        lambda store: store.admin().resume_queue("missing"),
        lambda store: store.admin().purge_queue("missing"),
        lambda store: store.admin().delete_queue("missing"),
        lambda store: store.admin().peek("missing"),
        lambda store: store.admin().list_archive("missing"),
        lambda store: store.admin().dead_letters("missing"),
        lambda store: store.admin().replay_dead_letters("missing"),
        lambda store: store.admin().purge_archive("missing", older_than=0),
        lambda store: store.admin().queue_stats("missing"),
    ],
)
def test_a_missing_queue_is_named(store: Any, use: Any) -> None:
    with pytest.raises(QueueNotFound) as caught:
        use(store)
    assert caught.value.name == "missing"


def test_two_stores_on_one_database_see_the_same(harness: Harness, admin: Any) -> None:
    other = harness.open(clock=harness.clock)
    assert other.admin().get_queue(QUEUE) == admin.get_queue(QUEUE)
