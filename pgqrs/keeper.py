"""The keeper of leases: renews the claims on messages while somebody is at work on them.

Workers, buffers, runs in a script, `store.workflows.execute` and drains on Spark all have their leases
kept here. A lease is renewed when a third of its time is over, so that two more attempts are left before
it lapses. The keeper's thread does nothing else: whatever a handler, an event loop or a schedule does,
and whatever becomes of other calls of the database, leases are renewed. One that cannot be renewed does
not hinder the others: rows that somebody has locked are left out, and then tried alone, for as long as
no other lease is due.

The thread is there while leases are kept, and a little longer: starting one takes longer than a step.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary, ref

from pgqrs.bell import Bell
from pgqrs.consumer import Holder
from pgqrs.duties import Trouble
from pgqrs.errors import (
    CommitUncertain,
    ConflictError,
    LeaseLost,
    LeaseTooLong,
    StoreClosed,
    StoreUnavailable,
)
from pgqrs.stores import Database, RowsLocked
from pgqrs.stores.forks import in_child
from pgqrs.types import Message

RENEW_AFTER = 1 / 3
"""The part of a lease after which it is renewed."""
REST = 1.0
"""Seconds between two attempts at a renewal that failed; less for leases that are shorter."""
SHORTEST, SHORTEST_PAUSE = 0.1, 0.01
BRIEFLY = 0.01
"""Seconds to wait for rows that somebody has locked, while others are to be renewed."""
MOST_ALONE = 10
"""Leases that are tried alone in one round, at most."""
LINGER = 10.0
"""Seconds that the thread stays when there is nothing to renew."""


class Lease:
    """A claim on a message, for so many seconds, as of a time of this process."""

    __slots__ = ("_is_lost", "due", "lease", "message", "renewed_at")

    def __init__(self, message: Message, lease: float, *, claimed_at: float) -> None:
        self.message = message
        self.lease = lease
        self.renewed_at = claimed_at
        self.due = claimed_at + lease * RENEW_AFTER
        """When to renew it."""
        self._is_lost = False

    @property
    def until(self) -> float:
        """When it may have lapsed, by the clock of this process."""
        return self.renewed_at + self.lease

    @property
    def is_lost(self) -> bool:
        """True if somebody else has the message now: what becomes of this claim does not count."""
        return self._is_lost

    @property
    def is_ended(self) -> bool:
        """True if the claim is over, and only the database does not know it yet."""
        return False

    def renewed(self, at: float) -> None:
        """It was renewed at this time."""
        self.renewed_at = at
        self.due = at + self.lease * RENEW_AFTER

    def not_renewed(self, error: Exception) -> None:
        """It could not be renewed. The keeper tries again."""

    def lose(self) -> None:
        """The lease is lost."""
        self._is_lost = True


def granted(message: Message) -> float:
    """The seconds that a claim was given for."""
    return max(SHORTEST, (message.vt - (message.dequeued_at or message.vt)).total_seconds())


def grants(messages: Iterable[Message]) -> Iterator[float]:
    """The same for each of many: nearly always those of one claim, which have it in common."""
    vt, since, lease = None, None, 0.0
    for message in messages:
        if message.vt != vt or message.dequeued_at != since:
            vt, since, lease = message.vt, message.dequeued_at, granted(message)
        yield lease


class Keeper:
    """Renews leases in a thread of its own."""

    def __init__(self, database: Callable[[], Database | None]) -> None:
        """`database` finds what threads reach the database by, when there is something to renew."""
        self._way = _Way(database)
        self._held: set[Lease] = set()
        self._renewing = threading.Lock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looks_at = 0.0
        self._bell = Bell()
        self._trouble = Trouble("lease renewal", longest=REST)

    def keep(self, leases: Sequence[Lease]) -> None:
        """Renew these from now on."""
        self._held.update(leases)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pgqrs-leases", daemon=True)
                self._thread.start()
                return
        if any(lease.due < self._looks_at for lease in leases):
            self._bell.ring()

    @contextmanager
    def keeping(self, leases: Sequence[Lease]) -> Iterator[None]:
        """Renew these meanwhile."""
        self.keep(leases)
        try:
            yield
        finally:
            self.forget(*leases)

    def forget(self, *leases: Lease) -> None:
        """Do not renew these any more."""
        self._held.difference_update(leases)

    def forget_all(self, *, wait: float) -> None:
        """Renew nothing any more. Waits so many seconds at most for a renewal that is under way."""
        self._held.clear()
        if self._renewing.acquire(timeout=wait):
            try:
                self._way.close()
            finally:
                self._renewing.release()

    def renew_soon(self, leases: Iterable[Lease]) -> None:
        """Renew these now, in the keeper's thread."""
        for lease in leases:
            lease.due = float("-inf")
        self._bell.ring()

    def renew(self, *, everything: bool = False) -> float:
        """Renew what is due, or everything. Returns the seconds until the next is due."""
        with self._renewing:
            now = time.monotonic()
            due: dict[float, list[Lease]] = {}
            for lease in self._current():
                if everything or lease.due <= now:
                    due.setdefault(lease.lease, []).append(lease)
            if due:
                self._extend_all(due.values())
            next_due = min((lease.due for lease in self._current()), default=now + LINGER)
            return max(SHORTEST_PAUSE, next_due - time.monotonic())

    def _current(self) -> list[Lease]:
        return [lease for lease in self._held.copy() if not lease.is_lost]

    # In the keeper's thread

    def _run(self) -> None:
        while self._is_needed():
            self._looks_at = float("inf")  # what comes from now on rings
            try:
                pause = self.renew()
            except StoreClosed:
                self._held.clear()
                continue
            except BaseException as exc:  # nobody else would renew
                pause = self._trouble.failed(exc)
            self._looks_at = time.monotonic() + pause
            self._bell.wait(pause)
        with self._renewing:
            self._way.close()

    def _is_needed(self) -> bool:
        with self._starting:
            if self._held or time.monotonic() < self._looks_at or not self._looks_at:
                return True
            self._thread, self._looks_at = None, 0.0
            return False

    def _extend_all(self, groups: Iterable[list[Lease]]) -> None:
        holder, failed, locked = Holder(self._way.open()), list[Exception](), list[Lease]()
        for leases in groups:
            locked += self._extend(holder, leases, failed, wait=BRIEFLY)
        for lease in random.sample(locked, min(len(locked), MOST_ALONE)):
            wait = self._patience(locked) / min(len(locked), MOST_ALONE)
            if self._extend(holder, [lease], failed, wait=wait):
                failed.append(RowsLocked())
        if failed:
            if isinstance(failed[0], StoreUnavailable):
                self._way.close()  # and is opened anew, or another is found
            self._trouble.failed(failed[0])
        else:
            self._trouble.worked()

    def _patience(self, locked: Collection[Lease]) -> float:
        """Seconds that those may be waited for whose rows somebody has locked: until another lease is
        due, and not so long that one which begins meanwhile would lapse.
        """
        now, patience = time.monotonic(), REST
        for lease in self._current():
            patience = min(patience, lease.lease / 10)
            if lease not in locked:
                patience = min(patience, lease.due - now)
        return max(BRIEFLY, patience)

    def _extend(
        self, holder: Holder, leases: list[Lease], failed: list[Exception], *, wait: float
    ) -> list[Lease]:
        """Renew leases of one length. Returns those whose rows somebody has locked."""
        leases = self._last_claims(leases)
        lease, asked = leases[0].lease, time.monotonic()
        lost: set[int] = set()
        locked: set[int] = set()
        try:
            locked = holder._renew([each.message for each in leases], lease, wait=wait)
        except LeaseLost as exc:
            lost = set(exc.ids)
        except LeaseTooLong as exc:
            # The queue allows less than when they were claimed: renewed more often, they last as well.
            shortened = [each for each in leases if each.message.queue == exc.queue]
            for each in shortened:
                each.lease = exc.max_lease
            others = [each for each in leases if each not in shortened]
            parts = [part for part in (shortened, others) if part]
            return [
                each for part in parts for each in self._extend(holder, part, failed, wait=wait)
            ]
        except StoreClosed:
            raise
        except Exception as exc:
            if len(leases) > 1 and not isinstance(exc, _OF_ALL):
                alone = [self._extend(holder, [each], failed, wait=wait) for each in leases]
                return [each for found in alone for each in found]
            failed.append(exc)
            again = time.monotonic() + min(REST, lease / 10)
            for each in leases:
                each.due = again
                each.not_renewed(exc)
            return []
        for each in leases:
            if each.message.id in lost:
                self._lose(each)
            elif each.message.id not in locked:
                each.renewed(asked)
        return [each for each in leases if each.message.id in locked]

    def _last_claims(self, leases: list[Lease]) -> list[Lease]:
        """Lose those whose message was claimed again here; the last claim counts."""
        last: dict[int, Lease] = {}
        for lease in sorted(leases, key=lambda each: each.message.read_ct):
            if (earlier := last.get(lease.message.id)) is not None:
                self._lose(earlier)
            last[lease.message.id] = lease
        return list(last.values())

    def _lose(self, lease: Lease) -> None:
        if lease not in self._held or lease.is_ended:
            return  # it was ended meanwhile, and is simply gone
        self._held.discard(lease)
        lease.lose()


