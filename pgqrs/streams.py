"""Taking the messages of a queue batch by batch, for somebody who remembers how far it has come.

Spark is such a somebody: before it works on a batch, it writes down the batch's number, and after it,
that the batch is complete. After a crash it asks for the same batch again, or goes on with the next.
So a batch is claimed before its number is given away, stays claimed whatever happens, and is
acknowledged when the next one is asked for: whoever asks what comes after a batch has completed it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection

from pgqrs.consumer import SWEEPS, set_unreadable_aside
from pgqrs.errors import ConstraintViolated, WorkerNotFound
from pgqrs.presence import Presence
from pgqrs.repositories import places, streams
from pgqrs.repositories.reading import Unreadable, telling
from pgqrs.repositories.streams import ANY, Batch, Owned
from pgqrs.stores import Database

LARGEST = 100_000
"""Messages of one batch: which they are is one value of its row."""
Question = Callable[..., Batch | None]


class Stream:
    """A stream, for who works with it. It is taken over with the first batch."""

    def __init__(self, database: Database, name: str, queue: str) -> None:
        self.name = name
        self.queue = queue
        self._database = database = database.of_queue(queue)
        self._presence = Presence(database, queue)
        self._owned: Owned | None = None

    def next_batch(self, after: int, *, limit: int, through: int = ANY) -> Batch | None:
        """The batch to work on after this one, if there is anything to do up to the id `through`. All up
        to this one is complete, and is acknowledged.
        """
        return self._ask(partial(streams.next_batch, after=after, through=through), limit)

    def add_batch(self, *, limit: int, through: int = ANY) -> Batch | None:
        """One more batch beside those that are claimed, if there is anything to claim up to the id
        `through`: also what only messages of this stream keep back, by being first in their groups.
        """
        # Two transactions: who locks groups must not have locked messages before.
        batch = self._ask(partial(streams.add_batch, through=through), limit)
        return batch or self._ask(partial(streams.add_followers, through=through), limit)

    def _ask(self, question: Question, limit: int) -> Batch | None:
        if self._owned is None:
            self._owned = self._take_over()
        self._presence.keep_alive()
        if self._is_quiet():
            return None
        try:
            batch = self._plan(self._owned, question, limit)
        except WorkerNotFound as gone:
            self._presence.reopen(gone.id)
            batch = self._plan(self._owned, question, limit)
        self._database.ring(self.queue)  # what was acknowledged may have kept others back
        return batch

    def _take_over(self) -> Owned:
        worker = self._presence.open()

        def work(connection: Connection) -> Owned:
            now = self._database.now()
            return streams.take_over(connection, self.name, self.queue, worker=worker, now=now)

        try:
            return self._database.write(work, repeatable=True)
        except ConstraintViolated:  # somebody else created it meanwhile: now it is found
            return self._database.write(work, repeatable=True)

    def _is_quiet(self) -> bool:
        return self._database.read(
            lambda c: streams.is_quiet(c, self.name, self.queue, now=self._database.now())
        )

    def _plan(
        self, owned: Owned, question: Question, limit: int, *, tries: int = SWEEPS
    ) -> Batch | None:
        worker = self._presence.open()

        def work(connection: Connection) -> Batch | None:
            with telling():
                return question(
                    connection, owned, worker=worker, limit=limit, now=self._database.now()
                )

        try:
            return self._database.write(work, repeatable=True, probe=True)
        except Unreadable:
            # If none is found, a consumer is setting it aside: the next claim passes over it.
            aside = set_unreadable_aside(self._database, self.queue, worker=worker)
            if not aside and (tries := tries - 1) == 0:
                raise
            return self._plan(owned, question, limit, tries=tries)

    def close(self) -> None:
        """Leave the workers. What is claimed stays so."""
        self._presence.close()


def _of_stream(database: Database, name: str) -> Database:
    return database.where(lambda c: places.has_stream(c, name))


def batches(database: Database, name: str, *, after: int, through: int) -> list[Batch]:
    """The batches of a stream with these numbers that are claimed."""
    database = _of_stream(database, name)
    return database.read(lambda c: streams.batches(c, name, after=after, through=through))


def acknowledge(database: Database, name: str, *, through: int) -> int:
    """Acknowledge all batches of a stream up to this one. Returns how many messages that were."""
    database = _of_stream(database, name)
    queue, total = database.write(
        lambda c: streams.acknowledge(c, name, through=through, now=database.now()), repeatable=True
    )
    database.ring(queue)
    return total


def end(database: Database, name: str) -> int:
    """Acknowledge all that a stream has claimed, and forget the stream. Returns how many messages that
    were.
    """
    database = _of_stream(database, name)
    queue, total = database.write(
        lambda c: streams.end(c, name, now=database.now()), repeatable=True
    )
    database.ring(queue)
    return total
