"""Reading along in a queue, for somebody who remembers the last id that it has read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pgqrs.repositories import tails
from pgqrs.stores import Database

ALL = 2**31 - 1


class _Coming(NamedTuple):
    """The next mark, when these have ended."""

    id: int
    writers: frozenset[str]


class Tail:
    """How far a queue can be read such that nothing below appears later."""

    def __init__(self, database: Database, queue: str) -> None:
        self.queue = queue
        self._database = database.of_queue(queue)
        self._mark = 0
        """Everything up to here that will ever be there, is."""
        self._coming: _Coming | None = None
        self._empty = (0, 0)
        """Between these ids there was nothing: it is a queue of few messages among many others."""

    def mark(self) -> int:
        """Every id up to this one is there, or never will be."""
        if self._coming is not None:
            self._settle(self._coming.id, self._coming.writers & self._writers())
        if self._coming is None:
            # Each read by itself: what is seen must be older than the answer to who is writing.
            greatest = self._database.read(tails.greatest_id)
            if greatest > self._mark:
                self._settle(greatest, self._writers())
        return self._mark

    def settled_mark(self, *, patience: float, sleep: Callable[[float], None] = time.sleep) -> int:
        """The same, after waiting for who is writing now, though not for ever."""
        deadline = time.monotonic() + patience
        self._coming = None
        self.mark()
        wanted = self._mark if self._coming is None else self._coming.id
        while self._mark < wanted and time.monotonic() < deadline:
            sleep(0.01)
            self.mark()
        return self._mark

    def _settle(self, id: int, writers: frozenset[str]) -> None:
        self._coming = _Coming(id, writers) if writers else None
        if not writers:
            self._mark = id

    def _writers(self) -> frozenset[str]:
        return self._database.read(tails.writers)

    def last_of_next(self, after: int, *, through: int, limit: int = ALL) -> int:
        """The id of the last of the next messages; the same id if there are none."""
        looked_after, empty_through = self._empty
        begin = empty_through if looked_after == after else after
        last = self._database.read(
            lambda c: tails.last_of_first(c, self.queue, after=begin, through=through, limit=limit)
        )
        if last is None:
            self._empty = (after, through)
        return after if last is None else last
