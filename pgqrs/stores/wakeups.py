"""How an idle consumer learns of a new message at once.

Whoever waits for a queue has a `Doorbell` at the database's `Wakeups`. It is rung by an enqueue in
the same process, and by what a database offers to hear from other processes, its *sentry*, a thread
that runs only while somebody waits:

- PostgreSQL: one connection that listens for NOTIFY (`NotifySentry`);
- SQLite: the kernel, which tells of writes to the file; where it does not, a look at the file's size
  and time every few milliseconds (`FileSentry`).

A doorbell may ring for nothing, and may fail to ring (behind a pooler, on a dead connection). So
who waits also looks from time to time by itself: seldom while the sentry is known to hear, and
often when it is not.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pgqrs.stores.inotify import Changes, watch

SELDOM = 5.0
OFTEN = 0.5
RESULTS = "\n"
"""The doorbell of those who wait for results; no queue has such a name."""


class Sentry(ABC):
    """A thread that hears of other processes' messages and rings. One loop: start, run, stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self.ring: Callable[[str | None], None] = lambda queue: None

    @property
    @abstractmethod
    def hears(self) -> bool:
        """Whether it can be relied on just now."""

    @abstractmethod
    def run(self) -> None:
        """Hear and ring until told to stop."""

    def want(self, wanted: bool) -> None:
        """Whether anybody waits just now. The first who does starts the thread."""
        if not wanted:
            self._wanted.clear()
            if (
                self._stop.is_set()
            ):  # else a thread that is to end would wait for the next who waits
                self._wanted.set()
            return
        self._wanted.set()
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self.run, name="pgqrs-sentry", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self.stop_soon()
            self._thread.join()
            self._thread = None

    def stop_soon(self) -> None:
        """Without waiting for it: also from within a garbage collection."""
        self._stop.set()
        self._wanted.set()


class Wakeups:
    """The doorbells of one database."""

    def __init__(self, sentry: Sentry | None = None) -> None:
        self._lock = threading.Lock()
        self._doorbells: dict[str, set[Doorbell]] = {}
        self._sentry = sentry
        if sentry is not None:
            sentry.ring = self.ring

    def doorbell(self, queue: str, ring: Callable[[], object]) -> Doorbell:
        """A doorbell for a queue. `ring` is called from any thread, and must not block."""
        return Doorbell(self, queue, ring)

    def ring(self, queue: str | None) -> None:
        """There may be something new in this queue, or in any."""
        with self._lock:
            names = self._doorbells.keys() if queue is None else (queue,)
            ringing = [bell for name in names for bell in self._doorbells.get(name, ())]
        for bell in ringing:
            bell.ring()

    @property
    def hears(self) -> bool:
        """Whether messages of other processes ring."""
        return self._sentry is not None and self._sentry.hears

    def patience(self) -> float:
        """Seconds after which to look without having heard anything."""
        return (SELDOM if self.hears else OFTEN) * random.uniform(0.8, 1.2)

    def close(self) -> None:
        """No more hearing; who still waits is rung once."""
        self.ring(None)
        if self._sentry is not None:
            self._sentry.stop()

    def _add(self, bell: Doorbell) -> None:
        with self._lock:
            self._doorbells.setdefault(bell.queue, set()).add(bell)
            if self._sentry is not None:
                self._sentry.want(True)

    def _remove(self, bell: Doorbell) -> None:
        with self._lock:
            waiting = self._doorbells.get(bell.queue, set())
            waiting.discard(bell)
            if not waiting:
                self._doorbells.pop(bell.queue, None)
            if self._sentry is not None and not self._doorbells:
                self._sentry.want(False)


class Doorbell:
    """There while somebody waits."""

    def __init__(self, wakeups: Wakeups, queue: str, ring: Callable[[], object]) -> None:
        self._wakeups = wakeups
        self.queue = queue
        self.ring = ring

    def __enter__(self) -> Self:
        self._wakeups._add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wakeups._remove(self)


class FileSentry(Sentry):
    """Hears from the kernel that a file was written to, and looks now and then whether it missed
    that. Where the kernel does not tell, it looks often, which is no query and costs microseconds.
    """

    EVERY = 0.004
    """Seconds between looks where there is nothing to hear, and between rings in any case."""
    RARELY = 0.1
    SETTLE = 0.001
    """Seconds from the first write of a commit to its end, as a rule."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self._paths = paths
        self._changes: Changes | None = None

    @property
    def hears(self) -> bool:
        return True

    def run(self) -> None:
        directory = Path(self._paths[0]).absolute().parent
        self._changes = watch(directory, [Path(path).name for path in self._paths])
        seen = self._look()
        self.ring(None)  # whatever came before that
        while not self._stop.is_set():
            changed = self._wait()
            if not self._wanted.is_set():
                self._wanted.wait()
            now = self._look()
            if changed or now != seen:
                seen = now
                self.ring(None)
                self._stop.wait(self.EVERY)

    def stop(self) -> None:
        self._stop.set()
        if self._changes is not None:
            self._changes.wake()
        super().stop()
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _wait(self) -> bool:
        """For a change, or until it is time to look. Returns whether there is one."""
        if self._changes is None:
            self._stop.wait(self.EVERY)
            return False
        changed = self._changes.wait(self.RARELY)
        if changed:
            self._stop.wait(self.SETTLE)
        return changed

    def _look(self) -> list[tuple[int, int]]:
        looks: list[tuple[int, int]] = []
        for path in self._paths:
            try:
                found = Path(path).stat()
                looks.append((found.st_mtime_ns, found.st_size))
            except OSError:
                looks.append((0, 0))
        return looks
