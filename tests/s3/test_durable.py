"""Durable mode, turn by turn: every situation is walked into by hand, with no sleeping."""

from __future__ import annotations

import gc
import sqlite3
import time
import weakref
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text

import pgqrs
from tests.s3.conftest import QUEUE, Call, Object, enqueue, replica_of, step, until, waiting
from tests.s3.proxy import (
    Held,
    answered,
    applied_but_answered,
    applied_but_unanswered,
    never_applied,
)


def ready(store: pgqrs.Store) -> list[Any]:
    return [message.payload for message in store.admin().peek(QUEUE)]


# One turn


def test_an_enqueue_returns_when_it_is_in_the_bucket(object: Object) -> None:
    store = object.open()
    (call,) = enqueue(store, "a")
    assert not call.done
    assert object.payloads() == []
    step(store)
    assert call.outcome() == 1
    assert object.payloads() == ['"a"']


def test_what_is_not_in_the_bucket_is_hidden(object: Object) -> None:
    store = object.open()
    consumer = Call(store.consumer(QUEUE).open)
    until(lambda: waiting(store))
    step(store)
    held = Held()
    object.proxy.script("PUT", held)
    (call,) = enqueue(store, "a")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)  # applied to write_db, and on its way
    assert ready(store) == []
    assert consumer.outcome().dequeue(10) == []  # and does not wait
    assert not call.done
    held.release()
    turn.outcome()
    call.outcome()
    assert ready(store) == ["a"]


def test_all_who_wait_share_one_upload(object: Object) -> None:
    store = object.open()
    calls = enqueue(store, *range(20))
    step(store)
    assert [call.outcome() for call in calls] == list(range(1, 21))
    assert object.proxy.puts() == 1


def test_who_comes_during_an_upload_is_in_the_next(object: Object) -> None:
    store = object.open()
    held = Held()
    object.proxy.script("PUT", held)
    first = enqueue(store, "first")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    second = enqueue(store, "second")
    held.release()
    turn.outcome()
    assert [call.outcome() for call in first] == [1]
    assert object.payloads() == ['"first"']
    assert not second[0].done
    step(store)
    assert second[0].outcome() == 2
    assert object.payloads() == ['"first"', '"second"']


def test_a_claim_finds_only_what_was_in_the_bucket_before(object: Object) -> None:
    object.other().producer(QUEUE).enqueue("old")
    store = object.open()
    opened = Call(store.consumer(QUEUE).open)
    until(lambda: waiting(store))
    step(store)
    consumer = opened.outcome()
    enqueued = enqueue(store, "new")
    claim = Call(lambda: consumer.dequeue(10))
    until(lambda: waiting(store) == 2)
    step(store)
    assert [message.payload for message in claim.outcome()] == ["old"]
    enqueued[0].outcome()
    assert ready(store) == ["old", "new"]


def test_what_changes_nothing_is_not_uploaded(object: Object) -> None:
    store = object.open()
    call = Call(lambda: store.write(lambda c: c.execute(text("SELECT 42")).scalar_one()))
    until(lambda: waiting(store))
    step(store)
    assert call.outcome() == 42
    assert object.proxy.puts() == 0


def test_a_work_that_fails_fails_alone(object: Object) -> None:
    store = object.open()
    good = enqueue(store, "good")
    bad = Call(lambda: store.producer("no such queue").enqueue(1))
    until(lambda: waiting(store) == 2)
    step(store)
    assert good[0].outcome() == 1
    with pytest.raises(pgqrs.QueueNotFound):
        bad.outcome()


def test_the_first_upload_creates_the_object(empty: Object) -> None:
    store = empty.open()
    call = Call(store.admin().install)
    until(lambda: waiting(store))
    step(store)
    call.outcome()
    assert empty.body().startswith(b"SQLite format 3")
    assert empty.other().admin().list_queues() == []


# Lost races


def test_who_loses_the_race_is_told_and_the_store_is_healthy(object: Object) -> None:
    store = object.open()
    held = Held()
    object.proxy.script("PUT", held)
    calls = enqueue(store, "lost", "lost too")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("winner")
    late = enqueue(store, "came later")
    held.release()
    turn.outcome()
    for call in calls:
        with pytest.raises(pgqrs.ConflictError):
            call.outcome()
    assert ready(store) == ["winner"]
    step(store)
    assert late[0].outcome() == 2
    assert ready(store) == ["winner", "came later"]
    assert store.admin().s3_stats().conflicts == 1


def test_what_is_safe_to_repeat_is_repeated(object: Object) -> None:
    store = object.open(by_hand=False)
    held = Held()
    object.proxy.script("PUT", held)
    opened = Call(store.consumer(QUEUE).open)
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("winner")
    held.release()
    assert opened.outcome().worker_id == 1
    assert store.admin().s3_stats().conflicts == 1


