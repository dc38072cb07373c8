"""Who waits for messages and results, in other processes: the table `pgqrs_waiting`.

Only PostgreSQL needs it. There a process that waits hears NOTIFY, and sending one costs every commit at
the same time a little, so nobody should send what nobody hears. A consumer that found nothing announces
that it waits, for some seconds; a producer's own statement sees the announcement, and notifies. A
consumer that gets one batch after the other withdraws it. Under load, then, nothing is sent.

*What is missed.* A statement that began before an announcement does not see it, and may commit after the
consumer has looked once more. So an announcement that is news (`Announced.is_news`) is followed by
further looks, soon and then less and less often (`wakeups.FOLLOW_UP`).
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Boolean, Connection, Text, bindparam, case, false, func, null, select, update
from sqlalchemy.sql.expression import ColumnElement, literal_column

from pgqrs.models import queues, waiting
from pgqrs.repositories.expressions import at, moment
from pgqrs.repositories.hot import Hot
from pgqrs.sqltypes import UTCDateTime

RESULTS = "\n"
"""What those who wait for results hear; no queue has such a name."""

_channel = bindparam("channel", type_=Text())
_queue = bindparam("queue", type_=Text())
_QUEUE_ID = select(queues.c.id).where(queues.c.queue_name == _queue).scalar_subquery()
_THIS = waiting.c.queue_id == _QUEUE_ID
BRIEFLY = 1000
"""Milliseconds that an announcement waits for its row. Only a process that stands still has it for
longer, and those that wait look by themselves now and then."""
_IS_BOUNDED: ColumnElement[bool] = literal_column(
    f"set_config('lock_timeout', '{BRIEFLY}', true) IS NOT NULL", Boolean
)
"""Found out when the row is looked for, and so before it is waited for. It ends with the transaction."""
_NO_FSYNC: ColumnElement[str] = literal_column(
    "set_config('synchronous_commit', 'off', true)", Text
)
"""For this transaction: who waits matters for seconds, so it need not survive a crash of the server.
Waiting for the disk would make waking up slower by as much as an enqueue costs."""


class Announced(NamedTuple):
    """A process is known to wait until a time of the server's."""

    until: datetime
    is_news: bool
    """False if it was known before."""


@cache
def _announcing(column: str) -> Any:
    # Only where it is used: it is slow to import.
    from sqlalchemy.dialects.postgresql import insert

    queue = select(queues.c.id, moment("until")).where(queues.c.queue_name == _queue, _IS_BOUNDED)
    new = insert(waiting).from_select(["queue_id", column], queue)
    before = waiting.alias("before")  # as it was when the statement began
    was_known = (
        select(before.c[column] > moment("now"))
        .where(before.c.queue_id == _QUEUE_ID)
        .scalar_subquery()
    )
    return new.on_conflict_do_update(
        index_elements=["queue_id"], set_={column: new.excluded[column]}
    ).returning(waiting.c[column], ~func.coalesce(was_known, false()), _NO_FSYNC)


def _announce(
    connection: Connection, column: str, queue: str, *, seconds: float, now: datetime | None
) -> Announced | None:
    bound = {"queue": queue} | at(until=(now, seconds), now=(now, 0.0))
    row = connection.execute(_announcing(column), bound).first()
    return None if row is None else Announced(*row[:2])


# Messages


def expect(
    connection: Connection, queue: str, *, seconds: float, now: datetime | None
) -> Announced | None:
    """A consumer waits for messages: producers should say so for so long. None if there is no such
    queue.
    """
    return _announce(connection, "waiting_until", queue, seconds=seconds, now=now)


_WITHDRAW = Hot(
    update(waiting)
    .where(
        _THIS, waiting.c.waiting_until <= bindparam("known_until", type_=UTCDateTime()), _IS_BOUNDED
    )
    .values(waiting_until=null())
    .returning(_NO_FSYNC)
)


def withdraw(connection: Connection, queue: str, announced: Announced) -> None:
    """This consumer waits no more. If another one has announced itself since, that stands."""
    _WITHDRAW.rows(connection, {"queue": queue, "known_until": announced.until})


def notify_if(is_waited_for: ColumnElement[Any]) -> ColumnElement[Any]:
    """Tells those who wait for the queue of a statement; PostgreSQL sends it with the commit. NULL if
    nobody waits, or the statement has no channel.
    """
    return case((is_waited_for, func.pg_notify(_channel, _queue, type_=Text())))


_TELL = Hot(
    update(waiting)
    .where(_THIS, waiting.c.waiting_until > moment("now"), _IS_BOUNDED)
    .values(waiting_until=null())
    .returning(func.pg_notify(_channel, _queue), _NO_FSYNC)
)


def tell(connection: Connection, queue: str, *, channel: str, now: datetime | None) -> None:
    """There is something for those who wait for this queue."""
    _TELL.rows(connection, {"queue": queue, "channel": channel} | at(now=(now, 0.0)))


def tell_at_commit(connection: Connection, queue: str, *, channel: str) -> None:
    """The same from a transaction that may commit much later: who will wait then is not known yet."""
    connection.execute(select(func.pg_notify(channel, queue))).close()


# Results


def expect_results(
    connection: Connection, queue: str, *, seconds: float, now: datetime | None
) -> Announced | None:
    """A process waits for results: workers should say so for so long."""
    return _announce(connection, "results_wanted_until", queue, seconds=seconds, now=now)


_WITH_RESULTS_WANTED = select(waiting.c.queue_id).where(
    waiting.c.results_wanted_until > moment("now")
)


def notify_of_result(queue_id: ColumnElement[int]) -> ColumnElement[Any]:
    """Tells those who wait for results of this queue, with the commit, and once for all rows of a
    statement. `channel` and `results` are bound.
    """
    told = func.pg_notify(_channel, bindparam("results", RESULTS, type_=Text()), type_=Text())
    return case((queue_id.in_(_WITH_RESULTS_WANTED), told))


_TELL_OF_RESULTS = Hot(
    update(waiting)
    .where(_THIS, waiting.c.results_wanted_until > moment("now"), _IS_BOUNDED)
    .values(results_wanted_until=null())
    .returning(func.pg_notify(_channel, bindparam("results", RESULTS, type_=Text())), _NO_FSYNC)
)


def tell_of_results(
    connection: Connection, queue: str, *, channel: str, now: datetime | None
) -> None:
    """There are results for those who wait for those of this queue."""
    _TELL_OF_RESULTS.rows(connection, {"queue": queue, "channel": channel} | at(now=(now, 0.0)))
