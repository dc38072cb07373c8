"""A broker as a loop of the application's own: pull, batch, flush."""

from __future__ import annotations

from typing import Any

import pytest

import pgqrs
from tests.s3.conftest import QUEUE, Call, Object, replica_of
from tests.s3.proxy import Held, answered, applied_but_unanswered, never_applied

both_modes = pytest.mark.parametrize("mode", ["durable", "local"])


def enqueueing(store: pgqrs.Store, *payloads: Any) -> list[Any]:
    return [
        lambda connection, payload=payload: store.using(connection).enqueue(QUEUE, payload)
        for payload in payloads
    ]


@both_modes
def test_operations_are_one_upload(object: Object, mode: str) -> None:
    store = object.open(mode)
    admin = store.admin()
    assert admin.batch_operations(enqueueing(store, "a", "b")) == 2
    assert admin.batch_operations(enqueueing(store, "c")) == 3
    assert object.payloads() == []
    assert admin.s3_state() == "local_changed"
    assert admin.flush_to_s3() == [1, 2, 3]
    assert object.payloads() == ['"a"', '"b"', '"c"']
    assert object.proxy.puts() == 1
    assert admin.flush_to_s3() == []
    assert object.proxy.puts() == 1


@both_modes
def test_an_operation_that_fails_does_not_hinder_the_others(object: Object, mode: str) -> None:
    store = object.open(mode)
    wrong = [lambda connection: store.using(connection).enqueue("missing", 1)]
    store.admin().batch_operations(enqueueing(store, "a") + wrong + enqueueing(store, "b"))
    first, error, second = store.admin().flush_to_s3()
    assert (first, second) == (1, 2)
    assert isinstance(error, pgqrs.QueueNotFound)


@both_modes
def test_operations_that_lost_the_race_are_run_again_on_what_won(object: Object, mode: str) -> None:
    store = object.open(mode)
    held = Held()
    object.proxy.script("PUT", held)
    store.admin().batch_operations(enqueueing(store, "mine"))
    flush = Call(store.admin().flush_to_s3)
    held.arrived.wait(100)
    assert object.other().producer(QUEUE).enqueue("theirs") == 1
    held.release()
    assert flush.outcome() == [2]
    assert object.payloads() == ['"theirs"', '"mine"']
    assert store.admin().s3_stats().set_aside == ()


def test_operations_wait_while_the_bucket_is_away(object: Object) -> None:
    store = object.open(retry_for=0.1)
    store.admin().batch_operations(enqueueing(store, "a"))
    object.proxy.usually["PUT"] = answered(409, "ConditionalRequestConflict")
    with pytest.raises(pgqrs.StoreUnavailable):
        store.admin().flush_to_s3()
    object.proxy.usually.clear()
    assert store.admin().flush_to_s3() == [1]
    assert object.payloads() == ['"a"']


@pytest.mark.parametrize("built_on", [False, True])
def test_operations_that_turn_out_to_be_uploaded_are_not_run_again(
    object: Object, built_on: bool
) -> None:
    store = object.open(retry_for=0.1)
    store.admin().batch_operations(enqueueing(store, "once"))
    object.proxy.script("PUT", applied_but_unanswered)
    object.proxy.usually["PUT"] = never_applied
    with pytest.raises(pgqrs.CommitUncertain):
        store.admin().flush_to_s3()
    object.proxy.script("PUT")
    object.proxy.usually.clear()
    if built_on:
        object.other().producer(QUEUE).enqueue("on top")
    store.admin().batch_operations(enqueueing(store, "new"))
    assert store.admin().flush_to_s3() == [1, 3 if built_on else 2]
    assert object.payloads().count('"once"') == 1


def test_pulling_tells_whether_there_was_anything(object: Object) -> None:
    store = object.open(s3_max_staleness=3600.0)
    assert store.admin().pull_from_s3() is False
    object.other().producer(QUEUE).enqueue("theirs")
    assert store.admin().pull_from_s3() is True
    assert len(store.admin().peek(QUEUE)) == 1
    assert replica_of(store).has_changes() is False


@both_modes
def test_the_state_has_five_values(object: Object, mode: str) -> None:
    store = object.open(mode, s3_max_staleness=3600.0)
    admin = store.admin()
    admin.list_queues()
    assert admin.s3_state() is pgqrs.S3State.IN_SYNC
    admin.batch_operations(enqueueing(store, "mine"))
    assert admin.s3_state() is pgqrs.S3State.LOCAL_CHANGED
    object.other().producer(QUEUE).enqueue("theirs")
    assert admin.s3_state() is pgqrs.S3State.BOTH_CHANGED
    admin.flush_to_s3()
    assert admin.s3_state() is pgqrs.S3State.IN_SYNC
    object.other().producer(QUEUE).enqueue("more")
    assert admin.s3_state() is pgqrs.S3State.REMOTE_CHANGED
    object.delete()
    assert admin.s3_state() is pgqrs.S3State.MISSING


@both_modes
def test_a_snapshot_is_a_database_like_any_other(object: Object, mode: str, tmp_path: Any) -> None:
    store = object.open(mode)
    store.admin().batch_operations(enqueueing(store, "a"))
    store.admin().flush_to_s3()
    store.admin().snapshot(tmp_path / "copy.db")
    with pgqrs.Store(f"sqlite:///{tmp_path / 'copy.db'}") as copy:
        assert [message.payload for message in copy.admin().peek(QUEUE)] == ["a"]


@both_modes
def test_dead_space_is_not_uploaded(object: Object, mode: str) -> None:
    store = object.open(mode, by_hand=False)
    store.producer(QUEUE).enqueue_many(["x" * 10_000] * 100)
    store.admin().flush_to_s3()
    full = len(object.body())
    assert full > 1_000_000
    store.admin().purge_queue(QUEUE)
    store.admin().flush_to_s3()
    assert len(object.body()) < full / 4
    stats = store.admin().s3_stats()
    assert stats.vacuums >= 1
    assert stats.last_upload_bytes == len(object.body())
    assert stats.dead_pages < stats.pages / 4
    assert store.producer(QUEUE).enqueue("after") == 101


def test_other_stores_have_no_bucket(tmp_path: Any) -> None:
    with pgqrs.Store(f"sqlite:///{tmp_path / 'q.db'}") as store:
        for name in ("pull_from_s3", "flush_to_s3", "s3_state", "s3_stats"):
            with pytest.raises(pgqrs.NotSupported, match=name):
                getattr(store.admin(), name)()
