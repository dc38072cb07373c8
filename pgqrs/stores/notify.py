"""Hearing PostgreSQL's NOTIFY, on one connection per store.

A connection that listens may be deaf without an error, when the network died silently. So the sentry
calls out to itself, from another connection, when it begins and from time to time. While it does
not hear itself it says so (`hears`), and who waits looks more often. Behind a pooler it does not even
try: see `pgqrs.stores.pooler`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg import sql

from pgqrs.stores.pooler import PROCESS, is_pooled
from pgqrs.stores.wakeups import Sentry

CALL = "\n?"
"""How a call to oneself begins; no queue has such a name."""
TEST_EVERY = 60.0
ANSWER_WITHIN = 5.0


class NotifySentry(Sentry):
    """Listens on a channel whose payloads are names of queues."""

    def __init__(self, connect: Callable[[], psycopg.Connection], channel: str) -> None:
        super().__init__()
        self._connect = connect
        self._channel = channel
        self._hears = False

    @property
    def hears(self) -> bool:
        return self._hears

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._hears = False

    def run(self) -> None:
        pause = 0.1
        while not self._stop.is_set():
            with suppress(psycopg.Error, OSError):
                pause = TEST_EVERY if self._try() else 0.1
            self._hears = False
            self._stop.wait(pause)
            pause = min(pause * 2, 10.0)

    def _try(self) -> bool:
        """Listen for as long as it works. Returns whether it cannot work at all."""
        with self._connect() as connection:
            answer = connection.execute(f"SELECT {PROCESS}").fetchone()
            if answer is None or is_pooled(connection, answer[0]):
                return True
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            self._listen(connection)
            return False

    def _listen(self, connection: psycopg.Connection) -> None:
        """Until told to stop, or until it does not hear itself."""
        while not self._stop.is_set():
            token = self._call_out()
            if not self._hear(connection, ANSWER_WITHIN, until=token):
                return
            self._hears = True
            self.ring(None)  # whatever came while it was deaf
            self._hear(connection, TEST_EVERY)

    def _call_out(self) -> str:
        token = f"{CALL}{uuid.uuid4()}"
        with self._connect() as other:
            other.execute("SELECT pg_notify(%s, %s)", (self._channel, token))
        return token

    def _hear(
        self, connection: psycopg.Connection, seconds: float, *, until: str | None = None
    ) -> bool:
        """Ring for what is heard, for so long; or until a token is heard, and then True."""
        deadline = time.monotonic() + seconds
        while not self._stop.is_set() and time.monotonic() < deadline:
            for notify in connection.notifies(timeout=0.5, stop_after=1):
                if notify.payload == until:
                    return True
                if not notify.payload.startswith(CALL):
                    self.ring(notify.payload)
        return False
