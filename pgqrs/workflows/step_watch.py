"""Shows the long steps of runs that a script runs itself: one thread for all runs of a store.

Beside the keeper of their leases, so that this can hold up nothing. A thread for each run would be
simpler, but starting one takes longer than a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pgqrs.errors import PgqrsError
from pgqrs.stores import Database
from pgqrs.stores.forks import in_child
from pgqrs.workflows.context import in_event_loop

logger = logging.getLogger("pgqrs.workflows")
PATIENCE = 1.0
"""Seconds to wait for what is under way when a run ends."""
LINGER = 10.0
"""Seconds that the thread stays when there is nothing to watch."""


@dataclass(eq=False, slots=True)
class Watched:
    """What is called, and when."""

    show: Callable[[], object]
    every: float
    due: float
    busy: threading.Lock = field(default_factory=threading.Lock)


class StepWatch:
    """Calls what shows the long steps of a run, again and again while the run goes on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._looks_at = 0.0

    def watch(self, show: Callable[[], object], *, every: float = 1.0) -> Watched:
        """Call this so often from now on."""
        watched = Watched(show, every, time.monotonic() + every)
        with self._changed:
            self._watched.add(watched)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pgqrs-steps", daemon=True)
                self._thread.start()
            elif watched.due < self._looks_at:
                self._changed.notify()
        return watched

    def forget(self, watched: Watched) -> None:
        """Do not call it any more."""
        with self._changed:
            self._watched.discard(watched)
        # The store may be closed next. An event loop does not wait: it may be what shows them.
        if not in_event_loop() and watched.busy.acquire(timeout=PATIENCE):
            watched.busy.release()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for watched in due:
                with watched.busy:
                    if watched in self._watched:
                        _show(watched)
                watched.due = time.monotonic() + watched.every

    def _wait(self) -> list[Watched] | None:
        """What is due now, perhaps nothing; None if there was nothing to watch for a while."""
        with self._changed:
            now = time.monotonic()
            self._looks_at = min((each.due for each in self._watched), default=now + LINGER)
            self._changed.wait(max(0.0, self._looks_at - now))
            now = time.monotonic()
            if not self._watched and now >= self._looks_at:
                self._thread = None
                return None
            return [each for each in self._watched if each.due <= now]


def _show(watched: Watched) -> None:
    try:
        watched.show()
    except PgqrsError:
        pass  # the database is away, or the run is another's: the run itself finds out
    except BaseException:  # also the unexpected: nobody else would show the others
        logger.exception("the long steps of a run could not be shown")


_of_stores: WeakKeyDictionary[Database, StepWatch] = WeakKeyDictionary()
_lock = threading.Lock()


def _start_anew() -> None:
    """The threads are the parent's, and so are the runs."""
    global _of_stores, _lock
    _of_stores, _lock = WeakKeyDictionary(), threading.Lock()


in_child(_start_anew)


def step_watch_of(database: Database) -> StepWatch:
    """That of a store: one that does not answer holds up no other."""
    with _lock:
        found = _of_stores.get(database)
        if found is None:
            found = _of_stores[database] = StepWatch()
        return found
