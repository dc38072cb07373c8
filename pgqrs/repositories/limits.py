"""Claiming from a queue with limits: how many messages are in flight, in all and for each key, and
how often they may start.

All claims of such a queue take turns: that is what makes the limits exact, and why a queue without
limits does none of this. On PostgreSQL they lock a row of a table that nobody else uses, and do all of
it in a function of the server (see the revision that creates it): whoever stops in the middle of a claim
holds no lock. SQLite has one writer at a time, and does the same in steps.

A message in flight has a *slot*, which counts only while the claim that took it lasts: nothing is
written to it when the message ends, is given back or lapses; whoever claims next sees that, and drops
it. A claim that lapsed is over here: `extend` does not bring it back.

A ready message whose key has no room is *parked*: claims do not find it again. When a slot of its key
ends, the first parked messages of that key are *let in*, as many as there is room for. One that was let
in has a slot too, which counts for nothing and ends when the message leaves: claimed, or otherwise. So a
key with parked messages always has a slot, and each slot that ends has its key looked at again: nothing
stays parked, whatever becomes of the messages before it.

When a queue's limits change, the next claim notices, and starts over: what is in flight gets slots, and
every key with parked messages is looked at. If keys are not limited any more, what is parked becomes
ready instead, `AT_MOST` with each claim; until all of it is, none of the limits counts as applied.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Double,
    Integer,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    select,
    text,
    true,
    type_coerce,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.types import NullType

from pgqrs import rate
from pgqrs.errors import LeaseTooLong
from pgqrs.models import limits, messages, queues, slots
from pgqrs.rate import Started
from pgqrs.repositories import dequeue
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import (
    Holds,
    at,
    held_by,
    in_its_schema,
    is_one_of,
    moment,
    per_dialect,
)
from pgqrs.repositories.groups import UNBLOCKED
from pgqrs.repositories.hot import Hot, commands
from pgqrs.repositories.messages import COLUMNS, FENCE, HELD, give_back
from pgqrs.sqltypes import BigId, Flag, Json, UTCDateTime
from pgqrs.types import Message, Rate, make_message

NO_FSYNC = ", set_config('synchronous_commit', 'off', true)"
PAGE = 100
"""Ready messages looked at in one go, when keys are counted."""
PAGES = 20
AT_MOST = 1000
"""Messages claimed in one turn: others wait for theirs, and the answer must fit into the buffers of a
connection, or a client that does not read it would hold the lock.
"""
BETWEEN = (0, 0)
"""Limits that no queue has: those before are not applied any more, and the new ones not yet."""
BY_KEY: ColumnElement[int] = literal_column("2")
"""Blocked by the limit of its key."""


# PostgreSQL

_FETCH = Hot(select(*COLUMNS).join_from(messages, HELD, and_(*FENCE)))
# A claim has the lock on its queue's limits until it is committed. If it waited for the disk with that,
# the others would wait for the disk one after the other. So only the statement that fetches the messages
# waits. It writes a record of a few bytes to the log, behind the claim's: when its own commit is on the
# disk, so is the claim, and nothing is handed out before.
_FETCH_ONCE_STORED = Hot(
    select(
        *COLUMNS,
        select(
            cast(func.pg_logical_emit_message(true(), "pgqrs", ""), Text()),
        ).scalar_subquery(),
    ).join_from(messages, HELD, and_(*FENCE))
)


def _commits_by_itself(connection: Connection) -> bool:
    """True if each statement is a transaction of its own."""
    driver: Any = connection.connection.driver_connection
    return bool(driver.autocommit and driver.pgconn.transaction_status == _IDLE)


_IDLE = 0
"""`psycopg.pq.TransactionStatus.IDLE`, without importing the driver."""


@contextmanager
def _interrupted(connection: Connection, lock_timeout: int | None) -> Iterator[None]:
    """End a transaction that has changed nothing yet, for a statement that commits by itself, and begin
    it again after that: a client that stops inside a transaction has the lock until it goes on.
    """
    commands(connection, "COMMIT")
    yield
    bound = f"SET LOCAL lock_timeout = {lock_timeout}"
    commands(connection, "BEGIN ISOLATION LEVEL READ COMMITTED", bound)


@cache
def _function(name: str, waits_for_disk: bool) -> Hot:
    """The statement that calls the function of this name."""
    name = name.replace(":", r"\:")
    arguments: dict[str, Any] = {
        "queue": Text(),
        "worker": BigId,
        "limit": Integer(),
        "lease": Double(),
        "max_bytes": BigId,
        "now_at": UTCDateTime(),
        "lock_timeout": Integer(),
    }
    binds = [bindparam(argument, type_=kind) for argument, kind in arguments.items()]
    call = text(
        f"SELECT *{'' if waits_for_disk else NO_FSYNC} "
        f"FROM {name}(CAST(:queue AS TEXT), CAST(:worker AS BIGINT), "
        "CAST(:limit AS INTEGER), CAST(:lease AS DOUBLE PRECISION), "
        "CAST(:max_bytes AS BIGINT), CAST(:now_at AS TIMESTAMP WITH TIME ZONE), "
        "CAST(:lock_timeout AS INTEGER))"
    )
    outputs = ["status", "limited", "leftovers", "room_in", "ids", "tokens", "size", "cut_short"]
    if not waits_for_disk:
        outputs.append("setting")
    return Hot(call.bindparams(*binds).columns(*map(column, outputs)))


def _claim_postgres(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime | None,
    max_bytes: int = dequeue.MAX_BYTES,
    lock_timeout: int | None = None,
) -> Claimed:
    if lease is not None:
        _check_lease(connection, queue, lease)
    bound = {"queue": queue, "worker": worker, "limit": min(limit, AT_MOST), "lease": lease}
    bound |= {"max_bytes": max_bytes, "now_at": now, "lock_timeout": lock_timeout}
    begun = not _commits_by_itself(connection)
    apart = not begun or lock_timeout is not None
    name = in_its_schema(connection, "pgqrs_claim_within_limits")
    with _interrupted(connection, lock_timeout) if begun and apart else nullcontext():
        found = _function(name, waits_for_disk=not apart).rows(connection, bound)
    if not found:
        return Claimed([], queue_exists=False, worker_status=None)
    status, limited, leftovers, room_in, ids, tokens, size, cut_short = found[0][:8]
    holds = Holds(worker, dict(zip(ids, tokens, strict=True)))
    claimed = _fetch(connection, queue, holds, apart=apart)
    sorted_out = dequeue.sorted_out(claimed, status, leftovers)
    cut_short = cut_short or limit > AT_MOST == len(ids)
    return replace(
        sorted_out,
        limited=limited,
        room_in=room_in or None,
        cut_short=sorted_out.cut_short or cut_short,
        size=size if cut_short else 0,
    )


_SHORTER = Hot(
    select(type_coerce(queues.c.max_lease, NullType())).where(
        queues.c.queue_name == bindparam("queue"),
        queues.c.max_lease < bindparam("lease", type_=Double()),
    )
)
"""The longest lease that a queue allows, if it is shorter than this. A float as the driver gives it."""


def _check_lease(connection: Connection, queue: str, lease: float) -> None:
    for (longest,) in _SHORTER.rows(connection, {"queue": queue, "lease": lease}):
        raise LeaseTooLong(queue, lease, longest)


def _fetch(connection: Connection, queue: str, holds: Holds, *, apart: bool) -> list[Message]:
    """The messages claimed; if that was a transaction `apart`, once it is on the disk. No lock is held
    by now: a client that reads slowly is in nobody's way.
    """
    if not holds.tokens:
        return []
    try:
        if apart:
            rows = [row[:-1] for row in _FETCH_ONCE_STORED.rows(connection, held_by(holds))]
        else:
            rows = _FETCH.rows(connection, held_by(holds))
    except DBAPIError:
        # Some cannot be read. None of them is handed out; the others are not to wait until they lapse.
        with suppress(DBAPIError):
            give_back(connection, holds, delay=0.0, counted=False, now=None)
        raise
    return dequeue.in_order([make_message(queue, *row) for row in rows])


# SQLite

_queue_id = bindparam("in_queue", type_=BigId)


class _Queue(NamedTuple):
    """A queue as a claim finds it, with what claims before have left."""

    lease: float
    max_read_ct: int
    status: str | None
    open_id: int | None
    is_limited: bool
    id: int
    some_due: bool
    some_expired: bool
    max_in_flight: int | None
    max_in_flight_per_key: int | None
    rate_limit: int | None
    rate_period: float | None
    state_id: int | None
    kept_in_flight: int | None
    kept_per_key: int | None
    rate_taken: Any


_QUEUE = Hot(
    dequeue.QUEUE.outerjoin(limits, limits.c.queue_id == queues.c.id).add_columns(
        queues.c.id,
        *dequeue.TROUBLES,
        queues.c.max_in_flight,
        queues.c.max_in_flight_per_key,
        queues.c.rate_limit,
        queues.c.rate_period,
        limits.c.queue_id,
        limits.c.max_in_flight,
        limits.c.max_in_flight_per_key,
        limits.c.rate_taken,
    )
)
_CREATE = insert(limits).values(queue_id=_queue_id)
_KEEP = Hot(
    update(limits)
    .where(limits.c.queue_id == _queue_id)
    .values(
        max_in_flight=bindparam("new_in_flight", type_=limits.c.max_in_flight.type),
        max_in_flight_per_key=bindparam("new_per_key", type_=limits.c.max_in_flight.type),
        rate_taken=cast(bindparam("log", type_=Text()), Json()),
    )
)
_FORGET = delete(limits).where(limits.c.queue_id == _queue_id)
_DROP_ALL = delete(slots).where(slots.c.queue_id == _queue_id)
_counts = exists().where(
    messages.c.id == slots.c.message_id,
    messages.c.blocked == UNBLOCKED,
    case(
        (slots.c.let_in, messages.c.ready),
        else_=and_(
            ~messages.c.ready,
            messages.c.read_ct == slots.c.read_ct,
            messages.c.consumer_worker_id.is_not(None),
            messages.c.vt > moment("now"),
        ),
    ),
)
_DROP_ENDED = Hot(
    delete(slots).where(slots.c.queue_id == _queue_id, ~_counts).returning(slots.c.dedup_key)
)
_COUNT = Hot(
    select(slots.c.dedup_key, func.count())
    .where(slots.c.queue_id == _queue_id, ~slots.c.let_in)
    .group_by(slots.c.dedup_key)
)
_READY = Hot(
    select(messages.c.id, messages.c.dedup_key, dequeue.EXPIRED, func.length(messages.c.payload))
    .where(messages.c.queue_id == _queue_id, messages.c.ready)
    .order_by(*dequeue.ORDER)
    .limit(bindparam("limit"))
)
_GIVEN = is_one_of(messages.c.id, "ids")
_HOLD = Hot(
    update(messages).where(_GIVEN).values(vt=moment("lease"), **dequeue.CLAIM).returning(*COLUMNS)
)
_PARK = Hot(update(messages).where(_GIVEN).values(ready=false(), blocked=BY_KEY))
_DROP = Hot(delete(slots).where(is_one_of(slots.c.message_id, "ids")))
_IS_PARKED = and_(messages.c.queue_id == _queue_id, messages.c.blocked == BY_KEY)
_SOME_PARKED = Hot(select(messages.c.id).where(_IS_PARKED).limit(bindparam("limit")))
_keys = select(func.min(messages.c.dedup_key).label("key")).where(_IS_PARKED).cte(recursive=True)
_next_key = (
    select(func.min(messages.c.dedup_key))
    .where(_IS_PARKED, messages.c.dedup_key > _keys.c.key)
    .correlate(_keys)
    .scalar_subquery()
)
# From key to key: there may be many messages of each.
_each_key = _keys.union_all(select(_next_key).where(_keys.c.key.is_not(None)))
_PARKED_KEYS = select(_each_key.c.key).where(_each_key.c.key.is_not(None))
_OF_KEY = Hot(
    select(messages.c.priority, messages.c.id)
    .where(_IS_PARKED, messages.c.dedup_key == bindparam("key"))
    .order_by(*dequeue.ORDER)
    .limit(bindparam("limit"))
)
_LET_IN_OF_KEY = Hot(
    select(messages.c.priority, messages.c.id)
    .join_from(slots, messages, messages.c.id == slots.c.message_id)
    .where(slots.c.queue_id == _queue_id, slots.c.let_in, slots.c.dedup_key == bindparam("key"))
)
_UNPARK = Hot(update(messages).where(_GIVEN).values(ready=true(), blocked=UNBLOCKED))


def _take_slots(*conditions: ColumnElement[bool]) -> Hot:
    """The statement that gives slots to messages as they are."""
    chosen = (
        *(messages.c.id, messages.c.queue_id, messages.c.dedup_key, messages.c.read_ct),
        bindparam("let_in", type_=Flag()),
    )
    names = ["message_id", "queue_id", "dedup_key", "read_ct", "let_in"]
    return Hot(insert(slots).from_select(names, select(*chosen).where(*conditions)))


_TAKE_SLOTS = _take_slots(_GIVEN)
_COUNT_FROM_NOW = _take_slots(
    messages.c.queue_id == _queue_id,
    messages.c.consumer_worker_id.is_not(None),
    *dequeue.WAITING,
    messages.c.vt > moment("now"),
    ~exists().where(slots.c.message_id == messages.c.id),
)


def _claim_sqlite(
    connection: Connection,
    queue: str,
    *,
    worker: int,
    limit: int,
    lease: float | None,
    now: datetime,
    max_bytes: int = dequeue.MAX_BYTES,
    lock_timeout: int | None = None,
) -> Claimed:
    bound: dict[str, Any] = {"queue": queue, "worker": worker, "lease": lease}
    bound |= at(now=(now, 0.0))
    rows = _QUEUE.rows(connection, bound)
    if not rows:
        return Claimed([], queue_exists=False, worker_status=None)
    found = _Queue(*rows[0])
    status = dequeue.as_status(found.status)
    if found.open_id is None:
        return Claimed([], True, status, limited=True, is_closed=True)
    bound |= {"in_queue": found.id, "open_id": found.id, "max_read_ct": found.max_read_ct}
    leftovers = bool(found.some_expired)
    if found.some_due:
        leftovers |= dequeue.return_due(connection, bound)
    turn = _Turn(connection, queue, found, bound, now, max_bytes)
    if not turn.prepare():
        return Claimed([], True, status, leftovers, limited=False)
    return turn.take(limit, found.lease if lease is None else lease, status, leftovers)


class _Turn:
    """One claim's turn at a queue."""

    def __init__(
        self,
        connection: Connection,
        queue: str,
        row: _Queue,
        bound: dict[str, Any],
        now: datetime,
        max_bytes: int,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._row = row
        self._bound = bound
        self._at = now
        self._now = now.timestamp()
        self._bytes = max_bytes
        limit, period = row.rate_limit, row.rate_period
        self._rate = None if limit is None or period is None else Rate(limit, period)
        self._log = [Started(*entry) for entry in row.rate_taken or ()]
        self._applied = (row.kept_in_flight, row.kept_per_key)
        self._kept = (self._applied, self._log)
        self._counts_slots = row.max_in_flight is not None or self._counts_keys
        self._in_flight: Counter[str | None] = Counter()
        self._freed: set[str | None] = set()

    @property
    def _counts_keys(self) -> bool:
        return self._row.max_in_flight_per_key is not None

    def prepare(self) -> bool:
        """Start over if the limits are others than before. False if there are none any more."""
        has_limits = self._counts_slots or self._rate is not None
        if self._row.state_id is None:
            if not has_limits:
                return False
            self._connection.execute(_CREATE, self._bound)
        if self._rate is not None:
            self._log = rate.no_later_than(self._log, self._now)
        wanted = (self._row.max_in_flight, self._row.max_in_flight_per_key)
        if self._applied != wanted or not has_limits:
            self._applied = wanted if self._start_over() else BETWEEN
            if not has_limits and self._applied == wanted:
                self._connection.execute(_FORGET, self._bound)
                return False
        return True

    def _start_over(self) -> bool:
        """Count what is in flight, and look at what is parked. False if some has yet to be let in."""
        if self._counts_slots:
            self._rows(_COUNT_FROM_NOW, let_in=False)
        else:
            self._connection.execute(_DROP_ALL, self._bound)
        if self._counts_keys:
            self._freed.update(self._connection.execute(_PARKED_KEYS, self._bound).scalars())
            return True
        parked = [id for (id,) in self._rows(_SOME_PARKED, limit=AT_MOST)]
        self._rows(_UNPARK, ids=parked)
        return len(parked) < AT_MOST

    def take(self, limit: int, lease: float, status: Any, leftovers: bool) -> Claimed:
        if self._counts_slots:
            self._see_who_left()
        room = self._room(limit)
        claimed: list[Message] = []
        budget, started, spoiled = self._bytes, 0, False
        # Nearly always the first messages have room. If not, there may be many that have none.
        more = False
        for at_least in (1, *[PAGE] * PAGES):
            if started >= room or self._bytes <= 0:
                break
            page, expired, is_last = self._pick(room - started, at_least)
            sound = self._hold(page, lease)
            claimed += sound
            spoiled = spoiled or len(sound) < len(page)
            started += len(page)
            leftovers |= expired
            if is_last:
                break
        else:  # so many have no room that there may be more behind them
            more = started < room and self._bytes > 0
        self._keep(started)
        room_in = rate.room_in(self._rate, self._log, self._now) if self._rate else 0.0
        return Claimed(
            dequeue.in_order(claimed),
            True,
            status,
            leftovers,
            limited=True,
            room_in=room_in or None,
            cut_short=spoiled or more,
            size=budget - self._bytes if more else 0,
        )

    def _see_who_left(self) -> None:
        freed = self._freed | {key for (key,) in self._rows(_DROP_ENDED)}
        self._in_flight.update(dict(self._rows(_COUNT)))
        if self._counts_keys:
            for key in freed:
                if key is not None:
                    self._let_in(key)

    def _let_in(self, key: str) -> None:
        """The first of those that are parked or were let in, as many as there is room for."""
        room = max(0, (self._row.max_in_flight_per_key or 0) - self._in_flight[key])
        parked = self._rows(_OF_KEY, key=key, limit=room)
        if not parked:
            return
        before = self._rows(_LET_IN_OF_KEY, key=key)
        first = sorted((-priority, id) for priority, id in (*parked, *before))[:room]
        ids = list({id for _, id in first} - {id for _, id in before})
        self._rows(_UNPARK, ids=ids)
        self._rows(_TAKE_SLOTS, ids=ids, let_in=True)

    def _room(self, limit: int) -> int:
        if self._row.max_in_flight is not None:
            limit = min(limit, self._row.max_in_flight - self._in_flight.total())
        if self._rate is not None:
            limit = min(limit, rate.room(self._rate, self._log, self._now))
        return limit

    def _pick(self, room: int, at_least: int) -> tuple[list[int], bool, bool]:
        """Messages that may start, whether some have expired, and whether there are no more."""
        at_once = max(room, at_least) if self._counts_keys else room
        page = self._rows(_READY, limit=at_once)
        picked: list[int] = []
        parked: list[int] = []
        expired = False
        for id, key, is_expired, size in page:
            if is_expired:
                expired = True
            elif not self._has_room(key):
                parked.append(id)
            elif len(picked) < room and self._bytes > 0:
                picked.append(id)
                self._in_flight[key] += 1
                self._bytes -= size
        if parked:
            self._rows(_PARK, ids=parked)
            self._rows(_DROP, ids=parked)
        return picked, expired, len(page) < at_once or expired

    def _has_room(self, key: str | None) -> bool:
        per_key = self._row.max_in_flight_per_key
        return key is None or per_key is None or self._in_flight[key] < per_key

    def _hold(self, ids: Sequence[int], lease: float) -> list[Message]:
        if not ids:
            return []
        until = self._at + timedelta(seconds=lease)
        rows = self._rows(_HOLD, ids=ids, **at(lease=(until, 0.0)))
        held = [make_message(self._queue, *row) for row in rows]
        if self._counts_slots:
            # Also of what turns out to be undecodable: its key is looked at when it has left.
            self._rows(_DROP, ids=ids)
            self._rows(_TAKE_SLOTS, ids=ids, let_in=False)
        return dequeue.decodable(self._connection, held, self._at)

    def _keep(self, started: int) -> None:
        """What the next claim has to know, if anything has changed."""
        if self._rate is not None and started:
            self._log = rate.start(self._rate, self._log, started, self._now)
        if (self._applied, self._log) == self._kept:
            return
        log = json.dumps(self._log) if self._log else None
        in_flight, per_key = self._applied
        self._rows(_KEEP, new_in_flight=in_flight, new_per_key=per_key, log=log)

    def _rows(self, statement: Hot, **more: Any) -> list[Any]:
        return statement.rows(self._connection, self._bound | more)


claim = per_dialect(postgresql=_claim_postgres, sqlite=_claim_sqlite)
"""Claim up to `limit` messages of a queue, or as many as its limits allow. Not `limited` if it turns out
to have none any more: then nothing was claimed.

With `lock_timeout`, in milliseconds, the claim commits by itself, and waits no longer for its turn
(PostgreSQL). The transaction that it is called in has changed nothing yet then, and begins anew.
"""
