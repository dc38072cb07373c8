"""Idle consumers of one process share their looks at the bucket."""

from __future__ import annotations

import pgqrs
from tests.s3.conftest import QUEUE, Object


def gets(store: pgqrs.Store) -> int:
    return store.admin().s3_stats().gets


def test_an_idle_consumer_uses_the_look_of_another(object: Object) -> None:
    store = object.other()
    consumers = [store.consumer(QUEUE).open() for _ in range(4)]
    for consumer in consumers:  # each looks for itself once, and is idle from then on
        assert consumer.dequeue(wait=0) == []
    store.admin().pull_from_s3()
    before = gets(store)
    for consumer in consumers:
        found, _ = consumer._look(1, None, consumer._life, within=3600)
        assert found == []
    assert gets(store) - before <= 1  # none, unless the machine was so slow that the look grew old


def test_what_another_process_enqueued_is_found_by_the_next_look(object: Object) -> None:
    store, elsewhere = object.other(), object.other()
    with store.consumer(QUEUE) as consumer:
        assert consumer.dequeue(wait=0.01) == []
        elsewhere.producer(QUEUE).enqueue(1)
        (message,) = consumer.dequeue(wait=60)
        assert message.payload == 1
        elsewhere.producer(QUEUE).enqueue(2)
        (message,) = consumer.dequeue()
        assert message.payload == 2
