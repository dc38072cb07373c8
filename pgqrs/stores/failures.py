"""From the errors of drivers and of SQLAlchemy to those of pgqrs, which carry facts and hide nothing:
the original is the `__cause__`.
"""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from pgqrs.errors import ConstraintViolated, StatementFailed

DRIVERS = frozenset(("sqlite3", "aiosqlite", "psycopg", "psycopg2", "asyncpg", "pg8000"))


def is_of_a_driver(error: BaseException) -> bool:
    """True for what SQLAlchemy, or a driver underneath it, raises."""
    return isinstance(error, SQLAlchemyError) or any(
        kind.__module__.partition(".")[0] in DRIVERS for kind in type(error).__mro__
    )


def statement_failed(error: BaseException) -> StatementFailed:
    """Our error for one of a driver."""
    refused = isinstance(error, IntegrityError) or type(error).__name__ == "IntegrityError"
    kind = ConstraintViolated if refused else StatementFailed
    return kind(first_line(error), code=code_of(error))


def code_of(error: BaseException) -> str | None:
    """What the database calls it: a SQLSTATE, or the name of an error of SQLite."""
    original = original_of(error)
    for name in ("sqlstate", "pgcode", "sqlite_errorname"):
        if code := getattr(original, name, None):
            return str(code)
    return None


def original_of(error: BaseException) -> BaseException:
    """The error of the driver."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    return error


def first_line(error: BaseException) -> str:
    """What happened, without the statement and its parameters."""
    return str(original_of(error)).strip().partition("\n")[0]
