"""The row of a producer or consumer among the workers: registering, signs of life, leaving."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from pgqrs.errors import ConflictError, StoreUnavailable
from pgqrs.repositories import queues, workers
from pgqrs.stores import Database
from pgqrs.stores.forks import Forking, watch
from pgqrs.types import WorkerStatus


class Presence(Forking):
    """One row among the workers, there from `open` until `close`."""

    def __init__(
        self, database: Database, queue: str | None, *, hostname: str | None = None, port: int = 0
    ) -> None:
        """Without a queue it is there for several."""
        self._database = database
        self._queue = queue
        self._hostname = hostname or socket.gethostname()
        self._port = port
        self._heard_at = 0.0
        self._settling = threading.Lock()
        """Never held while anybody waits for the database: under asyncio that would be waiting for
        oneself."""
        self.worker_id: int | None = None
        watch(self)

    def after_fork_in_child(self) -> None:
        """The row is the parent's."""
        self._settling = threading.Lock()
        self.worker_id = None

    def open(self) -> int:
        """Register, unless that was done. Returns the worker's id."""
        return self._replace(None) if self.worker_id is None else self.worker_id

    def reopen(self, gone: int) -> int:
        """Register anew: somebody purged the row of a worker that was only slow."""
        return self._replace(gone) if self.worker_id in (None, gone) else self.worker_id

    def _replace(self, known: int | None) -> int:
        """Register. If somebody else did that in the meantime, that row stays, and this one goes."""
        id = self._register()
        with self._settling:
            found = self.worker_id
            if found is None or found == known:
                self.worker_id = id
                return id
        self._remove(id)
        return found

    def keep_alive(self) -> None:
        """A sign of life, if the last one was some time ago."""
        if self.beats_in() < 0:
            self.heartbeat()

    def beats_in(self) -> float:
        """Seconds until the next sign of life is due."""
        return self._heard_at + self._database.config.heartbeat - time.monotonic()

    def heartbeat(self) -> WorkerStatus:
        """A sign of life. Returns what this worker was told to be."""
        id = self.open()
        status = self._database.write(
            lambda connection: workers.heartbeat(connection, id, now=self._database.now()),
            single=True,
            repeatable=True,
        )
        if status is None:
            self.reopen(id)
            return WorkerStatus.READY
        self._heard_at = time.monotonic()
        return status

    def close(self) -> None:
        """Take the row away. If the database is not there, it is purged with the dead ones."""
        id, self.worker_id = self.worker_id, None
        if id is not None:
            self._remove(id)

    def _remove(self, id: int) -> None:
        with suppress(StoreUnavailable, ConflictError):
            self._database.write(
                lambda connection: workers.remove(connection, id),
                single=True,
                repeatable=True,
            )

    def _register(self) -> int:
        id = self._database.write(
            lambda connection: workers.register(
                connection,
                queue_id=None if self._queue is None else queues.get(connection, self._queue).id,
                hostname=self._hostname,
                port=self._port,
                pid=os.getpid(),
                now=self._database.now(),
            ),
            repeatable=True,
        )
        self._heard_at = time.monotonic()
        return id


class Presences:
    """The row of a worker of several queues; in a store of several shards, one on each of theirs."""

    def __init__(
        self, database: Database, queues: Sequence[str], *, hostname: str | None, port: int
    ) -> None:
        of_shard: dict[Database, list[str]] = {}
        for queue in queues:
            of_shard.setdefault(database.of_queue(queue), []).append(queue)
        self._database = database
        self._all = {
            shard: Presence(
                shard, some[0] if len(some) == 1 else None, hostname=hostname, port=port
            )
            for shard, some in of_shard.items()
        }

    def of(self, queue: str) -> Presence:
        """The row that messages of a queue are held by."""
        return self._all[self._database.of_queue(queue)]

    @property
    def worker_id(self) -> int | None:
        """The id of the row, the first of them; None while there is none."""
        return next(iter(self._all.values())).worker_id

    def open(self) -> None:
        """Register, unless that was done."""
        for presence in self._all.values():
            presence.open()

    def beats_in(self) -> float:
        """Seconds until the next sign of life is due."""
        return min(presence.beats_in() for presence in self._all.values())

    def heartbeat(self) -> WorkerStatus:
        """A sign of life where it is due. Returns what the worker was told to be: stopped, if one of its
        rows was.
        """
        told = [each.heartbeat() for each in self._all.values() if each.beats_in() <= 0]
        return WorkerStatus.STOPPED if WorkerStatus.STOPPED in told else WorkerStatus.READY

    def close(self) -> None:
        """Take the rows away."""
        for presence in self._all.values():
            presence.close()
