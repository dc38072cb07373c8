"""The leases of runs that a script runs itself, renewed by one thread for all runs of a store.

A thread for each run would be simpler, but starting one takes longer than a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pgqrs.errors import PgqrsError
from pgqrs.stores import Database

logger = logging.getLogger("pgqrs.workflows")
LINGER = 10.0
"""Seconds that the thread stays when there is nothing to renew."""


@dataclass(eq=False, slots=True)
class _Lease:
    renew: Callable[[], object]
    every: float
    due: float
    busy: threading.Lock = field(default_factory=threading.Lock)


class Renewals:
    """Calls what renews a lease, again and again while it is kept."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: set[_Lease] = set()
        self._thread: threading.Thread | None = None
        self._looks_at = 0.0

    @contextmanager
    def keep(self, renew: Callable[[], object], *, every: float) -> Iterator[None]:
        """Renew meanwhile. When this ends, no renewal is under way."""
        lease = _Lease(renew, every, time.monotonic() + every)
        with self._changed:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pgqrs-inline", daemon=True)
                self._thread.start()
            elif lease.due < self._looks_at:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._leases.discard(lease)
            with lease.busy:
                pass

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for lease in due:
                with lease.busy:
                    if lease in self._leases:
                        _renew(lease)
                lease.due = time.monotonic() + lease.every

    def _wait(self) -> list[_Lease] | None:
        """What is due now, perhaps nothing; None if there was nothing to renew for a while."""
        with self._changed:
            now = time.monotonic()
            self._looks_at = min((lease.due for lease in self._leases), default=now + LINGER)
            self._changed.wait(max(0.0, self._looks_at - now))
            now = time.monotonic()
            if not self._leases and now >= self._looks_at:
                self._thread = None
                return None
            return [lease for lease in self._leases if lease.due <= now]


def _renew(lease: _Lease) -> None:
    try:
        lease.renew()
    except PgqrsError:
        pass  # lost or not, the run itself finds out
    except Exception:  # also the unexpected: nobody else would renew the others
        logger.exception("the lease of a run could not be renewed")


_of_stores: WeakKeyDictionary[Database, Renewals] = WeakKeyDictionary()
_lock = threading.Lock()


def renewals_of(database: Database) -> Renewals:
    """Those of a store: one that does not answer holds up no other."""
    with _lock:
        return _of_stores.setdefault(database, Renewals())
