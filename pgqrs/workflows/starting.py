"""New runs, and the queue they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pgqrs.admin import Admin
from pgqrs.errors import QueueNotFound
from pgqrs.stores import Database

T = TypeVar("T")


def with_queue(database: Database, queue: str, call: Callable[[], T]) -> T:
    """Call this; if its queue does not exist yet, create it first."""
    try:
        return call()
    except QueueNotFound:
        Admin(database).create_queue(queue, if_not_exists=True)
        return call()
