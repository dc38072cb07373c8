"""Column types: the same Python values from both databases.

PostgreSQL stores its native types. SQLite tables are STRICT, so only INTEGER, REAL and TEXT occur
there: times are ISO-8601 text in UTC with microseconds in one fixed width (so that text order is
time order), JSON is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    REAL,
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    Double,
    Integer,
    SmallInteger,
    Text,
    TypeDecorator,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from pgqrs.types import MAX_JSON_DEPTH

BigId = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit id; SQLite's autoincrement needs the column to be called INTEGER."""
Whole = Integer()
Small = SmallInteger().with_variant(Integer(), "sqlite")
Seconds: TypeEngine[Any] = Double().with_variant(REAL(), "sqlite")


def _time_as_text(value: datetime | None) -> str | None:
    if value is None:
        return None
    if value.tzinfo is not UTC:
        value = value.astimezone(UTC)
    # Without its zone, which it would ask how to be written: half the time.
    return value.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _time_from_text(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)


def _time_in_utc(value: datetime | None) -> datetime | None:
    return value if value is None or value.tzinfo is UTC else value.astimezone(UTC)


class UTCDateTime(TypeDecorator[datetime]):
    """An aware time in UTC, both ways."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        kind: TypeEngine[Any] = Text() if dialect.name == "sqlite" else DateTime(timezone=True)
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """What a statement that is rendered with its values goes by."""
        return _time_as_text(value) if dialect.name == "sqlite" else value

    # Both are chosen once for a column instead of asked for each value.

    def bind_processor(self, dialect: Dialect) -> Any:
        return _time_as_text if dialect.name == "sqlite" else None

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        return _time_from_text if dialect.name == "sqlite" else _time_in_utc


def _flag_from_number(value: int | None) -> bool | None:
    return None if value is None else bool(value)


class Flag(TypeDecorator[bool]):
    """True or false."""

    impl = Boolean
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        kind: TypeEngine[Any] = Integer() if dialect.name == "sqlite" else Boolean()
        return dialect.type_descriptor(kind)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        return _flag_from_number if dialect.name == "sqlite" else None


class Undecodable(str):
    """Stored text that turned out not to be JSON, as it is."""


_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
"""`json.loads` without looking for spaces around: half the time for a small payload."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def json_from_text(value: str | None) -> Any:
    """The value of a JSON text. Text that is none comes back as `Undecodable`: whoever wrote it past
    this library must not keep anybody from reading the rows beside it.
    """
    if value is None:
        return None
    try:
        decoded, end = _scan(value, 0)
        if end == len(value) and (end <= MAX_JSON_DEPTH or not _is_too_deep(value)):
            return decoded
    except (StopIteration, ValueError, RecursionError):
        pass
    if _is_too_deep(value):
        return Undecodable(value)
    try:
        return json.loads(value)
    except ValueError:  # not JSON, or an integer with more digits than Python reads
        return Undecodable(value)


def _is_too_deep(document: str) -> bool:
    """True if it is nested deeper than `MAX_JSON_DEPTH`. What Python can decode differs by version."""
    if (
        len(document) <= MAX_JSON_DEPTH
        or document.count("[") + document.count("{") <= MAX_JSON_DEPTH
    ):
        return False
    # Nearly always brackets match also with those in strings, which take long to find.
    return _nests_too_deep(document) and _nests_too_deep(_STRING.sub("", document))


def _nests_too_deep(document: str) -> bool:
    """Each turn takes away the innermost brackets: as many turns as the document is deep."""
    brackets = document.encode(errors="surrogatepass").translate(None, _NO_BRACKETS)
    brackets = brackets.replace(b"{", b"[").replace(b"}", b"]")
    for _ in range(MAX_JSON_DEPTH):
        left = brackets.replace(b"[]", b"")
        if left == brackets:
            return len(left) > 0  # they do not match
        brackets = left
    return len(brackets) > 0


def json_from_bytes(value: bytes) -> Any:
    """`json.loads` for what a driver hands over, without guessing its encoding: it is UTF-8."""
    return json_from_text(value.decode())


class _JsonText(FunctionElement[Any]):
    """A JSON column as its text: then each value is decoded by itself, whatever the driver does with
    JSON, and one that cannot be does not spoil the rows beside it.
    """

    name = "pgqrs_json_text"
    inherit_cache = True

    def __init__(self, column: ColumnElement[Any], type_: TypeEngine[Any]) -> None:
        super().__init__(column)
        self.type = type_  # what the text is decoded by


@compiles(_JsonText, "postgresql")
def _json_text_postgres(element: _JsonText, compiler: Any, **kw: Any) -> str:
    (found,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"CAST({found} AS TEXT)"


@compiles(_JsonText, "sqlite")
def _json_text_sqlite(element: _JsonText, compiler: Any, **kw: Any) -> str:
    (found,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return str(found)


class Json(TypeDecorator[Any]):
    """JSON. Bound as text that is JSON already (cast it), read as the Python value."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(Text())
        from sqlalchemy.dialects.postgresql import (
            JSONB,
        )  # only where it is used: it is slow to import

        return dialect.type_descriptor(JSONB())

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return _JsonText(column, self)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        return json_from_text


class JsonText(Json):
    """JSON that is kept as it was written: JSONB sorts the keys of objects, and knows no -0.0."""

    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(Text())
        from sqlalchemy.dialects.postgresql import JSON

        return dialect.type_descriptor(JSON())


class EnumText(TypeDecorator[StrEnum]):
    """One of the words of an enum, kept as text; a CHECK on the table guards it."""

    impl = Text
    cache_ok = True

    def __init__(self, words: type[StrEnum]) -> None:
        super().__init__()
        self.words = words
        self._by_text: dict[str, StrEnum] = {word.value: word for word in words}

    def process_result_value(self, value: Any, dialect: Dialect) -> StrEnum | None:
        return None if value is None else self._by_text.get(value) or self.words(value)


def many(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Many values where there are arrays, and one where there are not."""
    return kind.with_variant(ARRAY(kind), "postgresql")
