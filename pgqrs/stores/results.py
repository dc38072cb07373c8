"""Waiting for what becomes of messages: any number of them, with one thread.

Whoever waits is entered in the `ResultWatch` of its database. One thread (for a database that only an
event loop can reach, one task) looks them all up together: when the doorbell for results rings
(`wakeups.RESULTS`), when somebody new waits, and from time to time. It ends when nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from pgqrs.errors import MessageNotFound, PgqrsError, StoreClosed
from pgqrs.repositories import archive, messages
from pgqrs.repositories.reading import Unreadable
from pgqrs.stores.base import Database
from pgqrs.stores.forks import in_child
from pgqrs.stores.wakeups import FOLLOW_UP, FOLLOW_UP_GROWTH, RESULTS, SELDOM
from pgqrs.types import ArchivedMessage

Answer = ArchivedMessage | BaseException
Call = Callable[[Answer], object]
AT_ONCE = 1000
"""Messages looked up in one statement."""
LONGEST_REST = 0.1


class ResultWatch:
    """Who waits for which message of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Call]] = {}
        self._queues: set[str] = set()
        self._fresh: set[int] = set()
        self._news = False
        self._follow_up = SELDOM
        self._rung = threading.Event()
        self._running = False

    def watch(self, id: int, queue: str, call: Call) -> None:
        """Call this, from another thread, with how the message ended, or why nobody will know."""
        with self._lock:
            self._waiting.setdefault(id, []).append(call)
            self._queues.add(queue)
            self._fresh.add(id)
            begin, self._running = not self._running, True
        if begin:
            self._begin()
        else:
            self._wake()

    def forget(self, id: int, call: Call) -> None:
        """Wait no more."""
        with self._lock:
            calls = self._waiting.get(id, [])
            if call in calls:
                calls.remove(call)
            if not calls:
                self._waiting.pop(id, None)
                self._fresh.discard(id)
        self._wake()

    def step(self) -> float | None:
        """Look up what may have ended. Returns seconds until the next look; None if nobody waits."""
        news, self._news = self._news, False
        with self._lock:
            if not self._waiting:
                self._queues.clear()
                self._running = False
                return None
            ids = list(self._waiting) if news or not self._fresh else list(self._fresh)
            queues = list(self._queues)
            self._fresh.difference_update(ids)
        began = time.monotonic()
        try:
            self._look(ids)
            if self._waiting:
                # Whoever ends messages elsewhere has to know first that somebody waits.
                told = [self._database.expect_results(name, seconds=2 * SELDOM) for name in queues]
                if any(announced is not None and announced.is_news for announced in told):
                    self._look(self._ids())
                    self._follow_up = max(FOLLOW_UP, time.monotonic() - began)
        except StoreClosed as exc:
            self._answer(dict.fromkeys(self._ids(), exc))
        except PgqrsError:
            return 1.0  # the database is away: who waits has a timeout for that
        if self._fresh:
            return 0.0
        pause = min(self._follow_up, self._database.wakeups.patience())
        self._follow_up = min(self._follow_up * FOLLOW_UP_GROWTH, SELDOM)
        return pause

    def _ids(self) -> list[int]:
        with self._lock:
            return list(self._waiting)

    def _look(self, ids: Iterable[int]) -> None:
        wanted = list(ids)
        for start in range(0, len(wanted), AT_ONCE):
            piece = wanted[start : start + AT_ONCE]
            # In this order: messages move to the archive, and never back.
            alive = self._database.read(lambda c, piece=piece: messages.existing(c, piece))  # type: ignore[misc]
            gone = [id for id in piece if id not in alive]
            if gone:
                self._answer(self._ended(gone))

    def _ended(self, gone: list[int]) -> dict[int, Answer]:
        try:
            ended = self._database.read(lambda c: archive.ended(c, gone))
        except Unreadable as exc:  # only that one's result is lost
            return {gone[0]: exc} if len(gone) == 1 else _all(self._ended([id]) for id in gone)
        return {id: ended.get(id) or MessageNotFound(id) for id in gone}

    def _answer(self, answers: dict[int, Answer]) -> None:
        with self._lock:
            calls = [
                (call, answer)
                for id, answer in answers.items()
                for call in self._waiting.pop(id, ())
            ]
        for call, answer in calls:
            call(answer)

    def _ring(self) -> None:
        self._news = True
        self._wake()

    # The thread; for an event loop these are different

    def _wake(self) -> None:
        self._rung.set()

    def _begin(self) -> None:
        threading.Thread(target=self._run, name="pgqrs-results", daemon=True).start()

    def _run(self) -> None:
        with self._database.wakeups.doorbell(RESULTS, self._ring):
            while True:
                self._rung.clear()
                began = time.monotonic()
                pause = self.step()
                if pause is None:
                    return
                ended = time.monotonic()
                if self._rung.wait(pause):
                    # Many may wait, and the bell ring often: look no more than half of the time.
                    rest = min(LONGEST_REST, ended - began) - (time.monotonic() - ended)
                    time.sleep(max(0.0, rest))


def _all(answers: Iterable[dict[int, Answer]]) -> dict[int, Answer]:
    return {id: answer for some in answers for id, answer in some.items()}


def result_watch(database: Database) -> ResultWatch:
    """The watch of a database that threads can use."""
    with _MAKING:
        if database.result_watch is None:
            database.result_watch = ResultWatch(database)
        return database.result_watch


_MAKING = threading.Lock()


def _start_anew() -> None:
    global _MAKING
    _MAKING = threading.Lock()


in_child(_start_anew)
