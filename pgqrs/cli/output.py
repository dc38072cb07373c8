"""What commands print: one JSON document for programs, a table for people.

Text in a table comes from whoever enqueued it. It is shown as it is, never interpreted: no markup,
no emoji codes, no control characters that would reach the terminal. Nothing is cut off either:
`dequeue` acknowledges what it printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from pgqrs import ArchivedMessage, Message

LOG_WIDTH = 200
"""Columns of what is not a terminal: a log need not be wrapped as if it were one."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def print_json(value: Any) -> None:
    """One JSON document. In ASCII, so that it does not depend on the encoding of a pipe."""
    click.echo(json.dumps(value, indent=2, default=_as_data))


def _as_data(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    raise TypeError(f"{type(value).__name__} is not JSON")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table, or the sentence that says there is nothing to show."""
    listed = list(rows)
    if not listed:
        click.echo(empty)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        numbers = all(type(row[index]) in (int, float) for row in listed)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in listed:
        table.add_row(*map(cell, row))
    make_console().print(table)


def cell(value: object) -> str:
    """A value as a person reads it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
        case timedelta():
            return str(timedelta(seconds=round(value.total_seconds())))
        case float():
            return f"{value:g}"
    return printable(str(value))


def printable(text: str) -> str:
    """Text without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_duration(seconds: float | None) -> timedelta | None:
    """Seconds for `cell`."""
    return None if seconds is None else timedelta(seconds=seconds)


def as_text(payload: Any) -> str:
    """A payload as JSON on one line."""
    return json.dumps(payload, ensure_ascii=False)


def print_messages(messages: Sequence[Message], *, as_json: bool, empty: str) -> None:
    """Messages that are in a queue."""
    if as_json:
        print_json(messages)
        return
    print_table(
        ["id", "priority", "read_ct", "enqueued", "visible at", "worker", "payload"],
        (
            (
                m.id,
                m.priority,
                m.read_ct,
                m.enqueued_at,
                m.vt,
                m.consumer_worker_id,
                as_text(m.payload),
            )
            for m in messages
        ),
        empty=empty,
    )


def print_archived(messages: Sequence[ArchivedMessage], *, as_json: bool, empty: str) -> None:
    """Messages that are finished. Of a traceback the table shows the last line, JSON all of it."""
    if as_json:
        print_json(messages)
        return
    print_table(
        ["id", "archive id", "reason", "read_ct", "archived", "replayed as", "payload", "error"],
        (
            (
                m.original_message_id,
                m.id,
                m.archive_reason,
                m.read_ct,
                m.archived_at,
                m.replayed_as,
                as_text(m.payload),
                _last_line(m.error),
            )
            for m in messages
        ),
        empty=empty,
    )


def _last_line(error: str | None) -> str | None:
    return None if error is None else error.strip().rpartition("\n")[2]
