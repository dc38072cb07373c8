"""Values as JSON and back, by their hints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID

import pytest

from pgqrs.conversion import converter

UserId = NewType("UserId", int)
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


class Level(IntEnum):
    LOW = 1


class Shape(Enum):
    POINT = (0, 0)


@dataclass
class Base:
    a: int


@dataclass
class Derived(Base):
    b: date


class Pair(NamedTuple):
    first: Decimal
    second: UUID


class Options(TypedDict):
    until: datetime


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Any, {"a": [1, 2.5, None, True, "x"]}),
        (int, 5),
        (float, 2.0),
        (UserId, 5),
        (Annotated[datetime, []], NOW),
        (Literal["a", "b"], "a"),
        (date | datetime, NOW),
        (date | datetime, NOW.date()),
        (datetime | str, NOW.isoformat()),
        (datetime | str | None, None),
        (int | str, "5"),
        (Base | Derived, Derived(1, NOW.date())),
        (list[Base | Derived], [Base(1), Derived(2, NOW.date())]),
        (tuple[int, datetime], (1, NOW)),
        (tuple[Decimal, ...], (Decimal("1.0"), Decimal("-0"))),
        (set[UUID], {UUID(int=1), UUID(int=2)}),
        (Sequence[timedelta], [timedelta(microseconds=1)]),
        (Mapping[UUID, Level], {UUID(int=1): Level.LOW}),
        (dict[int, list[Shape]], {1: [Shape.POINT]}),
        (Pair, Pair(Decimal("1.50"), UUID(int=3))),
        (Options, {"until": NOW}),
        (bytes, b"\x00\xff"),
        (object, {"a": 1}),
    ],
    ids=str,
)
def test_what_is_sent_comes_back(hint: Any, value: Any) -> None:
    way = converter(hint)
    back = way.from_json(json.loads(json.dumps(way.to_json(value))))
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, tuple) or type(value) is list:
        assert [type(item) for item in back] == [type(item) for item in value]


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Any, NOW),
        (Any, Level.LOW),
        (Any, {"deep": [Decimal(1)]}),
        (date, NOW),
        (datetime, NOW.date()),
        (Base, Derived(1, NOW.date())),
        (UUID, "not one"),
        (int | str, 2.5),
        (tuple[int, int], (1, 2, 3)),
        (type("Other", (), {}), 1),
    ],
    ids=str,
)
def test_what_would_come_back_otherwise_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        converter(hint).to_json(value)
