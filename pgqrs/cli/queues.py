"""`pgqrs queue …`: queues and their settings, and `pgqrs stats`."""

from __future__ import annotations

from typing import Any

import click

from pgqrs import ArchiveReason, Queue, QueueStats, Rate
from pgqrs.cli import parameters
from pgqrs.cli.output import as_duration, print_json, print_messages, print_table
from pgqrs.cli.target import Target

NAME = click.argument("name")
LIMITS = ("max_in_flight", "max_in_flight_per_key", "rate", "max_lease", "max_releases")


@click.group()
def queue() -> None:
    """Create, look at, change and delete queues."""


@queue.command()
@NAME
@click.option("--lease", type=parameters.duration, help="How long a claim lasts by default.")
@click.option("--max-read-ct", type=int, help="How many attempts a message gets.")
@click.option(
    "--retention", type=parameters.duration, help="How long `purge-archive` keeps what is finished."
)
@click.option("--max-in-flight", type=int, help="How many messages are held at a time.")
@click.option("--max-in-flight-per-key", type=int, help="The same, of those with one key.")
@click.option("--rate", type=parameters.rate, help="How many start in a time: 5/s, 100/1m.")
@click.option(
    "--max-lease", type=parameters.duration, help="The longest lease anybody may ask for."
)
@click.option("--max-releases", type=int, help="How often a message may be given back untried.")
@click.option("--if-not-exists", is_flag=True, help="Accept a queue that is there, unchanged.")
@parameters.as_json
@click.pass_obj
def create(
    target: Target,
    name: str,
    lease: float | None,
    max_read_ct: int | None,
    retention: float | None,
    max_in_flight: int | None,
    max_in_flight_per_key: int | None,
    rate: Rate | None,
    max_lease: float | None,
    max_releases: int | None,
    if_not_exists: bool,
    as_json: bool,
) -> None:
    """Create the queue NAME.

    Durations are seconds, or have a unit: 500ms, 30s, 5m, 2h, 7d.
    """
    with target.open() as store:
        created = store.admin().create_queue(
            name,
            lease=lease,
            max_read_ct=max_read_ct,
            retention=retention,
            max_in_flight=max_in_flight,
            max_in_flight_per_key=max_in_flight_per_key,
            rate=rate,
            max_lease=max_lease,
            max_releases=max_releases,
            if_not_exists=if_not_exists,
        )
        print_queue(created, as_json)


@queue.command("list")
@parameters.as_json
@click.pass_obj
def list_queues(target: Target, as_json: bool) -> None:
    """List all queues with their settings."""
    with target.open() as store:
        found = store.admin().list_queues()
    if as_json:
        print_json(found)
    else:
        print_queues(found)


@queue.command()
@NAME
@parameters.as_json
@click.pass_obj
def show(target: Target, name: str, as_json: bool) -> None:
    """Show the settings of the queue NAME. What it holds is told by `pgqrs stats`."""
    with target.open() as store:
        print_queue(store.admin().get_queue(name), as_json)


