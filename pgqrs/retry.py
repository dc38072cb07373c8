"""When to try again: a policy decides, purely, from the attempt and the error.

A decision is a value: seconds to wait, or None for never again. Whoever holds the message acts on it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pgqrs.errors import InvalidArgument, PgqrsError
from pgqrs.types import Duration, seconds

logger = logging.getLogger("pgqrs")
Decide = Callable[[int, BaseException | None], Duration | None]


class RetryAfter(PgqrsError):
    """Raise this to be tried again after so long, whatever the policy's own delay is.

    Any exception with an attribute `retry_after` does the same.
    """

    def __init__(self, retry_after: Duration, message: str = "") -> None:
        super().__init__(message or f"try again after {retry_after}")
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often, and after how long: unless said otherwise 1 s, 2 s, 4 s … up to 10 minutes.

    Tasks and handlers that have no policy of their own have `OUTLASTING`.
    """

    max_attempts: int | None = None
    """Attempts in all; None leaves it to the queue's `max_read_ct`, which always counts as well."""
    delay: Duration = 1.0
    factor: float = 2.0
    max_delay: Duration = 600.0
    jitter: float = 0.0
    """Which part of a delay is random: 0 none of it, 1 all of it."""
    decide: Decide | None = None
    """A function of the attempt (from 1) and the error, instead of a formula."""

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidArgument("max_attempts", f"expected at least 1, got {self.max_attempts}")
        if not 0 <= self.jitter <= 1:
            raise InvalidArgument("jitter", f"expected between 0 and 1, got {self.jitter}")
        if self.factor < 1:
            raise InvalidArgument("factor", f"expected at least 1, got {self.factor}")
        seconds("delay", self.delay)
        seconds("max_delay", self.max_delay)

    @classmethod
    def fixed(cls, delay: Duration, *, max_attempts: int | None = None) -> Self:
        """The same delay each time."""
        return cls(delay=delay, factor=1.0, max_delay=delay, max_attempts=max_attempts)

    @classmethod
    def exponential(
        cls,
        delay: Duration = 1.0,
        *,
        factor: float = 2.0,
        max_delay: Duration = 600.0,
        jitter: float = 0.5,
        max_attempts: int | None = None,
    ) -> Self:
        """Longer each time, partly random so that many that failed together do not return together."""
        return cls(
            delay=delay,
            factor=factor,
            max_delay=max_delay,
            jitter=jitter,
            max_attempts=max_attempts,
        )

    @classmethod
    def custom(cls, decide: Decide, *, max_attempts: int | None = None) -> Self:
        """What a function of the attempt and the error says; None is never again."""
        return cls(decide=decide, max_attempts=max_attempts)

    def next_delay(
        self,
        attempt: int,
        error: BaseException | None = None,
        *,
        rand: Callable[[], float] = random.random,
    ) -> float | None:
        """Seconds until the next attempt after this one failed; None for never again."""
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return None
        asked = _asked_for(error)
        if asked is not None:
            return asked
        if self.decide is not None:
            try:
                decided = self.decide(attempt, error)
                return None if decided is None else seconds("decide", decided)
            except Exception:
                # By its type: what an error says may be secret.
                kind = type(error).__qualname__
                logger.exception("decide failed for %s; the policy's own delay counts", kind)
        longest = seconds("max_delay", self.max_delay)
        # Bounded before it is computed: a float power overflows.
        steps = min(attempt - 1, 64)
        wait = min(seconds("delay", self.delay) * self.factor**steps, longest)
        return wait * (1 - self.jitter * rand())


OUTLASTING = Retry(factor=3.0, max_delay=1800.0, jitter=0.5)
"""What counts where no policy is given: at most 1 s, 3 s, 9 s … up to half an hour. The 10 attempts that
a queue allows by default take about an hour, so that an outage is outlasted. Partly random, so that what
failed together, because something was down, does not come back together.
"""


def _asked_for(error: BaseException | None) -> float | None:
    """Seconds that an error asks to wait, if it asks for something that can be understood."""
    try:
        asked = getattr(error, "retry_after", None)
        return None if asked is None else seconds("retry_after", asked)
    except Exception:
        kind = type(error).__qualname__
        logger.exception("retry_after of %s cannot be used; the policy's own delay counts", kind)
        return None
