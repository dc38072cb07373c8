"""What became of a message, as a value: a handler returns one, the worker acts on it.

A handler that returns anything else has returned a result: `Done(result)`. One that raises has
`Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pgqrs.retry import Retry
from pgqrs.types import MAX_SECONDS, Duration

FOREVER = float(MAX_SECONDS)
"""A delay after which nobody looks: the message waits until somebody changes its `vt`."""


@dataclass(frozen=True, slots=True)
class Done:
    """It is finished: to the archive, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It went wrong: deliver it again when `retry` says, or never if it is `dead`."""

    error: str | BaseException
    retry: Retry | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class GivenBack:
    """It could not be finished now, and that is nobody's fault: deliver it again at once, after
    `delay`, or at `eta`. The attempt does not count.
    """

    delay: Duration | None = None
    eta: datetime | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing is left to do: the handler ended the message itself, in a transaction of its own."""

    ending: Any = field(default=None, compare=False)
    """How it ended, for who asks."""


Outcome = Done | Failed | GivenBack | Settled
OUTCOMES = (Done, Failed, GivenBack, Settled)


def as_outcome(returned: Any) -> Outcome:
    """What a handler returned, as an outcome."""
    return returned if isinstance(returned, OUTCOMES) else Done(returned)
