"""Time that stands still until a test moves it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

from pgqrs.types import Duration, aware, seconds


class ManualClock:
    """A clock for `Store(…, clock=ManualClock())`."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = datetime(2026, 1, 1, tzinfo=UTC) if start is None else aware("start", start)
        self._lock = threading.Lock()

    def now(self) -> datetime:
        return self._now

    def advance(self, by: Duration) -> datetime:
        """Let this much time pass."""
        with self._lock:
            self._now += timedelta(seconds=seconds("by", by))
            return self._now
