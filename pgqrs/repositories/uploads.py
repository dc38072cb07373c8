"""The last uploads of a database that is one object in a bucket: how an upload is recognised.

An upload whose answer was lost may have been applied, and another writer may have built on it since.
So each upload carries a row of its own inside the database: a *nonce*, which no other upload has, and
its *position*, the count of uploads that led to this state. A database that contains the nonce contains
the upload. One that does not contain it, but still remembers uploads of that position, does not contain
the upload. Only if so many uploads followed that the position is forgotten can it not be told.

Rows are forgotten by position, never by time: clocks differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto

from sqlalchemy import Connection, bindparam, delete, func, insert, inspect, select

from pgqrs.models import uploads
from pgqrs.repositories.expressions import at, moment

REMEMBERED = 200
"""How many uploads a database remembers."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload. Without a position it is of a database in which pgqrs is not installed."""

    nonce: str
    position: int | None = None


class Verdict(Enum):
    """What a database tells about an upload."""

    INCLUDED = auto()
    EXCLUDED = auto()
    FORGOTTEN = auto()
    """It was too long ago, or uploads are not recorded in this database."""


# The column of the nonce is called `writer`, and that of the position `number`: see `models`.
_BY_NONCE = select(uploads.c.number).where(uploads.c.writer == bindparam("nonce"))
_POSITION = select(func.max(uploads.c.number))
_LAST = select(uploads.c.writer, uploads.c.number).order_by(uploads.c.number.desc()).limit(1)
_RECORD = insert(uploads).values(
    writer=bindparam("nonce"), number=bindparam("position"), uploaded_at=moment("now")
)
_FORGET = delete(uploads).where(uploads.c.number <= bindparam("forgotten"))


def record(connection: Connection, nonce: str, *, now: datetime) -> Upload:
    """Record that this database is about to be uploaded. Before the first install: nothing."""
    if not _installed(connection):
        return Upload(nonce)
    position = (connection.execute(_POSITION).scalar() or 0) + 1
    connection.execute(_FORGET, {"forgotten": position - REMEMBERED})
    connection.execute(_RECORD, {"nonce": nonce, "position": position} | at(now=(now, 0.0)))
    return Upload(nonce, position)


def last(connection: Connection) -> Upload | None:
    """The last upload that is recorded in this database."""
    if not _installed(connection):
        return None
    found = connection.execute(_LAST).first()
    return None if found is None else Upload(found.writer, found.number)


def verdict(connection: Connection, upload: Upload) -> Verdict:
    """Whether this database contains an upload."""
    if upload.position is None or not _installed(connection):
        return Verdict.FORGOTTEN
    if connection.execute(_BY_NONCE, {"nonce": upload.nonce}).first() is not None:
        return Verdict.INCLUDED
    position = connection.execute(_POSITION).scalar() or 0
    if upload.position <= position - REMEMBERED:
        return Verdict.FORGOTTEN
    return Verdict.EXCLUDED


def _installed(connection: Connection) -> bool:
    return inspect(connection).has_table(uploads.name)
