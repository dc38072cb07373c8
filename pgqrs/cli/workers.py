"""`pgqrs worker …`: who consumes, and telling them to stop."""

from __future__ import annotations

import click

from pgqrs.cli import parameters
from pgqrs.cli.output import as_duration, print_json, print_table
from pgqrs.cli.running import run_worker
from pgqrs.cli.target import Target

ID = click.argument("id", type=int)


class WorkerCommands(click.Group):
    """What is no command is a module to work for: `pgqrs worker app.tasks`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=WorkerCommands)
def worker() -> None:
    """Be a worker; look at workers, and tell them to pause or to leave.

    `pgqrs worker app.tasks` is short for `pgqrs worker run app.tasks`.
    """


worker.add_command(run_worker)


@worker.command("list")
@parameters.as_json
@click.pass_obj
def list_workers(target: Target, as_json: bool) -> None:
    """List all workers and when they were last heard of."""
    with target.open() as store:
        found = store.admin().list_workers()
    if as_json:
        print_json(found)
        return
    print_table(
        ["id", "queue", "host", "pid", "status", "alive", "silent for", "since"],
        (
            (
                w.id,
                w.queue,
                w.hostname,
                w.pid,
                w.status,
                w.is_alive(),
                as_duration(w.silent_for),
                w.created_at,
            )
            for w in found
        ),
        empty="There are no workers.",
    )


@worker.command()
@ID
@click.pass_obj
def suspend(target: Target, id: int) -> None:
    """Let the worker ID claim nothing until resumed."""
    with target.open() as store:
        store.admin().suspend_worker(id)
    click.echo(f"Worker {id} claims nothing until it is resumed.")


@worker.command()
@ID
@click.pass_obj
def resume(target: Target, id: int) -> None:
    """Let the worker ID claim again."""
    with target.open() as store:
        store.admin().resume_worker(id)
    click.echo(f"Worker {id} may claim again.")


@worker.command()
@ID
@click.pass_obj
def stop(target: Target, id: int) -> None:
    """Tell the worker ID to leave. It may finish what it holds."""
    with target.open() as store:
        store.admin().stop_worker(id)
    click.echo(f"Worker {id} is told to stop with its next claim.")


@worker.command()
@ID
@parameters.as_json
@click.pass_obj
def release(target: Target, id: int, as_json: bool) -> None:
    """Give back what the worker ID holds, for one that is lost or hangs. It may still be running: then
    stop it first.
    """
    with target.open() as store:
        released = store.admin().release_worker(id)
    if as_json:
        print_json({"worker": id, "released": released})
    else:
        click.echo(f"Gave back {released} message(s) of worker {id}.")


@worker.command()
@click.option(
    "--silent-for",
    type=parameters.duration,
    default="5m",
    help="Those not heard of for so long are dead.",
)
@parameters.as_json
@click.pass_obj
def purge(target: Target, silent_for: float, as_json: bool) -> None:
    """Delete the rows of dead workers. What they held comes back when its leases lapse."""
    with target.open() as store:
        purged = store.admin().purge_workers(silent_for=silent_for)
    if as_json:
        print_json({"purged": purged})
    else:
        click.echo(f"Deleted the rows of {purged} worker(s).")
