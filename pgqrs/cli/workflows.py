"""`pgqrs workflow …`: runs, what they have done, and telling them what to do."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from pgqrs import RunInfo, RunStatus, StepInfo
from pgqrs.cli import parameters
from pgqrs.cli.output import as_duration, as_text, cell, print_json, print_table
from pgqrs.cli.target import Target
from pgqrs.workflows.decorators import QUEUE

ID = click.argument("id", type=int)


@click.group()
def workflow() -> None:
    """Look at runs of workflows, start them, and tell them what to do."""


@workflow.command("list")
@click.option("--name", help="Runs of this workflow alone.")
@click.option(
    "--status",
    type=click.Choice([status.value for status in RunStatus]),
    help="Runs that stand like this.",
)
@click.option("--key", help="The run of this key.")
@click.option("--parent", type=int, help="The children of this run.")
@parameters.limit
@click.option("--before", type=int, help="The last id of the page before.")
@parameters.as_json
@click.pass_obj
def list_runs(
    target: Target,
    name: str | None,
    status: str | None,
    key: str | None,
    parent: int | None,
    limit: int,
    before: int | None,
    as_json: bool,
) -> None:
    """List runs, the newest first."""
    with target.open() as store:
        found = store.workflows.list_runs(
            name=name, status=status, key=key, parent_id=parent, n=limit, before=before
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ["id", "workflow", "key", "status", "created", "ended", "wakes up", "error"],
        (
            (
                run.id,
                run.name,
                run.key,
                run.status,
                run.created_at,
                run.ended_at,
                run.wake_at,
                _last_line(run.error),
            )
            for run in found
        ),
        empty="There are no such runs.",
    )


@workflow.command()
@ID
@parameters.as_json
@click.pass_obj
def show(target: Target, id: int, as_json: bool) -> None:
    """Show the run ID, and what it has done and when."""
    with target.open() as store:
        run, steps = store.workflows.get(id), store.workflows.steps(id)
        events = store.workflows.events(id)
    if as_json:
        print_json({"run": run, "steps": steps, "events": events})
        return
    for label, value in _facts(run):
        if value is not None:
            click.echo(f"{label + ':':<12}{cell(value)}")
    print_table(
        ["+", "took", "step", "status", "attempts", "result"],
        (_line(run, step) for step in steps),
        empty="It has done nothing yet.",
    )
    if events:
        print_table(
            ["event", "value", "at"],
            ((event.name, as_text(event.payload), event.created_at) for event in events),
            empty="",
        )


def _facts(run: RunInfo) -> list[tuple[str, Any]]:
    return [
        ("run", f"{run.id} of {run.name}"),
        ("key", run.key),
        ("status", run.status),
        ("input", as_text(run.input)),
        ("output", None if run.status is not RunStatus.COMPLETED else as_text(run.output)),
        ("error", _last_line(run.error)),
        ("version", run.version),
        ("queue", run.queue),
        ("parent", run.parent_id),
        ("forked from", run.forked_from),
        ("created", run.created_at),
        ("started", run.started_at),
        ("ended", run.ended_at),
        ("wakes up", run.wake_at),
        ("deadline", run.deadline_at),
    ]


def _line(run: RunInfo, step: StepInfo) -> tuple[object, ...]:
    """A step in the timeline: when it began, how long it took, what came of it."""
    since = step.started_at or step.completed_at
    result = _last_line(step.error) if step.error is not None else as_text(step.output)
    return (
        None if since is None else _apart(run.created_at, since),
        None if step.completed_at is None or since is None else _apart(since, step.completed_at),
        step.step_id,
        step.status,
        step.attempts,
        result if step.wake_at is None else f"until {cell(step.wake_at)}",
    )


def _apart(first: datetime, second: datetime) -> str:
    seconds = (second - first).total_seconds()
    return f"{seconds:.3f} s" if seconds < 60 else cell(as_duration(seconds))


@workflow.command()
@click.argument("name")
@click.argument("arguments", metavar="ARGUMENT...", nargs=-1)
@click.option("--kwargs", default="{}", help="Further arguments by name: a JSON object.")
@click.option("--key", help="Names the run: starting again with it returns the run that is there.")
@click.option("--queue", default=QUEUE, help="The queue that workers of this workflow serve.")
@parameters.as_json
@click.pass_obj
def start(
    target: Target,
    name: str,
    arguments: tuple[str, ...],
    kwargs: str,
    key: str | None,
    queue: str,
    as_json: bool,
) -> None:
    """Start a run of the workflow NAME. Each ARGUMENT is a JSON value."""
    input = {"args": [_json(text) for text in arguments], "kwargs": _json(kwargs)}
    if not isinstance(input["kwargs"], dict):
        raise click.BadParameter("--kwargs is a JSON object, such as '{\"limit\": 10}'")
    with target.open() as store:
        run = store.workflows.create(name, input, key=key, queue=queue)
    _said(run.id, f"Run {run.id} of {name} is started.", as_json)


@workflow.command()
@ID
@parameters.as_json
@click.pass_obj
def cancel(target: Target, id: int, as_json: bool) -> None:
    """Let the run ID and its children end: at once, or at their next steps."""
    with target.open() as store:
        status = store.workflows.cancel(id)
    if as_json:
        print_json({"id": id, "status": status})
    else:
        click.echo(f"Run {id} is {status}.")


@workflow.command()
@ID
@click.pass_obj
def pause(target: Target, id: int) -> None:
    """Let the run ID stop at its next step until it is resumed."""
    with target.open() as store:
        store.workflows.pause(id)
    click.echo(f"Run {id} is paused.")


@workflow.command()
@click.argument("id", type=int, required=False)
@click.option("--all", "every", is_flag=True, help="All paused runs that match the other options.")
@click.option("--name", help="Runs of this workflow alone.")
@click.option("--version", help="Runs that were started with this version alone.")
@click.option("--error", help="Runs with this text in their error alone.")
@click.option(
    "--parked/--not-parked",
    default=None,
    help="Only runs that could not go on with the code that was there, or all but those.",
)
@click.pass_obj
def resume(
    target: Target,
    id: int | None,
    every: bool,
    name: str | None,
    version: str | None,
    error: str | None,
    parked: bool | None,
) -> None:
    """Let the run ID go on after a pause, or all that match."""
    given = {"name": name, "version": version, "error": error, "parked": parked}
    if (id is not None) == every:
        raise click.UsageError("give the ID of a run, or --all")
    if id is not None and any(value is not None for value in given.values()):
        raise click.UsageError("--name, --version, --error and --parked go with --all")
    with target.open() as store:
        if id is None:
            click.echo(f"{store.workflows.resume_all(**given)} run(s) go on.")  # type: ignore[arg-type]
        else:
            store.workflows.resume(id)
            click.echo(f"Run {id} goes on.")


@workflow.command()
@ID
@click.pass_obj
def retry(target: Target, id: int) -> None:
    """Let the failed run ID go on from the step that failed."""
    with target.open() as store:
        store.workflows.retry(id)
    click.echo(f"Run {id} goes on from the step that failed.")


@workflow.command()
@ID
@click.option("--step", help="The first step that is not taken over; without it, all are.")
@parameters.as_json
@click.pass_obj
def fork(target: Target, id: int, step: str | None, as_json: bool) -> None:
    """Start a new run that has done what the run ID did before a step."""
    with target.open() as store:
        run = store.workflows.fork(id, step)
    _said(run.id, f"Run {run.id} goes on from run {id}.", as_json)


@workflow.command()
@ID
@click.argument("name")
@click.argument("payload", default="null")
@click.pass_obj
def signal(target: Target, id: int, name: str, payload: str) -> None:
    """Say NAME to the run ID, with a JSON value as PAYLOAD."""
    with target.open() as store:
        store.workflows.signal(id, name, _json(payload))
    click.echo(f"Run {id} will get {name}.")


@workflow.command()
@click.option("--older-than", type=parameters.duration, required=True, help="30d, 12h …")
@click.option(
    "--status",
    type=click.Choice(["completed", "failed", "cancelled"]),
    help="Only those that ended like this.",
)
@parameters.as_json
@click.pass_obj
def purge(target: Target, older_than: float, status: str | None, as_json: bool) -> None:
    """Forget runs that ended longer ago than this."""
    with target.open() as store:
        purged = store.workflows.purge(older_than=older_than, status=status)
    if as_json:
        print_json({"purged": purged})
    else:
        click.echo(f"Forgot {purged} run(s).")


def _said(id: int, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json({"id": id})
    else:
        click.echo(sentence)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not JSON; text needs quotes: '\"{text}\"'") from None


def _last_line(error: str | None) -> str | None:
    return None if error is None else error.strip().rpartition("\n")[2]
