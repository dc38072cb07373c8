"""Python values as JSON and back, by type hints.

JSON knows of no datetime or dataclass. What a function's hints say of its arguments, both who enqueues
and who runs it know, so the hints decide: `convert(hint)` is a pair of functions, to JSON and back. What
would come back as something else (a datetime where no hint says so) is refused when it is sent.

Hints of pydantic's own (models, its dataclasses, `SecretStr` …) are left to its `TypeAdapter`. All
others are converted here, also where pydantic is installed: what is sent must not depend on that.
"""

from __future__ import annotations

import base64
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

PLAIN = (str, int, float, bool, type(None))


class Converter(NamedTuple):
    """To JSON, and back. `natural` if JSON itself tells such values from others."""

    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]
    accepts: Callable[[Any], bool]
    natural: bool = False
    identity: bool = False
    """Whether JSON that is a string, a whole number, true, false or null comes back as it is."""


def converter(hint: Any) -> Converter:
    """How values of this hint are converted."""
    try:
        hash(hint)
    except TypeError:  # metadata of an Annotated, for instance
        return _make(hint)
    return _cached(hint)


@cache
def _cached(hint: Any) -> Converter:
    return _make(hint)


def _make(hint: Any) -> Converter:
    if hint is Any:
        return PLAIN_VALUES
    if isinstance(hint, typing.NewType):
        return converter(hint.__supertype__)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return converter(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is typing.Literal:
        return PLAIN_VALUES
    if origin is not None:
        return _generic(origin, arguments)
    if isinstance(hint, type):
        return _class(hint)
    return PLAIN_VALUES  # Any, a type variable, a name that cannot be resolved


def _plain(value: Any) -> Any:
    """JSON as it is; anything else has no hint to come back by."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    if isinstance(value, PLAIN) and not isinstance(value, Enum):
        return value
    raise TypeError(
        f"{kind.__name__} is not JSON, and no type hint says what it should come back as"
    )


PLAIN_VALUES = Converter(_plain, lambda value: value, lambda value: True, identity=True)


def _same(value: Any) -> Any:
    return value


def _exactly(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _as_float(value: Any) -> Any:
    """A function that says float may still have returned something else: that is left as it is."""
    return float(value) if type(value) is int else value


SCALARS: dict[type, Converter] = {
    str: Converter(_same, _same, _exactly(str), natural=True, identity=True),
    bool: Converter(_same, _same, _exactly(bool), natural=True, identity=True),
    int: Converter(_same, _same, _exactly(int), natural=True, identity=True),
    float: Converter(_same, _as_float, _exactly(float, int), natural=True),
    type(None): Converter(_same, _same, _exactly(type(None)), natural=True, identity=True),
}


def _of(
    kind: type,
    to_json: Callable[[Any], Any],
    from_json: Callable[[Any], Any],
    *,
    exactly: bool = False,
) -> Converter:
    """`exactly` where one of a subclass would come back as less than it was."""

    def accepts(value: Any) -> bool:
        return type(value) is kind if exactly else isinstance(value, kind)

    def checked(value: Any) -> Any:
        if not accepts(value):
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return to_json(value)

    return Converter(checked, from_json, accepts)


def _has_fixed_offset(zone: tzinfo | None) -> bool:
    return zone is None or zone.utcoffset(None) is not None


def _datetime_to_json(value: datetime) -> str:
    """With the name of its time zone, if it has one: `2026-10-24T12:00:00+02:00[Europe/Berlin]`. By its
    offset alone, adding a day to it would no longer know of summer time.
    """
    zone = value.tzinfo
    if _has_fixed_offset(zone):
        return value.isoformat()
    if not isinstance(zone, ZoneInfo) or zone.key is None:
        raise TypeError(f"a time zone of {type(zone).__name__} has no name; use zoneinfo or UTC")
    text = f"{value.isoformat()}[{zone.key}]"
    if _datetime_from_json(text).replace(tzinfo=None) != value.replace(tzinfo=None):
        raise ValueError(f"{value} does not exist: clocks were put forward then")
    return text


def _datetime_from_json(text: str) -> datetime:
    moment, bracket, key = text.partition("[")
    found = datetime.fromisoformat(moment)
    return found.astimezone(ZoneInfo(key.removesuffix("]"))) if bracket else found


def _time_to_json(value: time) -> str:
    if not _has_fixed_offset(value.tzinfo):
        raise TypeError("a time of day has no offset in a time zone with summer time")
    return value.isoformat()


def _timedelta_to_json(value: timedelta) -> Any:
    """Seconds; of a long one its parts, since a float of so many seconds has no microseconds."""
    seconds = value.total_seconds()
    exact = timedelta(seconds=seconds) == value
    return seconds if exact else [value.days, value.seconds, value.microseconds]


def _timedelta_from_json(found: Any) -> timedelta:
    return timedelta(*found) if isinstance(found, list) else timedelta(seconds=found)


TEXTS: dict[type, Converter] = {
    datetime: _of(datetime, _datetime_to_json, _datetime_from_json),
    date: _of(date, lambda value: value.isoformat(), date.fromisoformat, exactly=True),
    time: _of(time, _time_to_json, time.fromisoformat),
    timedelta: _of(timedelta, _timedelta_to_json, _timedelta_from_json),
    UUID: _of(UUID, str, UUID),
    Decimal: _of(Decimal, str, Decimal),
    bytes: _of(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}


def _class(kind: type) -> Converter:
    for known in (SCALARS, TEXTS):
        if kind in known:
            return known[kind]
    if issubclass(kind, Enum):
        return _enum(kind)
    if issubclass(kind, PurePath):
        return _of(kind, str, kind)
    if _is_pydantic(kind):
        return _adapted(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if typing.is_typeddict(kind):
        return _fields(kind, dict, lambda value: value)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _fields(kind, kind, lambda value: value._asdict())
    if kind in (list, tuple, set, frozenset, dict):
        return _generic(kind, ())
    if kind is object:
        return PLAIN_VALUES
    raise TypeError(
        f"{kind.__name__} cannot be sent as JSON; use a dataclass, or codec='cloudpickle'"
    )


def _enum(kind: type[Enum]) -> Converter:
    if all(isinstance(member.value, PLAIN) for member in kind):
        return _of(kind, lambda value: value.value, kind)
    return _of(kind, lambda value: value.name, lambda name: kind[name])


def _dataclass(kind: type) -> Converter:
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    made = _fields(kind, kind, lambda value: {name: getattr(value, name) for name in names})
    is_whole = all(field.init or not field.compare for field in dataclasses.fields(kind))
    return made if is_whole else _checked(made)


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_validator__") or (
        hasattr(kind, "__get_pydantic_core_schema__") and kind.__module__.startswith("pydantic")
    )


def _adapted(kind: type) -> Converter:
    """Aliases, computed fields, generics and unions inside are pydantic's business. What it would
    write, but not read again as it was (a secret, a field that is excluded, what a subclass adds to
    the field of another type), is refused.
    """
    from pydantic import TypeAdapter  # there, since its types are

    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def to_json(value: Any) -> Any:
        return adapter.dump_python(value, mode="json", by_alias=True, round_trip=True)

    return _checked(_of(kind, to_json, adapter.validate_python, exactly=_is_model(kind)))


def _is_model(kind: type) -> bool:
    """Whether subclasses are other types: those of a model are, those of a URL are not."""
    return hasattr(kind, "__pydantic_validator__")


def _checked(made: Converter) -> Converter:
    """Reads what it writes, and refuses what would not come back."""

    def to_json(value: Any) -> Any:
        found = made.to_json(value)
        try:
            again = made.from_json(found)
        except Exception as exc:
            raise TypeError(f"{type(value).__name__} cannot be read again: {exc}") from exc
        if type(again) is not type(value) or again != value:
            raise TypeError(
                f"{type(value).__name__} would come back as something else: a part of it is secret, "
                "excluded, not set when it is made, or of a subclass"
            )
        return found

    return made._replace(to_json=to_json)


def _fields(kind: Any, make: Callable[..., Any], values: Callable[[Any], Any]) -> Converter:
    """Things with named parts. Hints are looked up when used: a class may contain itself."""

    def to_json(value: Any) -> dict[str, Any]:
        hints = _hints_of(kind)
        return {
            name: converter(hints.get(name, Any)).to_json(item)
            for name, item in values(value).items()
        }

    def from_json(found: dict[str, Any]) -> Any:
        hints = _hints_of(kind)
        return make(
            **{
                name: converter(hints.get(name, Any)).from_json(item)
                for name, item in found.items()
            }
        )

    if make is dict:
        return Converter(to_json, from_json, lambda value: isinstance(value, dict))
    return _of(kind, to_json, from_json, exactly=True)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _generic(origin: Any, arguments: tuple[Any, ...]) -> Converter:
    if not isinstance(origin, type):
        return PLAIN_VALUES
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return _fixed_tuple(arguments)
    if issubclass(origin, Mapping):
        return _mapping(*(arguments or (str, Any)))
    if issubclass(origin, Set | Sequence) or origin is Iterable:
        inner = converter(arguments[0] if arguments else Any)
        make = next((k for k in (tuple, frozenset, set) if issubclass(origin, k)), list)
        if issubclass(origin, Set) and make is list:
            make = set
        return Converter(
            lambda values: [inner.to_json(value) for value in values],
            lambda found: make(inner.from_json(value) for value in found),
            lambda value: isinstance(value, origin) and not isinstance(value, str | bytes),
        )
    return _class(origin)


def _fixed_tuple(hints: tuple[Any, ...]) -> Converter:
    inner = [converter(hint) for hint in hints]
    return _of(
        tuple,
        lambda values: [c.to_json(value) for c, value in zip(inner, values, strict=True)],
        lambda found: tuple(c.from_json(value) for c, value in zip(inner, found, strict=True)),
    )


def _mapping(key_hint: Any, value_hint: Any) -> Converter:
    key, inner = converter(key_hint), converter(value_hint)
    if key_hint in (int, float):  # JSON has only text for keys
        kinds = (float, int) if key_hint is float else (int,)
        key = Converter(lambda k: str(k) if type(k) in kinds else k, key_hint, _exactly(*kinds))

    def key_to_json(value: Any) -> Any:
        found = key.to_json(value)
        if not isinstance(found, str) or (isinstance(value, str) and key_hint in (int, float)):
            raise TypeError(f"{value!r} cannot be a key of a {key_hint!r}: JSON has text for keys")
        return found

    return _of(
        Mapping,
        lambda values: {key_to_json(k): inner.to_json(v) for k, v in values.items()},
        lambda found: {key.from_json(k): inner.from_json(v) for k, v in found.items()},
    )


def _union(hints: tuple[Any, ...]) -> Converter:
    """None stays null. Of other kinds, JSON may not tell which one it was: then its number is sent
    along.
    """
    kinds = [converter(hint) for hint in hints if hint is not type(None)]
    optional = len(kinds) < len(hints)
    tagged = len(kinds) > 1 and not all(kind.natural for kind in kinds)

    def to_json(value: Any) -> Any:
        if value is None and optional:
            return None
        for number, kind in enumerate(kinds):
            if kind.accepts(value):
                return [number, kind.to_json(value)] if tagged else kind.to_json(value)
        raise TypeError(f"{type(value).__name__} is none of the kinds that the hint allows")

    def from_json(found: Any) -> Any:
        if found is None and optional:
            return None
        if tagged:
            return kinds[found[0]].from_json(found[1])
        return kinds[0].from_json(found) if len(kinds) == 1 else found

    return Converter(to_json, from_json, lambda value: any(k.accepts(value) for k in kinds))
