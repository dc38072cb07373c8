"""The row of a producer or consumer among the workers: registering, signs of life, leaving."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

from pgqrs.errors import StoreUnavailable
from pgqrs.repositories import queues, workers
from pgqrs.stores import Database
from pgqrs.types import WorkerStatus


class Presence:
    """One row among the workers, there from `open` until `close`."""

    def __init__(
        self, database: Database, queue: str, *, hostname: str | None = None, port: int = 0
    ) -> None:
        self._database = database
        self._queue = queue
        self._hostname = hostname or socket.gethostname()
        self._port = port
        self._heard_at = 0.0
        self.worker_id: int | None = None

    def open(self) -> int:
        """Register, unless that was done. Returns the worker's id."""
        if self.worker_id is None:
            self.worker_id = self._register()
        return self.worker_id

    def reopen(self) -> int:
        """Register anew: somebody purged the row of a worker that was only slow."""
        self.worker_id = None
        return self.open()

    def keep_alive(self) -> None:
        """A sign of life, if the last one was some time ago."""
        if time.monotonic() - self._heard_at > self._database.config.heartbeat:
            self.heartbeat()

    def heartbeat(self) -> WorkerStatus:
        """A sign of life. Returns what this worker was told to be."""
        id, now = self.open(), self._database.now()
        status = self._database.write(
            lambda connection: workers.heartbeat(connection, id, now=now),
            single=True,
            repeatable=True,
        )
        if status is None:
            self.reopen()
            return WorkerStatus.READY
        self._heard_at = time.monotonic()
        return status

    def close(self) -> None:
        """Take the row away. If the database is not there, it is purged with the dead ones."""
        id, self.worker_id = self.worker_id, None
        if id is not None:
            with suppress(StoreUnavailable):
                self._database.write(
                    lambda connection: workers.remove(connection, id),
                    single=True,
                    repeatable=True,
                )

    def _register(self) -> int:
        now = self._database.now()
        id = self._database.write(
            lambda connection: workers.register(
                connection,
                queue_id=queues.get(connection, self._queue).id,
                hostname=self._hostname,
                port=self._port,
                pid=os.getpid(),
                now=now,
            ),
            repeatable=True,
        )
        self._heard_at = time.monotonic()
        return id
