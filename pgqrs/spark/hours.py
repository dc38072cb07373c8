"""The rows of a report: what ended in a queue in an hour, and all hours of a queue together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Hour:
    """What ended in an hour in a queue. Times are in seconds; None where nothing was ever claimed."""

    queue: str
    hour: datetime
    ended: int
    completed: int
    failed: int
    expired: int
    manual: int
    retries: int
    wait_p50: float | None
    wait_p90: float | None
    wait_p99: float | None
    run_p50: float | None
    run_p90: float | None
    run_p99: float | None

    @property
    def failure_rate(self) -> float:
        """The part of what ended that failed."""
        return self.failed / self.ended if self.ended else 0.0


def as_json(hours: Iterable[Hour]) -> str:
    """One JSON document."""
    rows = [
        asdict(hour) | {"hour": hour.hour.isoformat(), "failure_rate": hour.failure_rate}
        for hour in hours
    ]
    return json.dumps({"hours": rows}, indent=1)


def from_json(text: str) -> list[Hour]:
    """The rows of a document that `as_json` wrote."""
    return [_from_row(row) for row in json.loads(text)["hours"]]


def _from_row(row: dict[str, Any]) -> Hour:
    del row["failure_rate"]  # follows from the others
    return Hour(**row | {"hour": datetime.fromisoformat(row["hour"])})


@dataclass(frozen=True, slots=True)
class Total:
    """All hours of a queue together. Percentiles of hours cannot be added; the worst is shown."""

    queue: str
    ended: int
    per_hour: float
    failure_rate: float
    retries: int
    wait_p50: float | None
    wait_p99: float | None
    run_p50: float | None
    run_p99: float | None


def totals(hours: Sequence[Hour]) -> list[Total]:
    """Per queue, the busiest first."""
    queues: dict[str, list[Hour]] = {}
    for hour in hours:
        queues.setdefault(hour.queue, []).append(hour)
    found = [_total(name, each) for name, each in queues.items()]
    return sorted(found, key=lambda total: (-total.ended, total.queue))


def _total(queue: str, hours: Sequence[Hour]) -> Total:
    ended = sum(hour.ended for hour in hours)
    span = (hours[-1].hour - hours[0].hour).total_seconds() / 3600 + 1
    return Total(
        queue=queue,
        ended=ended,
        per_hour=ended / span,
        failure_rate=sum(hour.failed for hour in hours) / ended,
        retries=sum(hour.retries for hour in hours),
        wait_p50=_middle([hour.wait_p50 for hour in hours]),
        wait_p99=_worst([hour.wait_p99 for hour in hours]),
        run_p50=_middle([hour.run_p50 for hour in hours]),
        run_p99=_worst([hour.run_p99 for hour in hours]),
    )


def _middle(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
