"""Fairness among nodes: what is decided, and that it is done."""

from __future__ import annotations

import threading

import pytest

import pgqrs
from pgqrs.stores import fairness as rules
from pgqrs.stores.fairness import SUFFIX, Announcement, Fairness
from tests.s3.conftest import QUEUE, Call, Object, enqueue, step, until
from tests.s3.proxy import Held


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


# What is decided


def test_a_node_that_loses_again_and_again_announces_itself() -> None:
    fairness = Fairness("me", clock=Clock())
    assert [fairness.lost(0.1, behind=1) is None for _ in range(3)] == [True, True, False]
    fairness.won(0.1)
    assert fairness.losses == 0
    assert fairness.lost(0.1, behind=1) is None


def test_a_node_that_is_outpaced_announces_itself_at_once() -> None:
    found = Fairness("me", clock=Clock()).lost(0.25, behind=3)
    assert found == Announcement("me", 0.25)
    assert Announcement.parse(found.dump()) == found
    assert Announcement.parse(b"something else") is None


def test_the_others_pause_for_two_of_its_turns_unless_they_wait_themselves() -> None:
    clock = Clock()
    fairness = Fairness("me", clock=clock)
    fairness.heard(Announcement("me", 1.0))
    assert fairness.pause() == 0
    fairness.heard(Announcement("slow", 0.25))
    assert (fairness.pause(), fairness.pauses) == (0.5, 1)
    clock.time += 1
    assert fairness.pause() == 0
    fairness.lost(0.1, behind=5)
    fairness.heard(Announcement("slow", 0.25))
    assert fairness.pause() == 0
    fairness.heard(Announcement("far too slow", 1e9))
    fairness.won(0.1)
    fairness.heard(Announcement("far too slow", 1e9))
    assert fairness.pause() == rules.LONGEST_PAUSE


def test_a_node_is_alone_until_it_meets_another() -> None:
    clock = Clock()
    fairness = Fairness("me", clock=clock)
    looks = []
    for _ in range(16):
        looks.append(fairness.should_look())
        fairness.won(0.1)
    assert looks.count(True) == 2
    assert fairness.is_alone
    fairness.met()
    fairness.won(0.1)
    fairness.won(0.1)
    assert not fairness.is_alone
    assert fairness.should_look()
    clock.time += rules.REMEMBER + 1
    assert fairness.is_alone


# That it is done


def lose(object: Object, store: pgqrs.Store, other: pgqrs.Store, times: int) -> None:
    """A turn during which the other one uploads so many times."""
    held = Held()
    object.proxy.script("PUT", held)
    (call,) = enqueue(store, "lost")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    for number in range(times):
        other.producer(QUEUE).enqueue(number)
    held.release()
    turn.outcome()
    with pytest.raises(pgqrs.ConflictError):
        call.outcome()


def announcement(object: Object) -> str | None:
    listed = object.client.list_objects_v2(Bucket="bucket", Prefix=object.key + SUFFIX)
    return listed["Contents"][0]["ETag"] if listed["KeyCount"] else None


def test_a_starved_node_is_heard_by_the_others(
    object: Object, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = object.open(), object.other()
    lose(object, store, other, times=2)
    until(lambda: announcement(object))
    stats = store.admin().s3_stats()
    assert (stats.losses_in_a_row, stats.announcements) == (1, 1)
    assert "wins every race" in caplog.text

    def pauses() -> int:
        other.producer(QUEUE).enqueue("on and on")
        return other.admin().s3_stats().pauses

    until(pauses)
    (call,) = enqueue(store, "at last")
    step(store)
    call.outcome()
    assert store.admin().s3_stats().losses_in_a_row == 0
    for _ in range(2 * rules.LOOK_EVERY):
        assert pauses() == 1  # each announcement is honoured once
    store.close()
    assert announcement(object) is None


def test_a_node_that_lost_runs_its_turn_again_on_what_it_just_fetched(object: Object) -> None:
    store = object.open(s3_retry_conflicts=True)
    held = Held()
    object.proxy.script("PUT", held)
    (call,) = enqueue(store, "again")
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("winner")
    gets = object.proxy.seen.count("GET")
    held.release()
    turn.outcome()
    assert call.outcome() == 2
    assert object.proxy.seen.count("GET") == gets + 1


@pytest.mark.timeout(300)
def test_four_nodes_that_write_all_the_time_all_make_progress(object: Object) -> None:
    """By count: nobody stops before all have written their share."""
    each, stores = 10, [object.other(s3_retry_conflicts=True, retry_for=100.0) for _ in range(4)]
    done = [0] * len(stores)
    ended = threading.Event()

    def produce(number: int) -> None:
        while not ended.is_set():
            stores[number].producer(QUEUE).enqueue(number)
            done[number] += 1
            if min(done) >= each:
                ended.set()

    calls = [Call(lambda n=n: produce(n)) for n in range(len(stores))]
    [call.outcome() for call in calls]
    assert len(object.payloads()) == sum(done)
