"""From an exception to the one line that a person at a terminal can use."""

from __future__ import annotations

import errno
from typing import Any

import click
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pgqrs import PgqrsError, QueueExists, QueueNotEmpty, QueueNotFound, QueueScheduled
from pgqrs.cli.output import printable


class Commands(click.Group):
    """A group whose commands end with `Error: …` and exit code 1, and not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as exc:
            if exc.errno == errno.EPIPE:  # `| head`: click ends quietly
                raise
            raise click.ClickException(explain(exc)) from exc
        except (PgqrsError, SQLAlchemyError) as exc:
            raise click.ClickException(explain(exc)) from exc


def explain(error: BaseException) -> str:
    """Returns what went wrong, in one line. Texts of tasks may be part of it, so control characters are
    escaped.
    """
    return printable(_sentence(error))


def _sentence(error: BaseException) -> str:
    """The error in words. It names an option where the library names an argument."""
    match error:
        case QueueNotFound(name=name):
            return f"queue {name!r} does not exist; create it with `pgqrs queue create`"
        case QueueExists(name=name):
            return f"queue {name!r} exists already; pass --if-not-exists to accept that"
        case QueueNotEmpty(name=name, messages=count):
            return f"queue {name!r} still holds {count} message(s); purge it first, or pass --force"
        case QueueScheduled(name=name, schedules=schedules):
            using = ", ".join(schedules)
            return f"queue {name!r} is used by schedule(s) {using}; delete them, or pass --force"
        case DBAPIError(orig=orig) if orig is not None:
            return _first_line(orig)  # the rest is the statement and its parameters
        case SQLAlchemyError():
            return _first_line(error)
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
