"""Full turns, reads beside commits, bounded waits, and small copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from pgqrs.stores import durable, images
from pgqrs.stores.durable import Phase
from tests.s3.conftest import QUEUE, Call, Object, enqueue, replica_of, step, until, waiting
from tests.s3.proxy import Held, served, swallowed, trickling


def commit(store: pgqrs.Store, payload: Any) -> Any:
    (call,) = enqueue(store, payload)
    step(store)
    return call.outcome()


# Full turns


def test_works_that_come_during_the_look_are_in_the_turn(object: Object) -> None:
    store = object.open()
    held = Held()
    object.proxy.script("GET", held)
    first = enqueue(store, "first")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    second = enqueue(store, "second")
    held.release()
    turn.outcome()
    assert [call.outcome() for call in first + second] == [1, 2]
    assert object.proxy.puts() == 1


def test_a_turn_waits_for_those_whom_the_last_one_released(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "LINGER", 100.0)  # ends by count
    store = object.open(by_hand=False)
    replica = replica_of(store)
    held = Held()
    object.proxy.script("PUT", held)
    calls = [Call(lambda: store.producer(QUEUE).enqueue("alone"))]
    held.arrived.wait(100)
    calls += [Call(lambda n=n: store.producer(QUEUE).enqueue(n)) for n in range(3)]
    until(lambda: waiting(store) == 3)
    held.release()
    [call.outcome() for call in calls]
    puts = object.proxy.puts()
    again = [Call(lambda: store.producer(QUEUE).enqueue("again"))]
    until(lambda: replica.phase is Phase.LOOKING and waiting(store) == 1)
    again += [Call(lambda: store.producer(QUEUE).enqueue("again")) for _ in range(2)]
    [call.outcome() for call in again]
    assert object.proxy.puts() == puts + 1


def test_a_node_that_is_alone_skips_the_look(object: Object) -> None:
    store = object.open()
    for number in range(3):
        commit(store, number)
    gets = object.proxy.seen.count("GET")
    replica_of(store)._seen_at = time.monotonic()  # however slow this machine is
    commit(store, "at once")
    assert object.proxy.seen.count("GET") == gets


def test_a_node_that_was_wrong_to_think_so_runs_the_turn_again(object: Object) -> None:
    store, other = object.open(), object.other()
    for number in range(3):
        commit(store, number)
    other.producer(QUEUE).enqueue("theirs")
    replica_of(store)._seen_at = time.monotonic()
    assert commit(store, "ours") == 5
    assert len(object.payloads()) == 5
    gets = object.proxy.seen.count("GET")
    commit(store, "now it knows better")
    assert object.proxy.seen.count("GET") > gets


# Reads beside commits


def test_a_read_does_not_hold_up_a_commit(object: Object) -> None:
    store = object.open()
    for number in range(3):
        commit(store, number)
    held = Held()
    object.proxy.script("GET", held)
    reading = Call(lambda: store.admin().peek(QUEUE))
    held.arrived.wait(100)
    replica_of(store)._seen_at = time.monotonic()  # alone: the turn needs no look
    assert commit(store, "meanwhile") == 4
    assert not reading.done
    held.release()
    assert len(reading.outcome()) == 4


def test_a_look_from_before_does_not_bring_back_an_older_state(object: Object) -> None:
    """The answer to the look is an upload of ours, and two more have followed by the time it comes."""
    store = object.open()
    for number in range(3):
        commit(store, number)
    arrived, go_on = threading.Event(), threading.Event()

    def answered_late(exchange: Any) -> None:
        # As if it had been asked for without a condition, which is part of the signature.
        found = object.client.get_object(Bucket="bucket", Key=object.key)
        body = found["Body"].read()
        arrived.set()
        go_on.wait(100)
        labels = [(f"x-amz-meta-{name}", value) for name, value in found["Metadata"].items()]
        exchange.answer(200, [("ETag", found["ETag"]), *labels], body)

    object.proxy.script("GET", answered_late)
    reading = Call(lambda: store.admin().peek(QUEUE))
    arrived.wait(100)
    for number in range(2):
        replica_of(store)._seen_at = time.monotonic()
        commit(store, number)
    go_on.set()
    assert len(reading.outcome()) == 5


def test_a_reader_waits_for_an_upload_that_it_meets_instead_of_downloading_it(
    object: Object,
) -> None:
    store = object.open()
    commit(store, "before")
    arrived, go_on = threading.Event(), threading.Event()

    def answered_late(exchange: Any) -> None:
        found = exchange.forward()
        arrived.set()
        go_on.wait(100)
        exchange.answer(*found)

    object.proxy.script("PUT", answered_late)
    (call,) = enqueue(store, "after")
    turn = Call(lambda: step(store))
    arrived.wait(100)
    downloaded = store.admin().s3_stats().downloaded_bytes
    reading = Call(lambda: store.admin().peek(QUEUE))
    until(lambda: replica_of(store)._is_met())
    assert not reading.done
    go_on.set()
    turn.outcome()
    assert call.outcome() == 2
    assert [message.payload for message in reading.outcome()] == ["before", "after"]
    assert store.admin().s3_stats().downloaded_bytes == downloaded


# Bounded waits


def test_an_answer_that_trickles_is_given_up(object: Object) -> None:
    store = object.open(s3_timeout=0.3, retry_for=0.5)
    object.other().producer(QUEUE).enqueue("theirs")
    object.proxy.usually["GET"] = trickling
    with pytest.raises(pgqrs.StoreUnavailable):
        store.admin().list_queues()
    object.proxy.usually.clear()
    assert len(store.admin().peek(QUEUE)) == 1
    slot = replica_of(store).slot.directory
    object.proxy.gone.set()  # the request that was given up ends, and its file with it
    until(lambda: not list(slot.glob("incoming-*")))


def test_calls_that_come_while_the_bucket_is_silent_wait_no_longer_than_the_first(
    object: Object,
) -> None:
    retry_for, timeout = 8.0, 1.0
    store = object.open(by_hand=False, s3_timeout=timeout, retry_for=retry_for)
    store.admin().list_queues()
    producer = store.producer(QUEUE)
    object.proxy.usually = {"GET": swallowed, "PUT": swallowed}
    took: list[float] = []

    def timed(call: Callable[[], Any]) -> None:
        begun = time.monotonic()
        with pytest.raises((pgqrs.StoreUnavailable, pgqrs.CommitUncertain)):
            call()
        took.append(time.monotonic() - begun)

    calls = [Call(lambda: timed(lambda: producer.enqueue("first")))]
    until(lambda: replica_of(store).phase is Phase.LOOKING)
    calls.append(Call(lambda: timed(lambda: producer.enqueue("second"))))
    calls.append(Call(lambda: timed(lambda: store.admin().queue_stats(QUEUE))))
    [call.outcome() for call in calls]
    assert max(took) < 2.5 * retry_for  # and not a turn of each after the other
    object.proxy.gone.set()


# Claims


def test_a_claim_whose_lease_has_lapsed_is_not_handed_out(object: Object) -> None:
    class Movable:
        offset = timedelta()

        def now(self) -> datetime:
            return datetime.now(UTC) + self.offset

    clock = Movable()
    store = object.open(by_hand=False, clock=clock)
    store.producer(QUEUE).enqueue("m")
    consumer = store.consumer(QUEUE, lease=60).open()

    def take_long(exchange: Any) -> None:
        clock.offset = timedelta(seconds=61)
        served(exchange)

    object.proxy.script("PUT", take_long)
    assert consumer.dequeue() == []
    (message,) = consumer.dequeue()
    assert (message.payload, message.read_ct) == ("m", 2)
    consumer.ack(message)


# Small copies


def test_the_local_copies_stay_as_large_as_the_object(object: Object) -> None:
    store = object.open()
    for number in range(20):
        commit(store, number)
    directory = replica_of(store).slot.directory
    size = store.admin().s3_stats().last_upload_bytes
    kept = sum(path.stat().st_size for path in directory.iterdir())
    assert kept < 4 * size


def test_a_large_database_is_sent_and_fetched_through_files(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "SMALL", 0)
    dumped: list[int] = []
    monkeypatch.setattr(images, "dump", lambda _: dumped.append(1))
    store, other = object.open(), object.other()
    assert commit(store, "one") == 1
    assert other.producer(QUEUE).enqueue("two") == 2
    assert commit(store, "three") == 3
    assert dumped == []
    assert object.body()[18:20] == images.NO_LOG
    assert len(object.payloads()) == 3


def test_an_upload_that_was_given_up_sends_no_more_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(images.MAGIC + b"\0\0\2\2" + os.urandom(100))
    body = images.FileBody(path)
    assert body.read(20)[18:20] == images.NO_LOG
    body.seek(0)
    assert len(body.read()) == len(body) == 120
    body.close()
    with pytest.raises(ValueError, match="closed"):
        body.read(1)


def test_our_own_bytes_are_not_checked(object: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    store = object.open()
    commit(store, "first")
    monkeypatch.setattr(images, "_check", lambda *_: pytest.fail("checked"))
    commit(store, "second")
    assert len(store.admin().peek(QUEUE)) == 2


# Caches that are of no use


def test_a_cache_that_cannot_be_written_is_a_clear_error(object: Object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(pgqrs.InvalidConfig, match="s3_cache"):
        object.open(s3_cache=str(tmp_path / "file"))


@pytest.mark.parametrize("mode", ["durable", "local"])
@pytest.mark.parametrize("name", ["lock", "base.json", "write_db.sqlite", "read_db.sqlite"])
def test_a_corrupt_cache_is_rebuilt(object: Object, tmp_path: Path, mode: str, name: str) -> None:
    cache = tmp_path / "cache"
    object.other().producer(QUEUE).enqueue("a")
    object.open(mode, s3_cache=str(cache)).close()
    (slot,) = cache.glob("*/000")
    for path in slot.glob(f"{name}*"):
        path.unlink()
    (slot / name).write_bytes(b"garbage" * 1000)
    store = object.open(mode, s3_cache=str(cache))
    assert [message.payload for message in store.admin().peek(QUEUE)] == ["a"]
