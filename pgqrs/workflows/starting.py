"""New runs, and the queue they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.exc import IntegrityError

from pgqrs.admin import Admin
from pgqrs.errors import QueueNotFound
from pgqrs.repositories.starting import Started, start
from pgqrs.stores import Database

T = TypeVar("T")


def with_queue(database: Database, queue: str, call: Callable[[], T]) -> T:
    """Call this; if its queue does not exist yet, create it first."""
    try:
        return call()
    except QueueNotFound:
        Admin(database).create_queue(queue, if_not_exists=True)
        return call()


def start_once(
    database: Database, arguments: dict[str, Any], *, holder: int | None = None
) -> Started:
    """Start a run, or find the one that has its key, whoever else is doing the same."""
    now, queue = database.now(), arguments["queue"]

    def write() -> Started:
        return database.write(
            lambda connection: start(connection, holder=holder, now=now, **arguments),
            single=arguments["key"] is None,
        )

    def attempt() -> Started:
        return write() if queue is None else with_queue(database, queue, write)

    try:
        return attempt()
    except IntegrityError:  # somebody else started it meanwhile: now it is found
        return attempt()
