"""Which queues of a SQLite file have something new, for who was told that the file has changed.

On a connection of its own, which only reads and is never in a transaction: the engine may belong to an
event loop, and its pool to others.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from pgqrs.repositories.hot import run
from pgqrs.repositories.news import Mark, marks

VERSION = "PRAGMA data_version"
"""Moves with each commit of another connection, once it can be seen."""
BUSY = 0.25
"""Seconds to wait for a writer, where readers have to."""


class QueueNews:
    """Compares the marks of queues with what they were."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: dict[str, Mark] = {}
        self._connection: Connection | None = None
        self._version: int | None = None

    def moved(self) -> bool | None:
        """True if something was committed since the last call; None if that cannot be told."""
        with self._lock:
            try:
                ((version,),) = run(self._open(), VERSION, {}, returns_rows=True)
            except SQLAlchemyError:
                self._close()
                return None
            before, self._version = self._version, version
        return bool(before != version)

    def of(self, names: Collection[str]) -> Iterable[str]:
        """Those of these queues where there may be something new. All, if that cannot be told."""
        with self._lock:
            try:
                found = marks(self._open(), list(names))
            except SQLAlchemyError:
                self._close()
                return names
            seen, self._seen = self._seen, found
        return [name for name, mark in found.items() if _is_news(mark, seen.get(name))]

    def close(self) -> None:
        """Let go of the file. The next question opens it again."""
        with self._lock:
            self._close()

    def before_fork(self) -> None:
        """Let go of the file, and keep it closed until `after_fork_in_parent`."""
        self._lock.acquire()
        self._close()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._seen = {}

    def _open(self) -> Connection:
        if self._connection is None:
            # Not `rwc`: a file that is gone is not to be made anew.
            address = f"file:{quote(str(Path(self._path).absolute()))}?mode=rw"
            engine = create_engine(
                URL.create("sqlite", database=address, query={"uri": "true"}),
                poolclass=NullPool,
                isolation_level="AUTOCOMMIT",
                connect_args={"check_same_thread": False, "timeout": BUSY},
            )
            self._connection = engine.connect()
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._version = None  # each connection counts for itself
        if connection is not None:
            connection.close()


def _is_news(mark: Mark, before: Mark | None) -> bool:
    if mark.is_empty:
        return False
    # What leaves a queue with limits makes room, and no mark moves.
    return mark.limited or mark != before
