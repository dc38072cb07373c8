"""Adding messages that have keys or groups.

More than one statement, in one transaction: groups are locked and keys are taken before messages are
added, so that who comes second sees what the first did (see `keys` and `groups`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Integer, Text, and_, bindparam, case, column, insert, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from pgqrs.errors import QueueNotFound
from pgqrs.models import messages
from pgqrs.payloads import Batch
from pgqrs.repositories import groups, keys
from pgqrs.repositories.groups import BY_GROUP, UNBLOCKED
from pgqrs.repositories.keys import Unique
from pgqrs.repositories.messages import QUEUE, SHARED, Enqueued, pieces, shared
from pgqrs.sqltypes import BigId, Json
from pgqrs.types import MessageId


class Labels(NamedTuple):
    """For each message of a batch its key and its group; and what the keys are unique for."""

    keys: Sequence[str | None]
    groups: Sequence[str | None]
    unique: Unique | None


class Labelled(NamedTuple):
    """A message as JSON text, with its key and its group."""

    payload: str
    key: str | None
    group: str | None


class _Rows(FunctionElement[Any]):
    name = "pgqrs_labelled"
    inherit_cache = True


@compiles(_Rows, "postgresql")
def _labelled_postgres(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT CAST(value->>0 AS JSONB) AS payload, value->>1 AS dedup_key, "
        "value->>2 AS group_key, ordinality AS position "
        f"FROM jsonb_array_elements(CAST({text} AS JSONB)) WITH ORDINALITY)"
    )


@compiles(_Rows, "sqlite")
def _labelled_sqlite(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT json_extract(value, '$[0]') AS payload, json_extract(value, '$[1]') AS dedup_key, "
        f"json_extract(value, '$[2]') AS group_key, key AS position FROM json_each({text}))"
    )


_labelled = _Rows(bindparam("labelled", type_=Text())).table_valued(
    column("payload", Json()),
    column("dedup_key", Text()),
    column("group_key", Text()),
    column("position", Integer()),
    name="labelled",
)
_values = {
    "queue_id": bindparam("in_queue", type_=BigId),
    "payload": _labelled.c.payload,
    "dedup_key": _labelled.c.dedup_key,
    "group_key": _labelled.c.group_key,
    "blocked": case((_labelled.c.group_key.is_(None), UNBLOCKED), else_=BY_GROUP),
    **SHARED,
    "ready": and_(SHARED["ready"], _labelled.c.group_key.is_(None)),
}
_INSERT = (
    insert(messages)
    .from_select(list(_values), select(*_values.values()).order_by(_labelled.c.position))
    .returning(messages.c.id)
)


def enqueue(
    connection: Connection,
    queue: str,
    batch: Batch,
    *,
    labels: Labels,
    now: datetime | None,
    **options: Any,
) -> Enqueued:
    """Add messages in order; all of them or none.

    One whose unique key another message has is not added: its id is that of the other.
    """
    bound = shared(queue, now=now, **options)
    found = connection.execute(QUEUE, bound).first()
    if found is None:
        raise QueueNotFound(queue)
    queue_id, waited_for = found
    asked = list(map(Labelled, batch.texts, labels.keys, labels.groups))
    into = [(queue_id, message.group) for message in asked if message.group is not None]
    with groups.adding(connection, into, now=now):
        if labels.unique is None:
            ids = list(map(MessageId, _insert(connection, queue_id, asked, bound)))
        else:
            ids = _enqueue_unique(connection, queue_id, asked, labels.unique, bound, now=now)
    return Enqueued(ids, bool(waited_for))


def _enqueue_unique(
    connection: Connection,
    queue_id: int,
    asked: Sequence[Labelled],
    unique: Unique,
    bound: dict[str, Any],
    *,
    now: datetime | None,
) -> list[MessageId]:
    wanted = {message.key for message in asked if message.key is not None}
    owners = keys.take(connection, queue_id, wanted, unique=unique, now=now)
    is_new = _first_of_each_key(asked, owners)
    new = [message for message, added in zip(asked, is_new, strict=True) if added]
    ids = _insert(connection, queue_id, new, bound)
    given = {m.key: id for m, id in zip(new, ids, strict=True) if m.key is not None}
    keys.assign(connection, queue_id, given, unique=unique, now=now)
    keys.forget_free(connection, queue_id, added=len(wanted), now=now)
    rest, owners = iter(ids), owners | given
    return [
        MessageId(next(rest)) if added else MessageId.existing(owners[message.key or ""])
        for message, added in zip(asked, is_new, strict=True)
    ]


def _first_of_each_key(asked: Sequence[Labelled], owners: Mapping[str, int]) -> list[bool]:
    """Which messages are to be added: the first with a key that nobody has, and all without one."""
    seen: set[str | None] = set(owners)
    added: list[bool] = []
    for message in asked:
        added.append(message.key not in seen)
        if message.key is not None:
            seen.add(message.key)
    return added


def _insert(
    connection: Connection, queue_id: int, new: Sequence[Labelled], bound: dict[str, Any]
) -> list[int]:
    ids: list[int] = []
    for piece in pieces(new, size=lambda message: len(message.payload)):
        values = {"in_queue": queue_id, "labelled": json.dumps(piece)}
        ids += sorted(connection.execute(_INSERT, bound | values).scalars())
    return ids
