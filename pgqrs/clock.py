"""Where the time comes from.

A store without a clock uses the best one there is: PostgreSQL's own (one clock for the whole
fleet), or for SQLite the host's. Tests pass a clock of their own, such as
`pgqrs.testing.ManualClock`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Anything that tells the time as an aware datetime."""

    def now(self) -> datetime: ...


class SystemClock:
    """The host's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)
