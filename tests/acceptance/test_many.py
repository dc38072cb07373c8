"""One call takes more messages than a statement of PostgreSQL may have parameters (65,535)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pgqrs

COUNT = 70_000


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("q", lease=3600)
        yield store


def test_there_is_no_limit_to_the_messages_of_one_call(store: pgqrs.Store) -> None:
    admin, producer = store.admin(), store.producer("q")
    names = [f"n{number}" for number in range(COUNT)]
    ids = producer.enqueue_many(range(COUNT), keys=names, groups=names)
    again = producer.enqueue_many(range(COUNT), keys=names, groups=names)
    assert again == ids
    assert not any(id.created for id in again)
    with store.consumer("q") as consumer:
        messages = consumer.dequeue(COUNT)
        assert [message.id for message in messages] == ids
        consumer.extend_many(messages, 3600)
        consumer.fail_many(messages, "on purpose", dead=True)
        replayed = admin.replay(ids)
        assert len(replayed) == COUNT
        assert admin.get_archived(ids[-1]).replayed_as == replayed[-1]
        consumer.ack_many(consumer.dequeue(COUNT))
    assert admin.queue_stats("q").archived["completed"] == COUNT
