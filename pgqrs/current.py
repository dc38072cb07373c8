"""Which store is meant where none is named: the one that `use` named last, else the one that the
environment says.
"""

from __future__ import annotations

import threading
from importlib import import_module
from types import TracebackType
from typing import Any

_lock = threading.Lock()
_named: list[Any] = []
_of_environment: list[Any] = []


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


def store_for(given: Any = None) -> Any:
    """The store that is given, or the one that is meant."""
    if given is not None:
        return given
    if _named:
        return _named[-1]
    with _lock:
        if not _of_environment or _of_environment[0]._database.closed:
            # By name: what uses this is itself used by the store.
            _of_environment[:] = [import_module("pgqrs.store").Store()]
        return _of_environment[0]
