"""Taking messages out of a queue, and ending the claims on them.

A dequeued message is held until its `vt`. The holder ends that in one of five ways: `ack` (done),
`fail` (deliver again, or dead-letter), `release` (deliver again, not my fault), `delete` (as if it
never was), or by doing nothing, in which case it comes back by itself. Whoever holds a message no
longer gets `LeaseLost`, and changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial, reduce
from operator import or_
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgqrs.error_texts import error_text
from pgqrs.errors import (
    ForeignMessage,
    InvalidArgument,
    LeaseLost,
    LeaseTooLong,
    NotClaimed,
    PgqrsError,
    QueueNotFound,
    WorkerStopped,
)
from pgqrs.payloads import encode
from pgqrs.presence import Presence
from pgqrs.repositories import archive, dequeue, groups, limits, queues, unreadable
from pgqrs.repositories import messages as message_rows
from pgqrs.repositories.announcements import Announced
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import Holds
from pgqrs.repositories.reading import Unreadable, tell
from pgqrs.retry import Retry
from pgqrs.stores import Database, RowsLocked
from pgqrs.stores.base import lock_timeout
from pgqrs.stores.wakeups import FOLLOW_UP, FOLLOW_UP_GROWTH, RESULTS, SELDOM, Doorbell
from pgqrs.types import (
    NOT_CLAIMED,
    Duration,
    Message,
    WorkerStatus,
    aware,
    mark_claimed,
    seconds,
    whole,
)

if TYPE_CHECKING:
    from pgqrs.buffer import Buffer

logger = logging.getLogger("pgqrs")
MAX_DEQUEUE = 100_000
SHARED_LOOK = 1.5
"""Seconds: a bit more than passes between the looks that a store in S3 takes for all who wait."""
SWEEPS = 10
"""How often a dequeue clears away what may not be handed out before it makes do with what it has."""
BRIEFLY = 0.01
"""Seconds to wait for rows that another transaction has locked, while others wait for their turn."""
NEVER = float("inf")
NOTHING = Holds(0, {})
"""So that an empty batch is no special case."""
C = TypeVar("C", set[int], dict[int, bool])
Held = Message | int
"""A message as it was dequeued. Its id alone will do as well: then any claim of this consumer
counts.
"""


class Holder:
    """What can be done with held messages. Those of a `_many` call that were lost do not hinder the
    others.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def _own_worker_id(self) -> int | None:
        """The worker in whose name messages are held; None outside of a consumer."""
        return None

    def ack(self, message: Held, *, result: Any = None) -> None:
        """It is done: to the archive as completed, with its result. Repeating it is fine."""
        self.ack_many([message], results=None if result is None else [result])

    def ack_many(self, messages: Iterable[Held], *, results: Iterable[Any] | None = None) -> None:
        """Many are done. `results`, if there are any, has one for each."""
        done = list(messages)
        texts = None if results is None else self._texts(done, list(results))
        self._ack(done, texts, tells=results is not None)

    def _texts(self, messages: list[Held], results: list[Any]) -> dict[int, str]:
        """Results as JSON, by the id of their message."""
        if len(results) != len(messages):
            raise InvalidArgument(
                "results", f"{len(results)} for {len(messages)} messages; expected one for each"
            )
        limits = self._database.config
        return {
            _id_of(message): encode(
                result,
                max_bytes=limits.max_payload_bytes,
                max_depth=limits.max_payload_depth,
                name="result",
            )
            for message, result in zip(messages, results, strict=True)
            if result is not None
        }

    def _ack(
        self,
        messages: Iterable[Held],
        texts: Mapping[int, str] | None,
        *,
        tells: bool = False,
    ) -> None:
        """`tells` those who wait for results, in this process and elsewhere."""
        self._conclude(messages, self._acking(texts, tells=tells), repeatable=True)
        if tells:
            self._database.wakeups.ring(RESULTS)

    def _acking(
        self, texts: Mapping[int, str] | None, *, tells: bool, skip_locked: bool = False
    ) -> Callable[[Connection, Holds], set[int]]:
        database = self._database
        channel = database.channel if tells else None
        return lambda connection, holds: archive.ack(
            connection,
            holds,
            now=database.now(),
            results=texts or None,
            channel=channel,
            skip_locked=skip_locked,
        )

    def _ack_unlocked(self, messages: Sequence[Message], texts: Mapping[int, str]) -> set[int]:
        """Ack many that have no group, whatever row another transaction has locked, and tell those who
        wait for results. Returns the ids of those that were not to be had within a moment.
        """
        if not self._database.supports_skip_locked:
            self._ack(messages, texts, tells=True)
            return set()
        held, _ = self._held(messages)
        skipping = self._acking(texts, tells=True, skip_locked=True)
        done = self._apply(held, skipping, single=True, repeatable=True)
        left = [message for message in messages if message.id not in done]
        try:
            if left:
                self._change(left, self._acking(texts, tells=True), wait=BRIEFLY)
        except RowsLocked:
            return {message.id for message in left}
        finally:
            self._database.wakeups.ring(RESULTS)
            if self._leaves_room(messages):
                self._tell(messages)
        return set()

    archive = ack
    archive_many = ack_many

    def fail(
        self,
        message: Held,
        error: str | BaseException | None = None,
        *,
        delay: Duration = 0.0,
        dead: bool = False,
        retry: Retry | None = None,
    ) -> bool:
        """It went wrong: deliver it again after `delay`, or when `retry` says. Returns whether that
        will happen.

        It will not on the last attempt the queue allows, or if it is `dead`: then it goes to the
        archive as failed, with the error.
        """
        (again,) = self.fail_many([message], error, delay=delay, dead=dead, retry=retry).values()
        return again

    def fail_many(
        self,
        messages: Iterable[Held],
        error: str | BaseException | None = None,
        *,
        delay: Duration = 0.0,
        dead: bool = False,
        retry: Retry | None = None,
    ) -> dict[int, bool]:
        """Many went wrong. Returns for each id whether it will be delivered again."""
        failed = list(messages)
        wait = None if dead else seconds("delay", delay)
        options: dict[str, Any] = {
            "delays": {
                _id_of(message): wait if retry is None or dead else _decide(retry, message, error)
                for message in failed
            },
            "error": error_text(error, self._database.config),
        }
        again = self._change(
            failed,
            self._ending(
                failed,
                lambda connection, holds: archive.fail(
                    connection, holds, now=self._database.now(), **options
                ),
            ),
        )
        if any(again.values()) or self._leaves_room(failed):
            self._tell(failed)
        return again

    def release(
        self, message: Held, *, delay: Duration | None = None, eta: datetime | None = None
    ) -> None:
        """Give it back untried: the attempt does not count. It is delivered again at once, or after
        `delay`, or at `eta`.

        If it was given back as often as `max_releases` of its queue allows, it goes to the archive as
        failed instead.
        """
        self.release_many([message], delay=delay, eta=eta)

    def release_many(
        self,
        messages: Iterable[Held],
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
    ) -> None:
        """Give many back untried."""
        if delay is not None and eta is not None:
            raise InvalidArgument("eta", "give a delay or an eta, not both")
        options: dict[str, Any] = {
            "delay": 0.0 if delay is None else seconds("delay", delay),
            "eta": None if eta is None else aware("eta", eta),
        }
        given_back = list(messages)
        held, claimed_again = self._held(given_back)
        released = self._apply(
            held,
            lambda connection, holds: message_rows.release(
                connection, holds, now=self._database.now(), **options
            ),
            single=True,
        )
        left = _without(held, released)
        if left:
            ended = self._apply(
                left,
                lambda connection, holds: archive.end_released(
                    connection, holds, now=self._database.now()
                ),
            )
            if ended:
                self._tell_of_results(given_back)
            left = _without(left, ended)
        self._tell(given_back)
        _refuse_lost(left, claimed_again)

    def extend(self, message: Held, lease: Duration) -> None:
        """Hold it until so long from now. `LeaseTooLong` if that is more than its queue allows."""
        self.extend_many([message], lease)

    def extend_many(self, messages: Iterable[Held], lease: Duration) -> None:
        """Hold many until so long from now."""
        self._extend(messages, seconds("lease", lease), wait=None)

    def _extend(self, messages: Iterable[Held], lease: float, *, wait: float | None) -> None:
        """Hold many until so long from now. With `wait`, `RowsLocked` if somebody has locked the row of
        one for longer than that.
        """
        held, claimed_again = self._held(messages)
        extended = self._apply(
            held, self._extending(lease), single=True, repeatable=True, wait=wait
        )
        left = _without(held, extended)
        for database, some in self._by_database(left).items():
            for holds in some:
                database.read(partial(message_rows.check_lease, holds=holds, lease=lease))
        _refuse_lost(left, claimed_again)

    def _extending(
        self, lease: float, *, skip_locked: bool = False
    ) -> Callable[[Connection, Holds], set[int]]:
        return lambda connection, holds: message_rows.extend(
            connection, holds, lease=lease, now=self._database.now(), skip_locked=skip_locked
        )

    def _renew(self, messages: Sequence[Message], lease: float, *, wait: float) -> set[int]:
        """Hold many until so long from now, whatever row somebody else has locked. Returns the ids of
        those that were not to be had within `wait` seconds.
        """
        left = messages
        if self._database.supports_skip_locked:
            held, _ = self._held(messages)
            skipping = self._extending(lease, skip_locked=True)
            renewed = self._apply(held, skipping, single=True, repeatable=True)
            left = [message for message in messages if message.id not in renewed]
        try:
            if left:
                self._extend(left, lease, wait=wait)
        except RowsLocked:
            return {message.id for message in left}
        return set()

    def delete(self, message: Held) -> None:
        """Remove it without a trace in the archive."""
        self.delete_many([message])

    def delete_many(self, messages: Iterable[Held]) -> None:
        """Remove many without a trace in the archive."""
        self._conclude(messages, dequeue.remove)

    def _conclude(
        self,
        messages: Iterable[Held],
        work: Callable[[Connection, Holds], set[int]],
        *,
        repeatable: bool = False,
    ) -> None:
        """Change what is held so that it is over: whoever it kept back may go ahead."""
        ended = list(messages)
        end = self._ending(ended, work)
        self._change(ended, end, single=end is work, repeatable=repeatable)
        if self._leaves_room(ended):
            self._tell(ended)

    def _ending(
        self, messages: list[Held], work: Callable[[Connection, Holds], C]
    ) -> Callable[[Connection, Holds], C]:
        """The work; if messages may have groups, with their groups locked around it."""
        if not any(map(self._may_have_group, messages)):
            return work
        ids = list(map(_id_of, messages))

        def end(connection: Connection, holds: Holds) -> C:
            with groups.ending(connection, ids, now=self._database.now()):
                return work(connection, holds)

        return end

    def _may_have_group(self, message: Held) -> bool:
        return not isinstance(message, Message) or message.group is not None

    def _leaves_room(self, ended: Iterable[Held]) -> bool:
        """Whether others may be claimed now that these are over."""
        limited = self._database.limited
        return any(
            self._may_have_group(message)
            or (limited and isinstance(message, Message) and message.queue in limited)
            for message in ended
        )

    def _tell(self, messages: Iterable[Held]) -> None:
        """There is something for others now: ring who waits for it."""
        for queue in {message.queue for message in messages if isinstance(message, Message)}:
            self._database.ring(queue)

    def _tell_of_results(self, messages: Iterable[Held]) -> None:
        for queue in {message.queue for message in messages if isinstance(message, Message)}:
            self._database.ring_of_results(queue)

    def _change(
        self,
        messages: Iterable[Held],
        work: Callable[[Connection, Holds], C],
        *,
        single: bool = False,
        repeatable: bool = False,
        wait: float | None = None,
    ) -> C:
        held, claimed_again = self._held(messages)
        changed = self._apply(held, work, single=single, repeatable=repeatable, wait=wait)
        _refuse_lost(_without(held, changed), claimed_again)
        return changed

    def _apply(
        self,
        held: list[Holds],
        work: Callable[[Connection, Holds], C],
        *,
        single: bool = False,
        repeatable: bool = False,
        wait: float | None = None,
    ) -> C:
        def change(some: list[Holds], connection: Connection) -> C:
            return reduce(or_, (work(connection, holds) for holds in some))

        changed: list[C] = []
        for database, some in self._by_database(held).items():
            alone, now = single and len(some) == 1, partial(change, some)
            if wait is not None:
                changed.append(database.write_within(now, wait=wait, single=alone))
            else:
                changed.append(database.write(now, single=alone, repeatable=repeatable))
        return reduce(or_, changed)

    def _by_database(self, held: list[Holds]) -> dict[Database, list[Holds]]:
        """What is held, by the database that it is in: nearly always one."""
        if not self._database.is_sharded:
            return {self._database: held}
        found: dict[Database, list[Holds]] = {}
        for worker_id, tokens in held:
            apart: dict[Database, dict[int, int | None]] = {}
            for id, token in tokens.items():
                apart.setdefault(self._database.of_message(id), {})[id] = token
            for database, some in apart.items():
                found.setdefault(database, []).append(Holds(worker_id, some))
        return found or {self._database.shards[0]: held}

    def _held(self, messages: Iterable[Held]) -> tuple[list[Holds], set[int]]:
        """What is held, by worker: nearly always one. And the ids of messages that are given twice, as
        claimed before and as claimed again: the last claim counts, those before it are lost.
        """
        tokens: dict[int, dict[int, int | None]] = {}
        last: dict[int, tuple[int, int]] = {}
        claimed_again: set[int] = set()
        checked: str | None = None
        for message in messages:
            if isinstance(message, Message):
                worker_id, id, token = message.consumer_worker_id, message.id, message.read_ct
                if worker_id is None:
                    raise NotClaimed(id, None)
                if message.store_id is not checked:  # once for all that a dequeue returned
                    self._check_store(message)
                    checked = message.store_id
                known_token, known_worker = last.setdefault(id, (token, worker_id))
                if known_token != token:
                    claimed_again.add(id)
                    if known_token > token:
                        continue
                    del tokens[known_worker][id]
                    last[id] = token, worker_id
                tokens.setdefault(worker_id, {})[id] = token
            else:
                id = whole("message", message, low=1, high=2**63 - 1)
                tokens.setdefault(self._holder(), {})[id] = None
        return [Holds(*held) for held in tokens.items() if held[1]] or [NOTHING], claimed_again

    def _check_store(self, message: Message) -> None:
        claimed_from = message.store_id
        if claimed_from == NOT_CLAIMED:
            raise NotClaimed(message.id, message.consumer_worker_id)
        if claimed_from is not None and claimed_from != self._database.store_id:
            raise ForeignMessage(
                message.id,
                message.queue,
                store_id=self._database.store_id,
                claimed_from=claimed_from,
            )

    def _holder(self) -> int:
        worker_id = self._own_worker_id()
        if worker_id is None:
            raise InvalidArgument(
                "message", "an id alone does not say who holds it; pass the message"
            )
        return worker_id


