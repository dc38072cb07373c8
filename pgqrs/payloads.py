"""From a Python value to the JSON text that is stored, refusing what would not come back unchanged.

The common case costs one pass in Python for the keys and one in C for the text. Only when something
is wrong does a second, slower walk find out where, so that the error can name the path.

What JSON can hold but PostgreSQL's JSONB cannot (a nul character, half a surrogate pair) is refused
on every backend. Integers of any size are kept exactly. A float stays a float: JSONB would turn
`1e+16` into `10000000000000000`, so such numbers are written out in full, with a fraction. It has no
negative zero either, so that is written as a negative number too small for a float: read as one, it is
`-0.0` again.

The size that is limited is that of what is stored. JSONB writes all digits, so `1e-300` counts as 302
bytes, on every backend.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

from pgqrs.errors import InvalidPayload, PayloadTooLarge

_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)
_SCALARS = frozenset((str, int, float, bool, type(None)))
_CONTAINERS = frozenset((dict, list))
_STRING_OR_SPECIAL = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+e\+[0-9]+|-0\.0(?![0-9e])')
_STRING_OR_SMALL = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+e-[0-9]+')
_NEGATIVE_ZERO = "-1e-400"
_GROWTH = 60
"""How many times its size a text can become, when all its numbers are written out: `5e-324`."""


class Batch(NamedTuple):
    """Payloads as JSON: as one array, or else each by itself."""

    size: int
    whole: str | None
    texts: Sequence[str]


def _make_to_text() -> Callable[[Any], str]:
    """`JSONEncoder.encode` without what it sets up anew for each value."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # not CPython
        return _encoder.encode
    pieces = make(
        None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False
    )
    return lambda value: "".join(pieces(value, 0))


_to_text = _make_to_text()


def encode(payload: Any, *, max_bytes: int, max_depth: int, name: str = "payload") -> str:
    """The JSON text of a payload, or `InvalidPayload` saying what is wrong where."""
    try:
        text = _to_text(payload) if _is_plain(payload, max_depth) else None
        if text is not None:
            size = len(text) if text.isascii() else len(text.encode())
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None or "\\u0000" in text:
        _explain(payload, name, max_depth)
        text = _to_text(payload)
        size = len(text.encode())
    _check_size(name, size, max_bytes)
    if "e+" in text or "-0.0" in text:
        text = _STRING_OR_SPECIAL.sub(_in_full, text)
        size = len(text.encode())
    if size * _GROWTH > max_bytes and "e-" in text:
        size += sum(map(_growth, _STRING_OR_SMALL.finditer(text)))
    _check_size(name, size, max_bytes)
    return text


def _check_size(name: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise PayloadTooLarge(name, f"{size} bytes of JSON, more than the {max_bytes} allowed")


def encode_many(
    payloads: Sequence[Any], *, max_bytes: int, max_depth: int, apart: bool = False
) -> Batch:
    """The JSON of a batch, surely `apart` or perhaps as one array; an error names the index of the
    payload it is about.
    """
    if not apart:
        whole = _encode_whole(payloads, max_bytes=max_bytes, max_depth=max_depth)
        if whole is not None:
            return Batch(len(payloads), whole, ())
    texts: list[str] = []
    for payload in payloads:
        try:
            texts.append(encode(payload, max_bytes=max_bytes, max_depth=max_depth))
        except InvalidPayload as exc:
            raise exc.at(len(texts)) from None
    return Batch(len(texts), None, texts)


def _encode_whole(payloads: Sequence[Any], *, max_bytes: int, max_depth: int) -> str | None:
    """A batch in one go, if it is small and plain: objects and arrays without anything special."""
    if not _CONTAINERS.issuperset(map(type, payloads)):
        return None
    try:
        text = _to_text(payloads)
    except (TypeError, ValueError, RecursionError):
        return None
    flat = max_depth > 1 and _is_flat(payloads, text)
    if not flat and not _is_plain(payloads, max_depth + 1):
        return None
    # All of it no larger than one may be: then each is small enough, whatever its characters.
    if len(text) > max_bytes or not text.isascii():
        return None
    if len(text) * _GROWTH > max_bytes and _may_hold(text, "e-"):
        return None
    special = any(_may_hold(text, rare) for rare in ("\\u0000", "e+", "-0.0"))
    return None if special else text


def _may_hold(text: str, rare: str) -> bool:
    """`rare in text`, for something that holds a rare character: looking for one is much quicker."""
    return rare[0] in text and rare[-1] in text and rare in text


def _is_flat(payloads: Sequence[Any], text: str) -> bool:
    """Whether keys and nesting are surely fine, as far as the text of a batch tells: objects that
    hold no object, and arrays that hold none. Six times as quick as looking at every value.
    """
    if text.count("{") != len(payloads) or text.count("[") != text.count(":[") + 1:
        return False
    try:
        "".join(chain.from_iterable(payloads))  # refuses keys that are not text
    except TypeError:
        return False
    return True


def encode_headers(headers: Mapping[str, Any] | None, *, max_bytes: int) -> str | None:
    """The JSON text of message headers: a small map."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidPayload("headers", f"expected a mapping, got {type(headers).__name__}")
    _explain(dict(headers), "headers", max_depth=8)
    return encode(dict(headers), max_bytes=max_bytes, max_depth=8)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether keys and nesting are surely fine: exact built-in types, string keys, not too deep."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth == 0:
        return False
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                return False
            if type(item) not in _SCALARS and not _is_plain(item, depth - 1):
                return False
        return True
    if kind is not list:
        return False
    for item in value:  # noqa: SIM110 (twice as fast as all(…))
        if type(item) not in _SCALARS and not _is_plain(item, depth - 1):
            return False
    return True


def _explain(value: Any, path: str, max_depth: int) -> None:
    """Raise for the first thing that cannot be stored; return if there is none."""
    if isinstance(value, str):
        _explain_text(value, path)
    elif isinstance(value, Mapping | list | tuple):
        if max_depth == 0:
            raise InvalidPayload(path, "nested too deeply")
        if isinstance(value, Mapping):
            if not isinstance(value, dict):
                raise InvalidPayload(path, f"{type(value).__name__} is not JSON; make it a dict")
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidPayload(
                        path, f"the key {key!r} is not a string, and would come back as one"
                    )
                _explain_text(key, path)
                _explain(item, f"{path}.{key}", max_depth - 1)
        else:
            for index, item in enumerate(value):
                _explain(item, f"{path}[{index}]", max_depth - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidPayload(path, f"{value!r} is not JSON")
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError as exc:
            raise InvalidPayload(path, "the integer has too many digits to be JSON") from exc
    elif value is not None:
        raise InvalidPayload(path, f"{type(value).__name__} is not JSON{_advice(value)}")


def _explain_text(text: str, path: str) -> None:
    if "\0" in text:
        raise InvalidPayload(path, "contains a nul character, which PostgreSQL cannot store")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidPayload(path, "contains half of a surrogate pair, not text") from exc


def _advice(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "; encode it, for example as base64 text"
    if hasattr(value, "isoformat"):
        return "; use .isoformat(), with a time zone"
    return ""


def _in_full(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == '"':
        return token
    return _NEGATIVE_ZERO if token == "-0.0" else f"{Decimal(token):f}.0"


def _growth(match: re.Match[str]) -> int:
    """How many more bytes JSONB needs for a number than was written."""
    token = match[0]
    return 0 if token[0] == '"' else len(f"{Decimal(token):f}") - len(token)
