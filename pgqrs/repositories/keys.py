"""Unique keys: whether a message with this key may be added now.

A key has a row that names the message which has it, or had it last. Nothing is written to that row when
the message is claimed or ends: whether the key is free is decided when somebody wants it, by looking at
the message, or at how long ago it ended. So unique keys cost who uses them, and nobody else.

Who wants a key locks its row until the transaction ends; of two who want it at once, the second waits,
and then finds the message of the first. Rows whose keys are free again are deleted in passing: up to
twice as many as are added, so that there are never many more of them than of keys in use.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Integer,
    and_,
    bindparam,
    delete,
    literal_column,
    or_,
    select,
    update,
)

from pgqrs.models import archive, keys, messages
from pgqrs.repositories.expressions import at, is_one_of, moment, numbered, texts
from pgqrs.sqltypes import BigId
from pgqrs.types import KeyScope

LOOK_AGAIN = 300.0
"""Seconds until a key is looked at again, to see whether its row may go."""
AT_ONCE = 50
"""The least that is looked at in passing."""


class Unique(NamedTuple):
    """How long a message keeps others with its key out."""

    scope: KeyScope
    window_after: float = 0.0
    """Seconds after its end."""


_queue_id = bindparam("in_queue", type_=BigId)
_wanted = texts("wanted")
_TAKE = (
    select(
        _queue_id,
        _wanted.c.value,
        literal_column("0", Integer),
        bindparam("new_scope", type_=keys.c.scope.type),
        bindparam("new_window", type_=keys.c.window_after.type),
        moment("look"),
    )
    .where(literal_column("1 = 1"))  # or SQLite takes ON CONFLICT for a join
    .order_by(_wanted.c.position)
)
_COLUMNS = ("queue_id", "dedup_key", "message_id", "scope", "window_after", "look_at")
_running = and_(
    ~messages.c.ready, messages.c.consumer_worker_id.is_not(None), messages.c.vt > moment("now")
)
_LIVE = select(
    messages.c.id,
    _running,
    or_(messages.c.expires_at > moment("now"), _running, messages.c.expires_at.is_(None)),
).where(is_one_of(messages.c.id, "ids"))
_ENDED = select(archive.c.original_message_id, archive.c.archived_at).where(
    is_one_of(archive.c.original_message_id, "ids")
)
# Where a claim would free the key, none may happen until this transaction has ended.
_STILL_LIVE = _LIVE.order_by(messages.c.id).with_for_update(read=True)
_NOW = select(moment("now"))
_given = numbered("given")
_ASSIGN = (
    update(keys)
    .where(keys.c.queue_id == _queue_id, keys.c.dedup_key == _given.c.name)
    .values(
        message_id=_given.c.number,
        scope=bindparam("new_scope", type_=keys.c.scope.type),
        window_after=bindparam("new_window"),
        look_at=moment("look"),
    )
)
_OLD = (
    select(keys.c.dedup_key, keys.c.message_id, keys.c.scope, keys.c.window_after)
    .where(keys.c.queue_id == _queue_id, keys.c.look_at <= moment("now"))
    .order_by(keys.c.look_at)
    .limit(bindparam("at_once"))
    .with_for_update(skip_locked=True)
)
_FORGET = delete(keys).where(keys.c.queue_id == _queue_id, is_one_of(keys.c.dedup_key, "free"))
_LOOK_LATER = (
    update(keys)
    .where(keys.c.queue_id == _queue_id, is_one_of(keys.c.dedup_key, "taken"))
    .values(look_at=moment("look"))
)


@cache
def _take_rows(dialect: str) -> Any:
    # Only where it is used: it is slow to import.
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    new = insert(keys).from_select(_COLUMNS, _TAKE)
    # An update of what is there, which locks it, and tells who still sees an older state.
    return new.on_conflict_do_update(
        index_elements=["queue_id", "dedup_key"], set_={"dedup_key": new.excluded.dedup_key}
    ).returning(keys.c.dedup_key, keys.c.message_id, keys.c.scope, keys.c.window_after)


def take(
    connection: Connection,
    queue_id: int,
    wanted: Collection[str],
    *,
    unique: Unique,
    now: datetime | None,
) -> dict[str, int]:
    """Lock these keys. Returns those that others have, with the messages that have them."""
    bound: dict[str, Any] = {"in_queue": queue_id, "wanted": json.dumps(sorted(wanted))}
    bound |= {"new_scope": unique.scope, "new_window": unique.window_after}
    bound |= at(look=(now, LOOK_AGAIN))
    found = connection.execute(_take_rows(connection.dialect.name), bound).all()
    taken = _still_taken(connection, found, for_long=True, now=now)
    return {row.dedup_key: row.message_id for row in taken}


def assign(
    connection: Connection,
    queue_id: int,
    ids: Mapping[str, int],
    *,
    unique: Unique,
    now: datetime | None,
) -> None:
    """These keys, which are locked and free, belong to these messages now."""
    shared = {"in_queue": queue_id, "new_scope": unique.scope, "new_window": unique.window_after}
    shared |= at(look=(now, LOOK_AGAIN))
    if ids:
        connection.execute(_ASSIGN, shared | {"given": list(ids.items())})


def forget_free(connection: Connection, queue_id: int, *, added: int, now: datetime | None) -> None:
    """Delete the rows of some keys that are free again, after so many were added."""
    bound = {"in_queue": queue_id, "at_once": max(AT_ONCE, 2 * added)} | at(now=(now, 0.0))
    old = connection.execute(_OLD, bound).all()
    if not old:
        return
    taken = {row.dedup_key for row in _still_taken(connection, old, for_long=False, now=now)}
    free = [row.dedup_key for row in old if row.dedup_key not in taken]
    connection.execute(_FORGET, {"in_queue": queue_id, "free": free})
    bound = {"in_queue": queue_id, "taken": taken} | at(look=(now, LOOK_AGAIN))
    connection.execute(_LOOK_LATER, bound)


def _still_taken(
    connection: Connection, found: Sequence[Any], *, for_long: bool, now: datetime | None
) -> list[Any]:
    """Those of these rows whose messages keep others out; `for_long`: until this transaction ends."""
    bound = at(now=(now, 0.0))
    had = [row for row in found if row.message_id]
    if not had:
        return []
    live = _states(connection, _LIVE, [row.message_id for row in had], bound)
    queued = {row.message_id for row in had if row.scope is KeyScope.QUEUED}
    waiting = [id for id, (is_running, _) in live.items() if id in queued and not is_running]
    if waiting and for_long:
        live = {id: state for id, state in live.items() if id not in waiting}
        live |= _states(connection, _STILL_LIVE, waiting, bound)
    running = {id for id, (is_running, _) in live.items() if is_running}
    unfinished = {id for id, (_, is_alive) in live.items() if is_alive}
    ended = {row.message_id for row in had if row.window_after} - unfinished
    recent = dict(connection.execute(_ENDED, {"ids": list(ended)}).all())
    asked: datetime = connection.execute(_NOW, bound).scalar_one()

    def is_taken(row: Any) -> bool:
        if row.message_id in unfinished:
            return row.scope is not KeyScope.QUEUED or row.message_id not in running
        end = recent.get(row.message_id)
        return end is not None and end + timedelta(seconds=row.window_after) > asked

    return [row for row in had if is_taken(row)]


def _states(
    connection: Connection, statement: Any, ids: Sequence[int], bound: dict[str, Any]
) -> dict[int, tuple[bool, bool]]:
    """For each message that is not finished: whether it is running, and whether it is alive."""
    found = connection.execute(statement, bound | {"ids": ids})
    return {id: (bool(is_running), bool(is_alive)) for id, is_running, is_alive in found}
