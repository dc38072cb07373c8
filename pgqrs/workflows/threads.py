"""The threads of runs in an event loop: some for their steps, others for their journal.

They are not those of the loop's own executor, which an application may fill, and they keep no process
from ending. Steps have as many as they need, since one that hangs keeps its thread for ever; a run uses
`STEPS_OF_A_RUN` of them at a time. The journal has threads of its own for each store, so that steps
that hang keep no run from writing down what it did.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from pgqrs.stores import Database
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.forks import in_child

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
STEPS_OF_A_RUN = 32
step_threads = DaemonThreads("pgqrs-step")
_journals: WeakKeyDictionary[Database, DaemonThreads] = WeakKeyDictionary()
_lock = threading.Lock()


def _start_anew() -> None:
    global _lock
    _lock = threading.Lock()


in_child(_start_anew)


def journal_threads(database: Database) -> DaemonThreads:
    """The threads in which runs write to this database."""
    with _lock:
        found = _journals.get(database)
        if found is None:
            threads = DaemonThreads("pgqrs-journal", limit=database.bridge_threads)
            found = _journals[database] = threads
        return found
