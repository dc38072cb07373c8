"""What is to be done again and again beside the work itself, each in a thread of its own.

A duty that fails or hangs hinders no other: it is tried again, after pauses that grow, and the log says
so once for each reason, and once when it works again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pgqrs.bell import Bell
from pgqrs.errors import PgqrsError, StoreClosed

logger = logging.getLogger("pgqrs.worker")
LONGEST_PAUSE = 30.0
"""Seconds between two attempts at a duty that fails."""


class Trouble:
    """Something that fails, perhaps for long: told once for each reason, and when it is over."""

    def __init__(self, what: str, *, longest: float = LONGEST_PAUSE) -> None:
        self._what = what
        self._longest = longest
        self._count = 0
        self._reason: str | None = None

    def failed(self, error: BaseException) -> float:
        """It failed. Returns the seconds until the next attempt."""
        pause = min(2.0 ** min(self._count, 10), self._longest)
        self._count += 1
        reason = f"{type(error).__name__}: {error}"
        if reason != self._reason:
            self._reason = reason
            known = isinstance(error, PgqrsError)
            logger.warning(
                "%s failed, trying again in %g s: %s",
                *(self._what, pause, error if known else reason),
                exc_info=None if known else error,
            )
        return pause

    def worked(self) -> None:
        """It did not fail."""
        if self._count:
            logger.info("%s works again", self._what)
            self._count, self._reason = 0, None


class Duty:
    """Calls `do` in a thread of its own, until stopped. `do` returns the seconds until its next call."""

    def __init__(
        self, name: str, do: Callable[[], float], *, longest_pause: float = LONGEST_PAUSE
    ) -> None:
        self._name = name
        self._do = do
        self._longest_pause = longest_pause
        self._bell = Bell()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, also after a stop: a thread that still hangs in the last round ends with it."""
        self._stopped, self._bell = threading.Event(), Bell()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._stopped, self._bell),
            name=f"pgqrs-{self._name.replace(' ', '-')}",
            daemon=True,
        )
        self._thread.start()

    def ring(self) -> None:
        """It is due now."""
        self._bell.ring()

    def stop(self) -> None:
        """Call it no more. Does not wait for a call that is going on."""
        self._stopped.set()
        self._bell.ring()

    def wait(self, seconds: float) -> None:
        """Wait so long at most for a call that is going on after `stop`."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))

    def _run(self, stopped: threading.Event, bell: Bell) -> None:
        trouble = Trouble(self._name, longest=self._longest_pause)
        while not stopped.is_set():
            try:
                pause = self._do()
                trouble.worked()
            except StoreClosed:
                return
            except BaseException as exc:  # nobody else does it
                pause = trouble.failed(exc)
            bell.wait(pause)
