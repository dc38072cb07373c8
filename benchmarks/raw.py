"""The yardstick: what an expert would write by hand for this schema and nothing else.

One connection per process, statements prepared once, one round trip or one transaction per
operation, as durable as pgqrs (PostgreSQL with fsync; SQLite with WAL and synchronous=FULL) and as
safe: claims skip what others hold, and an ack is fenced by message, worker and attempt. Of several
ways to say the same, each statement is the one that measured fastest.

What it does not do, and pgqrs does: find the queue by name, obey pause and suspend, bring back
lapsed leases, bury dead letters, expire messages, wake who waits, check payloads, share connections
between threads, survive a restart of the server.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import psycopg

from benchmarks.driver import LEASE, QUEUE

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_NEW = "(queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at, payload)"
_KEPT = (
    "queue_id, priority, read_ct, released_ct, enqueued_at, dequeued_at, expires_at, "
    "producer_worker_id, consumer_worker_id, dedup_key, group_key, codec, payload_ref, headers, "
    "payload"
)
_INTO_ARCHIVE = (
    f"INSERT INTO pgqrs_archive (original_message_id, {_KEPT}, archive_reason, archived_at)"
)


class Claimed(NamedTuple):
    """A held message, with the columns that a claim changes."""

    id: int
    priority: int
    payload: Any
    vt: Any
    read_ct: int
    dequeued_at: Any
    consumer_worker_id: int


# PostgreSQL

_PG_ENQUEUE = f"""
    INSERT INTO pgqrs_messages {_NEW}
    VALUES (%s, 0, true, now(), 0, 0, now(), %s::jsonb)
    RETURNING id"""
_PG_ENQUEUE_MANY = f"""
    INSERT INTO pgqrs_messages {_NEW}
    SELECT %s, 0, true, now(), 0, 0, now(), value FROM jsonb_array_elements(%s::jsonb)
    RETURNING id"""
# The limit is part of the text: with a parameter the server would plan the statement every time.
_PG_CLAIM = f"""
    UPDATE pgqrs_messages
    SET ready = false, vt = now() + interval '{LEASE} seconds', read_ct = read_ct + 1,
        dequeued_at = now(), consumer_worker_id = %s
    WHERE id = ANY (ARRAY (
        SELECT id FROM pgqrs_messages WHERE queue_id = %s AND ready
        ORDER BY priority DESC, id LIMIT {{n}} FOR UPDATE SKIP LOCKED
    ))
    RETURNING {", ".join(Claimed._fields)}"""


def _pg_ack(held: str, fence: str) -> str:
    return f"""
    WITH done AS (DELETE FROM pgqrs_messages m {held} WHERE {fence} RETURNING m.*)
    {_INTO_ARCHIVE}
    SELECT id, {_KEPT}, 'completed', now() FROM done
    RETURNING original_message_id"""


_PG_ACK_ONE = _pg_ack("", "m.id = %s AND m.read_ct = %s AND m.consumer_worker_id = %s")
_PG_ACK_MANY = _pg_ack(
    "USING unnest(%s::bigint[], %s::int[]) AS held (id, read_ct)",
    "m.id = held.id AND m.read_ct = held.read_ct AND m.consumer_worker_id = %s",
)


class RawPostgres:
    """psycopg 3 in autocommit: every operation is one prepared statement."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self._cursor = self._connection.cursor(binary=True)
        self._worker = os.getpid()
        found = self._run("SELECT id FROM pgqrs_queues WHERE queue_name = %s", QUEUE)
        self._queue = found[0][0]

    def _run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._cursor.execute(statement, parameters).fetchall()

    def enqueue(self, payload: Any) -> int:
        ((id,),) = self._run(_PG_ENQUEUE, self._queue, _encode(payload))
        return int(id)

    def enqueue_and_notify(self, payload: Any, channel: str) -> int:
        """One round trip, for the latency of wake-ups."""
        statement = f"{_PG_ENQUEUE}, pg_notify('{channel}', '')"
        ((id, _),) = self._run(statement, self._queue, _encode(payload))
        return int(id)

    def enqueue_many(self, payloads: list[Any]) -> list[int]:
        return [id for (id,) in self._run(_PG_ENQUEUE_MANY, self._queue, _encode(payloads))]

    def claim(self, n: int) -> list[Claimed]:
        rows = self._run(_PG_CLAIM.format(n=n), self._worker, self._queue)
        return _in_order([Claimed(*row) for row in rows])

    def ack(self, claimed: Sequence[Claimed]) -> None:
        ids, attempts = [message.id for message in claimed], [m.read_ct for m in claimed]
        if len(ids) == 1:
            done = self._run(_PG_ACK_ONE, ids[0], attempts[0], self._worker)
        else:
            done = self._run(_PG_ACK_MANY, ids, attempts, self._worker)
        _check_all(done, claimed)

    def close(self) -> None:
        self._connection.close()


