"""Taking messages out of a queue, and ending the claims on them.

A dequeued message is held until its `vt`. The holder ends that in one of five ways: `ack` (done),
`fail` (deliver again, or dead-letter), `release` (deliver again, not my fault), `delete` (as if it
never was), or by doing nothing, in which case it comes back by itself. Whoever holds a message no
longer gets `LeaseLost`, and changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import reduce
from operator import or_
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sqlalchemy import Connection

from pgqrs.errors import InvalidArgument, LeaseLost, PgqrsError, QueueNotFound, WorkerStopped
from pgqrs.payloads import encode, error_text
from pgqrs.presence import Presence
from pgqrs.repositories import archive, dequeue, groups, limits
from pgqrs.repositories import messages as message_rows
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import Holds
from pgqrs.retry import Retry
from pgqrs.stores import Database
from pgqrs.stores.wakeups import SELDOM, Doorbell
from pgqrs.types import Duration, Message, WorkerStatus, aware, seconds, whole

if TYPE_CHECKING:
    from pgqrs.buffer import Buffer

MAX_DEQUEUE = 100_000
SWEEPS = 10
"""How often a dequeue clears away what may not be handed out before it makes do with what it has."""
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
        self._ack(done, None if results is None else self._texts(done, list(results)))
        if results is not None:
            self._tell_of_results(done)

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

    def _ack(self, messages: Iterable[Held], texts: Mapping[int, str] | None) -> None:
        now = self._database.now()
        self._conclude(
            messages,
            lambda connection, holds: archive.ack(
                connection, holds, now=now, results=texts or None
            ),
            repeatable=True,
        )

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
            "error": error_text(error),
            "now": self._database.now(),
        }
        again = self._change(
            failed,
            lambda connection, holds: archive.fail(connection, holds, **options),
        )
        if any(again.values()) or self._leaves_room(failed):
            self._tell(failed)
        return again

    def release(
        self, message: Held, *, delay: Duration | None = None, eta: datetime | None = None
    ) -> None:
        """Give it back untried: the attempt does not count. It is delivered again at once, or after
        `delay`, or at `eta`.
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
            "now": self._database.now(),
        }
        given_back = list(messages)
        self._change(
            given_back,
            lambda connection, holds: message_rows.give_back(
                connection, holds, counted=False, **options
            ),
            single=True,
        )
        self._tell(given_back)

    def extend(self, message: Held, lease: Duration) -> None:
        """Hold it until so long from now."""
        self.extend_many([message], lease)

    def extend_many(self, messages: Iterable[Held], lease: Duration) -> None:
        """Hold many until so long from now."""
        duration, now = seconds("lease", lease), self._database.now()
        self._change(
            messages,
            lambda connection, holds: message_rows.extend(
                connection, holds, lease=duration, now=now
            ),
            single=True,
            repeatable=True,
        )

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
        ended, now = list(messages), self._database.now()
        if not any(map(self._may_have_group, ended)):
            self._change(ended, work, single=True, repeatable=repeatable)
        else:

            def end(connection: Connection, holds: Holds) -> set[int]:
                with groups.ending(connection, list(holds.tokens), now=now):
                    return work(connection, holds)

            self._change(ended, end, repeatable=repeatable)
        if self._leaves_room(ended):
            self._tell(ended)

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
    ) -> C:
        held = self._held(messages)

        def change(connection: Connection) -> C:
            return reduce(or_, (work(connection, holds) for holds in held))

        changed = self._database.write(
            change, single=single and len(held) == 1, repeatable=repeatable
        )
        lost = [id for holds in held for id in holds.tokens if id not in changed]
        if lost:
            raise LeaseLost(lost)
        return changed

    def _held(self, messages: Iterable[Held]) -> list[Holds]:
        """What is held, by worker: nearly always one."""
        tokens: dict[int, dict[int, int | None]] = {}
        for message in messages:
            if isinstance(message, Message):
                worker_id, id, token = message.consumer_worker_id, message.id, message.read_ct
                if worker_id is None:
                    raise InvalidArgument("message", f"message {id} was not dequeued")
                tokens.setdefault(worker_id, {})[id] = token
            else:
                id = whole("message", message, low=1, high=2**63 - 1)
                tokens.setdefault(self._holder(), {})[id] = None
        return [Holds(*held) for held in tokens.items()] or [NOTHING]

    def _holder(self) -> int:
        worker_id = self._own_worker_id()
        if worker_id is None:
            raise InvalidArgument(
                "message", "an id alone does not say who holds it; pass the message"
            )
        return worker_id


