"""`pgqrs stream …`: who claims batch by batch, and giving back what was abandoned."""

from __future__ import annotations

import click

from pgqrs.cli import parameters
from pgqrs.cli.output import print_json, print_table
from pgqrs.cli.target import Target


@click.group()
def stream() -> None:
    """Look at the streams that Spark reads from queues, and release abandoned ones."""


@stream.command("list")
@parameters.as_json
@click.pass_obj
def list_streams(target: Target, as_json: bool) -> None:
    """List all streams and what each has claimed."""
    with target.open() as store:
        found = store.admin().list_streams()
    if as_json:
        print_json(found)
        return
    print_table(
        ["stream", "queue", "last batch", "batches", "messages", "claimed since"],
        ((s.name, s.queue, s.last_batch, s.batches, s.messages, s.claimed_since) for s in found),
        empty="There are no streams.",
    )


@stream.command()
@click.argument("name")
@parameters.as_json
@click.pass_obj
def release(target: Target, name: str, as_json: bool) -> None:
    """Give back all messages that the stream NAME has claimed.

    For a stream that nobody goes on with: what it claims does not come back by itself.
    """
    with target.open() as store:
        released = store.admin().release_stream(name)
    if as_json:
        print_json({"released": released})
    else:
        click.echo(f"Gave back {released} message(s).")
