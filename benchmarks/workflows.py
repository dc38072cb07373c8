"""`python -m benchmarks.workflows`: runs of five trivial steps, per second, and SQL per step.

*raw* writes the same journal by hand, in autocommit: a run, a row for each step, the end. *inline* is
`run_inline`, one run at a time; *worker* starts all runs and lets a worker of eight threads run them.
Where they are installed (`nox -s bench-peers`), the same workflow runs in DBOS, on the same server or
a file beside, one at a time and through its queue; and in absurd. All wait for the disk. All take
turns, so that whatever else the machine does meanwhile, it does it to each of them; the medians are
printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count as numbers
from statistics import median
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event

import pgqrs
from benchmarks.driver import Backend
from benchmarks.sites import Site, sites

STEPS = 5
ROUNDS = 7
Work = Callable[[int], object]
"""So many runs, from start to end."""


@pgqrs.step
def add(n: int) -> int:
    return n + 1


@pgqrs.workflow
def count(n: int) -> int:
    for _ in range(STEPS):
        n = add(n)
    return n


# By hand

TABLES = (
    "CREATE TABLE raw_runs (id INTEGER PRIMARY KEY, status TEXT, output TEXT)",
    "CREATE TABLE raw_steps (run INTEGER, step TEXT, output TEXT, PRIMARY KEY (run, step))",
)
START = "INSERT INTO raw_runs VALUES (?, 'running', NULL)"
STEP = "INSERT INTO raw_steps VALUES (?, ?, ?)"
END = "UPDATE raw_runs SET status = 'completed', output = '5' WHERE id = ?"


@contextmanager
def raw(site: Site) -> Iterator[Work]:
    for table in TABLES:
        site.run(table)
    mark = "%s" if site.backend == "postgres" else "?"
    start, step, end = (text.replace("?", mark) for text in (START, STEP, END))
    ids = numbers()
    with closing(_connect(site)) as connection:

        def some(runs: int) -> None:
            for _ in range(runs):
                id = next(ids)
                connection.execute(start, (id,))
                for number in range(STEPS):
                    connection.execute(step, (id, f"add#{number}", str(number)))
                connection.execute(end, (id,))

        yield some


def _connect(site: Site) -> Any:
    if site.backend == "postgres":
        return psycopg.connect(site.dsn, autocommit=True)
    connection = sqlite3.connect(site.dsn.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


# pgqrs


@contextmanager
def inline(site: Site) -> Iterator[Work]:
    with pgqrs.Store(site.dsn) as store:
        yield lambda runs: [count.run_inline(0, store=store) for _ in range(runs)]


@contextmanager
def one_by_one(site: Site) -> Iterator[Work]:
    """A run is started, claimed and run to its end; then the next."""
    with pgqrs.Store(site.dsn) as store, store.consumer(count.queue) as consumer:

        def some(runs: int) -> None:
            for _ in range(runs):
                count.start(0, store=store)
                (message,) = consumer.dequeue()
                store.workflows.execute(message, [count])

        yield some


@contextmanager
def worker(site: Site) -> Iterator[Work]:
    with pgqrs.Store(site.dsn) as store:

        def some(runs: int) -> None:
            started = [count.start(0, store=store) for _ in range(runs)]
            pgqrs.Worker(store, workflows=[count], concurrency=8).run(until_empty=True)
            assert started[-1].result(timeout=60) == STEPS

        yield some


def statements(site: Site) -> tuple[float, float]:
    """SQL of one more step, and of a run without steps."""
    executed: list[str] = []
    listen = (Engine, "before_cursor_execute", lambda *call: executed.append(call[2]))
    event.listen(*listen)
    try:
        with pgqrs.Store(site.dsn) as store, store.consumer(count.queue) as consumer:
            counts = []
            for many in (0, STEPS):

                @pgqrs.workflow
                def some(many: int = many) -> int:
                    return [add(n) for n in range(many)][-1:] == []

                some.start(store=store)
                (message,) = consumer.dequeue()
                executed.clear()
                store.workflows.execute(message, [some])
                counts.append(len(executed))
    finally:
        event.remove(*listen)
    return (counts[1] - counts[0]) / STEPS, counts[0]


# The peer


@contextmanager
def dbos(site: Site) -> Iterator[tuple[Work, Work]]:
    """One at a time, and through a queue."""
    from dbos import DBOS

    url = site.dsn
    if site.backend == "sqlite":
        url = site.dsn.replace(".db", "-dbos.db")
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})

    @DBOS.step()
    def add_there(n: int) -> int:
        return n + 1

    @DBOS.workflow()
    def count_there(n: int) -> int:
        for _ in range(STEPS):
            n = add_there(n)
        return n

    DBOS.launch()
    queue = DBOS.register_queue("bench", worker_concurrency=8)

    def queued(runs: int) -> None:
        for handle in [queue.enqueue(count_there, 0) for _ in range(runs)]:
            handle.get_result()

    try:
        yield lambda runs: [count_there(0) for _ in range(runs)], queued
    finally:
        DBOS.destroy()


@contextmanager
def absurd(site: Site) -> Iterator[Work]:
    """Spawned, claimed and run, one at a time; PostgreSQL only."""
    from absurd_sdk import Absurd
    from absurdctl import BUNDLED_SCHEMA_SQL

    site.run(BUNDLED_SCHEMA_SQL)
    app = Absurd(site.dsn, queue_name="bench")
    app.create_queue()

    @app.register_task("count")
    def count_there(params: Any, context: Any) -> int:
        n = params["n"]
        for _ in range(STEPS):
            n = context.step("add", lambda n=n: n + 1)
        return n

    def some(runs: int) -> None:
        for _ in range(runs):
            app.spawn("count", {"n": 0})
            app.work_batch()

    with closing(app):
        yield some


# Measuring

RAW, ALONE, QUEUED = "raw journal, one at a time", "DBOS, one at a time", "DBOS, queued"
ABSURD = "absurd, spawned and run one at a time"
PEERS = {
    "start, claim, run, one at a time": (ALONE, ABSURD),
    "run_inline, one at a time": (ALONE, ABSURD),
    "started, then a worker of 8": (QUEUED,),
}
"""What is to be compared with what."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workflows", description=__doc__)
    parser.add_argument("--backend", choices=("all", "postgres", "sqlite"), default="all")
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    backends: tuple[Backend, ...] = ("sqlite", "postgres")
    table = Table("backend", "what", "runs/s", "of raw", "of peers")
    notes: list[str] = []
    for backend in backends:
        if options.backend in ("all", backend):
            with sites(backend) as make_site:
                site = make_site(f"wf{backend}")
                _add_rows(table, backend, _measure(site, options.runs))
                each, around = statements(site)
            notes.append(f"{backend}: {each:g} statements a step, {around:g} for the run around it")
    console = Console()
    console.print(table)
    console.print("\n".join(notes))


