"""Who uploaded this database, and how often: how a writer recognises its own upload.

An upload whose answer was lost may have been applied, and somebody else may have built on it since.
Then the object is not the writer's any more, but its row is in it. Each writer has one upload under
way at a time, so the number of its last one is all there is to remember.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, insert, inspect, select, update

from pgqrs.models import uploads
from pgqrs.repositories.expressions import at, moment

FORGET_AFTER = 86400.0
"""Seconds after which a writer that uploads no more is forgotten. It knows by then how it ended."""

_THIS = uploads.c.writer == bindparam("this_writer")
_NUMBER = select(uploads.c.number).where(_THIS)
_AGAIN = update(uploads).where(_THIS).values(number=bindparam("new"), uploaded_at=moment("now"))
_FIRST = insert(uploads).values(
    writer=bindparam("this_writer"), number=bindparam("new"), uploaded_at=moment("now")
)
_FORGET = delete(uploads).where(uploads.c.uploaded_at < moment("cutoff"))


def record(connection: Connection, writer: str, number: int, *, now: datetime) -> None:
    """This writer is about to upload, for the so-manieth time. Before the first install: nothing."""
    if not _installed(connection):
        return
    connection.execute(_FORGET, at(cutoff=(now, -FORGET_AFTER)))
    bound = {"this_writer": writer, "new": number} | at(now=(now, 0.0))
    if not connection.execute(_AGAIN, bound).rowcount:
        connection.execute(_FIRST, bound)


def last_of(connection: Connection, writer: str) -> int:
    """The number of the last upload of this writer that is part of this database; 0 if none is."""
    if not _installed(connection):
        return 0
    return connection.execute(_NUMBER, {"this_writer": writer}).scalar() or 0


def _installed(connection: Connection) -> bool:
    return inspect(connection).has_table(uploads.name)