@queue.command()
@NAME
@click.option("--lease", type=parameters.duration, help="How long a claim lasts by default.")
@click.option("--max-read-ct", type=int, help="How many attempts a message gets.")
@click.option(
    "--retention", type=parameters.duration, help="How long `purge-archive` keeps what is finished."
)
@click.option("--max-in-flight", type=int, help="How many messages are held at a time.")
@click.option("--max-in-flight-per-key", type=int, help="The same, of those with one key.")
@click.option("--rate", type=parameters.rate, help="How many start in a time: 5/s, 100/1m.")
@click.option(
    "--max-lease", type=parameters.duration, help="The longest lease anybody may ask for."
)
@click.option("--max-releases", type=int, help="How often a message may be given back untried.")
@click.option("--no-retention", is_flag=True, help="Keep what is finished for ever.")
@click.option(
    "--no-limits",
    is_flag=True,
    help="Take away all limits and bounds that are not given anew.",
)
@parameters.as_json
@click.pass_obj
def configure(
    target: Target,
    /,
    name: str,
    no_retention: bool,
    no_limits: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Change settings of the queue NAME. They count from the next operation on."""
    if given["retention"] is not None and no_retention:
        raise click.UsageError("give --retention or --no-retention, not both")
    changes: dict[str, Any] = dict.fromkeys(LIMITS) if no_limits else {}
    changes |= {key: value for key, value in given.items() if value is not None}
    if no_retention:
        changes["retention"] = None
    if not changes:
        raise click.UsageError("nothing to change; give at least one setting")
    with target.open() as store:
        print_queue(store.admin().configure_queue(name, **changes), as_json)


@queue.command()
@NAME
@parameters.as_json
@click.pass_obj
def pause(target: Target, name: str, as_json: bool) -> None:
    """Hand out no more messages of the queue NAME. Enqueueing goes on."""
    with target.open() as store:
        print_queue(store.admin().pause_queue(name), as_json)


@queue.command()
@NAME
@parameters.as_json
@click.pass_obj
def resume(target: Target, name: str, as_json: bool) -> None:
    """Hand out messages of the queue NAME again."""
    with target.open() as store:
        print_queue(store.admin().resume_queue(name), as_json)


@queue.command()
@NAME
@parameters.yes
@parameters.as_json
@click.pass_obj
def purge(target: Target, name: str, yes: bool, as_json: bool) -> None:
    """Delete all messages of the queue NAME.

    Also held ones. The archive stays.
    """
    with target.open() as store:
        admin = store.admin()
        held = message_count(admin.queue_stats(name))
        if not yes:
            click.confirm(f"Delete all {held} message(s) of queue {name!r}?", abort=True, err=True)
        purged = admin.purge_queue(name)
    if as_json:
        print_json({"queue": name, "purged": purged})
    else:
        click.echo(f"Deleted {purged} message(s) of queue {name!r}.")


@queue.command()
@NAME
@click.option("--force", is_flag=True, help="Also if it holds messages, or schedules use it.")
@parameters.yes
@click.pass_obj
def delete(target: Target, name: str, force: bool, yes: bool) -> None:
    """Delete the queue NAME and its archive. Refused while it holds messages or schedules use it, unless
    forced.
    """
    with target.open() as store:
        admin = store.admin()
        if force and not yes:
            held = message_count(admin.queue_stats(name))
            question = f"Delete queue {name!r}, its {held} message(s) and its archive?"
            click.confirm(question, abort=True, err=True)
        admin.delete_queue(name, force=force)
    click.echo(f"Deleted queue {name!r}.")


@queue.command()
@NAME
@parameters.limit
@parameters.after
@parameters.as_json
@click.pass_obj
def peek(target: Target, name: str, limit: int, after: int, as_json: bool) -> None:
    """Show messages of the queue NAME.

    By id, whoever holds them, without claiming them.
    """
    with target.open() as store:
        found = store.admin().peek(name, limit, after=after)
    print_messages(found, as_json=as_json, empty=f"Queue {name!r} holds no messages.")


@click.command()
@click.argument("name", metavar="[QUEUE]", required=False)
@parameters.as_json
@click.pass_obj
def stats(target: Target, name: str | None, as_json: bool) -> None:
    """Show what every queue, or this one, holds now."""
    with target.open() as store:
        admin = store.admin()
        found = admin.stats() if name is None else [admin.queue_stats(name)]
    if as_json:
        print_json(found if name is None else found[0])
    else:
        print_stats(found)


def message_count(stats: QueueStats) -> int:
    """How many messages a queue holds, in whatever state."""
    return stats.ready + stats.delayed + stats.leased + stats.blocked


def print_queue(queue: Queue, as_json: bool) -> None:
    if as_json:
        print_json(queue)
    else:
        print_queues([queue])


def print_queues(queues: list[Queue]) -> None:
    print_table(
        ["queue", "paused", "lease", "max_read_ct", "retention", "limits", "created"],
        (
            (
                q.queue_name,
                q.paused,
                f"{q.lease:g} s",
                q.max_read_ct,
                as_duration(q.retention),
                limits_of(q),
                q.created_at,
            )
            for q in queues
        ),
        empty="There are no queues.",
    )


def limits_of(queue: Queue) -> str | None:
    limits = {
        "in flight": queue.max_in_flight,
        "in flight per key": queue.max_in_flight_per_key,
        f"in {queue.rate.period:g} s" if queue.rate else "": queue.rate and queue.rate.limit,
        "s of lease": None if queue.max_lease is None else f"{queue.max_lease:g}",
        "releases": queue.max_releases,
    }
    return ", ".join(f"{n} {what}" for what, n in limits.items() if n is not None) or None


def print_stats(stats: list[QueueStats]) -> None:
    print_table(
        ["queue", "paused", "ready", "delayed", "leased", "blocked", "oldest", *ArchiveReason],
        (
            (
                s.queue,
                s.paused,
                s.ready,
                s.delayed,
                s.leased,
                s.blocked,
                as_duration(s.oldest_age),
                *(s.archived.get(reason, 0) for reason in ArchiveReason),
            )
            for s in stats
        ),
        empty="There are no queues.",
    )
