"""`pgqrs schedule …`: what is enqueued again and again."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from pgqrs import MissedTicks
from pgqrs.cli import parameters
from pgqrs.cli.output import print_json, print_table
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
        ["name", "queue", "when", "time zone", "paused", "next", "last"],
        (
            (
                s.name,
                s.queue,
                s.cron or f"{s.every:g} s",
                s.timezone,
                s.paused,
                s.next_at,
                s.last_at,
            )
            for s in found
        ),
        empty="There are no schedules.",
    )


@schedule.command()
@NAME
@click.option("--cron", help='An expression of five fields, such as "0 3 * * *".')
@click.option("--every", type=parameters.duration, help="An interval instead, such as 15m.")
@click.option("--timezone", default="UTC", help="In which the expression is meant.")
@click.option("--queue", required=True, help="Where to enqueue.")
@click.option("--payload", required=True, help="What to enqueue, as JSON.")
@click.option(
    "--missed",
    type=click.Choice([str(policy) for policy in MissedTicks]),
    default="one",
    help="What to do about ticks that came while no worker ran.",
)
@click.option("--replace", is_flag=True, help="Replace a schedule of this name.")
@click.pass_obj
def create(target: Target, /, name: str, payload: str, **options: Any) -> None:
    """Make a schedule."""
    try:
        value = json.loads(payload)
    except ValueError as exc:
        raise click.BadParameter(f"--payload is not JSON: {exc}") from None
    with target.open() as store:
        made = store.schedules.create(name, payload=value, **options)
    click.echo(f"Schedule {name} ticks at {made.next_at.isoformat()}.")


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
    click.echo(f"Enqueued message {id}.")


@schedule.command()
@NAME
@click.option("--from", "start", type=parameters.moment, required=True, help="From this time on.")
@click.option("--to", "end", type=parameters.moment, required=True, help="Up to this time.")
@click.pass_obj
def backfill(target: Target, name: str, start: datetime, end: datetime) -> None:
    """Enqueue the ticks of a time that is past."""
    with target.open() as store:
        ids = store.schedules.backfill(name, start, end)
    click.echo(f"Enqueued {len(ids)} message(s).")


@schedule.command()
@NAME
@click.pass_obj
def delete(target: Target, name: str) -> None:
    """Forget a schedule."""
    with target.open() as store:
        store.schedules.delete(name)
    click.echo(f"Schedule {name} is forgotten.")
