"""The command itself: its options, and which commands there are."""

from __future__ import annotations

import io
import sys

import click

import pgqrs
from pgqrs.cli.archive import archive, dead, purge_archive, replay
from pgqrs.cli.demo import demo, demo_consumer
from pgqrs.cli.errors import Commands
from pgqrs.cli.messages import dequeue, enqueue
from pgqrs.cli.moving import copy
from pgqrs.cli.queues import queue, stats
from pgqrs.cli.s3 import s3
from pgqrs.cli.schedules import schedule
from pgqrs.cli.spark import spark
from pgqrs.cli.streams import stream
from pgqrs.cli.target import Target, name_of
from pgqrs.cli.tasks import task
from pgqrs.cli.top import top
from pgqrs.cli.workers import worker
from pgqrs.cli.workflows import workflow


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--dsn",
    envvar="PGQRS_DSN",
    show_envvar=True,
    metavar="URL",
    help="The database: sqlite:///app.db or postgresql://user@host/name. "
    "Without it, a SQLite file in your data directory.",
)
@click.option(
    "--schema",
    envvar="PGQRS_SCHEMA",
    show_envvar=True,
    help="The PostgreSQL schema that holds the tables.",
)
@click.version_option(pgqrs.__version__, package_name="pgqrs")
@click.pass_context
def app(context: click.Context, dsn: str | None, schema: str | None) -> None:
    """Durable queues in the database you already have.

    New here? `pgqrs demo` shows in a few seconds what it does.
    """
    context.obj = Target(dsn, schema)


@app.command()
@click.pass_obj
def install(target: Target) -> None:
    """Create the tables, or upgrade them to what this version needs."""
    with target.open(upgrade=True) as store:
        store.admin().install()
        click.echo(f"The tables in {name_of(store)} are up to date.")


@app.command()
@click.pass_obj
def verify(target: Target) -> None:
    """Check that the tables, columns and indexes are what this version needs."""
    with target.open() as store:
        store.admin().verify()
        click.echo(f"The tables in {name_of(store)} are up to date.")


for command in (queue, enqueue, dequeue, task, workflow, schedule, worker, stream, stats, top):
    app.add_command(command)
for command in (demo, demo_consumer, copy, s3, spark):
    app.add_command(command)
for command in (archive, dead, replay, purge_archive):
    queue.add_command(command)


def run() -> None:
    """Run the command line of this process."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            # A character that the console cannot show is no reason to fail.
            output.reconfigure(errors="backslashreplace")
    app(prog_name="pgqrs")
