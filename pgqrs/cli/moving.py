"""`pgqrs copy`: moving house."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pgqrs import CopyProgress
from pgqrs.cli import parameters
from pgqrs.cli.output import make_console, print_json, print_table
from pgqrs.cli.target import Target, name_of


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--from-schema", help="The PostgreSQL schema to copy from.")
@click.option("--to-schema", help="The PostgreSQL schema to copy to.")
@parameters.as_json
def copy(
    source: str, target: str, from_schema: str | None, to_schema: str | None, as_json: bool
) -> None:
    """Copy everything from one database to another, with all ids.

    FROM and TO are URLs. The tables in TO are created. Stop producers and consumers before. If it is
    interrupted, call it again: it goes on where it was. At the end both sides are compared.
    """
    with (
        Target(source, from_schema).open() as here,
        Target(target, to_schema).open(upgrade=True) as there,
        _bar() as bar,
    ):
        here.admin().verify()
        task = bar.add_task("looking", total=None)

        def show(progress: CopyProgress) -> None:
            what = f"{progress.doing} {progress.table}"
            bar.update(task, description=what, completed=progress.done, total=progress.total)

        copied = here.admin().copy_to(there, progress=show)
        names = name_of(here), name_of(there)
    if as_json:
        print_json([asdict(table) for table in copied])
        return
    rows = [(table.table, table.rows, table.checksum) for table in copied]
    print_table(["table", "rows", "checksum, the same on both sides"], rows, empty="")
    click.echo(f"Copied {names[0]} to {names[1]}.")


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = make_console(stderr=True)
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
