"""Values as JSON and back, by their hints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field

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


BERLIN = ZoneInfo("Europe/Berlin")


class Nameless(tzinfo):
    """A time zone that says nothing of itself without a time."""

    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None if when is None else timedelta(hours=1)

    def dst(self, when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, when: datetime | None) -> str | None:
        return None


class Order(BaseModel):
    order_id: int = Field(alias="orderId")


class Express(Order):
    hours: int


class Parcel(BaseModel):
    order: Order


class Box(BaseModel):
    model_config = ConfigDict(extra="forbid")
    side: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.side**2


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


class Login(BaseModel):
    password: SecretStr


class Job(BaseModel):
    name: str
    attempts: int = Field(default=0, exclude=True)


@dataclass
class Counted:
    name: str
    count: int = field(default=0, init=False)


def counted() -> Counted:
    found = Counted("x")
    found.count = 2
    return found


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
        (timedelta, timedelta(days=200_000, microseconds=1)),
        (datetime, datetime(2026, 10, 24, 12, tzinfo=BERLIN)),
        (datetime, datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN)),
        (Order, Order(orderId=1)),
        (list[Box], [Box(side=2)]),
        (Page[int], Page[int](items=[1, 2])),
        (Order | Box, Box(side=3)),
        (dict[str, Order], {"a": Order(orderId=2)}),
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
        (dict[int, str], {True: "x"}),
        (dict[int, str], {"1": "x"}),
        (dict[str, str], {1: "x"}),
        (datetime, datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN)),
        (time, time(12, tzinfo=BERLIN)),
        (datetime, datetime(2026, 1, 1, tzinfo=Nameless())),
        (Login, Login(password=SecretStr("hunter2"))),
        (SecretStr, SecretStr("hunter2")),
        (Job, Job(name="x", attempts=2)),
        (Order, Express(orderId=1, hours=2)),
        (Parcel, Parcel(order=Express(orderId=1, hours=2))),
        (Counted, counted()),
    ],
    ids=str,
)
def test_what_would_come_back_otherwise_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        converter(hint).to_json(value)
