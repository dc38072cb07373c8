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

    def __init__(self, until: datetime | None) -> None:
        super().__init__(f"waits until {until}")
        self.until = until


class Pause(Interrupt):
    """It was told to pause."""


class Cancel(Interrupt):
    """It was told to cancel."""


class Doom(Interrupt):
    """It cannot go on at all: its deadline has passed, or its history says otherwise."""

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
