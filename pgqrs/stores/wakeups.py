"""How an idle consumer learns of a new message at once.

Whoever waits for a queue has a `Doorbell` at the database's `Wakeups`. It is rung by an enqueue in
the same process, and by what a database offers to hear from other processes, its *sentry*, a thread
that runs only while somebody waits:

- PostgreSQL: one connection that listens for NOTIFY (`NotifySentry`);
- SQLite: the kernel, which tells of writes to the file; where it does not, a look at the file's size
  and time every few milliseconds (`FileSentry`). It rings only for the queues in which something is
  new (`queue_news`), since most writes concern others.

A doorbell may ring for nothing, and may fail to ring (behind a pooler, on a dead connection). So
who waits also looks from time to time by itself: seldom while the sentry is known to hear, and
often when it is not.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pgqrs.repositories import announcements
from pgqrs.stores.inotify import Changes, watch

SELDOM = 5.0
OFTEN = 0.5
FOLLOW_UP, FOLLOW_UP_GROWTH = 0.004, 6
"""Seconds until the first look after it was announced that a process waits, and by how much longer each
further one takes. Those who were writing at that moment may have seen no announcement: what they write
rings nobody."""
RESULTS = announcements.RESULTS
"""The doorbell of those who wait for results."""


class Sentry(ABC):
    """A thread that hears of other processes' messages and rings. One loop: start, run, stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self.ring: Callable[[str | None], None] = lambda queue: None
        self.waiting: Callable[[], Collection[str]] = lambda: ()
        """The queues that somebody waits for."""

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

    def rest(self) -> None:
        """Let go of what is only needed while somebody waits."""
        return

    def stop(self) -> None:
        if self._thread is not None:
            self.stop_soon()
            self._thread.join()
            self._thread = None

    def stop_soon(self) -> None:
        """Without waiting for it: also from within a garbage collection."""
        self._stop.set()
        self._wanted.set()

    # When the process forks: see `forks`

    def before_fork(self) -> None:
        return

    def after_fork_in_parent(self) -> None:
        return

    def after_fork_in_child(self) -> None:
        """There is no thread here."""
        self._stop, self._wanted = threading.Event(), threading.Event()
        self._thread = None


class Wakeups:
    """The doorbells of one database."""

    def __init__(self, sentry: Sentry | None = None) -> None:
        self._lock = threading.Lock()
        self._doorbells: dict[str, set[Doorbell]] = {}
        self._sentry = sentry
        if sentry is not None:
            sentry.ring = self.ring
            sentry.waiting = self._queues

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

    def before_fork(self) -> None:
        if self._sentry is not None:
            self._sentry.before_fork()

    def after_fork_in_parent(self) -> None:
        if self._sentry is not None:
            self._sentry.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Those who waited did so in threads of the parent."""
        self._lock = threading.Lock()
        self._doorbells = {}
        if self._sentry is not None:
            self._sentry.after_fork_in_child()

    def _queues(self) -> Collection[str]:
        with self._lock:
            return list(self._doorbells)

    def rest(self) -> None:
        """Nobody waits: let go of what is only needed meanwhile."""
        if self._sentry is not None:
            self._sentry.rest()

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


class News(Protocol):
    """Tells whether something was committed, and in which queues there may be something new."""

    def moved(self) -> bool | None:
        """True if something was committed since the last call; None if that cannot be told."""

    def of(self, names: Collection[str]) -> Iterable[str]:
        """Those of these queues in which something is new; all, if that cannot be told."""

    def close(self) -> None:
        """Let go of the file until the next call."""

    def before_fork(self) -> None:
        """Let go of the file until `after_fork_in_parent`."""

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


class FileSentry(Sentry):
    """Hears from the kernel that a file was written to, and looks now and then whether it missed
    that. Where the kernel does not tell, it looks often, which is no query and costs microseconds.

    A write is heard before it is committed: a commit is on the disk before others may see it. So
    after each write it looks again, soon and then less often, whether something was committed.
    """

    EVERY = 0.004
    """Seconds between looks where there is nothing to hear."""
    BETWEEN_RINGS = 0.0015
    """Seconds at the least, however often there is a commit."""
    RARELY = 0.1
    SETTLE = 0.0005
    """Seconds from the first write of a commit to its end, as a rule."""

    def __init__(self, *paths: str, news: News | None = None) -> None:
        super().__init__()
        self._paths = paths
        self._news = news
        self._changes: Changes | None = None
        self._seen: list[tuple[int, int]] = []

    @property
    def hears(self) -> bool:
        return True

    def run(self) -> None:
        directory = Path(self._paths[0]).absolute().parent
        self._changes = watch(directory, [Path(path).name for path in self._paths])
        self._has_moved(False)
        self.ring(None)  # whatever came before that
        pause = self.RARELY
        while not self._stop.is_set():
            heard = self._wait(pause)
            pause = self.SETTLE if heard else min(2 * pause, self.RARELY)
            if not self._wanted.is_set():
                self.rest()
                self._wanted.wait()
            if self._has_moved(heard):
                self._tell()
                self._stop.wait(self.BETWEEN_RINGS)
        self.rest()

    def stop(self) -> None:
        self._stop.set()
        if self._changes is not None:
            self._changes.wake()
        super().stop()
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def rest(self) -> None:
        if self._news is not None:
            self._news.close()

    def before_fork(self) -> None:
        if self._news is not None:
            self._news.before_fork()

    def after_fork_in_parent(self) -> None:
        if self._news is not None:
            self._news.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        if self._news is not None:
            self._news.after_fork_in_child()
        changes, self._changes = self._changes, None
        if changes is not None:
            changes.close()  # our copies: the parent's go on

    def _wait(self, seconds: float) -> bool:
        """For a write, or until it is time to look. Returns whether there was one."""
        if self._changes is None:
            self._stop.wait(self.EVERY)
            return False
        heard = self._changes.wait(seconds)
        if heard:
            self._stop.wait(self.SETTLE)
        return heard

    def _has_moved(self, heard: bool) -> bool:
        """Whether there is something new in the file, as far as can be told."""
        moved = None if self._news is None else self._news.moved()
        if moved is not None:
            return moved
        seen, self._seen = self._seen, self._look()
        return heard or self._seen != seen

    def _tell(self) -> None:
        """Ring for the queues in which something is new, and for those who wait for results."""
        if self._news is None:
            self.ring(None)
            return
        waiting = self.waiting()
        queues = [name for name in waiting if name != RESULTS]
        if len(queues) < len(waiting):
            self.ring(RESULTS)
        for name in self._news.of(queues) if queues else ():
            self.ring(name)

    def _look(self) -> list[tuple[int, int]]:
        looks: list[tuple[int, int]] = []
        for path in self._paths:
            try:
                found = Path(path).stat()
                looks.append((found.st_mtime_ns, found.st_size))
            except OSError:
                looks.append((0, 0))
        return looks
