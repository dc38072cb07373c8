"""What ends the running of a workflow from inside one of its durable calls.

They derive from BaseException, so that a workflow's `except Exception` does not swallow them. If one
is swallowed all the same, the next durable call raises it again, and what the workflow returns does
not count.
"""

from __future__ import annotations

from datetime import datetime

from pgqrs.errors import PgqrsError


class Interrupt(BaseException):
    """The workflow does not go on here and now."""


class Suspend(Interrupt):
    """It waits: until a time, or for news alone."""

    def __init__(self, until: datetime | None, nudge_ct: int | None = None) -> None:
        super().__init__(f"waits until {until}")
        self.until = until
        self.nudge_ct = nudge_ct
        """The news that the run knows of; None for those that it knew of when it was resumed."""


class Pause(Interrupt):
    """It was told to pause."""


class Cancel(Interrupt):
    """It was told to cancel."""


class Mismatch(Interrupt):
    """It cannot go on with this code: its history says otherwise, or cannot be read by it."""

    def __init__(self, error: PgqrsError) -> None:
        super().__init__(str(error))
        self.error = error


class Doom(Interrupt):
    """It cannot go on at all: its deadline has passed."""

    def __init__(self, error: PgqrsError) -> None:
        super().__init__(str(error))
        self.error = error


class Lost(Interrupt):
    """Somebody else holds its message: nothing that happens here counts any more."""


class Broken(Interrupt):
    """The database could not be reached; what became of the last call is not known."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Closed(Interrupt):
    """The workflow has returned: what it left behind does not go on."""


class Expired(Interrupt):
    """A `pgqrs.timeout` of a sync workflow is over. It ends the block alone, not the run."""

    def __init__(self, timer: object) -> None:
        super().__init__("a timeout is over")
        self.timer = timer
