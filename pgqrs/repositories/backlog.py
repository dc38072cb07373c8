"""The backlog of a queue: what was in it at some moment, told by the greatest id there was.

A drain or a stream that works off a backlog leaves later messages alone, also those of a higher
priority, which `dequeue` would claim first. The claims here pass over them without touching them. They
are made of the same parts as those of `dequeue`, in several statements, for thousands at a time.

A stream that holds the first message of a group may claim those behind it too (`claim_followers`): all
of a group then end together. While they are held they count as leased; if they are given back, all but
the first are blocked again (`groups.block_followers`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Text, bindparam, cast, func, select, update

from pgqrs.models import messages
from pgqrs.repositories import dequeue, groups
from pgqrs.repositories.dequeue import (
    CLAIM,
    DUE_AT_ONCE,
    EXPIRED,
    MAX_BYTES,
    ORDER,
    QUEUE,
    TROUBLES,
    Claimed,
    as_status,
    in_order,
    sorted_out,
)
from pgqrs.repositories.expressions import at, is_one_of, moment
from pgqrs.repositories.groups import BY_GROUP, UNBLOCKED
from pgqrs.repositories.messages import COLUMNS
from pgqrs.sqltypes import BigId
from pgqrs.types import make_message

_QUEUE = QUEUE.add_columns(*TROUBLES)
_queue_id = bindparam("open_id", type_=BigId)
_EARLY = messages.c.id <= bindparam("through", type_=BigId)
_GIVEN = is_one_of(messages.c.id, "ids")
_FIRST = (
    select(messages.c.id, func.length(cast(messages.c.payload, Text())))
    .where(messages.c.queue_id == _queue_id, messages.c.ready, _EARLY, ~EXPIRED)
    .order_by(*ORDER)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_HOLD = update(messages).where(_GIVEN).values(CLAIM | {"vt": moment("held")})


def claim(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
    through: int,
    max_bytes: int = MAX_BYTES,
) -> Claimed:
    """Claim as `dequeue.claim` does, but no message with a greater id than `through`."""
    bound = {"queue": queue, "worker": worker, "lease": lease, "limit": limit, "through": through}
    bound |= at(now=(now, 0.0))
    found = connection.execute(_QUEUE, bound).first()
    if found is None:
        return Claimed([], queue_exists=False, worker_status=None)
    status = as_status(found.status)
    if found.limited:
        return Claimed([], True, status, limited=True)
    if found.open_id is None:
        return Claimed([], True, status, is_closed=True)
    bound |= {"open_id": found.open_id, "max_read_ct": found.max_read_ct, "at_once": DUE_AT_ONCE}
    leftovers = bool(found.some_expired)
    if found.some_due:
        leftovers |= dequeue.return_due(connection, bound)
    ids = _within(max_bytes, connection.execute(_FIRST, bound))
    bound |= {"ids": ids} | at(held=(now, found.lease if lease is None else lease))
    held = connection.execute(_HOLD.returning(*COLUMNS), bound).all() if ids else []
    return sorted_out(
        in_order([make_message(queue, *row) for row in held]), found.status, leftovers
    )


def _within(max_bytes: int, sized: Any) -> list[int]:
    """The first ids whose messages have no more than so many bytes together, or just one."""
    ids: list[int] = []
    for id, size in sized:
        if max_bytes <= 0:
            break
        ids.append(id)
        max_bytes -= size
    return ids


# Those behind in their groups

_GROUPS = (
    select(messages.c.group_key)
    .distinct()
    .where(_GIVEN, messages.c.queue_id == _queue_id, messages.c.group_key.is_not(None))
)
_BEHIND = (
    select(messages.c.id, messages.c.group_key, messages.c.vt <= moment("now"), EXPIRED)
    .where(
        messages.c.queue_id == _queue_id,
        is_one_of(messages.c.group_key, "names"),
        messages.c.blocked == BY_GROUP,
        _EARLY,
    )
    .order_by(messages.c.group_key, messages.c.id)
)
_HOLD_FOLLOWERS = (
    update(messages)
    .where(_GIVEN, messages.c.blocked == BY_GROUP)
    .values(CLAIM | {"vt": moment("held"), "blocked": UNBLOCKED})
    .returning(messages.c.id, messages.c.read_ct)
)


def claim_followers(
    connection: Connection,
    queue_id: int,
    held: Collection[int],
    *,
    worker: int,
    limit: int,
    lease: float,
    now: datetime | None,
    through: int,
) -> dict[int, int | None]:
    """Claim messages that are blocked only by messages of their group among the `held`. Returns their
    ids, each with the token of its claim. Locks the groups before the messages (see `groups`).
    """
    bound: dict[str, Any] = {"open_id": queue_id, "worker": worker, "through": through}
    names = list(connection.execute(_GROUPS, bound | {"ids": list(held)}).scalars())
    if not names:
        return {}
    groups.lock(connection, queue_id, names)
    bound |= at(now=(now, 0.0), held=(now, lease))
    behind = connection.execute(_BEHIND, bound | {"names": names}).all()
    ids = [id for id, _ in zip(_in_turn(behind), range(limit), strict=False)]
    claimed = connection.execute(_HOLD_FOLLOWERS, bound | {"ids": ids}).all()
    return {row.id: row.read_ct for row in claimed}


def _in_turn(behind: Sequence[Any]) -> Iterator[int]:
    """The ids of each group up to the first that is delayed. What has expired is passed over."""
    stuck = None
    for id, name, is_due, has_expired in behind:
        if name == stuck or has_expired:
            continue
        if is_due:
            yield id
        else:
            stuck = name
