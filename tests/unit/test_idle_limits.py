"""A claim that finds nothing, or no room, changes nothing: in a bucket every change is an upload."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

import pgqrs
from pgqrs.repositories import limits
from pgqrs.testing import ManualClock


@pytest.mark.parametrize(
    "settings",
    [
        {"max_in_flight": 1},
        {"max_in_flight_per_key": 1},
        {"rate": pgqrs.Rate(1, per=60)},
        {"max_in_flight": 1, "max_in_flight_per_key": 1, "rate": pgqrs.Rate(5, per=60)},
    ],
    ids=str,
)
def test_an_idle_claim_changes_nothing(settings: dict[str, Any]) -> None:
    clock = ManualClock()
    with pgqrs.Store("sqlite::memory:", clock=clock, upgrade=True) as store:
        store.admin().create_queue("q", **settings)
        producer, consumer = store.producer("q"), store.consumer("q")
        producer.enqueue_many(range(3), keys=["k"] * 3, unique=None)
        assert len(consumer.dequeue(10)) == 1
        consumer.dequeue(10)
        clock._now += timedelta(seconds=1)

        def claim(connection: Connection) -> list[pgqrs.Message]:
            worker = consumer.worker_id
            options = {"worker": worker, "limit": 10, "lease": None, "now": clock.now()}
            return limits.claim(connection, "q", **options).messages

        database: Any = store._database
        assert database.try_out(claim) == (False, [])
