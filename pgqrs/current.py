"""What code is part of: the run whose body it is in, and the store that is meant where none is named.

A store is meant by its call (`store=`), else by the task or the step that the code is in, else it is the
one that `use` named last, else the one that the environment says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any

_lock = threading.Lock()
_named: list[Any] = []
_of_environment: list[Any] = []

StoreOfCall = Callable[[bool], Any]
"""Gives a store: an `AsyncStore` if it is asked for with True."""
run_here: ContextVar[Any] = ContextVar("pgqrs_run", default=None)
"""The run whose body this code is part of; None outside, and inside of steps and tasks."""
store_of_call: ContextVar[StoreOfCall | None] = ContextVar("pgqrs_store_of_call", default=None)
"""The store of the task or the run that this code is part of."""


class use:  # noqa: N801 (to its callers it is a function)
    """Let this be the store of the process from now on; in a `with` block, until its end."""

    def __init__(self, store: Any) -> None:
        self._store = store
        _named.append(store)

    def __enter__(self) -> Any:
        return self._store

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _named.remove(self._store)


def store_for(given: Any = None, *, is_async: bool = False) -> Any:
    """The store that is given, or the one that is meant. That of a task or a step is an `AsyncStore`
    for async callers.
    """
    if given is not None:
        return given
    of_call = store_of_call.get()
    if of_call is not None:
        return of_call(is_async)
    if _named:
        return _named[-1]
    with _lock:
        if not _of_environment or _of_environment[0]._database.closed:
            # By name: what uses this is itself used by the store.
            _of_environment[:] = [import_module("pgqrs.store").Store()]
        return _of_environment[0]


def store_on(database: Any) -> StoreOfCall:
    """The stores on a database that threads can use; of a shard, those on the whole store."""
    database = database.whole

    def find(is_async: bool) -> Any:
        if is_async:
            return import_module("pgqrs.aio.store").AsyncStore._of(database)
        return import_module("pgqrs.store").Store._of(database)

    return find


def store_in(database: Any, connection: Any) -> StoreOfCall:
    """What is done inside the transaction of a connection."""
    return lambda is_async: import_module("pgqrs.transaction").Transaction(database, connection)


@contextmanager
def outside(store: StoreOfCall | None = None) -> Iterator[None]:
    """Code in here is part of no run: a step is user code like any other. Without `store` it means the
    same store as before.
    """
    run, of_call = run_here.set(None), store and store_of_call.set(store)
    try:
        yield
    finally:
        run_here.reset(run)
        if of_call is not None:
            store_of_call.reset(of_call)


def in_event_loop() -> bool:
    """True if this code runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def part_of_run(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call as part of the run that this code is part of, if it is: for another thread."""
    run = run_here.get()
    return call if run is None else partial(_as_part_of, run, call)


def _as_part_of(run: Any, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = run_here.set(run)
    try:
        return call(*args, **kwargs)
    finally:
        run_here.reset(token)
