"""A judge of what nodes did with one object. It imports nothing of pgqrs.

Each process writes what it was answered, one JSON list a line: `["enqueued", payload, id]`, `["acked",
payload, id]`, `["error", name, payload]`, `["unexpected", text, null]`. Payloads are never used twice.
From these lines, and from the bytes of the object at the end, `judge` finds what must not have happened.

What a process was not answered, because it was killed or got an error, may or may not have happened;
but it has not happened twice.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

Line = Sequence[Any]


def tables(body: bytes) -> tuple[list[Any], list[Any]]:
    """The payloads that wait, and those that are done."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(body)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        waiting = connection.execute("SELECT payload FROM pgqrs_messages").fetchall()
        done = connection.execute("SELECT payload FROM pgqrs_archive").fetchall()
    return [json.loads(p) for (p,) in waiting], [json.loads(p) for (p,) in done]


def judge(said: Mapping[str, Iterable[Line]], body: bytes) -> list[str]:
    """What went wrong, in words; `said` is by node."""
    lines = [line for each in said.values() for line in each]
    waiting, done = tables(body)
    stored = Counter([*waiting, *done])
    problems = [f"unexpected: {line[1]}" for line in lines if line[0] == "unexpected"]
    problems += [f"{payload} is stored {n} times" for payload, n in stored.items() if n > 1]
    enqueued = Counter(line[1] for line in lines if line[0] == "enqueued")
    acked = Counter(line[1] for line in lines if line[0] == "acked")
    problems += [f"{payload} was acknowledged {n} times" for payload, n in acked.items() if n > 1]
    problems += [f"{p} was enqueued, and is lost" for p in enqueued if p not in stored]
    finished = set(done)
    problems += [f"{p} was acknowledged, and is not done" for p in acked if p not in finished]
    for node, each in said.items():
        counts = Counter(line[0] for line in each)
        problems += [
            f"{node} has {kind} nothing" for kind in ("enqueued", "acked") if not counts[kind]
        ]
    return problems
