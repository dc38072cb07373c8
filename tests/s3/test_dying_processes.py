"""Two processes on one object, with conflicts, faults, and `kill -9`.

`PGQRS_TEST_S3_KILLS` says how many of them are killed before the test ends, and `PGQRS_TEST_SEED`
what chance decides.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgqrs
from tests.s3.conftest import QUEUE, Object, until
from tests.s3.nursery import Child, Nursery
from tests.s3.proxy import (
    answered,
    applied_but_answered,
    applied_but_unanswered,
    late,
    never_applied,
    sometimes,
)

KILLS = int(os.environ.get("PGQRS_TEST_S3_KILLS", "8"))
pytestmark = pytest.mark.processes
MOST_LINES = 60
"""What a process says at most, more or less, before it is killed."""
ENOUGH = 5 * KILLS
"""So many messages are enqueued at least, and as many acknowledged, before the test ends."""
HANG = 240 + 30 * KILLS
"""Seconds after which this is not slow but stuck."""


@pytest.fixture
def nursery(object: Object, tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(object.url(), object.proxy.url, tmp_path)
    yield nursery
    nursery.close()


def stored(store: pgqrs.Store) -> Counter[str]:
    """How often each payload is there, finished or not."""
    admin = store.admin()
    found = [message.payload for message in admin.peek(QUEUE, 100_000)]
    found += [message.payload for message in admin.list_archive(QUEUE, n=100_000)]
    return Counter(found)


@pytest.mark.timeout(2 * HANG)
def test_nothing_acknowledged_is_lost_or_done_twice(
    object: Object, nursery: Nursery, dice: random.Random
) -> None:
    object.proxy.usually = {
        "PUT": sometimes(
            dice.random(),
            (0.10, late(0.2)),
            (0.05, applied_but_unanswered),
            (0.05, never_applied),
            (0.05, answered(503, "SlowDown")),
            (0.03, applied_but_answered(500, "InternalError")),
            (0.02, answered(409, "ConditionalRequestConflict")),
        ),
        "GET": sometimes(dice.random(), (0.03, never_applied), (0.03, answered(503, "SlowDown"))),
    }
    children = [nursery.bear(), nursery.bear()]
    alive = list(children)
    for _ in range(KILLS):
        victim, lines = dice.randrange(2), dice.randint(1, MOST_LINES)
        until(lambda v=victim, n=lines: len(alive[v].said()) >= n, limit=HANG)
        alive[victim].kill()
        alive[victim] = nursery.bear()
        children.append(alive[victim])
    until(
        lambda: min(counted(children, kind) for kind in ("enqueued", "acked")) >= ENOUGH, limit=HANG
    )
    for child in alive:
        child.kill()

    said = [line for child in children for line in child.said()]
    unexpected = [line for line in said if line[0] == "unexpected"]
    assert unexpected == []
    print(Counter(line[1] if line[0] == "error" else line[0] for line in said))
    enqueued = [payload for kind, payload, _ in said if kind == "enqueued"]
    acked = Counter(payload for kind, payload, _ in said if kind == "acked")
    assert set(acked.values()) == {1}, "acknowledged twice"

    with pgqrs.Store(object.url(), s3_endpoint_url=object.server, s3_cache=":memory:") as store:
        there = stored(store)
        assert set(there.values()) == {1}, "stored twice"
        assert set(enqueued) <= set(there), "lost"
        with store.consumer(QUEUE, lease=60) as consumer:
            until(lambda: _drained(store, consumer))
        done = {m.payload for m in store.admin().list_archive(QUEUE, n=100_000)}
        assert done == set(there)


def counted(children: list[Child], kind: str) -> int:
    return sum(line[0] == kind for child in children for line in child.said())


def _drained(store: pgqrs.Store, consumer: pgqrs.Consumer) -> bool:
    """What a killed process held comes back when its lease lapses."""
    consumer.ack_many(consumer.dequeue(1000))
    return store.admin().peek(QUEUE, 1) == []
