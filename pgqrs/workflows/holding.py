"""Holding the message of a run that goes on here, outside of a worker: its lease is renewed, and its
long steps are shown. Each by a thread of its own, whatever the run or its event loop does meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial

from pgqrs.keeper import Keeper, Lease, granted
from pgqrs.stores import Database
from pgqrs.types import Message
from pgqrs.workflows.execution import Reach, Watch
from pgqrs.workflows.step_watch import step_watch_of

Hold = Callable[..., AbstractContextManager[Watch]]
"""Holds a message meanwhile. Gives what the run is to tell how its long steps are shown."""


def holding(database: Database, keeper: Keeper) -> Hold:
    """Messages are held by this keeper."""
    return partial(_Hold, database, keeper)


class _Hold:
    """A message that is held. No generator: those of this and what it uses take as long as a small
    statement (benchmarks.workflows, `run_inline`).
    """

    __slots__ = ("_keeper", "_lease", "_reach", "_shown", "_steps", "_watched")

    def __init__(
        self,
        database: Database,
        keeper: Keeper,
        message: Message,
        reach: Reach = lambda call: call(),
        *,
        is_fresh: bool = True,
    ) -> None:
        """`is_fresh` if it was claimed just now. Threads call the database by `reach`."""
        age = 0.0 if is_fresh else _age(message, database.now() or datetime.now(UTC))
        self._lease = Lease(message, granted(message), claimed_at=time.monotonic() - age)
        self._keeper, self._reach = keeper, reach
        self._steps = step_watch_of(database)
        self._shown: list[Callable[[], None]] = []

    def __enter__(self) -> Watch:
        self._keeper.keep([self._lease])
        try:
            self._watched = self._steps.watch(self._show)
        except BaseException:
            self._keeper.forget(self._lease)
            raise
        return self._shown.append

    def __exit__(self, *_: object) -> None:
        try:
            self._steps.forget(self._watched)
        finally:
            self._keeper.forget(self._lease)

    def _show(self) -> None:
        for each in self._shown:
            self._reach(each)


def _age(message: Message, now: datetime) -> float:
    """Seconds since it was claimed; between 0 and its lease, whatever the clock of this machine says."""
    if message.dequeued_at is None:
        return 0.0
    return min(max(0.0, (now - message.dequeued_at).total_seconds()), granted(message))