class Keepers:
    """The keepers of a worker: one, but for a store of several shards. One that does not answer holds up
    no other.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._all = {shard: Keeper(partial(_itself, shard)) for shard in database.shards}

    def keep(self, leases: Sequence[Lease]) -> None:
        """Renew these from now on. All are of one queue."""
        if leases:
            self._all[self._database.of_queue(leases[0].message.queue)].keep(leases)

    def forget(self, *leases: Lease) -> None:
        """Do not renew these any more."""
        for keeper in self._all.values():
            keeper.forget(*leases)

    def forget_all(self, *, wait: float) -> None:
        """Renew nothing any more. Waits so many seconds at most for renewals that are under way."""
        deadline = time.monotonic() + wait
        for keeper in self._all.values():
            keeper.forget_all(wait=max(0.0, deadline - time.monotonic()))

    def renew(self, *, everything: bool = False) -> None:
        """Renew what is due, or everything."""
        for keeper in self._all.values():
            keeper.renew(everything=everything)


def _itself(database: Database) -> Database:
    return database


class _Way:
    """How a keeper reaches the database: by a connection of its own, if there is one to be had, so that
    it waits for no connection of others.
    """

    def __init__(self, database: Callable[[], Database | None]) -> None:
        self._database = database
        self._apart: Database | None = None

    def open(self) -> Database:
        database = self._database()
        if database is None or database.closed:
            raise StoreClosed
        if self._apart is None:
            try:
                apart = database.for_renewals()
            except Exception:  # the server has none left, perhaps: those of the store will do
                return database
            if apart is database:
                return database
            self._apart = apart
        return self._apart

    def close(self) -> None:
        apart, self._apart = self._apart, None
        if apart is not None:
            apart.close()


_OF_ALL = (StoreUnavailable, CommitUncertain, ConflictError)
"""Errors that each of many leases would meet as well."""

_of_stores: WeakKeyDictionary[Database, Keeper] = WeakKeyDictionary()
_lock = threading.Lock()


def _start_anew() -> None:
    """The threads that renew are the parent's, and so are the leases."""
    global _of_stores, _lock
    _of_stores, _lock = WeakKeyDictionary(), threading.Lock()


in_child(_start_anew)


def forget_leases(database: Database, *, wait: float = 1.0) -> None:
    """Renew nothing any more in this database, which is about to be closed. Waits so many seconds at
    most for a renewal that is under way.
    """
    for shard in database.shards:
        with _lock:
            keeper = _of_stores.pop(shard, None)
        if keeper is not None:
            keeper.forget_all(wait=wait)


def keeper_of(database: Database, reach: Callable[[], Database | None] | None = None) -> Keeper:
    """The keeper of a store: one that does not answer holds up no other. `reach` finds what threads
    reach the database by, if they cannot use this one.
    """
    with _lock:
        keeper = _of_stores.get(database)
        if keeper is None:
            keeper = _of_stores[database] = Keeper(reach or ref(database))
        return keeper