def _measure(site: Site, runs: int) -> dict[str, float]:
    """Runs per second of each contender."""
    with pgqrs.Store(site.dsn) as store:
        store.admin().create_queue(count.queue, if_not_exists=True)
    with ExitStack() as stack:
        contenders = {RAW: stack.enter_context(raw(site))}
        for what, contender in zip(PEERS, (one_by_one, inline, worker), strict=True):
            contenders[what] = stack.enter_context(contender(site))
        if importlib.util.find_spec("dbos") is not None:
            contenders[ALONE], contenders[QUEUED] = stack.enter_context(dbos(site))
        if site.backend == "postgres" and importlib.util.find_spec("absurdctl") is not None:
            contenders[ABSURD] = stack.enter_context(absurd(site))
        rates: dict[str, list[float]] = {what: [] for what in contenders}
        share = max(1, runs // ROUNDS)
        for work in contenders.values():
            work(min(share, 10))  # to warm up
        for number in range(ROUNDS):
            for what in list(contenders)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                contenders[what](share)
                rates[what].append(share / (time.perf_counter() - began))
    return {what: median(found) for what, found in rates.items()}


def _add_rows(table: Table, backend: str, rates: dict[str, float]) -> None:
    for what, rate in rates.items():
        peers = [
            f"{rate / rates[peer]:.1f} x {peer.partition(',')[0]}"
            for peer in PEERS.get(what, ())
            if peer in rates
        ]
        table.add_row(
            backend, what, f"{rate:.0f}", f"{rate / rates[RAW]:.2f}", "\n".join(peers) or "-"
        )


if __name__ == "__main__":
    main()
