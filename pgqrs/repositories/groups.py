"""Groups: strict order and one message in flight, at no cost to claims.

Only the first message of a group can be claimed; the others are *blocked*, and stand in none of the
indexes that claims look at. Whoever adds messages to a group or takes some out locks the row of the
group, and lets the first go ahead. Ids within a group are given under that lock, so the first is the
one with the lowest id. A message that is retried or given back stays the first: that is what strict
order means.

*The order of locks*, for every transaction that needs more than one: queues, archived messages, groups,
keys, messages, and of each kind the lower first. So two transactions never wait for each other. What
takes messages out therefore locks their groups before it touches them (`ending`). Who cannot wait,
since others would then wait for it, passes over what is locked (`SKIP LOCKED`).

SQLite has one writer at a time, and needs no locks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    bindparam,
    delete,
    exists,
    false,
    literal_column,
    select,
    update,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.models import groups, messages
from pgqrs.repositories.expressions import at, is_one_of, moment, per_dialect, texts
from pgqrs.sqltypes import BigId

BY_GROUP: ColumnElement[int] = literal_column("1")
"""Blocked by an earlier message of the group."""
UNBLOCKED: ColumnElement[int] = literal_column("0")

_queue_id = bindparam("in_queue", type_=BigId)
_names = texts("names")
_OF = (
    select(messages.c.queue_id, messages.c.group_key)
    .distinct()
    .where(is_one_of(messages.c.id, "ids"), messages.c.group_key.is_not(None))
)
_FIRST = (
    select(messages.c.id)
    # Not min(id) of equal names: PostgreSQL may then walk the messages by id until one of the group
    # comes, which for a group that is empty is all of them. In this order only the index of groups is.
    .where(
        messages.c.queue_id == _queue_id,
        messages.c.group_key >= _names.c.value,
        messages.c.group_key <= _names.c.value,
    )
    .order_by(messages.c.queue_id, messages.c.group_key, messages.c.id)
    .limit(literal_column("1"))
    .correlate(_names)
    .scalar_subquery()
)
_FIRSTS = select(_FIRST).select_from(_names)
_LET_GO = (
    update(messages)
    .where(is_one_of(messages.c.id, "ids"), messages.c.blocked == BY_GROUP)
    .values(blocked=UNBLOCKED, ready=messages.c.vt <= moment("now"))
)
_FORGET_EMPTY = delete(groups).where(
    groups.c.queue_id == _queue_id,
    groups.c.group_key.in_(select(_names.c.value).scalar_subquery()),
    ~exists().where(
        messages.c.queue_id == groups.c.queue_id, messages.c.group_key == groups.c.group_key
    ),
)


@cache
def _lock_rows() -> Any:
    # Only where it is used: it is slow to import.
    from sqlalchemy.dialects.postgresql import insert

    chosen = select(_queue_id, _names.c.value).order_by(_names.c.position)
    new = insert(groups).from_select(["queue_id", "group_key"], chosen)
    # An update, so that who still sees an older state of the group is told that it changed.
    return new.on_conflict_do_update(
        index_elements=["queue_id", "group_key"], set_={"group_key": new.excluded.group_key}
    )


def _lock_postgres(connection: Connection, queue_id: int, names: Collection[str]) -> None:
    # All lock in the same order, or they would wait for each other.
    connection.execute(_lock_rows(), {"in_queue": queue_id, "names": json.dumps(sorted(names))})


_KNOWN = select(groups.c.group_key).where(
    groups.c.queue_id == _queue_id, is_one_of(groups.c.group_key, "names")
)
_TRY_LOCK = _KNOWN.with_for_update(skip_locked=True)


def _try_lock_postgres(connection: Connection, queue_id: int, names: set[str]) -> set[str]:
    bound = {"in_queue": queue_id, "names": names}
    locked = set(connection.execute(_TRY_LOCK, bound).scalars())
    if len(locked) < len(names):
        # Messages that somebody inserted by hand may have a group without a row.
        unknown = names.difference(connection.execute(_KNOWN, bound).scalars())
        if unknown:
            lock(connection, queue_id, unknown)
        locked |= unknown
    return locked


def _all_locked(_connection: Connection, _queue_id: int, names: set[str]) -> set[str]:
    return names


try_lock = per_dialect(postgresql=_try_lock_postgres, sqlite=_all_locked)
"""The same for those of these groups that nobody else changes now. Returns them; never waits."""


def _nothing_to_lock(_connection: Connection, _queue_id: int, _names: Collection[str]) -> None:
    return


lock = per_dialect(postgresql=_lock_postgres, sqlite=_nothing_to_lock)
"""Let nobody else change these groups until the transaction ends."""


def let_first_go(
    connection: Connection, queue_id: int, names: Collection[str], *, now: datetime | None
) -> None:
    """Unblock the first message of each of these groups, which are locked."""
    bound = {"in_queue": queue_id, "names": json.dumps(sorted(names))}
    firsts = [id for id in connection.execute(_FIRSTS, bound).scalars() if id is not None]
    if firsts:
        connection.execute(_LET_GO, {"ids": firsts} | at(now=(now, 0.0)))
    if len(firsts) < len(names):
        connection.execute(_FORGET_EMPTY, bound)


_BLOCK = (
    update(messages)
    .where(
        messages.c.queue_id == _queue_id,
        is_one_of(messages.c.group_key, "groups"),
        messages.c.blocked == UNBLOCKED,
        messages.c.consumer_worker_id.is_(None),
        ~is_one_of(messages.c.id, "firsts"),
    )
    .values(blocked=BY_GROUP, ready=false())
)


@contextmanager
def giving_back(
    connection: Connection, ids: Sequence[int], *, now: datetime | None
) -> Iterator[None]:
    """Around what gives back several messages of a group at once: only the first can be claimed."""
    touched = _by_queue(connection.execute(_OF, {"ids": ids}))
    with _changing(connection, touched, now=now):
        yield
        for queue_id, names in touched.items():
            bound = {"in_queue": queue_id, "names": json.dumps(sorted(names))}
            firsts = [id for id in connection.execute(_FIRSTS, bound).scalars() if id is not None]
            bound |= {"groups": list(names), "firsts": firsts}
            connection.execute(_BLOCK, bound)


@contextmanager
def adding(
    connection: Connection, into: Iterable[Sequence[Any]], *, now: datetime | None
) -> Iterator[None]:
    """Around what adds blocked messages to groups, each a queue's id and a name."""
    with _changing(connection, _by_queue(into), now=now):
        yield


