"""The row of a producer or consumer among the workers: registering, signs of life, leaving."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

from pgqrs.errors import ConflictError, StoreUnavailable
from pgqrs.repositories import queues, workers
from pgqrs.stores import Database
from pgqrs.types import WorkerStatus


class Presence:
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
        self._registering = threading.Lock()
        self.worker_id: int | None = None

    def open(self) -> int:
        """Register, unless that was done. Returns the worker's id."""
        if self.worker_id is None:
            self.worker_id = self._register()
        return self.worker_id

    def reopen(self, gone: int) -> int:
        """Register anew: somebody purged the row of a worker that was only slow."""
        # Never waits: under asyncio that would be waiting for oneself.
        if self._registering.acquire(blocking=False):
            try:
                if self.worker_id == gone:
                    self.worker_id = self._register()
            finally:
                self._registering.release()
        return gone if self.worker_id is None else self.worker_id

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
            self.reopen(id)
            return WorkerStatus.READY
        self._heard_at = time.monotonic()
        return status

    def close(self) -> None:
        """Take the row away. If the database is not there, it is purged with the dead ones."""
        id, self.worker_id = self.worker_id, None
        if id is not None:
            with suppress(StoreUnavailable, ConflictError):
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
                queue_id=None if self._queue is None else queues.get(connection, self._queue).id,
                hostname=self._hostname,
                port=self._port,
                pid=os.getpid(),
                now=now,
            ),
            repeatable=True,
        )
        self._heard_at = time.monotonic()
        return id
