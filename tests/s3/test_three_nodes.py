"""Three nodes on one object: one as it should be, one far away, one with a bad line; and `kill -9`.

Requests get lost before or after they were applied, or are applied long after the client has given up.
`PGQRS_TEST_S3_KILLS` says how many processes are killed before the test ends, and `PGQRS_TEST_SEED` what
chance decides. The default takes about a minute; 300 kills take about half an hour.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pgqrs
from tests.s3.conftest import QUEUE, Object, until
from tests.s3.history import judge, tables
from tests.s3.nursery import Child, Nursery
from tests.s3.proxy import (
    Fault,
    S3Proxy,
    answered,
    applied_but_answered,
    applied_but_unanswered,
    late,
    never_applied,
    sometimes,
    zombie,
)

KILLS = int(os.environ.get("PGQRS_TEST_S3_KILLS", "9"))
MOST_LINES = 40
"""What a process says at most, more or less, before it is killed."""
ENOUGH = 15
"""So much is enqueued, and as much acknowledged, by each node after the last kill."""
HANG = 300 + 60 * KILLS
"""Seconds after which this is not slow but stuck."""
pytestmark = pytest.mark.processes


class Node:
    """A place from which the bucket is reached; the processes there are killed and start again."""

    def __init__(self, name: str, proxy: S3Proxy, nursery: Nursery) -> None:
        self.name = name
        self.proxy = proxy
        self._nursery = nursery
        self.children = [nursery.bear()]

    @property
    def child(self) -> Child:
        return self.children[-1]

    def restart(self) -> None:
        self.child.kill()
        self.children.append(self._nursery.bear())

    def said(self) -> list[list[object]]:
        return [line for child in self.children for line in child.said()]


def faults(dice: random.Random) -> dict[str, dict[str, Fault]]:
    bad_puts = sometimes(
        dice.random(),
        (0.10, late(0.2)),
        (0.06, applied_but_unanswered),
        (0.04, zombie(0.3)),
        (0.04, never_applied),
        (0.04, answered(503, "SlowDown")),
        (0.03, applied_but_answered(500, "InternalError")),
        (0.02, answered(409, "ConditionalRequestConflict")),
    )
    bad_gets = sometimes(
        dice.random(), (0.03, never_applied), (0.03, answered(503, "SlowDown")), (0.03, late(0.3))
    )
    return {
        "near": {},
        "far": {"GET": late(0.08), "PUT": late(0.08)},
        "bad": {"GET": bad_gets, "PUT": bad_puts},
    }


@pytest.fixture
def nodes(object: Object, tmp_path: Path, dice: random.Random) -> Iterator[list[Node]]:
    with ExitStack() as cleanup:
        found = []
        for name, usually in faults(dice).items():
            proxy = S3Proxy(object.server)
            cleanup.callback(proxy.close)
            proxy.usually = usually
            (tmp_path / name).mkdir()
            nursery = Nursery(
                object.url(), proxy.url, tmp_path / name, PGQRS_S3_RETRY_CONFLICTS="true"
            )
            cleanup.callback(nursery.close)
            found.append(Node(name, proxy, nursery))
        yield found


@pytest.mark.timeout(2 * HANG)
def test_nothing_is_lost_or_doubled_and_every_node_goes_on(
    object: Object, nodes: list[Node], dice: random.Random
) -> None:
    for _ in range(KILLS):
        victim, lines = dice.choice(nodes), dice.randint(1, MOST_LINES)
        until(lambda v=victim, n=lines: len(v.child.said()) >= n, limit=HANG)
        victim.restart()
    for node in nodes:
        until(lambda n=node: progressed(n), limit=HANG)
    for node in nodes:
        node.child.kill()
    for node in nodes:
        node.proxy.close()  # and what was on its way arrives, or does not
    said = {node.name: node.said() for node in nodes}
    for name, lines in said.items():
        print(name, Counter(line[1] if line[0] == "error" else line[0] for line in lines))
    assert judge(said, object.body()) == []
    drain(object)
    waiting, done = tables(object.body())
    assert waiting == []
    assert judge(said, object.body()) == []
    assert max(Counter(done).values()) == 1


def progressed(node: Node) -> bool:
    counts = Counter(line[0] for line in node.child.said())
    return min(counts["enqueued"], counts["acked"]) >= ENOUGH


def drain(object: Object) -> None:
    """What a killed process held comes back when its lease lapses."""
    with pgqrs.Store(object.url(), s3_endpoint_url=object.server, s3_cache=":memory:") as store:
        consumer = store.consumer(QUEUE, lease=60).open()

        def is_empty() -> bool:
            consumer.ack_many(consumer.dequeue(1000))
            return store.admin().peek(QUEUE, 1) == []

        until(is_empty)
        consumer.close()


# The judge itself


def test_the_judge_sees_what_is_wrong() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE pgqrs_messages (payload)")
    connection.execute("CREATE TABLE pgqrs_archive (payload)")
    connection.execute("""INSERT INTO pgqrs_messages VALUES ('"a"'), ('"b"'), ('"b"')""")
    connection.execute("""INSERT INTO pgqrs_archive VALUES ('"c"')""")
    connection.commit()
    body = connection.serialize()
    connection.close()
    said = {
        "one": [["enqueued", "a", 1], ["enqueued", "gone", 2], ["acked", "a", 1]],
        "two": [["enqueued", "c", 3], ["acked", "c", 3], ["acked", "c", 3]],
        "three": [["unexpected", "KeyError", None]],
    }
    assert sorted(judge(said, body)) == [
        "a was acknowledged, and is not done",
        "b is stored 2 times",
        "c was acknowledged 2 times",
        "gone was enqueued, and is lost",
        "three has acked nothing",
        "three has enqueued nothing",
        "unexpected: KeyError",
    ]
