"""`pgqrs task …`: calling functions elsewhere, and what came of it."""

from __future__ import annotations

import json
from typing import Any

import click

from pgqrs import Handle, MessageNotFound, Store
from pgqrs.cli import parameters
from pgqrs.cli.output import print_json
from pgqrs.cli.target import Target

ID = click.argument("id", type=int)


@click.group()
def task() -> None:
    """Enqueue tasks, and look at their results."""


@task.command("enqueue")
@click.argument("name", metavar="MODULE:FUNCTION")
@click.argument("arguments", metavar="ARGUMENT...", nargs=-1)
@click.option("--kwargs", default="{}", help="Named arguments, as a JSON object.")
@click.option("--queue", default="default", help="The queue of the task.")
@click.option("--delay", type=parameters.duration, help="Run it only after so long.")
@click.option("--priority", type=int, default=0, help="Higher ones run first.")
@parameters.as_json
@click.pass_obj
def enqueue_task(
    target: Target,
    name: str,
    arguments: tuple[str, ...],
    kwargs: str,
    queue: str,
    delay: float | None,
    priority: int,
    as_json: bool,
) -> None:
    """Have a worker call a task. Each ARGUMENT is JSON, or else taken as text."""
    payload = {
        "task": name,
        "args": [_value(argument) for argument in arguments],
        "kwargs": _value(kwargs),
    }
    if not isinstance(payload["kwargs"], dict):
        raise click.BadParameter("--kwargs is not a JSON object")
    with target.open() as store:
        id = store.producer(queue).enqueue(payload, delay=delay, priority=priority)
    if as_json:
        print_json({"id": id})
    else:
        click.echo(f"Enqueued task {id}.")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@task.command()
@ID
@click.option("--timeout", type=parameters.duration, help="Wait so long for it.")
@click.pass_obj
def result(target: Target, id: int, timeout: float | None) -> None:
    """Print the result of the task ID, as JSON; waits for it."""
    with target.open() as store:
        print_json(_handle(store, id).result(timeout))


@task.command()
@ID
@click.pass_obj
def status(target: Target, id: int) -> None:
    """Print where the task ID stands."""
    with target.open() as store:
        click.echo(_handle(store, id).status())


@task.command()
@ID
@click.pass_obj
def cancel(target: Target, id: int) -> None:
    """End the task ID, also while it runs."""
    with target.open() as store:
        done = not _handle(store, id).cancel()
    click.echo(f"Task {id} was done already." if done else f"Task {id} is cancelled.")


def _handle(store: Store, id: int) -> Handle[Any]:
    try:
        queue = store.admin().get_message(id).queue
    except MessageNotFound:
        queue = store.admin().get_archived(id).queue
    return Handle(store._database, queue, id, lambda ended: ended.result)
