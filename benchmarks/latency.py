"""From enqueue to the start of the handler, for a consumer that has nothing to do; and what it costs
to have nothing to do.

The clock starts before `enqueue` is called, so a durable commit is part of it, and stops when the
handler gets the message, which is claimed by then. `wakeup-same` is a thread of the producer's own
process, `wakeup-across` another process. The raw side is what an expert would write for nothing
else: in the same process an `Event`, across processes `LISTEN` and `NOTIFY`, or on SQLite a look at
`data_version` every millisecond.

`idle` is a process with one consumer that waits: its statements per second, and the share of a core
it uses.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import psycopg
from sqlalchemy import Engine, event

from benchmarks.consumers import processes
from benchmarks.driver import LEASE, QUEUE, Backend, Driver
from benchmarks.raw import RawPostgres
from benchmarks.report import Result
from benchmarks.sides import open_driver
from benchmarks.sites import MakeSite, Site
from pgqrs import Store

COLUMNS = ("raw", "pgqrs")
TARGETS: dict[Backend, float] = {"postgres": 5000.0, "sqlite": 8000.0}
"""Microseconds, for the median."""
MOST_STATEMENTS = 5.0
"""Per second and idle process."""
LOOK_EVERY = 0.001
CHANNEL = "raw"
Tell = Callable[[Any], object]


def names(backend: Backend) -> list[str]:
    """All benchmarks of this file."""
    return ["wakeup-same", "wakeup-across", "idle"]


def measure(
    backend: Backend, wanted: list[str], make_site: MakeSite, *, quick: bool
) -> Iterator[Result]:
    """Run benchmarks, one after the other."""
    rounds, samples, idle_for = (3, 20, 10.0) if quick else (7, 50, 30.0)
    for name in wanted:
        site = make_site(name.replace("-", "_"))
        if name == "idle":
            yield from _idle(site, idle_for)
        else:
            yield from _wakeups(site, name, rounds, samples)


def _wakeups(site: Site, name: str, rounds: int, samples: int) -> Iterator[Result]:
    across = name == "wakeup-across"
    sides = (_raw, _pgqrs)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(rounds):  # in turns, each alone: the other would hear and claim as well
        for taken, side in zip(times, sides, strict=True):
            with ExitStack() as stack:
                sample = side(stack, site, across)
                for _ in range(5):  # to warm up
                    sample()
                taken.append([sample() for _ in range(samples)])
    for label, of_round, target in (
        ("p50", median, TARGETS[site.backend]),
        ("p95", lambda round: quantiles(round, n=20)[-1], None),
    ):
        raw, pgqrs = ([of_round(round) for round in taken] for taken in times)
        yield Result(site.backend, f"{name} {label}", "µs", raw, pgqrs, None, at_most=target)


class _Listener:
    """Whoever waits, in a thread or a process of its own; ends at the message that says so."""

    def __init__(self, across: bool, target: Callable[..., None], *args: Any) -> None:
        self._here, there = Pipe()
        start = processes.Process if across else threading.Thread
        self._waiting = start(target=target, args=(there, *args), daemon=True)
        self._waiting.start()
        self._here.recv()

    def sample(self, enqueue: Callable[[Any], object]) -> float:
        """Microseconds from enqueue to handler."""
        time.sleep(random.uniform(0.03, 0.05))  # until it waits again
        enqueue({"at": time.monotonic_ns()})
        return float(self._here.recv())

    def end(self, enqueue: Callable[[Any], object]) -> None:
        enqueue({"at": None})
        self._waiting.join()


def _handle(there: Connection, payload: dict[str, Any]) -> bool:
    """The handler: says how old the message is. Returns whether to go on."""
    if payload["at"] is None:
        return False
    there.send((time.monotonic_ns() - payload["at"]) / 1000)
    return True


# pgqrs


def _pgqrs(stack: ExitStack, site: Site, across: bool) -> Callable[[], float]:
    store = stack.enter_context(Store(site.dsn))
    producer = store.producer(QUEUE)
    listener = _Listener(across, _wait_pgqrs, site.dsn if across else store)
    stack.callback(listener.end, producer.enqueue)
    return lambda: listener.sample(producer.enqueue)


def _wait_pgqrs(there: Connection, target: str | Store) -> None:
    store = Store(target) if isinstance(target, str) else target
    with store.consumer(QUEUE, lease=LEASE) as consumer:
        there.send("ready")
        for message in consumer:
            going_on = _handle(there, message.payload)
            consumer.ack(message)
            if not going_on:
                break
    if isinstance(target, str):
        store.close()


# Raw


def _raw(stack: ExitStack, site: Site, across: bool) -> Callable[[], float]:
    driver = stack.enter_context(closing(open_driver("raw", site.backend, site.dsn)))
    rung = threading.Event()
    if not across:
        listener = _Listener(across, _wait_raw_event, site.backend, site.dsn, rung)
    elif site.backend == "postgres":
        listener = _Listener(across, _wait_raw_notify, site.dsn)
    else:
        listener = _Listener(across, _wait_raw_file, site.dsn)

    def enqueue(payload: Any) -> None:
        if across and isinstance(driver, RawPostgres):
            driver.enqueue_and_notify(payload, CHANNEL)
        else:
            driver.enqueue(payload)
            rung.set()

    stack.callback(listener.end, enqueue)
    return lambda: listener.sample(enqueue)


def _claim_raw(there: Connection, driver: Driver) -> bool:
    for claimed in driver.claim(1):
        going_on = _handle(there, claimed.payload)
        driver.ack([claimed])
        return going_on
    return True


def _wait_raw_event(there: Connection, backend: Backend, dsn: str, rung: threading.Event) -> None:
    with closing(open_driver("raw", backend, dsn)) as driver:
        there.send("ready")
        going_on = True
        while going_on:
            rung.wait()
            rung.clear()
            going_on = _claim_raw(there, driver)


def _wait_raw_notify(there: Connection, dsn: str) -> None:
    with (
        closing(open_driver("raw", "postgres", dsn)) as driver,
        psycopg.connect(dsn, autocommit=True) as listener,
    ):
        listener.execute(f"LISTEN {CHANNEL}".encode())
        there.send("ready")
        for _ in listener.notifies():
            if not _claim_raw(there, driver):
                return


def _wait_raw_file(there: Connection, dsn: str) -> None:
    with (
        closing(open_driver("raw", "sqlite", dsn)) as driver,
        closing(sqlite3.connect(dsn.removeprefix("sqlite:///"))) as watch,
    ):
        there.send("ready")
        seen, going_on = None, True
        while going_on:
            (now,) = watch.execute("PRAGMA data_version").fetchone()
            if now == seen:
                time.sleep(LOOK_EVERY)
                continue
            seen = now
            going_on = _claim_raw(there, driver)


# Idle


def _idle(site: Site, seconds: float) -> Iterator[Result]:
    here, there = Pipe()
    waiting = processes.Process(target=_wait_and_count, args=(there, site.dsn, seconds))
    waiting.start()
    statements, cpu = here.recv()
    waiting.join()
    most = MOST_STATEMENTS
    yield Result(site.backend, "idle statements/s", "at rest", [], [statements], None, at_most=most)
    yield Result(site.backend, "idle % of a core", "at rest", [], [cpu], None)


def _wait_and_count(there: Connection, dsn: str, seconds: float) -> None:
    statements = 0

    def count(*_: Any) -> None:
        nonlocal statements
        statements += 1

    with Store(dsn) as store, store.consumer(QUEUE) as consumer:
        consumer.dequeue(wait=2)  # to get past the beginning
        event.listen(Engine, "before_cursor_execute", count)
        began, used = time.monotonic(), time.process_time()
        consumer.dequeue(wait=seconds)
        took = time.monotonic() - began
        there.send((statements / took, 100 * (time.process_time() - used) / took))
