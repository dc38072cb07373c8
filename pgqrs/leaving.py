"""How a worker leaves: told by whom, until when its handlers may go on, and who waits for how long.

Whatever hangs (a handler, an event loop, the database), a worker that was told to leave has left when
its grace is over and `LATE` more. So it works in a daemon thread, and whoever called `run` waits for
that thread only so long. A thread that is left behind ends when what it hangs in does, or with the
process; the messages that it could not give back come back by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LATE = 1.5
"""Seconds after its grace in which a worker gives back what is not done, and says good-bye."""
LOOK_EVERY = 0.25
logger = logging.getLogger("pgqrs.worker")


class Leaving:
    """Whether a worker was told to leave. May be told from any thread, and from a signal handler: it
    takes no lock, and logs nothing by itself.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.by = ""
        """Who told it, if that was a signal."""
        self._deadline: float | None = None
        self._is_said = False

    def tell(self, *, by: str = "", now: bool = False) -> None:
        """Leave when the grace is over, or at once."""
        if self._deadline is None:
            self.by = by
            self._deadline = time.monotonic() + (0.0 if now else self.grace)
        elif now:
            self._deadline = min(self._deadline, time.monotonic())

    @property
    def is_told(self) -> bool:
        return self._deadline is not None

    @property
    def left(self) -> float:
        """Seconds until handlers may go on no longer."""
        return self.grace if self._deadline is None else self._deadline - time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """True if it should have left."""
        return self._deadline is not None and self.left <= -LATE

    def say(self) -> None:
        """Log that it was told, once."""
        if self._deadline is not None and not self._is_said:
            self._is_said = True
            logger.info(
                "the worker was told to stop%s; handlers may go on for %g s",
                *(f" by {self.by}" if self.by else "", max(0.0, round(self.left, 1))),
            )


class Running:
    """A worker at work in a thread of its own."""

    def __init__(self, work: Callable[[], None], leaving: Leaving) -> None:
        self.leaving = leaving
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="pgqrs-worker", daemon=True).start()

    @property
    def goes_on(self) -> bool:
        return not self._done.is_set()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:
            self._error = exc
        finally:
            self._done.set()

    def wait(self) -> None:
        """Until it has left, or should have. What ended it is raised here."""
        while not self._done.wait(LOOK_EVERY):
            self.leaving.say()
            if self.leaving.is_overdue:
                logger.error(
                    "the worker could not end in time, and is left behind: its messages come back "
                    "when their leases lapse"
                )
                return
        if self._error is not None:
            raise self._error