# SQLite

_LITE_ENQUEUE = f"INSERT INTO pgqrs_messages {_NEW} VALUES (?1, 0, 1, ?2, 0, 0, ?2, ?3)"
_LITE_ENQUEUE_MANY = f"""
    INSERT INTO pgqrs_messages {_NEW}
    SELECT ?1, 0, 1, ?2, 0, 0, ?2, value FROM json_each(?3)"""
_LITE_FIRST = """
    SELECT id, priority, read_ct, payload FROM pgqrs_messages WHERE queue_id = ? AND ready = 1
    ORDER BY priority DESC, id LIMIT ?"""
_LITE_HOLD = """
    UPDATE pgqrs_messages
    SET ready = 0, vt = ?, read_ct = read_ct + 1, dequeued_at = ?, consumer_worker_id = ?
    WHERE id """
_LITE_HOLD_ONE = _LITE_HOLD + "= ?"
_LITE_HOLD_MANY = _LITE_HOLD + "IN (SELECT value FROM json_each(?))"
_LITE_HELD = """
    FROM json_each(?1) AS held CROSS JOIN pgqrs_messages AS m
    ON m.id = CAST(held.key AS INTEGER) AND m.read_ct = held.value AND m.consumer_worker_id = ?2"""
_LITE_ARCHIVE = f"""
    {_INTO_ARCHIVE} SELECT m.id, m.{_KEPT.replace(", ", ", m.")}, 'completed', ?3 {_LITE_HELD}"""
_LITE_DELETE = f"DELETE FROM pgqrs_messages WHERE id IN (SELECT m.id {_LITE_HELD})"
_FEW = 50
"""Up to so many, one update for each is quicker than unfolding a JSON list."""


class RawSqlite:
    """The sqlite3 module: WAL, synchronous=FULL, every operation one immediate transaction."""

    def __init__(self, dsn: str) -> None:
        self._connection = sqlite3.connect(
            dsn.removeprefix("sqlite:///"), isolation_level=None, timeout=30
        )
        self._run = self._connection.execute
        self._run("PRAGMA journal_mode = WAL")
        self._run("PRAGMA synchronous = FULL")
        self._worker = os.getpid()
        found = self._run("SELECT id FROM pgqrs_queues WHERE queue_name = ?", (QUEUE,))
        (self._queue,) = found.fetchone()

    def enqueue(self, payload: Any) -> int:
        inserted = self._run(_LITE_ENQUEUE, (self._queue, _time(), _encode(payload)))
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def enqueue_many(self, payloads: list[Any]) -> list[int]:
        # Objects and arrays only: json_each would unwrap strings and numbers.
        inserted = self._run(_LITE_ENQUEUE_MANY, (self._queue, _time(), _encode(payloads)))
        assert inserted.lastrowid is not None
        last = inserted.lastrowid  # AUTOINCREMENT, one statement: the ids are contiguous
        return list(range(last - len(payloads) + 1, last + 1))

    def claim(self, n: int) -> list[Claimed]:
        self._run("BEGIN IMMEDIATE")
        rows = self._run(_LITE_FIRST, (self._queue, n)).fetchall()
        now, vt = _time(), _time(LEASE)
        self._hold([row[0] for row in rows], (vt, now, self._worker))
        self._run("COMMIT")
        return [
            Claimed(id, priority, json.loads(payload), vt, read_ct + 1, now, self._worker)
            for id, priority, read_ct, payload in rows
        ]

    def _hold(self, ids: list[int], values: tuple[Any, ...]) -> None:
        if len(ids) <= _FEW:
            self._connection.executemany(_LITE_HOLD_ONE, [(*values, id) for id in ids])
        else:
            self._run(_LITE_HOLD_MANY, (*values, _encode(ids)))

    def ack(self, claimed: Sequence[Claimed]) -> None:
        held = _encode({str(message.id): message.read_ct for message in claimed})
        self._run("BEGIN IMMEDIATE")
        self._run(_LITE_ARCHIVE, (held, self._worker, _time()))
        deleted = self._run(_LITE_DELETE, (held, self._worker)).rowcount
        self._run("COMMIT")
        _check_all(range(deleted), claimed)

    def close(self) -> None:
        self._connection.close()


# Both


def _in_order(claimed: list[Claimed]) -> list[Claimed]:
    claimed.sort(key=lambda message: (-message.priority, message.id))
    return claimed


def _check_all(done: Sequence[Any], claimed: Sequence[Any]) -> None:
    if len(done) != len(claimed):
        raise RuntimeError(f"{len(claimed) - len(done)} of {len(claimed)} claims were lost")


def _time(seconds: float = 0.0) -> str:
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    return when.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
