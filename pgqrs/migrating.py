"""One migration at a time in a process.

Revisions call Alembic's `op`, which belongs to the whole process: of two migrations at the same time
each would work on the connection of the other. So whoever migrates waits for its turn, in a thread or
in a greenlet on an event loop. A greenlet that waits lets the loop go on.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from pgqrs.errors import StoreUnavailable

LOOK_AGAIN_SECONDS = 0.01


class _Turn:
    """Who migrates just now."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop_thread: int | None = None
        """The thread of the event loop on which the migration runs, if it runs on one."""


_turn = _Turn()


def _start_anew() -> None:
    global _turn
    _turn = _Turn()  # whoever had the old one is in the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for the migration of another thread or task to end, and keep others out meanwhile."""
    turn = _turn
    if in_greenlet():
        while not turn.lock.acquire(blocking=False):
            await_only(asyncio.sleep(LOOK_AGAIN_SECONDS))
        turn.loop_thread = threading.get_ident()
    else:
        _acquire_in_thread(turn)
    try:
        yield
    finally:
        turn.loop_thread = None
        turn.lock.release()


def _acquire_in_thread(turn: _Turn) -> None:
    while not turn.lock.acquire(timeout=LOOK_AGAIN_SECONDS):
        if turn.loop_thread == threading.get_ident():  # it cannot go on while we wait for it
            raise StoreUnavailable(
                "this thread's event loop is installing another store; await that first, "
                "or open this one as an AsyncStore"
            )