def test_conflicts_can_be_left_to_the_store(object: Object) -> None:
    store = object.open(by_hand=False, s3_retry_conflicts=True)
    held = Held()
    object.proxy.script("PUT", held)
    call = Call(lambda: store.producer(QUEUE).enqueue("again"))
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("winner")
    held.release()
    assert call.outcome() == 2
    assert object.payloads() == ['"winner"', '"again"']


def test_two_create_the_object_and_one_wins(empty: Object) -> None:
    store = empty.open()
    held = Held()
    empty.proxy.script("PUT", held)
    call = Call(store.admin().install)
    until(lambda: waiting(store))
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    other = empty.other()
    other.admin().install()
    other.admin().create_queue("first")
    held.release()
    turn.outcome()
    until(lambda: waiting(store) or call.done)  # installing is repeated by itself
    step(store)
    call.outcome()
    assert [queue.queue_name for queue in store.admin().list_queues()] == ["first"]


# Answers that are lost, and errors that pass


@pytest.mark.parametrize(
    "fault",
    [
        applied_but_unanswered,
        applied_but_answered(500, "InternalError"),
        applied_but_answered(503, "SlowDown"),
    ],
    ids=["reset", "500", "503"],
)
def test_an_upload_that_was_applied_but_not_answered_is_recognised(
    object: Object, fault: Any
) -> None:
    store = object.open()
    object.proxy.script("PUT", fault)
    (call,) = enqueue(store, "once")
    step(store)
    assert call.outcome() == 1
    assert object.payloads() == ['"once"']
    assert store.admin().s3_stats().conflicts == 0


def test_it_is_recognised_also_when_somebody_built_on_it(object: Object) -> None:
    store = object.open()
    held = Held()
    object.proxy.script("PUT", applied_but_unanswered, held)
    (call,) = enqueue(store, "once")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    assert object.other().producer(QUEUE).enqueue("on top") == 2
    held.release()
    turn.outcome()
    assert call.outcome() == 1
    assert ready(store) == ["once", "on top"]
    (call,) = enqueue(store, "next")
    step(store)
    assert call.outcome() == 3
    assert object.payloads() == ['"once"', '"on top"', '"next"']


@pytest.mark.parametrize(
    "fault",
    [
        never_applied,
        answered(500, "InternalError"),
        answered(503, "SlowDown"),
        answered(409, "ConditionalRequestConflict"),
        answered(429, "TooManyRequests"),
        answered(400, "RequestTimeout"),
    ],
    ids=["reset", "500", "503", "409", "429", "400"],
)
def test_errors_that_pass_are_waited_for_and_all_are_released(object: Object, fault: Any) -> None:
    store = object.open()
    object.proxy.script("PUT", fault, fault)
    object.proxy.script("GET", fault)
    calls = enqueue(store, "a", "b")
    step(store)
    assert [call.outcome() for call in calls] == [1, 2]
    assert object.payloads() == ['"a"', '"b"']


def test_a_bucket_that_stays_away_is_an_error_and_nothing_is_kept(object: Object) -> None:
    store = object.open(retry_for=0.3)
    (call,) = enqueue(store, "a")
    object.proxy.usually["PUT"] = answered(409, "ConditionalRequestConflict")
    step(store)
    with pytest.raises(pgqrs.StoreUnavailable):
        call.outcome()
    object.proxy.usually.clear()
    (call,) = enqueue(store, "b")
    step(store)
    call.outcome()
    assert object.payloads() == ['"b"']


def test_an_answer_that_never_comes_is_reported_as_uncertain(object: Object) -> None:
    store = object.open(retry_for=0.3)
    (call,) = enqueue(store, "a")
    object.proxy.usually["PUT"] = never_applied
    step(store)
    with pytest.raises(pgqrs.CommitUncertain):
        call.outcome()
    object.proxy.usually.clear()
    assert ready(store) == []


def test_a_read_that_cannot_look_says_so(object: Object) -> None:
    store = object.open(retry_for=0.3)
    object.proxy.usually["GET"] = answered(503, "SlowDown")
    with pytest.raises(pgqrs.StoreUnavailable):
        store.admin().list_queues()
    object.proxy.usually.clear()
    assert len(store.admin().list_queues()) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (404, "NoSuchBucket"), (403, "InvalidAccessKeyId")]
)
def test_what_will_not_pass_is_an_error_at_once(object: Object, status: int, code: str) -> None:
    object.proxy.usually["GET"] = answered(status, code)
    with pytest.raises(pgqrs.InvalidConfig, match=code):
        object.open()


# What is in the bucket


