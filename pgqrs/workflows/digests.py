"""A number that stands for the arguments of a call, the same in every process and every release.

Arguments of steps need not be JSON. What cannot be told apart in a way that lasts (a connection, an
object of a class that has no say in it) has no digest, and such calls are not compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from pathlib import PurePath
from typing import Any
from uuid import UUID

_BY_REPR = (date, time, timedelta, Decimal, UUID, PurePath, bytes)


class _Unknown(Exception):
    """There is something among the arguments that has no digest."""


def _as_json(value: Any) -> Any:
    """What stands for a value that is not JSON. Its type is part of it."""
    kind = type(value).__qualname__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            kind,
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)},
        ]
    if isinstance(value, Enum):
        return [kind, value.name]
    if isinstance(value, _BY_REPR):
        return [kind, str(value)]
    if isinstance(value, Set):
        return [kind, sorted(map(_text, value))]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__pydantic_validator__") and hasattr(value, "__dict__"):
        return [kind, vars(value)]
    raise _Unknown


_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_as_json)


def _make_text() -> Callable[[Any], str]:
    """`JSONEncoder.encode` without what it sets up anew for each value: half of the time of a digest."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # not CPython
        return _encoder.encode
    escaped = json.encoder.encode_basestring_ascii
    pieces = make(None, _as_json, escaped, None, ":", ",", True, False, True)
    return lambda value: "".join(pieces(value, 0))


_text = _make_text()


def digest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The digest of the arguments of a call; None if they have none."""
    try:
        text = _text((args, kwargs) if kwargs else args)
    except (_Unknown, TypeError, ValueError, RecursionError):
        return None
    found = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(found, "big", signed=True)
