"""What a claim costs as the tables grow.

Two databases, one with few rows in some state and one with many, are claimed from in turns. Ten
messages are claimed, which is timed, and given back, so that the next claim finds the same. Neither
waits for the disk, which would cost both the same and hide the difference. What PostgreSQL's
autovacuum does now and then is done between rounds.

`flat-grouped` compares messages without groups with many more in groups, of which one is stuck.
`flat-burst` is different: in both the queue is full, but in the second one the consumer has polled
it while it was empty, and no statistics were gathered since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from benchmarks.driver import LEASE, QUEUE, Backend
from benchmarks.report import Result
from benchmarks.sites import IN_A_GROUP, MakeSite, Site

COLUMNS = ("few, µs", "many, µs")
TARGET = 1.3
CLAIMED = 10
READY = 10_000
"""Messages to claim from, where their number is not what varies."""
LEASED = 10_000
GROUPED = 100_000
BURST = 100_000
POLLS = 20
"""How often an idle consumer looks: enough for prepared statements to have settled on a plan."""
PATIENCE = 3.0
"""Seconds after which a round has seen enough, however few its claims were."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How often to measure, how much each time, and how many rows are many."""

    rounds: int
    claims: int
    few: int
    many: int


FULL = Sizes(rounds=9, claims=100, few=10_000, many=1_000_000)
QUICK = Sizes(rounds=5, claims=30, few=10_000, many=100_000)


def names(backend: Backend) -> list[str]:
    """All benchmarks of this file."""
    return [
        *("flat-ready", "flat-delayed", "flat-archived", "flat-leased"),
        *("flat-grouped", "flat-burst"),
    ]


def measure(
    backend: Backend, wanted: list[str], make_site: MakeSite, *, quick: bool
) -> Iterator[Result]:
    """Run benchmarks, one after the other."""
    sizes = QUICK if quick else FULL
    for name in wanted:
        label, few, many = _pair(name, make_site, sizes)
        with closing(few), closing(many):
            times = [
                (few.claim_time(sizes.claims), many.claim_time(sizes.claims))
                for _ in range(sizes.rounds)
            ]
        yield Result(backend, label, "µs", [t[0] for t in times], [t[1] for t in times], TARGET)


def _pair(name: str, make_site: MakeSite, sizes: Sizes) -> tuple[str, _Subject, _Subject]:
    state = name.removeprefix("flat-")
    here, there = make_site(f"{state}_few"), make_site(f"{state}_many")
    if state == "burst":
        full = {"ready": BURST}
        label = f"{name} {_short(BURST)}"
        return label, _Subject(here, full), _Subject(there, full, polled_before=True)
    if state == "grouped":
        few, many = {"ready": READY}, {"grouped": GROUPED}
        label = f"{name} {_short(READY)} → {_short(GROUPED)} in {_short(GROUPED // IN_A_GROUP)}"
        return label, _Subject(here, few), _Subject(there, many)
    few, many = (0, LEASED) if state == "leased" else (sizes.few, sizes.many)
    return (
        f"{name} {_short(few)} → {_short(many)}",
        _Subject(here, {"ready": READY} | {state: few}),
        _Subject(there, {"ready": READY} | {state: many}),
    )


def _short(rows: int) -> str:
    return f"{rows // 1_000_000}M" if rows >= 1_000_000 else f"{rows // 1000}k" if rows else "0"


class _Subject:
    """A queue with so many rows in each state, and a consumer of it."""

    def __init__(self, site: Site, rows: dict[str, int], *, polled_before: bool = False) -> None:
        self._site = site
        self._store = site.store_without_fsync()
        self._consumer = self._store.consumer(QUEUE, lease=LEASE)
        self._settles = not polled_before
        if polled_before:
            site.settle()
            for _ in range(POLLS):
                self._consumer.dequeue(CLAIMED)
        site.fill(**rows)

    def claim_time(self, claims: int) -> float:
        """The median over so many claims, in microseconds."""
        if self._settles:
            self._site.settle()
        else:
            self._site.flush()
        times: list[float] = []
        deadline = time.monotonic() + PATIENCE
        while len(times) < claims and time.monotonic() < deadline:
            times.append(self._claim())
        return median(times) * 1e6

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