def _id_of(message: Held) -> int:
    return message.id if isinstance(message, Message) else message


def _decide(retry: Retry, message: Held, error: str | BaseException | None) -> float | None:
    if not isinstance(message, Message):
        raise InvalidArgument(
            "retry", "an id alone does not say which attempt it was; pass the message"
        )
    return retry.next_delay(message.attempt, error if isinstance(error, BaseException) else None)


class Consumer(Holder):
    """Dequeues from one queue. It has a row among the workers until it is closed.

    Use one for each thread.
    """

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
        super().__init__(database)
        self.queue = queue
        self._lease = None if lease is None else seconds("lease", lease)
        self._presence = presence or Presence(database, queue, hostname=hostname, port=port)
        self._life = 0
        self._met_groups = False
        self._room_in: float | None = None
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
        """Claim up to `n` messages, for `lease` or what the consumer or else the queue says.

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
                found, pause = self._look(n, lease, life)
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
            for _ in range(SWEEPS):
                claimed = self._claim_as_worker(n - len(found), duration)
                found += claimed.messages
                if not claimed.leftovers or not self._sweep() or len(found) == n:
                    break
        except PgqrsError:
            if not found:  # what is claimed must reach its holder; the error will come again
                raise
        return found

    def _look(self, n: int, lease: Duration | None, life: int) -> tuple[list[Message], float]:
        """What there is now; if nothing, how long to wait for the doorbell before looking again."""
        found = self._dequeue_now(n, lease)
        if not found and self._database.expect(self.queue, seconds=2 * SELDOM):
            found = self._dequeue_now(n, lease)  # enqueued while nobody was known to wait
        if self._life != life:  # closed meanwhile: looking has registered anew
            self._presence.close()
            return found, 0.0
        return found, 0.0 if found else self._pause()

    def _pause(self) -> float:
        now = self._database.now()
        due = self._database.read(lambda c: message_rows.next_in(c, self.queue, now=now))
        pauses = (self._database.wakeups.patience(), due, self._room_in)
        return min(pause for pause in pauses if pause is not None)

    def _doorbell(self, ring: Callable[[], object]) -> Doorbell:
        return self._database.wakeups.doorbell(self.queue, ring)

    def _claim_as_worker(self, n: int, lease: float | None) -> Claimed:
        worker = self._presence.open()
        claimed = self._claim(n, lease)
        if claimed.worker_status is None:
            self._presence.reopen(worker)
            claimed = self._claim(n, lease)
        if claimed.worker_status is WorkerStatus.STOPPED:
            raise WorkerStopped(self._presence.open())
        return claimed

    def _sweep(self) -> int:
        now = self._database.now()
        return self._database.write(
            lambda c: dequeue.sweep(c, self.queue, now=now), repeatable=True
        )

    def _claim(self, n: int, lease: float | None) -> Claimed:
        worker, now = self._presence.open(), self._database.now()

        limited = self._limited

        def work(connection: Connection) -> Claimed:
            claim = limits.claim if limited else dequeue.claim
            return claim(connection, self.queue, worker=worker, limit=n, lease=lease, now=now)

        # Repeatable: a claim nobody heard of is like a holder that died.
        claimed = self._database.write(work, single=not limited, repeatable=True, probe=True)
        if claimed.limited and not limited:  # so a transaction is needed
            self._database.limited.add(self.queue)
            return self._claim(n, lease)
        if limited and not claimed.limited:
            self._database.limited.discard(self.queue)
        if not claimed.queue_exists:
            raise QueueNotFound(self.queue)
        self._room_in = claimed.room_in
        self._met_groups = self._met_groups or any(m.group for m in claimed.messages)
        return claimed

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
