"""SQLite databases as bytes: how they come into a local database, and out of it again.

Both ways go through SQLite itself (backup and serialize), so that connections which are open, and
what is still in the write-ahead log, are taken care of. Bytes that travel are always those of a
database without such a log, which any SQLite can open.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from pgqrs.errors import StoreDamaged

MAGIC = b"SQLite format 3\0"
PAGE_SIZE = 4096
WORTH_VACUUM = 0.25
"""The share of dead pages from which on a vacuum pays."""
FEW_PAGES = 32
"""Dead pages below which it does not."""


def load(connection: sqlite3.Connection, data: bytes, *, source: str) -> None:
    """Replace everything in a local database. `source` names where the bytes are from."""
    with closing(_opened(data, source)) as image:
        image.backup(connection, sleep=0.005)  # while a reader tries something out


def dump(connection: sqlite3.Connection) -> bytes:
    """Everything that is committed in a local database, at one moment."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if not pages:
        return b""
    data = bytearray(connection.serialize())
    data[18:20] = b"\1\1"  # not WAL any more: there is no log that belongs to it
    return bytes(data)


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


def _opened(data: bytes, source: str) -> sqlite3.Connection:
    """An intact database in memory, or the error that says what is wrong with it."""
    image = sqlite3.connect(":memory:", isolation_level=None)
    try:
        if data:
            _fill(image, data, source)
    except sqlite3.DatabaseError as exc:
        image.close()
        raise StoreDamaged(source, str(exc)) from exc
    except BaseException:
        image.close()
        raise
    return image


def _fill(image: sqlite3.Connection, data: bytes, source: str) -> None:
    if not data.startswith(MAGIC):
        raise StoreDamaged(source, "it is not a SQLite database")
    if data[18:20] != b"\1\1":
        data = data[:18] + b"\1\1" + data[20:]
    image.deserialize(data)
    (problem,) = image.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise StoreDamaged(source, problem)
    (size,) = image.execute("PRAGMA page_size").fetchone()
    if size != PAGE_SIZE:  # a backup into a database with a log needs pages of the same size
        image.execute(f"PRAGMA page_size={PAGE_SIZE}").close()
        image.execute("VACUUM").close()
