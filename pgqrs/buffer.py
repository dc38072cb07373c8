"""Reading ahead, and acknowledging in batches: the speed of batches in a loop over single messages.

A buffer holds three sets of messages for its consumer:

- *ahead*: claimed, and not handed out yet; at most `n` of them;
- *out*: handed out, and somebody is at work on them;
- *done*: acked, and the database does not know it yet.

One thread (for asyncio one task) claims more when half of `n` is used up, and acks what is done by
size or by time. The leases of all three sets are renewed by the store's keeper (`keeper`), in a thread
of its own: also while a claim or an ack hangs. When the process dies, all three come back by
themselves: also what was done but not yet known to be, which is delivered once more and not lost.

A message that expires while it is ahead is not handed out: the buffer gives it back, and the next
claim takes it to the archive as expired. A buffer that was not opened has no thread, so it acks at
once, as its consumer does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from pgqrs.consumer import MAX_DEQUEUE, Consumer, Held, Holder
from pgqrs.errors import InvalidArgument, LeaseLost, PgqrsError, StoreClosed, StoreUnavailable
from pgqrs.keeper import Keeper, Lease, keeper_of
from pgqrs.stores.forks import Forking, watch
from pgqrs.stores.wakeups import Doorbell
from pgqrs.types import Duration, Message, seconds, whole

REST = 1.0
"""Seconds between two tries at something that failed."""
NEVER = float("inf")


class _Hold(Lease):
    """A message of a buffer, and when it may have expired, by the clock of this process.

    The keeper calls `renewed`, `not_renewed` and `lose` from its thread: none of them may block.
    """

    __slots__ = ("_buffer", "expires")

    def __init__(
        self, message: Message, lease: float, *, claimed_at: float, expires: float, buffer: Buffer
    ) -> None:
        super().__init__(message, lease, claimed_at=claimed_at)
        self.expires = expires
        self._buffer = buffer

    def renewed(self, at: float) -> None:
        had_lapsed = self.until <= time.monotonic()
        super().renewed(at)
        if had_lapsed:
            self._buffer._announce()  # somebody may wait for it

    def not_renewed(self, error: Exception) -> None:
        self._buffer._report(error)

    def lose(self) -> None:
        super().lose()
        self._buffer._lose(self)


class _Asked(NamedTuple):
    """What there was when somebody asked for a message: see `Buffer._is_over`."""

    looks: int
    deadline: float


class _AtFork(Forking):
    """Tells a buffer that it is in a child now; there for as long as the buffer is."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = weakref.ref(buffer)
        watch(self)

    def after_fork_in_child(self) -> None:
        if buffer := self._buffer():
            buffer._leave_to_parent()


