"""Column types: the same Python values from both databases.

PostgreSQL stores its native types. SQLite tables are STRICT, so only INTEGER, REAL and TEXT occur
there: times are ISO-8601 text in UTC with microseconds in one fixed width (so that text order is
time order), JSON is text.
"""

from __future__ import annotations

import json
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
from sqlalchemy.types import TypeEngine

BigId = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit id; SQLite's autoincrement needs the column to be called INTEGER."""
Whole = Integer()
Small = SmallInteger().with_variant(Integer(), "sqlite")
Seconds: TypeEngine[Any] = Double().with_variant(REAL(), "sqlite")


def _time_as_text(value: datetime | None) -> str | None:
    if value is None:
        return None
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


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


def _json_from_text(value: str | None) -> Any:
    if value is None:
        return None
    try:
        decoded, end = _scan(value, 0)
        if end == len(value):
            return decoded
    except (StopIteration, ValueError):
        pass
    try:
        return json.loads(value)
    except ValueError:
        return Undecodable(value)


def json_from_bytes(value: bytes) -> Any:
    """`json.loads` for what a driver hands over, without guessing its encoding: it is UTF-8."""
    return _json_from_text(value.decode())


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

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        # PostgreSQL's driver has parsed it already, or its dialect knows how to.
        if dialect.name == "sqlite":
            return _json_from_text
        return self.load_dialect_impl(dialect).result_processor(dialect, coltype)


class EnumText(TypeDecorator[StrEnum]):
    """One of the words of an enum, kept as text; a CHECK on the table guards it."""

    impl = Text
    cache_ok = True

    def __init__(self, words: type[StrEnum]) -> None:
        super().__init__()
        self.words = words

    def process_result_value(self, value: Any, dialect: Dialect) -> StrEnum | None:
        return None if value is None else self.words(value)


def many(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Many values where there are arrays, and one where there are not."""
    return kind.with_variant(ARRAY(kind), "postgresql")
