"""What a claim costs as the tables grow.

Two databases, one with few rows in some state and one with many, are claimed from in turns: ten messages are claimed, which is timed, and given back, so
that the next claim finds the same. Neither waits for the disk, which would cost both the same and hide the difference. What
PostgreSQL's autovacuum does now and then is done between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from benchmarks.driver import LEASE, QUEUE, Backend
from benchmarks.report import Result
from benchmarks.sites import MakeSite, Site

COLUMNS = ("few, µs", "many, µs")
TARGET = 1.3
CLAIMED = 10
READY = 10_000
"""Messages to claim from, where their number is not what varies."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How often to measure, how much each time, and how many rows are many."""

    rounds: int
    claims: int
    many: int


FULL = Sizes(rounds=9, claims=100, many=1_000_000)
QUICK = Sizes(rounds=5, claims=40, many=100_000)


def names(backend: Backend) -> list[str]:
    """All benchmarks of this file."""
    return ["flat-ready", "flat-delayed", "flat-archived", "flat-leased"]


def measure(
    backend: Backend, wanted: list[str], make_site: MakeSite, *, quick: bool
) -> Iterator[Result]:
    """Run benchmarks, one after the other."""
    sizes = QUICK if quick else FULL
    for name in wanted:
        state = name.removeprefix("flat-")
        few, many = (0, 10_000) if state == "leased" else (10_000, sizes.many)
        with (
            closing(_Subject(make_site(f"{state}_few"), state, few)) as small,
            closing(_Subject(make_site(f"{state}_many"), state, many)) as large,
        ):
            times = [
                (small.claim_time(sizes.claims), large.claim_time(sizes.claims))
                for _ in range(sizes.rounds)
            ]
        label = f"{name} {few:,} → {many:,}"
        yield Result(backend, label, "µs", [t[0] for t in times], [t[1] for t in times], TARGET)


class _Subject:
    """A queue with so many rows in one state, and a consumer of it."""

    def __init__(self, site: Site, state: str, rows: int) -> None:
        site.fill(**{"ready": READY} | {state: rows})
        self._site = site
        self._store = site.store_without_fsync()
        self._consumer = self._store.consumer(QUEUE, lease=LEASE)

    def claim_time(self, claims: int) -> float:
        """The median over so many claims, in microseconds."""
        self._site.settle()
        return median(self._claim() for _ in range(claims)) * 1e6

    def _claim(self) -> float:
        began = time.perf_counter()
        claimed = self._consumer.dequeue(CLAIMED)
        took = time.perf_counter() - began
        if len(claimed) != CLAIMED:
            raise RuntimeError(f"claimed {len(claimed)} messages, not {CLAIMED}")
        self._consumer.release_many(claimed)
        return took

    def close(self) -> None:
        self._consumer.close()
        self._store.close()
        self._site.empty()
