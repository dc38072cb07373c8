"""Rows of unique keys go when their keys are free again."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

import pgqrs
from pgqrs.models import keys
from pgqrs.testing import ManualClock

DAY = 86400


@pytest.mark.parametrize("size", [20, 500])
def test_there_are_never_many_more_rows_than_keys_in_use(database: str, size: int) -> None:
    clock = ManualClock()
    with pgqrs.Store(database, clock=clock, upgrade=True) as store:
        admin = store.admin()
        admin.create_queue("q")
        producer, consumer = store.producer("q"), store.consumer("q").open()
        for day in range(5):
            for first in range(0, 500, size):
                names = [f"{day}-{number}" for number in range(first, first + size)]
                producer.enqueue_many(names, keys=names)
            consumer.ack_many(consumer.dequeue(1000))
            admin.purge_archive("q", older_than=0)
            clock.advance(DAY)
        count = store.read(lambda c: c.execute(select(func.count()).select_from(keys)).scalar_one())
    assert count <= 2 * 500
