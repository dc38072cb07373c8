"""A limit to the time that statements of one transaction take."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.util import await_only

from pgqrs.drivers import sqlite_connection
from pgqrs.repositories.expressions import per_dialect

STEPS = 10_000
"""Instructions of SQLite between two looks at the clock."""


@contextmanager
def _limit_on_server(connection: Connection, seconds: float) -> Iterator[None]:
    milliseconds = max(1, int(seconds * 1000))
    # For this transaction alone: it ends with it.
    setting = func.set_config("statement_timeout", f"{milliseconds}ms", True)
    connection.execute(select(setting)).close()
    yield


@contextmanager
def _limit_in_process(connection: Connection, seconds: float) -> Iterator[None]:
    driver: Any = sqlite_connection(connection)
    deadline = time.monotonic() + seconds
    _at_once(driver.set_progress_handler(lambda: int(time.monotonic() > deadline), STEPS))
    try:
        yield
    finally:
        _at_once(driver.set_progress_handler(None, 0))


def _at_once(called: Any) -> None:
    """An async driver gives something to await, for code that runs in a greenlet."""
    if inspect.isawaitable(called):
        await_only(called)


limited = per_dialect(postgresql=_limit_on_server, sqlite=_limit_in_process)
"""A context in which no statement of the connection takes longer than so many seconds. One that does is
ended with an error of the driver.
"""
