"""How often messages of a queue may start: decided, purely, from what was started before.

What was started is a short log of counts. A count is remembered for the whole period, so there are
never more than `limit` starts in any stretch of that length, however they are spread. Starts close
to each other share an entry, which counts until the last of them is a period old; that keeps the log
short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqrs.types import Rate

GRAINS = 50
"""About how many entries a log has at most."""


class Started(NamedTuple):
    """So many messages were started between two times, in seconds since 1970."""

    since: float
    until: float
    number: int


def no_later_than(log: Sequence[Started], now: float) -> list[Started]:
    """The log for a clock that says this, which may have been set back: what lies ahead of it counts as
    started now. Otherwise nothing could start until the clock is where it was.
    """
    if not any(entry.until > now for entry in log):
        return list(log)
    return [Started(min(entry.since, now), min(entry.until, now), entry.number) for entry in log]


def room(rate: Rate, log: Sequence[Started], now: float) -> int:
    """How many may start now."""
    return max(0, rate.limit - sum(entry.number for entry in _recent(rate, log, now)))


def room_in(rate: Rate, log: Sequence[Started], now: float) -> float:
    """Seconds until one more may start."""
    recent = _recent(rate, log, now)
    if not recent or room(rate, log, now):
        return 0.0
    return max(0.0, recent[0].until + rate.period - now)


def start(rate: Rate, log: Sequence[Started], number: int, now: float) -> list[Started]:
    """The log after so many have started."""
    recent = _recent(rate, log, now)
    if recent and now - recent[-1].since < rate.period / GRAINS:
        last = recent.pop()
        return [*recent, Started(last.since, max(last.until, now), last.number + number)]
    return [*recent, Started(now, now, number)]


def _recent(rate: Rate, log: Sequence[Started], now: float) -> list[Started]:
    start = now - rate.period
    return [entry for entry in log if entry.until > start]