def _without(held: list[Holds], changed: Collection[int]) -> list[Holds]:
    """What of it was not changed."""
    return [
        holds._replace(tokens={id: t for id, t in holds.tokens.items() if id not in changed})
        for holds in held
        if any(id not in changed for id in holds.tokens)
    ]


def _refuse_lost(left: list[Holds], claimed_again: set[int]) -> None:
    """Raise for what was not changed, and for claims before the last of one message."""
    if left or claimed_again:
        lost = [id for holds in left for id in holds.tokens]
        raise LeaseLost(lost + [id for id in claimed_again if id not in lost])


def _id_of(message: Held) -> int:
    return message.id if isinstance(message, Message) else message


def _decide(retry: Retry, message: Held, error: str | BaseException | None) -> float | None:
    if not isinstance(message, Message):
        raise InvalidArgument(
            "retry", "an id alone does not say which attempt it was; pass the message"
        )
    return retry.next_delay(message.attempt, error if isinstance(error, BaseException) else None)


def set_unreadable_aside(database: Database, queue: str, *, worker: int) -> int:
    """Take the first messages that cannot be read to the archive. Returns how many."""
    after: unreadable.Place | None = unreadable.FIRST
    found = 0

    def page(connection: Connection) -> tuple[int, unreadable.Place | None]:
        return unreadable.set_aside(
            connection, queue, worker=worker, after=after or unreadable.FIRST, now=database.now()
        )

    while not found and after is not None:
        found, after = database.write(page, repeatable=True)
    return found


