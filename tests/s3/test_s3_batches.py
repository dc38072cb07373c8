"""Operations that go through a store in batches take one upload for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pgqrs
from pgqrs import admin as admin_module
from pgqrs.workflows import runs as runs_module
from tests.s3.conftest import QUEUE, Object

MESSAGES = 10


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admin_module, runs_module):
        monkeypatch.setattr(module, "BATCH", 3)


def uploads_of(store: pgqrs.Store, call: Callable[[], Any]) -> tuple[Any, int]:
    before = store.admin().s3_stats().uploads
    outcome = call()
    return outcome, store.admin().s3_stats().uploads - before


def test_a_purge_of_the_archive_is_one_upload(object: Object) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue_many(range(MESSAGES))
    with store.consumer(QUEUE) as consumer:
        consumer.ack_many(consumer.dequeue(MESSAGES))
    admin = store.admin()
    purge = uploads_of(store, lambda: admin.purge_archive(QUEUE, older_than=0))
    assert purge == (MESSAGES, 1)
    assert admin.list_archive(QUEUE) == []


def test_a_purge_of_a_queue_is_one_upload(object: Object) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue_many(range(MESSAGES))
    assert uploads_of(store, lambda: store.admin().purge_queue(QUEUE)) == (MESSAGES, 1)
    assert store.admin().peek(QUEUE) == []


def test_giving_back_what_a_worker_holds_is_one_upload(object: Object) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue_many(range(MESSAGES))
    with store.consumer(QUEUE) as consumer:
        consumer.dequeue(MESSAGES)
        worker = consumer.worker_id
        assert worker is not None
        release = uploads_of(store, lambda: store.admin().release_worker(worker))
    assert release == (MESSAGES, 1)


def test_a_purge_of_runs_is_one_upload(object: Object) -> None:
    @pgqrs.workflow
    def nothing() -> None: ...

    store = object.other()
    for run in [nothing.start(store=store) for _ in range(4)]:
        run.cancel()
    assert uploads_of(store, store.workflows.purge) == (4, 1)


@pytest.mark.parametrize("chosen", [{}, {"error": "broken"}])
def test_a_replay_of_all_is_one_upload(object: Object, chosen: dict[str, str]) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue_many(range(MESSAGES))
    with store.consumer(QUEUE) as consumer:
        for message in consumer.dequeue(MESSAGES):
            consumer.fail(message, "broken", dead=True)
    admin = store.admin()
    assert uploads_of(store, lambda: admin.replay_all(QUEUE, **chosen)) == (MESSAGES, 1)
    assert uploads_of(store, lambda: admin.replay_dead_letters(QUEUE)) == (0, 0)
    assert [message.payload for message in admin.peek(QUEUE, 100)] == list(range(MESSAGES))
