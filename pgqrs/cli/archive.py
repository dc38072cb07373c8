"""`pgqrs queue archive|dead|replay|purge-archive`: what has become of messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from pgqrs import Admin, ArchiveReason, MessageNotFound
from pgqrs.cli import parameters
from pgqrs.cli.output import print_archived, print_json
from pgqrs.cli.target import Target
from pgqrs.matching import ANYTHING

NAME = click.argument("name")
REASON = click.option(
    "--reason",
    type=click.Choice([reason.value for reason in ArchiveReason]),
    help="Only those that ended this way.",
)


def _payload(_context: click.Context, _option: click.Parameter, text: str | None) -> Any:
    if text is None:
        return ANYTHING
    try:
        return json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"not JSON: {exc}") from None


def _headers(
    _context: click.Context, _option: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str] | None:
    parts = [pair.partition("=") for pair in pairs]
    for name, separator, _ in parts:
        if not separator:
            raise click.BadParameter(f"{name!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in parts} or None


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """The options that choose among finished messages by what is in them."""
    for option in (
        click.option(
            "--header",
            "headers",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_headers,
            help="Only with this header; may be repeated.",
        ),
        click.option(
            "--payload",
            metavar="JSON",
            callback=_payload,
            help="Equal; of an object, these members.",
        ),
        click.option("--error", metavar="TEXT", help="Only with this text in the error."),
        click.option("--until", type=parameters.moment, metavar="TIME", help="Ended before."),
        click.option(
            "--since", type=parameters.moment, metavar="TIME", help="Ended then or later."
        ),
    ):
        command = option(command)
    return command


@click.command()
@NAME
@REASON
@choosing
@parameters.limit
@parameters.after
@parameters.as_json
@click.pass_obj
def archive(
    target: Target,
    /,
    name: str,
    limit: int,
    after: int,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Show finished messages of the queue NAME.

    They come in the order they ended; --after takes the archive id of the last one.
    """
    with target.open() as store:
        found = store.admin().list_archive(name, n=limit, after=after, **chosen)
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
@click.option(
    "--reason",
    type=click.Choice([*(reason.value for reason in ArchiveReason), "any"]),
    default=ArchiveReason.FAILED.value,
    help="Those that ended this way.",
)
@choosing
@parameters.as_json
@click.pass_context
def replay(
    context: click.Context,
    /,
    name: str,
    ids: tuple[int, ...],
    reason: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Enqueue dead letters of the queue NAME anew.

    All of them, those that the options choose, or the messages that --id names. The archive keeps
    them, with what they became. `pgqrs queue archive` shows what the same options choose.
    """
    if ids and not all(_is_default(context, option) for option in ("reason", *chosen)):
        raise click.UsageError("--id names the messages; it goes with no other choice")
    target: Target = context.obj
    with target.open() as store:
        admin = store.admin()
        if not ids:
            replayed = admin.replay_all(name, reason=None if reason == "any" else reason, **chosen)
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


def _is_default(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.DEFAULT


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
