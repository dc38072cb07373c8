"""Operations per second: pgqrs against hand-written SQL, in turns, on the same tables.

`enqueue` is one by one, `enqueue_many` a thousand at a time. `drain-100x4` is 4 processes which
claim and ack a hundred at a time until a full queue is empty. `buffer-100x4` compares that with the
same through buffers, which hand out and take acks one by one, and `limited-100x4` with the same on a
queue with limits. `threads` compares one thread that
enqueues with 16 on the same store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from benchmarks.consumers import Consumers
from benchmarks.driver import Backend, Driver, Side, payloads
from benchmarks.report import Result
from benchmarks.sides import SIDES, PgqrsDriver, open_driver
from benchmarks.sites import MakeSite, Site

COLUMNS = ("baseline /s", "pgqrs /s")
BATCH = 1000
THREADS = 16
Round = Callable[[], float]
"""Measures once, and returns a rate per second."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How often to measure, and how much each time."""

    rounds: int
    singles: int
    batches: int
    drained: dict[int, int]
    """Batch size → messages."""


FULL = Sizes(
    rounds=7, singles=2000, batches=20, drained={1: 2000, 10: 10_000, 100: 30_000, 500: 50_000}
)
QUICK = Sizes(rounds=5, singles=200, batches=3, drained={1: 200, 10: 1000, 100: 4000, 500: 8000})
SIDES_OF: dict[str, tuple[Side, Side]] = {
    "drain": SIDES,
    "buffer": ("pgqrs", "buffer"),
    "limited": ("pgqrs", "limited"),
}
"""What a drain compares."""
LIMITED = {"limited-1x4": 0.4, "limited-10x4": 0.4, "limited-100x4": 0.4}
TARGETS: dict[Backend, dict[str, float]] = {
    "postgres": {
        "enqueue": 0.65,
        "enqueue_many": 0.85,
        "drain-1x1": 0.65,
        "drain-100x1": 0.75,
        "drain-100x4": 0.75,
        **LIMITED,
    },
    "sqlite": {
        "enqueue": 0.5,
        "enqueue_many": 0.75,
        "drain-100x1": 0.75,
        "drain-100x4": 0.75,
        **LIMITED,
        "threads": 2.0,
    },
}


def names(backend: Backend) -> list[str]:
    """All benchmarks of this file."""
    drains = [f"drain-{batch}x{consumers}" for consumers in (1, 4) for batch in FULL.drained]
    buffers = [f"buffer-100x{consumers}" for consumers in (1, 4)]
    limited = [f"limited-{batch}x4" for batch in (1, 10, 100)]
    threads = ["threads"] if backend == "sqlite" else []
    return ["enqueue", "enqueue_many", *drains, *buffers, *limited, *threads]


def measure(
    backend: Backend, wanted: list[str], make_site: MakeSite, *, quick: bool
) -> Iterator[Result]:
    """Run benchmarks, one after the other."""
    sizes = QUICK if quick else FULL
    every_side = get_args(Side)
    sites = {side: make_site(f"throughput_{side}") for side in every_side} if wanted else {}
    if sites:
        sites["limited"].limit()
    for name in wanted:
        with _contest(name, sites, sizes) as (baseline, pgqrs):
            rates = _in_turns(baseline, pgqrs, sizes.rounds)
        yield Result(backend, name, "per second", *rates, TARGETS[backend].get(name))


def _in_turns(baseline: Round, pgqrs: Round, rounds: int) -> tuple[list[float], list[float]]:
    """Whatever else the machine does meanwhile, it does it to both."""
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            rates[which].append((baseline, pgqrs)[which]())
    return rates


@contextmanager
def _contest(name: str, sites: dict[Side, Site], sizes: Sizes) -> Iterator[tuple[Round, Round]]:
    """The two rounds to compare."""
    kind, _, shape = name.partition("-")
    with ExitStack() as stack:
        if kind == "threads":
            yield _thread_rounds(stack, sites["pgqrs"], sizes.singles)
        elif kind in SIDES_OF:
            batch, consumers = map(int, shape.split("x"))
            sides = SIDES_OF[kind]
            yield _drain_rounds(stack, sites, sides, batch, consumers, sizes.drained[batch])
        else:
            amount = sizes.singles if kind == "enqueue" else sizes.batches * BATCH
            work = _one_by_one if kind == "enqueue" else _in_batches
            yield _enqueue_rounds(stack, sites, work, amount)


# Enqueueing

Work = Callable[[list[Any]], object]


def _one_by_one(driver: Driver, messages: list[Any]) -> None:
    for payload in messages:
        driver.enqueue(payload)


def _in_batches(driver: Driver, messages: list[Any]) -> None:
    for start in range(0, len(messages), BATCH):
        driver.enqueue_many(messages[start : start + BATCH])


def _enqueue_rounds(
    stack: ExitStack,
    sites: dict[Side, Site],
    work: Callable[[Driver, list[Any]], None],
    amount: int,
) -> tuple[Round, Round]:
    def round_of(side: Side) -> Round:
        site = sites[side]
        driver = stack.enter_context(closing(open_driver(side, site.backend, site.dsn)))
        work(driver, payloads(BATCH))  # to warm up
        return lambda: _enqueue_rate(site, lambda messages: work(driver, messages), amount)

    return round_of("raw"), round_of("pgqrs")


def _enqueue_rate(site: Site, work: Work, amount: int) -> float:
    messages = payloads(amount)
    site.empty()
    site.settle()
    began = time.perf_counter()
    work(messages)
    took = time.perf_counter() - began
    if (stored := site.count_messages()) != amount:
        raise RuntimeError(f"{amount} messages were enqueued, {stored} are there")
    return amount / took


def _thread_rounds(stack: ExitStack, site: Site, amount: int) -> tuple[Round, Round]:
    driver = stack.enter_context(closing(PgqrsDriver(site.dsn)))
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    amount -= amount % THREADS

    def one(messages: list[Any]) -> None:
        _one_by_one(driver, messages)

    def sixteen(messages: list[Any]) -> None:
        shares = [messages[number::THREADS] for number in range(THREADS)]
        list(pool.map(one, shares))

    sixteen(payloads(BATCH))  # to warm up
    return lambda: _enqueue_rate(site, one, amount), lambda: _enqueue_rate(site, sixteen, amount)


# Draining


def _drain_rounds(
    stack: ExitStack,
    sites: dict[Side, Site],
    sides: tuple[Side, Side],
    batch: int,
    consumers: int,
    amount: int,
) -> tuple[Round, Round]:
    def round_of(side: Side) -> Round:
        workers = Consumers(sites[side], side, consumers=consumers, batch=batch)
        stack.enter_context(workers)
        return lambda: amount / workers.drain(amount)

    return round_of(sides[0]), round_of(sides[1])
