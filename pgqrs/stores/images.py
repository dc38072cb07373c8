"""SQLite databases that travel: how they come into a local database, and out of it again.

Every way goes through SQLite itself (backup and serialize), so that connections which are open, and
what is still in the write-ahead log, are taken care of. What travels is always a database without such
a log, which any SQLite can open: bytes 18 and 19 of its header say so.

A large database is never held in memory. It is downloaded to a file, copied from file to file, and
uploaded from the file in which it was prepared (`FileBody`).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pgqrs.errors import StoreDamaged

MAGIC = b"SQLite format 3\0"
NO_LOG = b"\1\1"
"""Bytes 18 and 19 of the header of a database without a write-ahead log."""
PAGE_SIZE = 4096
WORTH_VACUUM = 0.25
"""The share of dead pages from which on a vacuum pays."""
FEW_PAGES = 32
"""Dead pages below which it does not."""
SMALL = 1 << 20
"""Bytes up to which a database is uploaded from memory."""

Image = bytes | Path
"""A database that was downloaded: in memory, or in a file."""


class FileBody:
    """The body of an upload: the file of a database, as if it had no log.

    The file must not change while it is read. Once closed, no more of it is sent: a request that was
    given up, and goes on in the background, cannot mix two states of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._size = path.stat().st_size
        self._reading = threading.Lock()

    def again(self) -> FileBody:
        """The same body from its beginning, for one request."""
        return FileBody(self._path)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        with self._reading:
            begin = self._file.tell()
            wanted = self._size - begin if size < 0 else min(size, self._size - begin)
            data = self._file.read(wanted)  # an error once closed
        if begin < 20 and begin + len(data) > 18:
            patched = bytearray(data)
            for offset in (18, 19):
                if begin <= offset < begin + len(data):
                    patched[offset - begin] = 1
            return bytes(patched)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        with self._reading:
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        with self._reading:
            return self._file.tell()

    def close(self) -> None:
        with self._reading:
            self._file.close()


Body = bytes | FileBody


@contextmanager
def body_of(connection: sqlite3.Connection, path: str | None) -> Iterator[Body]:
    """What to upload of a local database; `path` is its file, if it has one."""
    _, total = dead_pages(connection)
    if path is None or total * PAGE_SIZE <= SMALL or not checkpoint(connection):
        yield dump(connection)
        return
    body = FileBody(Path(path))
    try:
        yield body
    finally:
        body.close()


def load(connection: sqlite3.Connection, image: Image, *, source: str) -> None:
    """Replace everything in a local database. `source` names where the image is from."""
    with opened(image, source) as found:
        copy(found, connection)


def copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Replace everything in a local database by what is in another one."""
    source.backup(target, sleep=0.005)  # while a reader tries something out
    checkpoint(target)  # a backup writes all of it to the log, which would only grow


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Empty the log. Returns False if that must wait for a reader; this does not wait."""
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout=0").close()
    try:
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout={patience}").close()
    return not busy


def dump(connection: sqlite3.Connection) -> bytes:
    """Everything that is committed in a local database, at one moment."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if not pages:
        return b""
    data = connection.serialize()
    return data if data[18:20] == NO_LOG else b"".join((data[:18], NO_LOG, data[20:]))


def export(connection: sqlite3.Connection, path: Path) -> None:
    """Write a local database to a file of its own."""
    with closing(sqlite3.connect(path, isolation_level=None)) as target:
        connection.backup(target)
    forget_log(path)


def forget_log(path: Path) -> None:
    """Let a file be a database without a log."""
    with path.open("r+b") as file:
        if file.read(len(MAGIC)) == MAGIC:
            file.seek(18)
            file.write(NO_LOG)


def dead_pages(connection: sqlite3.Connection) -> tuple[int, int]:
    """Pages that hold nothing, and all pages."""
    (dead,) = connection.execute("PRAGMA freelist_count").fetchone()
    (total,) = connection.execute("PRAGMA page_count").fetchone()
    return int(dead), int(total)


def deflate(connection: sqlite3.Connection) -> bool:
    """Vacuum, if that pays. Returns whether it was done; while somebody is at work it is not."""
    dead, total = dead_pages(connection)
    if dead < FEW_PAGES or dead < WORTH_VACUUM * total:
        return False
    try:
        connection.execute("VACUUM").close()
    except sqlite3.OperationalError:
        return False
    return True


@contextmanager
def opened(image: Image, source: str) -> Iterator[sqlite3.Connection]:
    """An intact database, or the error that says what is wrong with it."""
    place = image if isinstance(image, Path) else ":memory:"
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        try:
            if isinstance(image, Path):
                _check_file(image, source)
            elif image:
                _fill(connection, image, source)
            _check(connection, source)
        except sqlite3.DatabaseError as exc:
            raise StoreDamaged(source, str(exc)) from exc
        yield connection


def _check_file(path: Path, source: str) -> None:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) not in (MAGIC, b""):
            raise StoreDamaged(source, "it is not a SQLite database")
    if path.stat().st_size:
        forget_log(path)


def _fill(connection: sqlite3.Connection, data: bytes, source: str) -> None:
    if not data.startswith(MAGIC):
        raise StoreDamaged(source, "it is not a SQLite database")
    if data[18:20] != NO_LOG:
        data = b"".join((data[:18], NO_LOG, data[20:]))
    connection.deserialize(data)


def _check(connection: sqlite3.Connection, source: str) -> None:
    (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise StoreDamaged(source, problem)
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    if size != PAGE_SIZE:  # a backup into a database with a log needs pages of the same size
        connection.execute(f"PRAGMA page_size={PAGE_SIZE}").close()
        connection.execute("VACUUM").close()
