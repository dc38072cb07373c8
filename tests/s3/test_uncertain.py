"""Uploads that may have been applied: each is recognised exactly, or called uncertain."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import pgqrs
from pgqrs.repositories import uploads
from pgqrs.repositories.uploads import Upload, Verdict
from pgqrs.stores import images
from tests.s3.conftest import QUEUE, Call, Object, enqueue, replica_of, step
from tests.s3.proxy import (
    Delayed,
    Held,
    answered,
    applied_but_unanswered,
    never_applied,
    served,
)


def operation(store: pgqrs.Store, payload: Any) -> Any:
    return lambda connection: store.using(connection).enqueue(QUEUE, payload)


# Operations of an application's own loop


def test_a_later_upload_is_not_taken_for_one_that_was_lost(object: Object) -> None:
    store = object.open(retry_for=0.3)
    admin = store.admin()
    admin.batch_operations([operation(store, "request")])
    object.proxy.usually["PUT"] = answered(500, "InternalError")
    with pytest.raises(pgqrs.CommitUncertain):
        admin.flush_to_s3()
    object.proxy.usually.clear()
    (other,) = enqueue(store, "something else")
    step(store)
    other.outcome()
    assert admin.flush_to_s3() == [2]
    assert object.payloads() == ['"something else"', '"request"']


@pytest.mark.parametrize("flushes", [1, 2, 3])
def test_an_upload_that_arrives_late_is_found_however_often_it_was_repeated(
    object: Object, flushes: int
) -> None:
    store = object.open(retry_for=0.2)
    admin = store.admin()
    admin.batch_operations([operation(store, "request")])
    late = Delayed()
    object.proxy.script("PUT", late)
    object.proxy.usually["PUT"] = never_applied
    for _ in range(flushes):
        with pytest.raises(pgqrs.CommitUncertain):
            admin.flush_to_s3()
    assert late.apply() == 200
    object.proxy.usually.clear()
    assert admin.flush_to_s3() == [1]
    assert object.payloads() == ['"request"']


def test_operations_whose_upload_is_forgotten_say_so(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "REMEMBERED", 2)
    store, other = object.open(retry_for=0.2), object.other()
    admin = store.admin()
    admin.batch_operations([operation(store, "request")])
    object.proxy.usually["PUT"] = never_applied
    with pytest.raises(pgqrs.CommitUncertain):
        admin.flush_to_s3()
    object.proxy.usually.clear()
    for number in range(4):
        other.producer(QUEUE).enqueue(number)
    (outcome,) = admin.flush_to_s3()
    assert isinstance(outcome, pgqrs.CommitUncertain)
    assert admin.flush_to_s3() == []


# What tells


def test_an_upload_is_forgotten_by_position_and_never_by_time(object: Object) -> None:
    class Ahead:
        def now(self) -> datetime:
            return datetime.now(UTC) + timedelta(days=400)

    store, ahead = object.open(), object.other(clock=Ahead())
    held = Held()
    object.proxy.script("PUT", applied_but_unanswered, held)
    (call,) = enqueue(store, "once")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    ahead.producer(QUEUE).enqueue("on top")
    held.release()
    turn.outcome()
    assert call.outcome() == 1
    assert object.payloads() == ['"once"', '"on top"']


def test_how_many_uploads_are_remembered_is_bounded(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "REMEMBERED", 5)
    for number in range(8):
        with pgqrs.Store(object.url(), **object.settings(by_hand=False)) as store:
            store.producer(QUEUE).enqueue(number)
    with object.other().engine.connect() as connection:
        found = connection.execute(text("SELECT number FROM pgqrs_uploads ORDER BY 1")).scalars()
        assert list(found) == [4, 5, 6, 7, 8]
        assert uploads.verdict(connection, Upload("x", 3)) is Verdict.FORGOTTEN
        assert uploads.verdict(connection, Upload("x", 4)) is Verdict.EXCLUDED
        assert uploads.verdict(connection, Upload("x", None)) is Verdict.FORGOTTEN


@pytest.mark.parametrize("uploads_of_one", [1, 2])
def test_copies_of_a_cache_are_two_writers(
    object: Object, tmp_path: Path, uploads_of_one: int
) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    object.open("local", s3_cache=str(first)).close()
    shutil.copytree(first, second)
    one, two = (object.open("local", s3_cache=str(path)) for path in (first, second))
    assert len(one.admin().list_queues()) == len(two.admin().list_queues()) == 1
    for number in range(uploads_of_one):
        one.producer(QUEUE).enqueue(f"one {number}")
        one.admin().flush_to_s3()
    two.producer(QUEUE).enqueue("two")
    with pytest.raises(pgqrs.ConflictError):
        two.admin().flush_to_s3()
    assert len(two.admin().s3_stats().set_aside) == 1
    assert object.payloads() == [f'"one {number}"' for number in range(uploads_of_one)]


def test_a_store_that_is_opened_again_is_another_writer(object: Object, tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with pgqrs.Store(object.url("local"), **object.settings(name="cache")) as store:
            names.add(replica_of(store).writer)
    assert len(names) == 2


# Once an upload may have been applied


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (404, "NoSuchBucket"), (400, "ExpiredToken")],
)
def test_a_refusal_afterwards_is_called_uncertain(object: Object, status: int, code: str) -> None:
    store = object.open()
    object.proxy.script("PUT", applied_but_unanswered, answered(status, code))
    (call,) = enqueue(store, "stored")
    step(store)
    with pytest.raises(pgqrs.CommitUncertain):
        call.outcome()
    assert object.payloads() == ['"stored"']


@pytest.mark.parametrize("mode", ["durable", "local"])
def test_a_look_that_is_refused_afterwards_is_called_uncertain(object: Object, mode: str) -> None:
    store = object.open(mode)
    store.admin().batch_operations([operation(store, "stored")])
    store.admin().list_queues()
    refused = answered(403, "AccessDenied")

    def apply_and_refuse_looks(exchange: Any) -> None:
        object.proxy.usually["GET"] = refused
        applied_but_unanswered(exchange)

    object.proxy.script("PUT", apply_and_refuse_looks)
    with pytest.raises(pgqrs.CommitUncertain):
        store.admin().flush_to_s3()
    object.proxy.usually.clear()
    store.admin().flush_to_s3()
    assert object.payloads() == ['"stored"']


def test_a_local_copy_that_cannot_be_updated_is_no_error_of_the_caller(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk is full by the time the upload is stored."""
    store = object.open()
    assert store.admin().list_queues()
    (call,) = enqueue(store, "stored")

    def refuse(*_: Any) -> None:
        raise OSError("No space left on device")

    def fill_the_disk(exchange: Any) -> None:
        monkeypatch.setattr(images, "copy", refuse)
        served(exchange)

    object.proxy.script("PUT", fill_the_disk)
    step(store)
    assert call.outcome() == 1
    monkeypatch.undo()
    assert [message.payload for message in store.admin().peek(QUEUE)] == ["stored"]


def test_a_bucket_that_still_shows_what_was_replaced_is_looked_at_again(object: Object) -> None:
    store = object.open()
    held = Held()
    object.proxy.script("PUT", held)
    (call,) = enqueue(store, "lost")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("winner")
    unchanged = answered(304, "NotModified")
    object.proxy.script("GET", unchanged, unchanged)
    held.release()
    turn.outcome()
    with pytest.raises(pgqrs.ConflictError):
        call.outcome()
    assert [message.payload for message in store.admin().peek(QUEUE)] == ["winner"]


def test_an_object_that_was_rolled_back_is_noticed(object: Object) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue("kept")
    before = object.body()
    store.producer(QUEUE).enqueue("undone")
    object.client.put_object(Bucket="bucket", Key=object.key, Body=before)
    assert [m.payload for m in store.admin().peek(QUEUE)] == ["kept"]
    store.producer(QUEUE).enqueue("goes on")
    assert [m.payload for m in store.admin().peek(QUEUE)] == ["kept", "goes on"]
    (aside,) = store.admin().s3_stats().set_aside  # the last copy of what was undone
    assert Path(aside).exists()