def test_something_else_than_a_database_is_refused_and_kept(empty: Object) -> None:
    empty.put(b"precious, but no database")
    with pytest.raises(pgqrs.StoreDamaged, match="not a SQLite database"):
        empty.open()
    assert empty.body() == b"precious, but no database"


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_database_is_refused_and_kept(
    empty: Object, installed: bytes, damage: str
) -> None:
    half = len(installed) // 2
    damaged = installed[:half] + (b"" if damage == "truncated" else b"\xff" * half)
    empty.put(damaged)
    with pytest.raises(pgqrs.StoreDamaged):
        empty.open()
    assert empty.body() == damaged


def test_a_newer_schema_is_refused_also_while_the_store_is_open(object: Object) -> None:
    store = object.open()
    connection = sqlite3.connect(":memory:")
    connection.deserialize(object.body())
    connection.execute("INSERT INTO pgqrs_schema_history VALUES ('pgqrs_9999', 'x', '2030-01-01')")
    connection.commit()
    newer = connection.serialize()
    connection.close()
    object.put(newer)
    (call,) = enqueue(store, "a")
    step(store)
    with pytest.raises(pgqrs.SchemaTooNew):
        call.outcome()
    with pytest.raises(pgqrs.SchemaTooNew):
        store.admin().list_queues()
    with pytest.raises(pgqrs.SchemaTooNew):
        object.open()
    assert object.body() == newer


def test_an_object_that_was_deleted_is_noticed(object: Object) -> None:
    store = object.open()
    object.delete()
    with pytest.raises(pgqrs.SchemaNotInstalled):
        store.admin().list_queues()
    call = Call(store.admin().install)
    until(lambda: waiting(store))
    step(store)
    call.outcome()
    assert store.admin().list_queues() == []


def test_an_object_that_was_deleted_leaves_its_last_copy(object: Object) -> None:
    store = object.open()
    (call,) = enqueue(store, "a")
    step(store)
    call.outcome()
    object.delete()
    with pytest.raises(pgqrs.SchemaNotInstalled):
        store.admin().list_queues()
    (path,) = store.admin().s3_stats().set_aside
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT payload FROM pgqrs_messages").fetchall() == [('"a"',)]


def test_pages_of_another_size_and_a_log_are_fine(empty: Object, installed: bytes) -> None:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(installed)
    connection.execute("PRAGMA page_size=8192")
    connection.execute("VACUUM")
    data = bytearray(connection.serialize())
    connection.close()
    data[18:20] = b"\2\2"
    empty.put(bytes(data))
    store = empty.open()
    (call,) = enqueue(store, "a")
    step(store)
    assert call.outcome() == 1
    assert empty.payloads() == ['"a"']


# Reading


def test_a_read_that_finds_nothing_new_downloads_nothing(object: Object) -> None:
    store = object.open()
    ready(store)
    before = store.admin().s3_stats()
    ready(store)
    after = store.admin().s3_stats()
    assert after.not_modified > before.not_modified
    assert after.downloaded_bytes == before.downloaded_bytes


def test_reads_see_what_others_uploaded(object: Object) -> None:
    store, other = object.open(), object.other()
    other.producer(QUEUE).enqueue("theirs")
    assert ready(store) == ["theirs"]


def test_reads_may_be_a_little_behind(object: Object) -> None:
    store, other = object.open(s3_max_staleness=3600.0), object.other()
    assert ready(store) == []
    other.producer(QUEUE).enqueue("theirs")
    gets = store.admin().s3_stats().gets
    assert ready(store) == []
    assert store.admin().s3_stats().gets == gets
    assert store.admin().pull_from_s3() is True
    assert ready(store) == ["theirs"]