class Consumer(Holder):
    """Dequeues from one queue. It has a row among the workers until it is closed.

    Use one for each thread.
    """

    _claims_in_one_statement = True
    """Which then commits by itself."""

    def __init__(
        self,
        database: Database,
        queue: str,
        *,
        lease: Duration | None = None,
        hostname: str | None = None,
        port: int = 0,
        presence: Presence | None = None,
    ) -> None:
        """`presence` is the row of a worker that consumes from several queues."""
        database = database.of_queue(queue)
        super().__init__(database)
        self.queue = queue
        self._lease = None if lease is None else seconds("lease", lease)
        self._presence = presence or Presence(database, queue, hostname=hostname, port=port)
        self._life = 0
        self._met_groups = False
        self._idle = False
        self._room_in: float | None = None
        self._announced: Announced | None = None
        self._found_since = 0
        """Batches that were found since producers were told that this consumer waits."""
        self._follow_up = NEVER
        """Seconds until the next look for what rang nobody."""
        self._due_at = -NEVER
        """Until then a message can only come by being enqueued."""
        self._was_rung = False
        self._has_more = False
        """True if the last dequeue cleared so much away that it did not come to what is behind it."""
        self._buffers: set[Buffer] = set()

    @property
    def worker_id(self) -> int | None:
        """The worker in whose name messages are held; None before the first use."""
        return self._presence.worker_id

    def _own_worker_id(self) -> int | None:
        return self.worker_id

    def _may_have_group(self, message: Held) -> bool:
        # An id alone is that of a message claimed here.
        return message.group is not None if isinstance(message, Message) else self._met_groups

    def _leaves_room(self, ended: Iterable[Held]) -> bool:
        return self._limited or super()._leaves_room(ended)

    @property
    def _limited(self) -> bool:
        return self.queue in self._database.limited

    def _tell(self, messages: Iterable[Held]) -> None:
        self._database.ring(self.queue)

    def open(self) -> Self:
        """Register among the workers, unless that was done. The first dequeue does it too."""
        self._presence.open()
        return self

    def dequeue(
        self, n: int = 1, *, lease: Duration | None = None, wait: Duration | None = None
    ) -> list[Message]:
        """Claim up to `n` messages, for `lease` or what the consumer or else the queue says;
        `LeaseTooLong` if that is more than `max_lease` of the queue.

        Always a list; empty when there is nothing to do, the queue is paused, or this worker is
        suspended. With `wait` it returns as soon as there is something, or after that long.
        """
        if wait is None:
            return self._dequeue_now(n, lease)
        deadline = time.monotonic() + seconds("wait", wait)
        rung, life = threading.Event(), self._life
        with self._doorbell(rung.set):
            while True:
                rung.clear()
                found, pause = self._look(n, lease, life, within=seconds("wait", wait))
                remaining = deadline - time.monotonic()
                if found or remaining <= 0:
                    return found
                rung.wait(min(pause, remaining))
                if self._life != life:
                    return []

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one as they come, until the consumer is closed."""
        life = self._life
        while self._life == life:
            yield from self.dequeue(wait=SELDOM)

    def buffer(
        self,
        n: int = 100,
        *,
        lease: Duration | None = None,
        ack_size: int | None = None,
        ack_every: Duration = 0.1,
        wait: Duration | None = None,
    ) -> Buffer:
        """Messages one by one, claimed up to `n` ahead, with leases that are renewed.

        Acks are sent when there are `ack_size` of them (half of `n`), or after `ack_every`. The
        iteration ends when the buffer is closed, or when nothing came for `wait`.
        """
        from pgqrs.buffer import Buffer  # which is made of consumers

        return Buffer(self, n, lease=lease, ack_size=ack_size, ack_every=ack_every, wait=wait)

    def heartbeat(self) -> WorkerStatus:
        """A sign of life. Returns what this worker was told to be."""
        return self._presence.heartbeat()

    def close(self) -> None:
        """Leave the workers; who waits for messages stops waiting, and buffers are closed.

        Messages still held come back when their leases lapse.
        """
        self._life += 1
        self._database.wakeups.ring(self.queue)
        try:
            for buffer in tuple(self._buffers):
                buffer.close()
        finally:
            self._presence.close()

    def _dequeue_now(self, n: int, lease: Duration | None) -> list[Message]:
        whole("n", n, low=1, high=MAX_DEQUEUE)
        duration = self._lease if lease is None else seconds("lease", lease)
        self._presence.keep_alive()
        found: list[Message] = []
        try:
            sweeps, max_bytes = 0, self._database.config.max_dequeue_bytes
            while len(found) < n and sweeps < SWEEPS and max_bytes > 0:
                claimed = self._claim_as_worker(n - len(found), duration, max_bytes)
                found += claimed.messages
                max_bytes -= claimed.size
                if claimed.cut_short:
                    continue
                sweeps += 1
                if not claimed.leftovers or not self._sweep():
                    break
            self._has_more = sweeps == SWEEPS
        except PgqrsError:
            if not found:  # what is claimed must reach its holder; the error will come again
                raise
        return found

    def _look(
        self, n: int, lease: Duration | None, life: int, *, within: float = SHARED_LOOK
    ) -> tuple[list[Message], float]:
        """What there is now; if nothing, how long to wait for the doorbell before looking again.

        An idle consumer whose store is a copy of something elsewhere shares the looks of others there,
        if they are not older than `within`.
        """
        shared = min(within, SHARED_LOOK) if self._idle else 0.0
        with self._database.tolerating(shared):
            found, pause = self._look_here(n, lease, life)
        self._idle = not found
        return found, pause

    def _look_here(self, n: int, lease: Duration | None, life: int) -> tuple[list[Message], float]:
        if self._is_following_up() and not self._has_ready():
            return [], self._next_look()
        self._due_at = -NEVER
        found = self._dequeue_now(n, lease)
        if found:
            self._withdraw_if_busy()
        elif self._announce():
            self._follow_up = FOLLOW_UP
            found = self._dequeue_now(n, lease)  # enqueued while nobody was known to wait
        if self._life != life:  # closed meanwhile: looking has registered anew
            self._presence.close()
            return found, 0.0
        return found, 0.0 if found else self._pause()

    def _announce(self) -> bool:
        """Tell producers that this consumer waits. True if that is news to them."""
        announced = self._database.expect(self.queue, seconds=2 * SELDOM)
        self._announced, self._found_since = announced, 0
        return announced is not None and announced.is_news

    def _withdraw_if_busy(self) -> None:
        """With the second batch in a row there is no need for producers to ring any more. With the first
        there is: as a rule the consumer waits again at once.
        """
        self._found_since += 1
        if self._announced is not None and self._found_since > 1:
            self._database.withdraw(self.queue, self._announced)
            self._announced = None

    def _is_following_up(self) -> bool:
        """True if this look is only for what producers were enqueueing when they were told to ring: the
        doorbell did not ring, and nothing else has come due.
        """
        was_rung, self._was_rung = self._was_rung, False
        return not was_rung and time.monotonic() < self._due_at

    def _has_ready(self) -> bool:
        return self._database.read(lambda c: message_rows.has_ready(c, self.queue))

    def _pause(self) -> float:
        if self._has_more:
            return 0.0
        due = self._database.read(
            lambda c: message_rows.next_in(c, self.queue, now=self._database.now())
        )
        pauses = (self._database.wakeups.patience(), due, self._room_in)
        pause = min(pause for pause in pauses if pause is not None)
        self._due_at = time.monotonic() + pause
        return self._next_look()

    def _next_look(self) -> float:
        """Returns the seconds until something is due, or the next follow-up."""
        follow_up, self._follow_up = self._follow_up, self._follow_up * FOLLOW_UP_GROWTH
        return max(0.0, min(self._due_at - time.monotonic(), follow_up))

    def _doorbell(self, ring: Callable[[], object]) -> Doorbell:
        def rung() -> None:
            self._was_rung = True
            ring()

        self._due_at = -NEVER  # it did not ring until now
        return self._database.wakeups.doorbell(self.queue, rung)

    def _claim_as_worker(self, n: int, lease: float | None, max_bytes: int) -> Claimed:
        worker = self._presence.open()
        claimed = self._claim(n, lease, max_bytes)
        if claimed.worker_status is None:
            self._presence.reopen(worker)
            claimed = self._claim(n, lease, max_bytes)
        if claimed.worker_status is WorkerStatus.STOPPED:
            raise WorkerStopped(self._presence.open())
        if claimed.is_closed and lease is not None:
            self._check_lease(lease)
        return claimed

    def _check_lease(self, lease: float) -> None:
        longest = self._database.read(lambda c: queues.get(c, self.queue)).max_lease
        if longest is not None and lease > longest:
            raise LeaseTooLong(self.queue, lease, longest)

    def _sweep(self) -> bool:
        """Clear away what may not be handed out. Returns True if a claim may find others now."""
        swept = self._database.write(
            lambda c: dequeue.sweep(c, self.queue, now=self._database.now()), repeatable=True
        )
        return any(swept)

    def _set_aside(self, spoiled: Sequence[Message]) -> None:
        self._database.write(
            lambda c: dequeue.set_aside(c, spoiled, now=self._database.now()), repeatable=True
        )

    def _claim(
        self, n: int, lease: float | None, max_bytes: int, *, tries: int = SWEEPS
    ) -> Claimed:
        worker, store_id = self._presence.open(), self._database.store_id
        limited = self._limited
        apart = partial(limits.claim, lock_timeout=lock_timeout(self._database.config))

        def work(connection: Connection) -> Claimed:
            claim = apart if limited else self._claim_unlimited
            now = self._database.now()
            try:
                return claim(
                    connection,
                    self.queue,
                    worker=worker,
                    limit=n,
                    lease=lease,
                    now=now,
                    max_bytes=max_bytes,
                )
            except DBAPIError as exc:
                tell(exc)
                raise

        try:
            # Repeatable: a claim nobody heard of is like a holder that died.
            single = self._claims_in_one_statement
            claimed = self._database.write(work, single=single, repeatable=True, probe=True)
        except Unreadable:
            # If none is found, another consumer is setting it aside: the next claim passes over it.
            aside = set_unreadable_aside(self._database, self.queue, worker=worker)
            if not aside and (tries := tries - 1) == 0:
                raise
            return self._claim(n, lease, max_bytes, tries=tries)
        if not claimed.queue_exists:
            raise QueueNotFound(self.queue)
        if claimed.limited is not limited:  # nothing was claimed: the other way is needed
            change = (
                self._database.limited.add if claimed.limited else self._database.limited.discard
            )
            change(self.queue)
            return self._claim(n, lease, max_bytes)
        if claimed.spoiled:
            self._set_aside(claimed.spoiled)
        mark_claimed(claimed.messages, store_id)
        self._room_in = claimed.room_in
        self._met_groups = self._met_groups or any(m.group for m in claimed.messages)
        return self._without_lapsed(claimed)

    def _claim_unlimited(self, connection: Connection, queue: str, **options: Any) -> Claimed:
        """How messages are claimed from a queue without limits."""
        return dequeue.claim(connection, queue, **options)

    def _without_lapsed(self, claimed: Claimed) -> Claimed:
        """The claim without messages whose lease ended before this consumer heard of them.

        That happens where a commit may take as long as a lease: in a bucket. They are given back, so
        that the attempt does not count, unless another consumer holds them by now.
        """
        if self._database.remote is None:
            return claimed
        now = self._database.now()  # and not in a work: once the claim is in the bucket
        if now is None:
            return claimed
        lapsed = [m for m in claimed.messages if m.vt <= now and m.vt != m.dequeued_at]
        if not lapsed:
            return claimed
        logger.warning(
            "queue %s: claiming took longer than the lease; %d messages are given back",
            self.queue,
            len(lapsed),
        )
        with suppress(PgqrsError):
            self.release_many(lapsed)
        return replace(claimed, messages=[m for m in claimed.messages if m not in lapsed])

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
