"""`python -m benchmarks.workflows`: runs of five trivial steps, per second, and SQL per step.

*raw* writes the same journal by hand, in autocommit: a run, a row for each step, the end. *inline* is
`run_inline`, one run at a time; *worker* starts all runs and lets a worker of eight threads run them.
Where `dbos` is installed (`nox -s bench-peers`), the same workflow runs there, on the same server or a
file beside; one at a time, and through its queue. All wait for the disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event

import pgqrs
from benchmarks.driver import Backend
from benchmarks.sites import Site, sites

STEPS = 5


@pgqrs.step
def add(n: int) -> int:
    return n + 1


@pgqrs.workflow
def count(n: int) -> int:
    for _ in range(STEPS):
        n = add(n)
    return n


def per_second(runs: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return runs / (time.perf_counter() - began)


# By hand

TABLES = (
    "CREATE TABLE raw_runs (id INTEGER PRIMARY KEY, status TEXT, output TEXT)",
    "CREATE TABLE raw_steps (run INTEGER, step TEXT, output TEXT, PRIMARY KEY (run, step))",
)


def raw(site: Site, runs: int) -> float:
    for table in TABLES:
        site.run(table)
    mark = "%s" if site.backend == "postgres" else "?"
    with closing(_connect(site)) as connection:

        def one(n: int) -> None:
            connection.execute(
                f"INSERT INTO raw_runs VALUES ({mark}, 'running', NULL)".encode()
                if site.backend == "postgres"
                else f"INSERT INTO raw_runs VALUES ({mark}, 'running', NULL)",
                (n,),
            )
            for step in range(STEPS):
                text = f"INSERT INTO raw_steps VALUES ({mark}, {mark}, {mark})"
                values = (n, f"add#{step}", str(step))
                connection.execute(text.encode() if site.backend == "postgres" else text, values)
            text = f"UPDATE raw_runs SET status = 'completed', output = '5' WHERE id = {mark}"
            connection.execute(text.encode() if site.backend == "postgres" else text, (n,))

        return per_second(runs, lambda: [one(n) for n in range(runs)])


def _connect(site: Site) -> Any:
    if site.backend == "postgres":
        return psycopg.connect(site.dsn, autocommit=True)
    connection = sqlite3.connect(site.dsn.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


# pgqrs


def inline(site: Site, runs: int) -> float:
    with pgqrs.Store(site.dsn) as store:
        count.run_inline(0, store=store)
        return per_second(runs, lambda: [count.run_inline(0, store=store) for _ in range(runs)])


def one_by_one(site: Site, runs: int) -> float:
    """A run is started, claimed and run to its end; then the next."""
    with pgqrs.Store(site.dsn) as store:
        store.admin().create_queue(count.queue, if_not_exists=True)
        with store.consumer(count.queue) as consumer:

            def one() -> None:
                count.start(0, store=store)
                (message,) = consumer.dequeue()
                store.workflows.execute(message, [count])

            one()
            return per_second(runs, lambda: [one() for _ in range(runs)])


def worker(site: Site, runs: int) -> float:
    with pgqrs.Store(site.dsn) as store:

        def all_of_them() -> None:
            started = [count.start(0, store=store) for _ in range(runs)]
            pgqrs.Worker(store, workflows=[count], concurrency=8).run(until_empty=True)
            assert started[-1].result(timeout=60) == STEPS

        return per_second(runs, all_of_them)


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


def dbos(site: Site, runs: int) -> tuple[float, float]:
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
    try:
        queue = DBOS.register_queue("bench", worker_concurrency=8)
        count_there(0)
        alone = per_second(runs, lambda: [count_there(0) for _ in range(runs)])

        def queued() -> None:
            for handle in [queue.enqueue(count_there, 0) for _ in range(runs)]:
                handle.get_result()

        return alone, per_second(runs, queued)
    finally:
        DBOS.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workflows", description=__doc__)
    parser.add_argument("--backend", choices=("all", "postgres", "sqlite"), default="all")
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    backends: tuple[Backend, ...] = ("sqlite", "postgres")
    table = Table("backend", "what", "runs/s", "of raw", "of DBOS, the same way")
    notes: list[str] = []
    for backend in backends:
        if options.backend in ("all", backend):
            with sites(backend) as make_site:
                notes.append(_measure(backend, make_site(f"wf{backend}"), options.runs, table))
    console = Console()
    console.print(table)
    console.print("\n".join(notes))


def _measure(backend: str, site: Site, runs: int, table: Table) -> str:
    base = raw(site, runs)
    peers = {}
    if importlib.util.find_spec("dbos") is not None:
        peers["one at a time"], peers["queued"] = dbos(site, runs)
    table.add_row(backend, "raw journal, one at a time", f"{base:.0f}", "1", "")
    for what, measure, alike in (
        ("start, claim, run, one at a time", one_by_one, "one at a time"),
        ("run_inline, one at a time", inline, "one at a time"),
        ("started, then a worker of 8", worker, "queued"),
    ):
        rate = measure(site, runs)
        peer = f"{rate / peers[alike]:.1f}" if peers else "-"
        table.add_row(backend, what, f"{rate:.0f}", f"{rate / base:.2f}", peer)
    for what, rate in peers.items():
        table.add_row(backend, f"DBOS, {what}", f"{rate:.0f}", f"{rate / base:.2f}", "1")
    each, around = statements(site)
    return f"{backend}: {each:g} statements for each step, {around:g} for the run around them"


if __name__ == "__main__":
    main()
