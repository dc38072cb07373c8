"""What the keeper of leases does with claims of its own process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import pgqrs
from pgqrs.keeper import Keeper, Lease
from pgqrs.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Iterator[pgqrs.Store]:
    with pgqrs.Store("sqlite::memory:", clock=clock, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=30)
        yield store


def test_a_message_that_was_claimed_again_here_is_held_by_the_last_claim(
    store: pgqrs.Store, clock: ManualClock
) -> None:
    store.producer("tasks").enqueue(1)
    consumer = store.consumer("tasks")
    (before,) = consumer.dequeue()
    clock.advance(31)
    (after,) = consumer.dequeue()
    keeper = Keeper(lambda: store._database)
    earlier, last = (Lease(each, 30, claimed_at=time.monotonic()) for each in (before, after))
    keeper.keep([last, earlier])
    clock.advance(10)
    keeper.renew(everything=True)
    assert (earlier.is_lost, last.is_lost) == (True, False)
    assert store.admin().get_message(after.id).vt > after.vt


def test_a_claim_lasts_when_its_queue_allows_only_shorter_leases_now(database: str) -> None:
    clock = ManualClock()
    with pgqrs.Store(database, clock=clock, upgrade=True) as store:
        for queue in ("tasks", "others"):
            store.admin().create_queue(queue, lease=30)
            store.producer(queue).enqueue(1)
        held = [message for queue in ("tasks", "others") for message in claimed(store, queue)]
        keeper = Keeper(lambda: store._database)
        leases = [Lease(message, 30, claimed_at=time.monotonic()) for message in held]
        keeper.keep(leases)
        store.admin().configure_queue("tasks", lease=10, max_lease=10)
        clock.advance(25)
        keeper.renew(everything=True)
        clock.advance(8)
        assert [claimed(store, queue) for queue in ("tasks", "others")] == [[], []]
        assert [lease.lease for lease in leases] == [10, 30]
        assert not any(lease.is_lost for lease in leases)
        keeper.forget_all(wait=10)


def claimed(store: pgqrs.Store, queue: str) -> list[pgqrs.Message]:
    return store.consumer(queue).dequeue()
