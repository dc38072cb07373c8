"""`pgqrs worker MODULE`: be a worker."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import click

from pgqrs import Task, Worker, Workflow
from pgqrs.cli import parameters
from pgqrs.cli.target import Target, name_of
from pgqrs.tasks import as_task


@click.command("run")
@click.argument("modules", metavar="MODULE[:NAME]...", nargs=-1)
@click.option("--queue", "queues", multiple=True, help="Serve this queue too; may be repeated.")
@click.option("--concurrency", type=click.IntRange(min=1), default=8, help="Handlers at a time.")
@click.option("--lease", type=parameters.duration, help="Claim messages for so long at a time.")
@click.option("--grace", type=parameters.duration, default="30s", help="To finish when stopped.")
@click.option("--codec", "codecs", multiple=True, help="Accept this codec: cloudpickle.")
@click.option("--log-messages", is_flag=True, help="Log every message that is finished.")
@click.option("--until-empty", is_flag=True, help="Leave when nothing is left to do now.")
@click.pass_obj
def run_worker(
    target: Target,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    concurrency: int,
    lease: float | None,
    grace: float,
    codecs: tuple[str, ...],
    log_messages: bool,
    until_empty: bool,
) -> None:
    """Run the tasks and workflows that the modules declare, until told to stop.

    app.tasks is all that a module declares, app.tasks:send or app:all_tasks a part of it, and
    app.work:add a plain function, for a TaskQueue. SIGTERM and Ctrl-C stop it when it has finished
    what it does; a second one at once.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    found = list(_found(modules))
    tasks = [one for one in found if isinstance(one, Task)]
    workflows = [one for one in found if isinstance(one, Workflow)]
    if not tasks and not workflows and not queues:
        raise click.UsageError("the modules declare no tasks or workflows; name some, or --queue")
    with target.open(retry_for=30.0) as store:
        worker = Worker(
            store,
            queues=queues,
            tasks=tasks,
            workflows=workflows,
            codecs=codecs,
            concurrency=concurrency,
            lease=lease,
            grace=grace,
            log_messages=log_messages,
        )
        click.echo(f"Working on {', '.join(worker.queues)} in {name_of(store)}.", err=True)
        worker.run(until_empty=until_empty)


def _found(modules: Iterable[str]) -> Iterable[Any]:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    for named in modules:
        module, _, attribute = named.partition(":")
        try:
            value: Any = import_module(module)
            for part in attribute.split(".") if attribute else ():
                value = getattr(value, part)
        except (ImportError, AttributeError) as exc:
            raise click.BadParameter(f"{named!r} cannot be imported: {exc}") from exc
        yield from [as_task(value)] if isfunction(value) else _declared_in(value)


def _declared_in(value: Any) -> Iterable[Any]:
    if isinstance(value, Task | Workflow):
        return [value]
    members = value if isinstance(value, list | tuple | set) else vars(value).values()
    return [member for member in members if isinstance(member, Task | Workflow)]
