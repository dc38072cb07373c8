"""`pgqrs queue archive|dead|replay|purge-archive`: what has become of messages."""

from __future__ import annotations

import click

from pgqrs import Admin, ArchiveReason, MessageNotFound
from pgqrs.cli import parameters
from pgqrs.cli.output import print_archived, print_json
from pgqrs.cli.target import Target

NAME = click.argument("name")
REASON = click.option(
    "--reason",
    type=click.Choice([reason.value for reason in ArchiveReason]),
    help="Only those that ended this way.",
)


@click.command()
@NAME
@REASON
@parameters.limit
@parameters.after
@parameters.as_json
@click.pass_obj
def archive(
    target: Target, name: str, reason: str | None, limit: int, after: int, as_json: bool
) -> None:
    """Show finished messages of the queue NAME.

    They come in the order they ended; --after takes the archive id of the last one.
    """
    with target.open() as store:
        found = store.admin().list_archive(name, reason=reason, n=limit, after=after)
    print_archived(found, as_json=as_json, empty=f"The archive of queue {name!r} has no such.")


@click.command()
@NAME
@parameters.limit
@parameters.after
@parameters.as_json
@click.pass_obj
def dead(target: Target, name: str, limit: int, after: int, as_json: bool) -> None:
    """Show the dead letters of the queue NAME.

    Those are messages that failed for good and were not replayed; --after takes an archive id.
    """
    with target.open() as store:
        found = store.admin().dead_letters(name, n=limit, after=after)
    print_archived(found, as_json=as_json, empty=f"Queue {name!r} has no dead letters.")


@click.command()
@NAME
@click.option(
    "--id",
    "ids",
    type=int,
    multiple=True,
    help="Only this message, however it ended; may be repeated.",
)
@parameters.as_json
@click.pass_obj
def replay(target: Target, name: str, ids: tuple[int, ...], as_json: bool) -> None:
    """Enqueue dead letters of the queue NAME anew.

    All of them, or the messages that --id names. The archive keeps them, with what they became.
    """
    with target.open() as store:
        admin = store.admin()
        if not ids:
            replayed = admin.replay_dead_letters(name)
            result: dict[str, object] = {"queue": name, "replayed": replayed}
        else:
            check_queue(admin, name, ids)
            new_ids = admin.replay(ids)
            replayed = len(new_ids)
            result = {"queue": name, "replayed": replayed, "ids": new_ids}
    if as_json:
        print_json(result)
    else:
        click.echo(f"Enqueued {replayed} message(s) anew into queue {name!r}.")


def check_queue(admin: Admin, name: str, ids: tuple[int, ...]) -> None:
    """Refuse ids of another queue: one of them is a slip of the hand."""
    admin.get_queue(name)
    for id in ids:
        if admin.get_archived(id).queue != name:
            raise MessageNotFound(id)


@click.command("purge-archive")
@NAME
@click.option(
    "--older-than", type=parameters.duration, help="Ended so long ago.  [default: its retention]"
)
@REASON
@parameters.yes
@parameters.as_json
@click.pass_obj
def purge_archive(
    target: Target,
    name: str,
    older_than: float | None,
    reason: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget old finished messages of the queue NAME."""
    with target.open() as store:
        admin = store.admin()
        age = admin.get_queue(name).retention if older_than is None else older_than
        if age is None:
            raise click.UsageError(f"queue {name!r} has no retention; give --older-than")
        if not yes:
            what = f"{reason or 'finished'} messages of queue {name!r} older than {age:g} s"
            click.confirm(f"Forget {what}?", abort=True, err=True)
        purged = admin.purge_archive(name, older_than=age, reason=reason)
    if as_json:
        print_json({"queue": name, "purged": purged})
    else:
        click.echo(f"Forgot {purged} finished message(s) of queue {name!r}.")