class Buffer(Holder):
    """Messages of one consumer, handed out one by one; acks are sent later, several at a time.

    An iterator. `ack` only takes note. That a lease was lost, or that the database stayed away, is
    raised by the next step of the iteration, by `flush` or by `close`, whichever comes first;
    iterating may go on after that. Everything else (`fail`, `release`, `extend`, `delete`) is done at
    once, as by the consumer.
    """

    def __init__(
        self,
        consumer: Consumer,
        n: int,
        *,
        lease: Duration | None,
        ack_size: int | None,
        ack_every: Duration,
        wait: Duration | None,
    ) -> None:
        super().__init__(consumer._database)
        self._consumer = consumer
        self._life = consumer._life
        self._n = whole("n", n, low=1, high=MAX_DEQUEUE)
        self._lease = consumer._lease if lease is None else seconds("lease", lease)
        if self._lease == 0:
            raise InvalidArgument("lease", "expected more than 0 seconds")
        self._ack_size = (
            max(1, n // 2)
            if ack_size is None
            else whole("ack_size", ack_size, low=1, high=MAX_DEQUEUE)
        )
        self._ack_every = seconds("ack_every", ack_every)
        self._wait = None if wait is None else seconds("wait", wait)

        self._state = threading.Condition()
        """Guards what follows, never while the database is asked, and tells of changes."""
        self._holds: dict[int, _Hold] = {}
        self._ahead: deque[Message] = deque()
        self._expired: list[Message] = []
        self._done: list[Held] = []
        self._results: dict[int, str] = {}
        self._acked = self._settled = 0
        self._looks_begun = self._looks_ended = 0
        self._lost: list[int] = []
        self._error: Exception | None = None
        self._opened = self._closed = False

        self._look_wanted = True
        self._flush_wanted = False
        self._look_at = self._ack_at = NEVER
        self._rung = threading.Event()
        self._wake: Callable[[], object] = self._rung.set
        self._heard: Callable[[], object] = lambda: None
        """Both are called from any thread, and must not block."""
        self._opening = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leases: Keeper
        """Renews what is held; there once the buffer is open."""

        self._at_fork = _AtFork(self)

    def _leave_to_parent(self) -> None:
        """In a child of a fork: what was read ahead is the parent's. Here nothing of it is handed out,
        acked or given back.
        """
        self._state, self._opening = threading.Condition(), threading.Lock()
        self._holds, self._ahead, self._done = {}, deque(), []
        self._expired, self._results, self._lost = [], {}, []
        self._thread, self._closed = None, True

    def _own_worker_id(self) -> int | None:
        return self._consumer.worker_id

    # For the application

    def open(self) -> Self:
        """Begin to read ahead, unless that was done. The first step of the iteration does it too."""
        if self._thread is None:
            with self._opening:
                self._start()
        return self

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._consumer.open()
            self._consumer._buffers.add(self)
            self._leases = keeper_of(self._database)
            self._thread = threading.Thread(target=self._run, name="pgqrs-buffer", daemon=True)
            self._thread.start()
            self._opened = True

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        """The next message; waits for one. Ends when closed, or when nothing came for `wait`."""
        self.open()
        asked = self._ask()
        with self._state:
            while (message := self._take()) is None:
                if self._is_over(asked):
                    raise StopIteration
                self._state.wait(self._patience(asked))
        return message

    def ack_many(self, messages: Iterable[Held], *, results: Iterable[Any] | None = None) -> None:
        """Many are done: noted, and sent with the next batch. `results` has one for each."""
        done = list(messages)
        self._held(done)  # refuses what cannot be held
        texts = {} if results is None else self._texts(done, list(results))
        if self._closed or not self._opened:
            self._ack(done, texts)
            if texts:
                self._tell_of_results(done)
            return
        with self._state:
            self._results |= texts
            if not self._done:
                self._ack_at = time.monotonic() + self._ack_every
                self._wake()  # so that it knows until when it may sleep
            self._done += done
            self._acked += len(done)
            if len(self._done) >= self._ack_size:
                self._wake()

    archive_many = ack_many

    def flush(self) -> None:
        """Send the acks that were noted so far, and wait until they are stored."""
        mark = self._want_flush()
        with self._state:
            while not self._is_settled(mark):
                self._state.wait()

    def close(self) -> None:
        """Send the acks, give back what was not handed out, and stop.

        What was handed out and not acked stays held until its lease lapses; it can still be acked.
        """
        if self._end():
            self._consumer._buffers.discard(self)
            if self._thread is not None:
                self._thread.join()
            self._finish()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PgqrsError:
            if error is None:  # else what went wrong first is what counts
                raise

    # Steps of the above that wait for nothing, and serve asyncio as well

    def _ask(self) -> _Asked:
        with self._state:
            deadline = NEVER if self._wait is None else time.monotonic() + self._wait
            if not self._ahead and (self._done or self._wait is not None):
                # What comes next may wait for it, in a group or a limit.
                self._flush_wanted = self._flush_wanted or bool(self._done)
                self._ring()
            return _Asked(self._looks_begun, deadline)

    def _take(self) -> Message | None:
        """The next message that is really held, if there is one now."""
        with self._state:
            self._raise_trouble()
            if self._closed:
                return None
            self._skip_expired()
            if not self._ahead:
                return None
            if self._holds[self._ahead[0].id].until <= time.monotonic():
                # This process slept: perhaps it is somebody else's by now.
                self._leases.renew_soon(self._holds.values())
                return None
            message = self._ahead.popleft()
            if len(self._ahead) == self._n // 2:
                self._ring()
            return message

    def _skip_expired(self) -> None:
        """Leave what has expired to the buffer's thread, which gives it back."""
        before = len(self._expired)
        while self._ahead and self._has_expired(self._ahead[0]):
            self._expired.append(self._ahead.popleft())
        if len(self._expired) > before:
            self._ring()

    def _has_expired(self, message: Message) -> bool:
        if message.expires_at is None:
            return False
        now = self._database.now()
        if (
            now is None
        ):  # the server tells the time: count from when it said that there is some left
            return self._holds[message.id].expires <= time.monotonic()
        return message.expires_at <= now

    def _is_over(self, asked: _Asked) -> bool:
        """Whether to give up: closed, or too late, and a look begun after asking found nothing."""
        return self._closed or (
            time.monotonic() >= asked.deadline and self._looks_ended > asked.looks
        )

    def _patience(self, asked: _Asked) -> float | None:
        """Seconds until giving up is worth a thought; None if only a change can matter."""
        remaining = asked.deadline - time.monotonic()
        return remaining if 0 < remaining < NEVER else None

    def _want_flush(self) -> int:
        with self._state:
            self._flush_wanted = True
            self._wake()
            return self._acked

    def _is_settled(self, mark: int) -> bool:
        """Whether all acks up to this mark are stored."""
        with self._state:
            self._raise_trouble()
            return self._settled >= mark or self._closed

    def _raise_trouble(self) -> None:
        """What went wrong in another thread."""
        lost, error = self._lost, self._error
        self._lost, self._error = [], error if isinstance(error, StoreClosed) else None
        if lost:
            self._error = error
            raise LeaseLost(lost)
        if error is not None:
            raise error

    def _end(self) -> bool:
        """Hand out no more. Returns whether that is new."""
        with self._state:
            new, self._closed = not self._closed, True
            self._announce()
            self._wake()
            return new

    def _finish(self) -> None:
        """After the thread has ended: ack what is done, give back what nobody has begun with."""
        self._error = None  # claims matter no more, and acks are tried once more
        try:
            self._flush()
        finally:
            ahead = [*self._expired, *self._ahead]
            self._expired.clear()
            self._ahead.clear()
            if ahead:
                with suppress(LeaseLost):
                    self._consumer.release_many(ahead)
            with self._state:
                self._drop(list(self._holds))
        self._raise_trouble()

    # How the buffer's thread is woken, and how it tells of changes

    def _ring(self) -> None:
        """There may be something to claim, or somebody to claim for."""
        self._look_wanted = True
        self._wake()

    def _announce(self) -> None:
        with self._state:
            self._state.notify_all()
        self._heard()

    def _doorbell(self) -> Doorbell:
        return self._consumer._doorbell(self._ring)

    # In the buffer's thread

    def _run(self) -> None:
        with self._doorbell():
            while not self._closed:
                self._rung.clear()
                self._rung.wait(self._step())

    def _step(self) -> float:
        """Do what is due. Returns the seconds until something else is."""
        duties: tuple[Callable[[], object], ...] = (
            self._consumer._presence.keep_alive,
            self._flush_if_due,
            self._give_back_expired,
            self._refill_if_low,
        )
        failed = False
        for duty in duties:
            if self._closed:
                return 0.0
            try:
                duty()
            except Exception as exc:
                self._report(exc)
                failed = True
                if isinstance(exc, StoreUnavailable):
                    break  # the others would wait for it as well
        if failed:
            return REST
        due = min(self._look_at, self._ack_at) - time.monotonic()
        return max(0.0, min(due, self._database.config.heartbeat))

    def _report(self, error: Exception) -> None:
        with self._state:
            if error is self._error:
                return
            self._error = error
            self._look_wanted = True
            self._announce()
            if isinstance(error, StoreClosed):
                self._closed = True

    def _flush_if_due(self) -> None:
        if (
            self._flush_wanted
            or len(self._done) >= self._ack_size
            or self._ack_at <= time.monotonic()
        ):
            self._flush()

    def _flush(self) -> None:
        with self._state:
            done, self._done = self._done, []
            results, self._results = self._results, {}
            self._flush_wanted, self._ack_at = False, NEVER
        lost: tuple[int, ...] = ()
        try:
            if done:
                self._consumer._ack(done, results)
        except LeaseLost as exc:
            lost = exc.ids
        except BaseException:
            with self._state:
                self._done = done + self._done  # repeating an ack is fine
                self._results = results | self._results
                self._ack_at = time.monotonic() + REST
            raise
        with self._state:
            self._lost += lost
            self._settled += len(done)
            self._forget(done)
            self._announce()
        if results:
            self._consumer._tell_of_results(done)

    def _forget(self, done: list[Held]) -> None:
        """These are over; not a later claim of one of them."""
        self._drop(
            message if isinstance(message, int) else message.id
            for message in done
            if isinstance(message, int) or self._has(message)
        )

    def _has(self, message: Message) -> bool:
        hold = self._holds.get(message.id)
        return hold is not None and hold.message.read_ct == message.read_ct

    def _lose(self, hold: _Hold) -> None:
        """It has lapsed, or was ended by other means than this buffer."""
        with self._state:
            if self._holds.get(hold.message.id) is hold:
                self._drop([hold.message.id])
            self._announce()

    def _drop(self, ids: Iterable[int]) -> None:
        """Messages that are not held any more, handed out or not."""
        gone = [self._holds.pop(id) for id in ids if id in self._holds]
        if gone:
            self._leases.forget(*gone)
            self._ahead = deque(message for message in self._ahead if message.id in self._holds)

    def _give_back_expired(self) -> None:
        with self._state:
            self._skip_expired()
            expired = list(self._expired)
        if not expired:
            return
        with suppress(LeaseLost):
            self._consumer.release_many(expired)
        with self._state:
            del self._expired[: len(expired)]
            self._forget([*expired])

    def _refill_if_low(self) -> None:
        if len(self._ahead) > self._n // 2:
            self._look_at = NEVER  # whoever takes the next ones rings
            return
        if not self._look_wanted and self._look_at > time.monotonic():
            return
        with self._state:
            self._look_wanted = False
            self._looks_begun += 1
            room = self._n - len(self._ahead)
        asked = time.monotonic()
        within = NEVER if self._wait is None else self._wait
        found, pause = self._consumer._look(room, self._lease, self._life, within=within)
        with self._state:
            self._look_at = asked + pause
            self._looks_ended += 1
            # Claimed again after this process stood still: what was ahead is an earlier claim, and lost.
            if again := self._holds.keys() & {message.id for message in found}:
                self._drop(again)
            self._hold(found, asked)
            self._ahead.extend(found)
            self._announce()

    def _hold(self, claimed: list[Message], asked: float) -> None:
        holds = []
        for message in claimed:
            since = message.dequeued_at or message.vt
            left = (message.expires_at - since).total_seconds() if message.expires_at else NEVER
            lease = self._granted(message)
            holds.append(_Hold(message, lease, claimed_at=asked, expires=asked + left, buffer=self))
        self._holds |= {hold.message.id: hold for hold in holds}
        self._leases.keep(holds)

    def _granted(self, message: Message) -> float:
        """The lease of a claim: what was asked for, or what the queue gave.

        Not what is left of it: a claim that waited long may have lapsed when it is answered.
        """
        asked = self._lease
        begun = message.dequeued_at or message.vt
        given = (message.vt - begun).total_seconds()
        if given > 0:
            return given if asked is None else min(asked, given)
        return self._database.config.lease if asked is None else asked
