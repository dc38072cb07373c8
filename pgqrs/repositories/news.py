"""Which queues may have something new to claim, found out without claiming.

A consumer that waits on SQLite hears of every write to the file, whatever was written. Claiming takes
the write lock, so a busy queue would make the consumers of all others take it again and again. The
*mark* of a queue is a few look-ups in indexes, without a lock; only when it has moved is there
something to claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, cast, exists, func, literal_column, select
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.models import messages, queues, workers
from pgqrs.repositories.dequeue import ORDER, QUEUE, WAITING
from pgqrs.repositories.expressions import is_one_of
from pgqrs.repositories.hot import Hot
from pgqrs.types import WorkerStatus


class Mark(NamedTuple):
    """What decides whether anything can be claimed from a queue, now or soon."""

    first_ready: str | None
    """The id and the number of claims of the first ready message: they never come twice."""
    next_vt: Any
    """When the first message that is delayed or held comes back."""
    parked: bool
    limited: bool
    settings: str
    suspended: int
    """How many workers may not claim."""

    @property
    def is_empty(self) -> bool:
        return self.first_ready is None and self.next_vt is None and not self.parked


def _first(wanted: ColumnElement[Any], *conditions: ColumnElement[bool], order: Any) -> Any:
    return (
        select(wanted)
        .where(messages.c.queue_id == queues.c.id, *conditions)
        .order_by(*order)
        .limit(literal_column("1"))
        .correlate(queues)
        .scalar_subquery()
    )


def _text(column: ColumnElement[Any]) -> ColumnElement[str]:
    return func.coalesce(cast(column, Text()), "")


_MARKS = Hot(
    select(
        queues.c.queue_name,
        _first(
            cast(messages.c.id, Text()) + " " + cast(messages.c.read_ct, Text()),
            messages.c.ready,
            order=ORDER,
        ),
        _first(messages.c.vt, *WAITING, order=(messages.c.vt,)),
        exists().where(messages.c.queue_id == queues.c.id, messages.c.blocked == 2),
        QUEUE.selected_columns.limited,
        _text(queues.c.paused)
        + " "
        + _text(queues.c.max_in_flight)
        + " "
        + _text(queues.c.max_in_flight_per_key)
        + " "
        + _text(queues.c.rate_limit),
        select(func.count()).where(workers.c.status != WorkerStatus.READY).scalar_subquery(),
    ).where(is_one_of(queues.c.queue_name, "names"))
)


def marks(connection: Connection, names: Sequence[str]) -> dict[str, Mark]:
    """The marks of these queues."""
    return {row[0]: Mark(*row[1:]) for row in _MARKS.rows(connection, {"names": list(names)})}
