"""Taking messages that cannot be read out of a claim's way.

One such message makes every claim fail that would hand it out (see `reading`). After that the next ones
are tried, a page at a time in the order of claims, and each of a page that cannot be read by itself.
What cannot be read goes to the archive with the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, and_, bindparam, cast, func, or_, select

from pgqrs.models import messages, queues
from pgqrs.repositories import dequeue
from pgqrs.repositories.expressions import at, is_one_of, moment, per_dialect
from pgqrs.repositories.messages import COLUMNS
from pgqrs.repositories.reading import Unreadable, telling
from pgqrs.sqltypes import BigId, Json
from pgqrs.types import ArchiveReason

AT_ONCE = 200
LARGEST = 2**31 - 1
"""To a `read_ct` that is as large as its column no claim can add one."""


class Place(NamedTuple):
    """A message's place in the order of claims."""

    priority: int
    id: int


FIRST = Place(2**31, 0)
"""Before all of them."""
_priority, _id = bindparam("priority", type_=BigId), bindparam("after", type_=BigId)
_CANDIDATES = (
    select(messages.c.priority, messages.c.id)
    .join_from(messages, queues, messages.c.queue_id == queues.c.id)
    .where(
        queues.c.queue_name == bindparam("queue"),
        messages.c.priority <= _priority,
        or_(messages.c.priority < _priority, messages.c.id > _id),
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
_SIZES = [func.length(cast(column, Text())) for column in COLUMNS if isinstance(column.type, Json)]
_IS_TEXT = _IS_READ.with_only_columns(messages.c.read_ct, *_SIZES)
"""PostgreSQL fails when it makes text of a row, so that nothing has to be sent to find out."""
_ARE_TEXT = select(func.max(messages.c.read_ct), *(func.sum(part) for part in _SIZES)).where(
    is_one_of(messages.c.id, "ids")
)


def set_aside(
    connection: Connection, queue: str, *, worker: int, after: Place, now: datetime | None
) -> tuple[int, Place | None]:
    """Take messages that cannot be read to the archive: of a page of those that this worker holds or may
    claim next. Returns how many, and where the next page begins; None if there is none.
    """
    bound: dict[str, Any] = {"queue": queue, "worker": worker, "at_once": AT_ONCE}
    bound |= {"priority": after.priority, "after": after.id} | at(now=(now, 0.0))
    page = [Place(*row) for row in connection.execute(_CANDIDATES, bound)]
    ids = [place.id for place in page]
    count = 0
    # As a rule it is among the first, and to find out that a page cannot be read takes long.
    is_sound = after != FIRST and bool(ids) and _are_readable(connection, ids)
    for id in () if is_sound else ids:
        error = _trouble(connection, id)
        if error is not None:
            dequeue.bury(connection, [id], reason=ArchiveReason.FAILED, error=error, now=now)
            count += 1
    return count, page[-1] if len(page) == AT_ONCE else None


def _are_readable_postgres(connection: Connection, ids: Sequence[int]) -> bool:
    try:
        with telling(), connection.begin_nested():
            read_ct: int = connection.execute(_ARE_TEXT, {"ids": ids}).one()[0]
            return read_ct < LARGEST
    except Unreadable:
        return False


def _look_at_each(_connection: Connection, _ids: Sequence[int]) -> bool:
    return False


_are_readable = per_dialect(postgresql=_are_readable_postgres, sqlite=_look_at_each)
"""True if all of these messages can be read: in one round trip, where there are any."""


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
