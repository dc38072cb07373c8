"""Claiming from a queue with limits: how many messages are in flight, in all and for each key, and
how often they may start.

All claims of such a queue take turns: they lock its row. That is what makes the limits exact, and why
a queue without limits does none of this. A message in flight has a *slot*, which counts only while
the claim that took it lasts: nothing is written to it when the message ends, is given back or lapses;
whoever claims next sees that, and drops it.

A ready message whose key has no room is *parked*: claims do not find it again until some message of
that key has left its slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    Connection,
    Text,
    bindparam,
    cast,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.sql.expression import ColumnElement

from pgqrs import rate
from pgqrs.models import messages, queues, slots
from pgqrs.payloads import encode
from pgqrs.rate import Started
from pgqrs.repositories import dequeue
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import at, moment
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.messages import COLUMNS
from pgqrs.sqltypes import BigId, Json
from pgqrs.types import Message, Rate

PAGE = 100
"""Ready messages looked at in one go, when keys are counted."""
PAGES = 20
BY_KEY: ColumnElement[int] = literal_column("2")
"""Blocked by the limit of its key."""

_queue_id = bindparam("in_queue", type_=BigId)
_QUEUE = dequeue.QUEUE.add_columns(
    queues.c.id,
    *dequeue.TROUBLES,
    queues.c.max_in_flight,
    queues.c.max_in_flight_per_key,
    queues.c.rate_limit,
    queues.c.rate_period,
    queues.c.rate_taken,
    moment("now").label("asked_at"),
).with_for_update(of=queues, key_share=True)
_in_flight = exists().where(
    messages.c.id == slots.c.message_id,
    messages.c.read_ct == slots.c.read_ct,
    messages.c.consumer_worker_id.is_not(None),
    ~messages.c.ready,
    messages.c.vt > moment("now"),
)
_DROP_ENDED = (
    delete(slots).where(slots.c.queue_id == _queue_id, ~_in_flight).returning(slots.c.dedup_key)
)
_COUNT = (
    select(slots.c.dedup_key, func.count())
    .where(slots.c.queue_id == _queue_id)
    .group_by(slots.c.dedup_key)
)
_READY = (
    select(messages.c.id, messages.c.dedup_key, dequeue.EXPIRED)
    .where(messages.c.queue_id == _queue_id, messages.c.ready)
    .order_by(*dequeue.ORDER)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_GIVEN = messages.c.id.in_(bindparam("ids", expanding=True))
_HOLD = (
    update(messages).where(_GIVEN).values(vt=moment("lease"), **dequeue.CLAIM).returning(*COLUMNS)
)
_PARK = update(messages).where(_GIVEN).values(ready=false(), blocked=BY_KEY)
_PARKED = (
    select(messages.c.id)
    .where(
        messages.c.queue_id == _queue_id,
        messages.c.blocked == BY_KEY,
        messages.c.dedup_key == bindparam("key"),
    )
    .order_by(messages.c.id)
    .limit(bindparam("limit"))
)
_UNPARK = update(messages).where(_GIVEN).values(ready=true(), blocked=UNBLOCKED)
_UNPARK_ALL = (
    update(messages)
    .where(messages.c.queue_id == _queue_id, messages.c.blocked == BY_KEY)
    .values(ready=true(), blocked=UNBLOCKED)
)
_TAKE_SLOTS = insert(slots)
_COUNT_FROM_NOW = insert(slots).from_select(
    ["message_id", "queue_id", "dedup_key", "read_ct"],
    select(messages.c.id, messages.c.queue_id, messages.c.dedup_key, messages.c.read_ct).where(
        messages.c.queue_id == _queue_id,
        messages.c.consumer_worker_id.is_not(None),
        *dequeue.WAITING,
        messages.c.vt > moment("now"),
        ~exists().where(slots.c.message_id == messages.c.id),
    ),
)
_TURN = (
    update(queues)
    .where(queues.c.id == _queue_id)
    .values(rate_taken=cast(bindparam("log", type_=Text()), Json()))
)


def claim(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
) -> Claimed:
    """Claim up to `limit` messages of a queue, or as many as its limits allow."""
    bound: dict[str, Any] = {"queue": queue, "worker": worker} | at(now=(now, 0.0))
    found = connection.execute(_QUEUE, bound).first()
    if found is None:
        return Claimed([], queue_exists=False, worker_status=None)
    status = dequeue.as_status(found.status)
    if found.open_id is None:
        return Claimed([], queue_exists=True, worker_status=status)
    bound |= {"in_queue": found.id, "open_id": found.id, "max_read_ct": found.max_read_ct}
    leftovers = bool(found.some_expired)
    if found.some_due:
        leftovers |= dequeue.return_due(connection, bound)
    return _Turn(connection, queue, found, bound).take(
        limit, found.lease if lease is None else lease, status, leftovers
    )


class _Turn:
    """One claim's turn at a queue whose row it has locked."""

    def __init__(self, connection: Connection, queue: str, row: Any, bound: dict[str, Any]) -> None:
        self._connection = connection
        self._queue = queue
        self._row = row
        self._bound = bound
        self._rate = None if row.rate_limit is None else Rate(row.rate_limit, row.rate_period)
        self._log = [Started(*entry) for entry in row.rate_taken or ()]
        self._now = row.asked_at.timestamp()
        self._counts_slots = row.max_in_flight is not None or self._counts_keys
        self._in_flight: Counter[str | None] = Counter()

    @property
    def _counts_keys(self) -> bool:
        return self._row.max_in_flight_per_key is not None

    def take(self, limit: int, lease: float, status: Any, leftovers: bool) -> Claimed:
        if self._counts_slots:
            self._see_who_left()
        room = self._room(limit)
        claimed: list[Message] = []
        for _ in range(PAGES):
            if len(claimed) >= room:
                break
            page, expired, is_last = self._pick(room - len(claimed))
            claimed += self._hold(page, lease)
            leftovers |= expired
            if is_last:
                break
        if claimed:
            self._keep_count(claimed)
        room_in = rate.room_in(self._rate, self._log, self._now) if self._rate else 0.0
        return Claimed(
            dequeue.in_order(claimed),
            True,
            status,
            leftovers,
            limited=bool(self._row.limited),
            room_in=room_in or None,
        )

    def _see_who_left(self) -> None:
        freed = self._connection.execute(_DROP_ENDED, self._bound).scalars().all()
        for key, count in self._connection.execute(_COUNT, self._bound):
            self._in_flight[key] = count
        if self._counts_keys:
            for key in {key for key in freed if key is not None}:
                self._unpark(key)

    def _unpark(self, key: str) -> None:
        room = self._row.max_in_flight_per_key - self._in_flight[key]
        wanted = self._bound | {"key": key, "limit": max(0, room)}
        parked = self._connection.execute(_PARKED, wanted).scalars().all()
        self._connection.execute(_UNPARK, {"ids": parked})

    def _room(self, limit: int) -> int:
        if self._row.max_in_flight is not None:
            limit = min(limit, self._row.max_in_flight - self._in_flight.total())
        if self._rate is not None:
            limit = min(limit, rate.room(self._rate, self._log, self._now))
        return limit

    def _pick(self, room: int) -> tuple[list[int], bool, bool]:
        """Messages that may start, whether some have expired, and whether there are no more."""
        at_once = max(room, PAGE) if self._counts_keys else room
        page = self._connection.execute(_READY, self._bound | {"limit": at_once}).all()
        picked: list[int] = []
        parked: list[int] = []
        expired = False
        for id, key, is_expired in page:
            if is_expired:
                expired = True
            elif not self._has_room(key):
                parked.append(id)
            elif len(picked) < room:
                picked.append(id)
                self._in_flight[key] += 1
        if parked:
            self._connection.execute(_PARK, {"ids": parked})
        return picked, expired, len(page) < at_once or expired

    def _has_room(self, key: str | None) -> bool:
        if key is None or not self._counts_keys:
            return True
        return bool(self._in_flight[key] < self._row.max_in_flight_per_key)

    def _hold(self, ids: Sequence[int], lease: float) -> list[Message]:
        if not ids:
            return []
        until = self._row.asked_at + timedelta(seconds=lease)
        bound = self._bound | {"ids": ids} | at(lease=(until, 0.0))
        held = [Message(self._queue, *row) for row in self._connection.execute(_HOLD, bound)]
        return dequeue.decodable(self._connection, held, self._row.asked_at)

    def _keep_count(self, claimed: Iterable[Message]) -> None:
        started = list(claimed)
        if self._counts_slots:
            self._connection.execute(
                _TAKE_SLOTS,
                [
                    {
                        "message_id": message.id,
                        "queue_id": self._row.id,
                        "dedup_key": message.key,
                        "read_ct": message.read_ct,
                    }
                    for message in started
                ],
            )
        if self._rate is not None:
            self._log = rate.start(self._rate, self._log, len(started), self._now)
        # Also without a rate: who still sees an older state is told that it changed.
        log = encode(self._log, max_bytes=2**20, max_depth=2) if self._log else None
        self._connection.execute(_TURN, {"in_queue": self._row.id, "log": log})


def change(connection: Connection, queue_id: int, *, now: datetime | None) -> None:
    """After the limits of a queue have changed: what was in flight counts, and nothing stays parked."""
    bound = {"in_queue": queue_id} | at(now=(now, 0.0))
    connection.execute(_DROP_ENDED, bound).close()
    connection.execute(_COUNT_FROM_NOW, bound)
    connection.execute(_UNPARK_ALL, bound)
