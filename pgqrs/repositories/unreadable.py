"""Taking messages that cannot be read out of a claim's way.

One such message makes every claim fail that would hand it out (see `reading`). After that the next ones
are tried, each by itself, and what cannot be read goes to the archive with the error.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Text, and_, bindparam, cast, func, or_, select

from pgqrs.models import messages, queues
from pgqrs.repositories import dequeue
from pgqrs.repositories.expressions import at, moment, per_dialect
from pgqrs.repositories.messages import COLUMNS
from pgqrs.repositories.reading import Unreadable, telling
from pgqrs.sqltypes import BigId, Json
from pgqrs.types import ArchiveReason

AT_ONCE = 200
LARGEST = 2**31 - 1
"""To a `read_ct` that is as large as its column no claim can add one."""

_CANDIDATES = (
    select(messages.c.id)
    .join_from(messages, queues, messages.c.queue_id == queues.c.id)
    .where(
        queues.c.queue_name == bindparam("queue"),
        or_(
            messages.c.ready,
            messages.c.consumer_worker_id == bindparam("worker", type_=BigId),
            and_(*dequeue.WAITING, messages.c.vt <= moment("now")),
        ),
    )
    .order_by(*dequeue.ORDER)
    .limit(bindparam("at_once"))
    .with_for_update(skip_locked=True, of=messages)
)
_THIS = messages.c.id == bindparam("id")
_IS_READ = select(*COLUMNS).where(_THIS)
_IS_TEXT = _IS_READ.with_only_columns(
    *(
        func.length(cast(column, Text())) if isinstance(column.type, Json) else column
        for column in COLUMNS
    )
)
"""PostgreSQL fails when it makes text of a row, so that nothing has to be sent to find out."""


def set_aside(connection: Connection, queue: str, *, worker: int, now: datetime | None) -> int:
    """Take messages that cannot be read to the archive: of those that this worker holds or may claim
    next. Returns how many.
    """
    bound: dict[str, Any] = {"queue": queue, "worker": worker, "at_once": AT_ONCE}
    ids = connection.execute(_CANDIDATES, bound | at(now=(now, 0.0))).scalars().all()
    count = 0
    for id in ids:
        error = _trouble(connection, id)
        if error is not None:
            dequeue.bury(connection, [id], reason=ArchiveReason.FAILED, error=error, now=now)
            count += 1
    return count


def _try_postgres(connection: Connection, bound: dict[str, Any]) -> int:
    with connection.begin_nested():  # a failure would end the transaction
        return int(connection.execute(_IS_TEXT, bound).one().read_ct)


def _try_sqlite(connection: Connection, bound: dict[str, Any]) -> int:
    return int(connection.execute(_IS_READ, bound).one().read_ct)


_try = per_dialect(postgresql=_try_postgres, sqlite=_try_sqlite)
"""Read a message, or fail. Returns how often it was claimed."""


def _trouble(connection: Connection, id: int) -> str | None:
    try:
        with telling():
            read_ct = _try(connection, {"id": id})
    except Unreadable as exc:
        return str(exc)
    return None if read_ct < LARGEST else dequeue.MISCOUNTED
