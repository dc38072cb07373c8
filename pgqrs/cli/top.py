"""`pgqrs top`: what goes on, live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import click
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table

from pgqrs import QueueStats, Store, WorkerInfo
from pgqrs.cli import parameters
from pgqrs.cli.output import as_duration, cell, make_console
from pgqrs.cli.target import Target, name_of


@click.command()
@click.option("--every", type=parameters.duration, default="1s", help="Look so often.")
@click.option("--looks", type=click.IntRange(min=1), help="End after so many; else with Ctrl-C.")
@click.pass_obj
def top(target: Target, every: float, looks: int | None) -> None:
    """Show queues, their rates, and workers, until interrupted."""
    with target.open() as store, Live(console=make_console(), auto_refresh=False) as live:
        before, asked, count = _ended(store.admin().stats()), time.monotonic(), 0
        while looks is None or count < looks:
            time.sleep(every)
            stats, now = store.admin().stats(), time.monotonic()
            ended = _ended(stats)
            rates = {
                name: (done - before.get(name, done)) / (now - asked)
                for name, done in ended.items()
            }
            live.update(_screen(store, stats, rates, store.admin().list_workers()), refresh=True)
            before, asked, count = ended, now, count + 1


def _ended(stats: Sequence[QueueStats]) -> dict[str, int]:
    return {queue.queue: sum(queue.archived.values()) for queue in stats}


def _screen(
    store: Store,
    stats: Sequence[QueueStats],
    rates: Mapping[str, float],
    workers: Sequence[WorkerInfo],
) -> Group:
    queues = _table(
        name_of(store), ["queue", "ready", "delayed", "in flight", "ended", "per s", "oldest"]
    )
    for found in stats:
        queues.add_row(
            cell(found.queue + (" (paused)" if found.paused else "")),
            *map(str, (found.ready, found.delayed, found.leased, sum(found.archived.values()))),
            f"{rates.get(found.queue, 0.0):.1f}",
            cell(as_duration(found.oldest_age)),
        )
    present = _table("workers", ["id", "queue", "host", "pid", "status", "silent for"])
    for worker in workers:
        present.add_row(
            *map(cell, (worker.id, worker.queue or "several", worker.hostname, worker.pid)),
            cell(worker.status if worker.is_alive() else f"{worker.status}, dead"),
            cell(as_duration(worker.silent_for)),
        )
    return Group(queues, present)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in headings:
        table.add_column(heading)
    return table
