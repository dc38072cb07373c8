"""Holding the message of a run that goes on here, outside of a worker: its lease is renewed, and its
long steps are shown. Each by a thread of its own, whatever the run or its event loop does meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    return partial(_hold, database, keeper)


@contextmanager
def _hold(
    database: Database,
    keeper: Keeper,
    message: Message,
    reach: Reach = lambda call: call(),
    *,
    is_fresh: bool = True,
) -> Iterator[Watch]:
    """`is_fresh` if it was claimed just now. Threads call the database by `reach`."""
    shown: list[Callable[[], None]] = []

    def show() -> None:
        for each in shown:
            reach(each)

    age = 0.0 if is_fresh else _age(message, database.now() or datetime.now(UTC))
    lease = Lease(message, granted(message), claimed_at=time.monotonic() - age)
    with keeper.keeping([lease]), step_watch_of(database).watching(show):
        yield shown.append


def _age(message: Message, now: datetime) -> float:
    """Seconds since it was claimed; between 0 and its lease, whatever the clock of this machine says."""
    if message.dequeued_at is None:
        return 0.0
    return min(max(0.0, (now - message.dequeued_at).total_seconds()), granted(message))
