"""`pgqrs schedule …`: what is enqueued again and again."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pgqrs import BackfillProgress, MissedTicks
from pgqrs.cli import parameters
from pgqrs.cli.output import make_console, print_json, print_table
from pgqrs.cli.target import Target

NAME = click.argument("name")


@click.group()
def schedule() -> None:
    """Look after schedules. Workers enqueue their ticks."""


@schedule.command("list")
@parameters.as_json
@click.pass_obj
def list_schedules(target: Target, as_json: bool) -> None:
    """List all schedules and when they tick next."""
    with target.open() as store:
        found = store.schedules.list_schedules()
    if as_json:
        print_json(found)
        return
    print_table(
        ["name", "queue", "workflow", "when", "time zone", "paused", "next", "last", "error"],
        (
            (
                s.name,
                s.queue,
                s.workflow,
                s.cron or f"{s.every:g} s",
                s.timezone,
                s.paused,
                s.next_at,
                s.last_at,
                s.error,
            )
            for s in found
        ),
        empty="There are no schedules.",
    )


@schedule.command()
@NAME
@click.option("--cron", help='An expression of five fields, such as "0 3 * * *".')
@click.option(
    "--seconds", is_flag=True, help="The expression has six fields, the first for seconds."
)
@click.option("--every", type=parameters.duration, help="An interval instead, such as 15m.")
@click.option("--timezone", default="UTC", help="In which the expression is meant.")
@click.option("--queue", help="Where to enqueue; for a workflow: workflows, unless given.")
@click.option("--payload", help="What to enqueue, as JSON.")
@click.option("--workflow", help="Start runs of this workflow instead, by its name.")
@click.option("--args", default="[]", help="The arguments of the workflow, a JSON list.")
@click.option("--kwargs", default="{}", help="Its arguments by name, a JSON object.")
@click.option(
    "--missed",
    type=click.Choice([str(policy) for policy in MissedTicks]),
    default="one",
    help="What to do about ticks that came while no worker ran.",
)
@click.option("--replace", is_flag=True, help="Change a schedule of this name where it differs.")
@click.pass_obj
def create(
    target: Target,
    /,
    name: str,
    payload: str | None,
    workflow: str | None,
    args: str,
    kwargs: str,
    **options: Any,
) -> None:
    """Make a schedule: of messages (--queue and --payload) or of runs (--workflow)."""
    if (payload is None) == (workflow is None):
        raise click.UsageError("give --payload or --workflow, one of them")
    if payload is not None and options["queue"] is None:
        raise click.UsageError("--payload needs a --queue")
    options |= {"args": _json("--args", args, list), "kwargs": _json("--kwargs", kwargs, dict)}
    if payload is not None:
        options["payload"] = _json("--payload", payload, object)
    with target.open() as store:
        made = store.schedules.create(name, workflow=workflow, **options)
    click.echo(f"Schedule {name} ticks at {made.next_at.isoformat()}.")


def _json(option: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"{option} is not JSON: {exc}") from None
    if not isinstance(value, kind):
        raise click.BadParameter(f"{option} is no JSON {'list' if kind is list else 'object'}")
    return value


@schedule.command()
@NAME
@click.pass_obj
def pause(target: Target, name: str) -> None:
    """Let a schedule rest until resumed."""
    with target.open() as store:
        store.schedules.pause(name)
    click.echo(f"Schedule {name} rests.")


@schedule.command()
@NAME
@click.pass_obj
def resume(target: Target, name: str) -> None:
    """Let a schedule tick again."""
    with target.open() as store:
        resumed = store.schedules.resume(name)
    click.echo(f"Schedule {name} ticks at {resumed.next_at.isoformat()}.")


@schedule.command()
@NAME
@click.pass_obj
def trigger(target: Target, name: str) -> None:
    """Enqueue it once now, out of turn."""
    with target.open() as store:
        id = store.schedules.trigger(name)
        is_run = store.schedules.get(name).workflow is not None
    click.echo(f"Started run {id}." if is_run else f"Enqueued message {id}.")


@schedule.command()
@NAME
@click.option("--from", "start", type=parameters.moment, required=True, help="From this time on.")
@click.option("--to", "end", type=parameters.moment, required=True, help="Up to this time.")
@click.pass_obj
def backfill(target: Target, name: str, start: datetime, end: datetime) -> None:
    """Enqueue the ticks of a time that is past.

    If it is interrupted, call it again with the same times: it goes on where it was.
    """
    with target.open() as store, _bar() as bar:
        task = bar.add_task("Enqueueing", total=1.0, count=0)

        def show(progress: BackfillProgress) -> None:
            bar.update(task, completed=progress.done, count=progress.enqueued)

        ids = store.schedules.backfill(name, start, end, progress=show)
        bar.update(task, completed=1.0, count=len(ids))
        what = "message" if store.schedules.get(name).workflow is None else "run"
    click.echo(f"Enqueued {len(ids)} {what}(s).")


def _bar() -> Progress:
    columns = (TextColumn("{task.description} {task.fields[count]}"), BarColumn())
    console = make_console(stderr=True)
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


@schedule.command()
@NAME
@click.pass_obj
def delete(target: Target, name: str) -> None:
    """Forget a schedule."""
    with target.open() as store:
        store.schedules.delete(name)
    click.echo(f"Schedule {name} is forgotten.")