def test_reads_that_come_together_share_a_look(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = object.open()
    replica = replica_of(store)
    before, asked = store.admin().s3_stats().gets, list[float]()

    def clock() -> float:
        asked.append(time.monotonic())
        return asked[-1]

    held = Held()
    object.proxy.script("GET", held)
    first = Call(store.admin().list_queues)
    held.arrived.wait(100)
    # A read asks it when it begins, and once more when it waits for the first one.
    monkeypatch.setattr(replica, "_clock", clock)
    one = text("SELECT 1")
    others = [
        Call(lambda: store._database.read(lambda c: c.execute(one).scalar_one())) for _ in range(10)
    ]
    until(lambda: len(asked) == 2 * len(others))
    held.release()
    first.outcome()
    assert [call.outcome() for call in others] == [1] * 10
    assert (
        store.admin().s3_stats().gets - before == 2
    )  # what the first saw is too old for the others


# Transactions of the application's own


def test_a_transaction_returns_when_it_is_in_the_bucket(object: Object) -> None:
    store = object.open()
    with store.engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
        connection.execute(text("INSERT INTO orders VALUES (7)"))
        assert store.using(connection).enqueue(QUEUE, "with the order") == 1
        assert object.payloads() == []
    assert object.payloads() == ['"with the order"']
    with object.other().engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM orders")).scalar_one() == 7
        puts = object.proxy.puts()
    assert object.proxy.puts() == puts


def test_a_transaction_that_lost_the_race_says_so(object: Object) -> None:
    store = object.open()
    connection = store.engine.connect()
    store.using(connection).enqueue(QUEUE, "lost")
    object.other().producer(QUEUE).enqueue("winner")
    with pytest.raises(pgqrs.ConflictError):
        connection.commit()
    connection.close()
    assert ready(store) == ["winner"]
    with store.engine.begin() as connection:
        store.using(connection).enqueue(QUEUE, "again")
    assert ready(store) == ["winner", "again"]


def test_a_transaction_that_is_forgotten_does_not_block_the_others(object: Object) -> None:
    store = object.open()
    connection = store.engine.connect()
    connection.execute(text("SELECT 1"))
    del connection
    gc.collect()
    (call,) = enqueue(store, "after")
    step(store)
    assert call.outcome() == 1


def test_a_transaction_that_stays_open_is_waited_for_in_bounded_time(object: Object) -> None:
    store = object.open(retry_for=0.2)
    with (
        store.engine.begin(),
        pytest.raises(pgqrs.StoreUnavailable),
        store.engine.begin(),
    ):
        pass


def test_a_write_waits_in_bounded_time_for_a_transaction(object: Object) -> None:
    store = object.open(by_hand=False, retry_for=0.2)
    with store.engine.begin(), pytest.raises(pgqrs.StoreUnavailable):
        store.producer(QUEUE).enqueue("waits for itself")
    store.producer(QUEUE).enqueue("after")
    assert object.payloads() == ['"after"']


def test_what_holds_an_applications_code_is_run_once_and_alone(object: Object) -> None:
    store = object.open()
    runs: list[int] = []

    def step_of_a_workflow(connection: Any) -> int:
        runs.append(1)
        if len(runs) == 1:
            object.other().producer(QUEUE).enqueue("winner")
        return store.using(connection).enqueue(QUEUE, "mine")

    with pytest.raises(pgqrs.ConflictError):
        store._database.write_once(step_of_a_workflow)
    assert len(runs) == 1
    assert ready(store) == ["winner"]
    assert store._database.write_once(step_of_a_workflow) == 2
    assert ready(store) == ["winner", "mine"]
    with pytest.raises(ZeroDivisionError):
        store._database.write_once(lambda connection: 1 // 0)
    assert ready(store) == ["winner", "mine"]


# The end


def test_closing_while_somebody_waits_tells_them(object: Object) -> None:
    store = object.open()
    (call,) = enqueue(store, "a")
    store.close()
    with pytest.raises(pgqrs.StoreClosed):
        call.outcome()
    assert object.payloads() == []


def test_closing_during_an_upload_waits_for_it(object: Object) -> None:
    store = object.open(by_hand=False)
    held = Held()
    object.proxy.script("PUT", held)
    call = Call(lambda: store.producer(QUEUE).enqueue("a"))
    held.arrived.wait(100)
    late = Call(lambda: store.producer(QUEUE).enqueue("late"))
    until(lambda: waiting(store))
    closing = Call(store.close)
    until(lambda: replica_of(store).closed)
    held.release()
    closing.outcome()
    assert call.outcome() == 1
    with pytest.raises(pgqrs.StoreClosed):
        late.outcome()
    assert object.payloads() == ['"a"']


def test_a_store_that_nobody_uses_is_collected_with_its_thread_and_its_place(
    object: Object,
) -> None:
    settings = object.settings(by_hand=False, name="cache")
    store = pgqrs.Store(object.url(), **settings)
    store.producer(QUEUE).enqueue("a")
    thread = replica_of(store).task._thread
    place, gone = replica_of(store).slot.directory, weakref.ref(store._database)
    del store
    gc.collect()
    assert gone() is None
    thread.join(100)
    assert not thread.is_alive()
    with pgqrs.Store(object.url(), **settings) as again:
        assert replica_of(again).slot.directory == place


def test_stores_of_one_process_have_places_of_their_own(object: Object) -> None:
    settings = object.settings(name="cache")
    with pgqrs.Store(object.url(), **settings) as one, pgqrs.Store(object.url(), **settings) as two:
        assert replica_of(one).slot.directory != replica_of(two).slot.directory


def test_everything_can_be_in_memory(object: Object) -> None:
    store = object.open(by_hand=False, s3_cache=":memory:")
    store.producer(QUEUE).enqueue_many(["a", "b"])
    with store.consumer(QUEUE) as consumer:
        consumer.ack_many(consumer.dequeue(1))
    with store.engine.begin() as connection:
        store.using(connection).enqueue(QUEUE, "c")
    assert ready(store) == ["b", "c"]
    assert object.payloads() == ['"b"', '"c"']
