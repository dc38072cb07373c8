"""Places to measure in: databases with pgqrs' schema, and SQL that fills them quickly.

Rows are made inside the database, by `INSERT … SELECT`, not through either side of a comparison.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from benchmarks.driver import QUEUE, Backend, payloads
from pgqrs import Rate, Store
from pgqrs.testing.postgres import local_postgres

_PAYLOAD = json.dumps(payloads(1)[0])
_MESSAGE = """
    INSERT INTO pgqrs_messages (queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at,
        dequeued_at, consumer_worker_id, payload)
    SELECT q.id, 0, {ready}, {vt}, {read_ct}, 0, {now}, {dequeued_at}, {worker}, {payload}
    FROM pgqrs_queues AS q, {rows}"""
_ARCHIVED = """
    INSERT INTO pgqrs_archive (original_message_id, queue_id, archive_reason, priority, read_ct,
        released_ct, enqueued_at, dequeued_at, archived_at, consumer_worker_id, payload)
    SELECT 1000000000 + n, q.id, 'completed', 0, 1, 0, {now}, {now}, {now}, 1, {payload}
    FROM pgqrs_queues AS q, {rows}"""


_GROUPED = """
    INSERT INTO pgqrs_messages (queue_id, priority, ready, blocked, group_key, vt, read_ct,
        released_ct, enqueued_at, payload)
    SELECT q.id, 0, {first}, CASE WHEN {first} THEN 0 ELSE 1 END, 'group ' || (n % {groups}),
        {now}, 0, 0, {now}, {payload}
    FROM pgqrs_queues AS q, {rows}"""
_GROUPS = """
    INSERT INTO pgqrs_groups (queue_id, group_key)
    SELECT q.id, 'group ' || (n - 1) FROM pgqrs_queues AS q, {rows}"""
_STUCK = """
    UPDATE pgqrs_messages SET ready = {no}, vt = {later}, read_ct = 1, consumer_worker_id = 1
    WHERE id = (SELECT min(id) FROM pgqrs_messages WHERE group_key IS NOT NULL)"""
IN_A_GROUP = 10


class Site(ABC):
    """One database with an empty queue."""

    backend: Backend
    dsn: str
    _words: ClassVar[dict[str, str]]
    """How this database says now, in an hour (a little later for each row), true, false, n rows."""

    def __init__(self) -> None:
        with Store(self.dsn) as store, store.admin() as admin:
            admin.install()
            admin.create_queue(QUEUE)

    def fill(
        self,
        *,
        ready: int = 0,
        delayed: int = 0,
        leased: int = 0,
        archived: int = 0,
        grouped: int = 0,
    ) -> None:
        """Add so many rows in each state. Of `grouped`, ten are in a group, and one group is stuck."""
        now, later = self._words["now"], self._words["later"]
        unheld = {"read_ct": "0", "dequeued_at": "NULL", "worker": "NULL"}
        held = {"read_ct": "1", "dequeued_at": now, "worker": "1"}
        yes, no = self._words["true"], self._words["false"]
        self._insert(_MESSAGE, ready, ready=yes, vt=now, **unheld)
        self._insert(_MESSAGE, delayed, ready=no, vt=later, **unheld)
        self._insert(_MESSAGE, leased, ready=no, vt=later, **held)
        self._insert(_ARCHIVED, archived)
        groups = grouped // IN_A_GROUP
        self._insert(_GROUPED, grouped, first=f"n <= {groups}", groups=str(groups))
        self._insert(_GROUPS, groups)
        if groups:
            self.run(_STUCK.format(no=no, later=later.replace("n ", "1 ")))

    def _insert(self, statement: str, n: int, **values: str) -> None:
        if n:
            rows = self._words["rows"].format(n=n)
            words = {"now": self._words["now"], "payload": f"'{_PAYLOAD}'", "rows": rows} | values
            self.run(statement.format(**words))

    def count_messages(self) -> int:
        """How many messages there are, in whatever state."""
        return int(self.value("SELECT count(*) FROM pgqrs_messages"))

    def count_archived(self) -> int:
        """How many messages are finished."""
        return int(self.value("SELECT count(*) FROM pgqrs_archive"))

    def limit(self) -> None:
        """Give the queue limits of every kind, none of which is ever reached."""
        with Store(self.dsn) as store, store.admin() as admin:
            admin.configure_queue(
                QUEUE, max_in_flight=10_000, max_in_flight_per_key=1000, rate=Rate(10**9, per=1)
            )

    @abstractmethod
    def empty(self) -> None:
        """Delete all messages and the archive."""

    @abstractmethod
    def flush(self) -> None:
        """Have everything written to disk now, and not in the middle of a measurement."""

    def settle(self) -> None:
        """The same, and what else a database does by itself from time to time."""
        self.flush()

    @abstractmethod
    def store_without_fsync(self) -> Store:
        """A store that does not wait for the disk, so that the rest of the cost shows."""

    @abstractmethod
    def run(self, statement: str) -> None: ...

    @abstractmethod
    def value(self, statement: str) -> Any: ...


class PostgresSite(Site):
    """A database of its own on a server."""

    backend = "postgres"
    _words: ClassVar = {
        "now": "now()",
        "later": "now() + interval '1 hour' + n * interval '1 millisecond'",
        "true": "true",
        "false": "false",
        "rows": "generate_series(1, {n}) AS n",
    }

    def __init__(self, server: str, name: str) -> None:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        self.dsn = f"{server.rpartition('/')[0]}/{name}"
        super().__init__()

    def empty(self) -> None:
        self.run("TRUNCATE pgqrs_messages, pgqrs_archive, pgqrs_groups")

    def flush(self) -> None:
        self.run("CHECKPOINT")

    def settle(self) -> None:
        self.run("VACUUM (ANALYZE) pgqrs_messages, pgqrs_archive, pgqrs_groups")
        super().settle()

    def store_without_fsync(self) -> Store:
        return Store(f"{self.dsn}?options=-csynchronous_commit%3Doff")

    def run(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode())

    def value(self, statement: str) -> Any:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(statement.encode()).fetchone()
            return None if row is None else row[0]


_NOW = "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')"


class SqliteSite(Site):
    """A file of its own."""

    backend = "sqlite"
    _words: ClassVar = {
        "now": _NOW,
        "later": "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', '+1 hour', (n / 1000.0) || ' seconds')",
        "true": "1",
        "false": "0",
        "rows": (
            "(WITH RECURSIVE up (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < {n})"
            " SELECT n FROM up) AS numbers"
        ),
    }

    def __init__(self, path: Path) -> None:
        self._path = path
        self.dsn = f"sqlite:///{path}"
        super().__init__()

    def empty(self) -> None:
        self.run("DELETE FROM pgqrs_messages")
        self.run("DELETE FROM pgqrs_archive")
        self.run("DELETE FROM pgqrs_groups")

    def flush(self) -> None:
        self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def store_without_fsync(self) -> Store:
        return Store(self.dsn, sqlite_synchronous="OFF")

    def run(self, statement: str) -> None:
        self._execute(statement)

    def value(self, statement: str) -> Any:
        rows = self._execute(statement)
        return rows[0][0] if rows else None

    def _execute(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=30)) as connection:
            return connection.execute(statement).fetchall()


MakeSite = Callable[[str], Site]
"""A new site by a name."""


@contextmanager
def sites(backend: Backend) -> Iterator[MakeSite]:
    """Room for sites: a server that waits for the disk, or a directory."""
    if backend == "postgres":
        with local_postgres(durable=True) as server:
            yield lambda name: PostgresSite(server.dsn, name)
    else:
        with tempfile.TemporaryDirectory(prefix="pgqrs-bench-") as directory:
            yield lambda name: SqliteSite(Path(directory) / f"{name}.db")


def version(backend: Backend, make: MakeSite) -> str:
    """The database and its version."""
    if backend == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    return f"PostgreSQL {make('version').value('SHOW server_version')}"