@contextmanager
def ending(connection: Connection, ids: Sequence[int], *, now: datetime | None) -> Iterator[None]:
    """Around what takes messages out: those behind them in their groups go ahead.

    Their groups are locked before the messages are: see the order of locks above.
    """
    with _changing(connection, _by_queue(connection.execute(_OF, {"ids": ids})), now=now):
        yield


@contextmanager
def trying(
    connection: Connection, found: Sequence[Any], *, now: datetime | None
) -> Iterator[set[int]]:
    """Around what takes some of these messages out, each a row with its id, queue and group. Gives the
    ids of those whose group, if they have one, nobody else changes now.
    """
    touched = _by_queue((row.queue_id, row.group_key) for row in found if row.group_key)
    locked = {
        queue_id: try_lock(connection, queue_id, names)
        for queue_id, names in sorted(touched.items())
    }
    yield {
        row.id for row in found if row.group_key is None or row.group_key in locked[row.queue_id]
    }
    for queue_id, names in locked.items():
        if names:
            let_first_go(connection, queue_id, names, now=now)


@contextmanager
def _changing(
    connection: Connection, touched: dict[int, set[str]], *, now: datetime | None
) -> Iterator[None]:
    for queue_id, names in sorted(touched.items()):
        lock(connection, queue_id, names)
    yield
    for queue_id, names in touched.items():
        let_first_go(connection, queue_id, names, now=now)


def _by_queue(found: Iterable[Sequence[Any]]) -> dict[int, set[str]]:
    names: dict[int, set[str]] = {}
    for queue_id, name in found:
        names.setdefault(queue_id, set()).add(name)
    return names
