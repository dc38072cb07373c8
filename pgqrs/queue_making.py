"""Queues that are created by whoever first puts something into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from pgqrs.errors import ConstraintViolated, InvalidArgument, QueueNotFound
from pgqrs.repositories import queues
from pgqrs.stores import Database
from pgqrs.types import Queue

MAX_NAME = 255
T = TypeVar("T")


def check_name(name: str) -> None:
    """Raise `InvalidArgument` if no queue can have this name."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise InvalidArgument("name", f"a queue's name is printable text, not {name!r}")
    if len(name) > MAX_NAME:
        raise InvalidArgument("name", f"longer than {MAX_NAME} characters")


def make_queue(database: Database, name: str) -> Queue:
    """Create a queue with the settings of the store, unless there is one of this name."""
    check_name(name)
    config = database.config

    def work(connection: Connection) -> Queue:
        return queues.create(
            connection,
            name,
            if_not_exists=True,
            now=database.now(),
            lease=config.lease,
            max_read_ct=config.max_read_ct,
        )

    try:
        with database.savepoint():
            return database.write(work)
    except ConstraintViolated:  # somebody else created it meanwhile: now it is found
        return database.write(work)


def with_queue(database: Database, queue: str, call: Callable[[], T]) -> T:
    """Call this; if its queue does not exist yet, create it first."""
    try:
        return call()
    except QueueNotFound:
        make_queue(database, queue)
        return call()
