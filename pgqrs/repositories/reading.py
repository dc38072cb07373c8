"""Reading rows of which some cannot be read.

Most of what is written past this library can be read, and is judged value by value (`sqltypes`,
`dequeue.spoiled_among`). Some cannot: a JSONB number of a hundred thousand digits needs ten bytes in its
row and fails as text. Then the statement fails as a whole, and with it everything beside that row. So
after such a failure the rows are read one by one, and the unreadable ones *bare*: without what is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import literal_column
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.sql.expression import ColumnElement

from pgqrs.errors import PgqrsError
from pgqrs.sqltypes import Json

T = TypeVar("T")
REASON = "the stored row cannot be read"
_DATA = ("22", "54")
"""PostgreSQL's classes of errors: data exception, program limit exceeded."""
_TOO_MUCH = ("XX000", "53200")
"""An allocation that is refused, and memory that is not there."""
_CONSTRAINT, _TOO_BIG, _MISMATCH = 19, 18, 20
"""SQLite's."""


class Unreadable(PgqrsError):
    """A statement failed because of what is in a row."""


@contextmanager
def telling() -> Iterator[None]:
    """Raise `Unreadable` for an error that may be due to what is in a row."""
    try:
        yield
    except DBAPIError as exc:
        tell(exc)
        raise


def tell(error: DBAPIError) -> None:
    """The same for an error that was caught, where every microsecond counts."""
    if _is_due_to_data(error):
        raise Unreadable(f"{REASON}: {_first_line(error)}") from error


def _is_due_to_data(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return False
    code = getattr(error.orig, "sqlstate", None)
    if code is not None:
        return code[:2] in _DATA or code in _TOO_MUCH
    number = getattr(error.orig, "sqlite_errorcode", None)
    if number is not None:
        return number & 0xFF in (_CONSTRAINT, _TOO_BIG, _MISMATCH)
    return isinstance(error, DataError) or "decode" in str(error.orig)


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def bare(columns: tuple[ColumnElement[Any], ...]) -> list[ColumnElement[Any]]:
    """These columns with `REASON` in the place of JSON. It is none, so it is read as `Undecodable`."""
    return [
        literal_column(f"'{REASON}'", Json()).label(column.key)
        if isinstance(column.type, Json)
        else column
        for column in columns
    ]


def carefully(read: Callable[[bool], list[T]], one: Callable[[T], T]) -> list[T]:
    """What `read(False)` lists. If that fails, what `read(True)` lists bare, each row made whole by
    `one` if it can be.
    """
    try:
        return read(False)
    except Unreadable:
        pass
    found: list[T] = []
    for row in read(True):
        try:
            found.append(one(row))
        except Unreadable:
            found.append(row)
    return found
