"""`pgqrs enqueue` and `pgqrs dequeue`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pgqrs import InvalidPayload, MessageId, PgqrsError, Producer
from pgqrs.cli import parameters
from pgqrs.cli.errors import explain
from pgqrs.cli.output import make_console, print_json, print_messages
from pgqrs.cli.target import Target

BATCH = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """A payload, and which argument or line of input it was."""

    number: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Labels:
    """What messages have in common with others."""

    key: str | None
    unique: Any
    group: str | None


@click.command()
@click.argument("queue")
@click.argument("payloads", metavar="PAYLOAD...", nargs=-1, required=True)
@click.option("--delay", type=parameters.duration, help="Deliver it only after so long.")
@click.option("--eta", type=parameters.moment, help="Deliver it only from this time on (ISO 8601).")
@click.option("--priority", type=int, default=0, help="Higher ones are delivered first.")
@click.option("--ttl", type=parameters.duration, help="Deliver it only for so long.")
@click.option("--key", help="Enqueue nothing if a message has this key.")
@click.option(
    "--unique",
    type=parameters.unique,
    default="unfinished",
    help="For how long: 'queued', 'unfinished', or a time after its end.",
)
@click.option("--group", help="Deliver strictly in order and one by one with others of this name.")
@parameters.as_json
@click.pass_obj
def enqueue(
    target: Target,
    queue: str,
    payloads: tuple[str, ...],
    delay: float | None,
    eta: datetime | None,
    priority: int,
    ttl: float | None,
    key: str | None,
    unique: Any,
    group: str | None,
    as_json: bool,
) -> None:
    """Put messages into QUEUE.

    Each PAYLOAD is a JSON value: '{"job": "hello"}', 17, '"text"'. All are enqueued, or none.
    A single - reads one JSON value per line from the standard input, and enqueues them 1000 at
    a time.
    """
    if "-" in payloads and len(payloads) > 1:
        raise click.UsageError("- reads all messages from the standard input; give no others")
    if key is not None and (len(payloads) > 1 or payloads == ("-",)):
        raise click.UsageError("--key is for one message")
    options: dict[str, Any] = {"delay": delay, "eta": eta, "priority": priority, "ttl": ttl}
    labels = Labels(key, unique, group)
    with target.open() as store, store.producer(queue) as producer:
        if payloads == ("-",):
            ids = enqueue_input(producer, options, labels)
        else:
            lines = list(parse(payloads, "PAYLOAD"))
            ids = enqueue_batch(producer, lines, "PAYLOAD", options, labels)
    created = [id for id in ids if id.created]
    if as_json:
        print_json({"queue": queue, "enqueued": len(created), "ids": ids})
    elif ids and not created:
        click.echo(f"Enqueued nothing: message {ids[0]} of queue {queue!r} has this key.")
    else:
        click.echo(f"Enqueued {len(ids)} message(s) into queue {queue!r}{id_range(ids)}.")


def id_range(ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return f": id {ids[0]}" if len(ids) == 1 else f": ids {ids[0]} to {ids[-1]}"


def enqueue_input(producer: Producer, options: dict[str, Any], labels: Labels) -> list[MessageId]:
    """Enqueue the lines of the standard input. An error tells how far it came."""
    lines = parse(sys.stdin.buffer, "line")
    ids: list[MessageId] = []
    last = 0
    try:
        with input_progress() as progress:
            task = progress.add_task("Enqueueing", total=None)
            while batch := list(islice(lines, BATCH)):
                ids += enqueue_batch(producer, batch, "line", options, labels)
                last = batch[-1].number
                progress.update(task, completed=len(ids))
    except (PgqrsError, click.ClickException) as exc:
        so_far = f"everything up to line {last} was enqueued" if ids else "nothing was enqueued"
        raise click.ClickException(f"{explain(exc)}; {so_far}") from exc
    return ids


def input_progress() -> Progress:
    """A bar on stderr, so that stdout stays what was asked for; none in a log."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_interactive
    )


def parse(texts: Iterable[str | bytes], what: str) -> Iterator[Line]:
    """Each text as JSON; blank ones are passed over."""
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield Line(number, parse_json(text, f"{what} {number}"))


def parse_json(text: str | bytes, where: str) -> Any:
    try:
        # JSON is UTF-8, whatever the terminal speaks; some editors put a mark before it.
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        problem = "nested too deeply"
    except json.JSONDecodeError as exc:
        problem = f"{exc.msg} at column {exc.colno}"
    except ValueError as exc:
        problem = str(exc)
    raise click.ClickException(f"{where} is not JSON: {problem}")


def enqueue_batch(
    producer: Producer, lines: Sequence[Line], what: str, options: dict[str, Any], labels: Labels
) -> list[MessageId]:
    """Enqueue all or none; an error about one payload says which it was."""
    try:
        return producer.enqueue_many(
            [line.payload for line in lines],
            keys=None if labels.key is None else [labels.key] * len(lines),
            unique=labels.unique,
            groups=None if labels.group is None else [labels.group] * len(lines),
            **options,
        )
    except InvalidPayload as exc:
        if exc.index is None:
            raise
        number = lines[exc.index].number
        raise click.ClickException(f"{what} {number}: {exc.path}: {exc.problem}") from exc


@click.command()
@click.argument("queue")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=1, help="At most so many messages."
)
@click.option(
    "--lease", type=parameters.duration, help="Hold them so long.  [default: the queue's lease]"
)
@click.option(
    "--ack/--no-ack",
    default=True,
    help="Acknowledge them once they are printed, or leave them leased: they come back.",
)
@parameters.as_json
@click.pass_obj
def dequeue(
    target: Target, queue: str, limit: int, lease: float | None, ack: bool, as_json: bool
) -> None:
    """Take messages out of QUEUE and print them."""
    with target.open() as store, store.consumer(queue, lease=lease) as consumer:
        messages = consumer.dequeue(limit)
        print_messages(messages, as_json=as_json, empty=f"Queue {queue!r} has nothing ready.")
        # Printed first: what could not be printed was not delivered, and comes back.
        sys.stdout.flush()
        if ack and messages:
            consumer.ack_many(messages)
