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
