"""Two processes on one object, with conflicts, faults, and `kill -9`.

`PGQRS_TEST_S3_SECONDS` says for how long; `nox -s s3` runs it for a minute.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from tests.s3.conftest import QUEUE, Object, until
from tests.s3.proxy import (
    answered,
    applied_but_answered,
    applied_but_unanswered,
    late,
    never_applied,
    sometimes,
)

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("PGQRS_TEST_S3_SECONDS", "6"))
MOST_LINES = 60
"""What a process says at most, more or less, before it is killed."""


class Nursery:
    """Where processes come from."""

    def __init__(self, object: Object, directory: Path) -> None:
        self._directory = directory
        self._born = 0
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.s3.children"),
                *(object.url(), object.proxy.url, str(directory / "cache")),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def bear(self) -> Child:
        assert self._process.stdin
        assert self._process.stdout
        path = self._directory / f"{self._born}.jsonl"
        self._born += 1
        print(path, file=self._process.stdin, flush=True)
        return Child(path, int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Child:
    """A process that produces and consumes, and writes down what it was told."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self._pid = pid

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        until(self._is_gone)

    def _is_gone(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False

    def said(self) -> list[list[Any]]:
        """All but a last line that was cut off."""
        lines = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def nursery(object: Object, tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(object, tmp_path)
    yield nursery
    nursery.close()


def stored(store: pgqrs.Store) -> Counter[str]:
    """How often each payload is there, finished or not."""
    admin = store.admin()
    found = [message.payload for message in admin.peek(QUEUE, 100_000)]
    found += [message.payload for message in admin.list_archive(QUEUE, n=100_000)]
    return Counter(found)


def test_nothing_acknowledged_is_lost_or_done_twice(object: Object, nursery: Nursery) -> None:
    dice = random.Random(42)
    object.proxy.usually = {
        "PUT": sometimes(
            1,
            (0.10, late(0.2)),
            (0.05, applied_but_unanswered),
            (0.05, never_applied),
            (0.05, answered(503, "SlowDown")),
            (0.03, applied_but_answered(500, "InternalError")),
            (0.02, answered(409, "ConditionalRequestConflict")),
        ),
        "GET": sometimes(2, (0.03, never_applied), (0.03, answered(503, "SlowDown"))),
    }
    children = [nursery.bear(), nursery.bear()]
    alive = list(children)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        victim, lines = dice.randrange(2), dice.randint(1, MOST_LINES)
        until(lambda v=victim, n=lines: len(alive[v].said()) >= n)
        alive[victim].kill()
        alive[victim] = nursery.bear()
        children.append(alive[victim])
    for child in alive:
        child.kill()

    said = [line for child in children for line in child.said()]
    unexpected = [line for line in said if line[0] == "unexpected"]
    assert unexpected == []
    print(Counter(line[1] if line[0] == "error" else line[0] for line in said))
    enqueued = [payload for kind, payload, _ in said if kind == "enqueued"]
    acked = Counter(payload for kind, payload, _ in said if kind == "acked")
    assert enqueued
    assert acked
    assert set(acked.values()) == {1}, "acknowledged twice"

    with pgqrs.Store(object.url(), s3_endpoint_url=object.server, s3_cache=":memory:") as store:
        there = stored(store)
        assert set(there.values()) == {1}, "stored twice"
        assert set(enqueued) <= set(there), "lost"
        with store.consumer(QUEUE, lease=60) as consumer:
            until(lambda: _drained(store, consumer))
        done = {m.payload for m in store.admin().list_archive(QUEUE, n=100_000)}
        assert done == set(there)


def _drained(store: pgqrs.Store, consumer: pgqrs.Consumer) -> bool:
    """What a killed process held comes back when its lease lapses."""
    consumer.ack_many(consumer.dequeue(1000))
    return store.admin().peek(QUEUE, 1) == []
