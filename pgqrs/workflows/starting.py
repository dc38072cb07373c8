"""New runs, and the queue they are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgqrs.errors import ConstraintViolated
from pgqrs.queue_making import with_queue
from pgqrs.repositories import starting_many
from pgqrs.repositories.starting import Started, start
from pgqrs.repositories.starting_many import NewRun, StartedMany
from pgqrs.stores import Database


def start_many(
    database: Database,
    runs: Sequence[NewRun],
    arguments: dict[str, Any],
) -> StartedMany:
    """Start runs of one workflow, or find those that have their keys: all of them or none."""
    queue = arguments["queue"]

    def write() -> StartedMany:
        return database.write(
            lambda connection: starting_many.start_many(
                connection, runs, now=database.now(), **arguments
            )
        )

    def attempt() -> StartedMany:
        with database.savepoint():
            return with_queue(database, queue, write)

    try:
        return attempt()
    except ConstraintViolated:  # somebody else started one meanwhile: now it is found
        return attempt()


def start_once(
    database: Database, arguments: dict[str, Any], *, holder: int | None = None
) -> Started:
    """Start a run, or find the one that has its key, whoever else is doing the same."""
    queue = arguments["queue"]

    def write() -> Started:
        return database.write(
            lambda connection: start(connection, holder=holder, now=database.now(), **arguments),
            single=arguments["key"] is None,
        )

    def attempt() -> Started:
        with database.savepoint():
            return write() if queue is None else with_queue(database, queue, write)

    try:
        return attempt()
    except ConstraintViolated:  # somebody else started it meanwhile: now it is found
        return attempt()
