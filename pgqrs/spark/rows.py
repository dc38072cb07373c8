"""Rows of a data frame as messages: which columns there may be, and what may be in them.

What `enqueue` refuses is refused here too, by columns and not by rows where that can be: of the text of
a payload only what looks unusual is parsed here, if the database parses it anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pgqrs.errors import InvalidArgument, InvalidPayload, PayloadTooLarge
from pgqrs.payloads import encode, encode_headers
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY, MAX_HEADER_BYTES, MAX_LABEL

TIME = pa.timestamp("us", tz="UTC")
COLUMNS = {
    "payload": ("payload", pa.string()),
    "priority": ("priority", pa.int32()),
    "eta": ("eta", TIME),
    "expires_at": ("expires_at", TIME),
    "headers": ("headers", pa.string()),
    "group": ("group_key", pa.string()),
    "key": ("dedup_key", pa.string()),
    "codec": ("codec", pa.string()),
}
"""What a data frame may have: the column it is stored in, and the type it has there."""
INSTEAD = {
    "delay": "give the time as eta, or one delay for all as an option",
    "ttl": "give the time as expires_at, or one ttl for all as an option",
    "dedup_key": "it is called key",
    "group_key": "it is called group",
}
UNUSUAL = r"[0-9.][eE][+-]?[0-9]"
"""A number with an exponent, which PostgreSQL would turn into another kind of number."""
LONGEST_NUMBER = 4300
"""Digits of a number that Python reads."""


class Limits(NamedTuple):
    """How large a payload may be."""

    max_bytes: int
    max_depth: int


def check_columns(names: list[str]) -> None:
    """Refuse a data frame that has other columns than messages have."""
    for name in names:
        if name not in COLUMNS:
            advice = INSTEAD.get(name, f"there may be {', '.join(COLUMNS)}")
            raise InvalidArgument(name, f"a message has no such column; {advice}")
    if "payload" not in names:
        raise InvalidArgument("payload", "the data frame has no such column")


def checked(batch: Any, limits: Limits, *, parsed_later: bool) -> Any:
    """A batch with the columns that are stored. `parsed_later` says that the database parses JSON."""
    columns: dict[str, Any] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        stored, kind = COLUMNS[name]
        columns[stored] = _CHECKS[name](name, array, kind, limits, parsed_later)
    return pa.RecordBatch.from_pydict(columns)


def _payload(_name: str, array: Any, _kind: Any, limits: Limits, parsed_later: bool) -> Any:
    if array.null_count:
        index = pc.index(pc.is_null(array), True).as_py()
        raise InvalidPayload("payload", "is null; JSON's null is the text null", index=index)
    if not _is_text(array.type):
        return _encoded(array, limits)
    sizes = pc.binary_length(array)
    if len(array) and pc.max(sizes).as_py() > limits.max_bytes:
        size = pc.max(sizes).as_py()
        index = pc.index(sizes, size).as_py()
        problem = f"{size} bytes of JSON, more than the {limits.max_bytes} allowed"
        raise PayloadTooLarge("payload", problem, index=index)
    unusual = _unusual(array, sizes, limits) if parsed_later else None
    return _parsed(array, unusual, limits)


def _unusual(array: Any, sizes: Any, limits: Limits) -> Any:
    """Which texts have to be looked at more closely."""
    opened = pc.add(pc.count_substring(array, "{"), pc.count_substring(array, "["))
    deep = pc.greater(opened, limits.max_depth)
    long = pc.greater(sizes, LONGEST_NUMBER)
    return pc.or_(pc.or_(deep, long), pc.match_substring_regex(array, UNUSUAL))


def _parsed(array: Any, which: Any | None, limits: Limits) -> Any:
    """Texts of JSON as `enqueue` would have written them: all, or only some."""
    if which is not None and not pc.any(which).as_py():
        return array
    texts = array.to_pylist()
    for index in range(len(texts)) if which is None else pc.indices_nonzero(which).to_pylist():
        try:
            value = json.loads(texts[index], parse_constant=_no_number)
        except (ValueError, RecursionError) as exc:
            raise InvalidPayload("payload", f"is not JSON: {exc}", index=index) from exc
        texts[index] = _encode(value, index, limits)
    return pa.array(texts, pa.string())


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _encode(value: Any, index: int, limits: Limits) -> str:
    try:
        return encode(value, max_bytes=limits.max_bytes, max_depth=limits.max_depth)
    except InvalidPayload as exc:
        raise exc.at(index) from None


def _encoded(array: Any, limits: Limits) -> Any:
    """Values of any other type as texts of JSON."""
    plain = plain_values(array.type)
    values = (plain(value) for value in array.to_pylist())
    return pa.array([_encode(value, i, limits) for i, value in enumerate(values)], pa.string())


def plain_values(kind: Any) -> Callable[[Any], Any]:
    """How values of a type become what JSON knows: Arrow hands out maps as lists of pairs."""
    if pa.types.is_map(kind):
        item = plain_values(kind.item_type)
        return lambda value: None if value is None else {k: item(v) for k, v in value}
    if pa.types.is_struct(kind):
        fields = {field.name: plain_values(field.type) for field in kind}
        return lambda value: (
            None if value is None else {name: of(value[name]) for name, of in fields.items()}
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = plain_values(kind.value_type)
        return lambda value: None if value is None else [element(v) for v in value]
    return lambda value: value


def _headers(_name: str, array: Any, _kind: Any, _limits: Limits, _parsed: bool) -> Any:
    """Most rows have the same few headers: each is checked once."""
    if _is_text(array.type):
        indices = array.dictionary_encode()
        texts = [_header_text(text) for text in indices.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(indices.indices)
    plain = plain_values(array.type)
    values = (plain(value) for value in array.to_pylist())
    return pa.array(
        [encode_headers(value, max_bytes=MAX_HEADER_BYTES) for value in values], pa.string()
    )


def _header_text(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise InvalidPayload("headers", f"is not JSON: {exc}") from exc
    return encode_headers(value, max_bytes=MAX_HEADER_BYTES)


def _priority(name: str, array: Any, kind: Any, _limits: Limits, _parsed: bool) -> Any:
    if not pa.types.is_integer(array.type):
        raise InvalidArgument(name, f"expected whole numbers, got {array.type}")
    least, most = (bound.as_py() for bound in pc.min_max(array).values())
    if least is not None and not LOWEST_PRIORITY <= least <= most <= HIGHEST_PRIORITY:
        raise InvalidArgument(name, f"expected {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}")
    return pc.cast(array, kind)


def _time(name: str, array: Any, kind: Any, _limits: Limits, _parsed: bool) -> Any:
    if not pa.types.is_timestamp(array.type) or array.type.tz is None:
        raise InvalidArgument(name, f"expected times with a zone, got {array.type}")
    return pc.cast(array, kind)


def _label(name: str, array: Any, kind: Any, _limits: Limits, _parsed: bool) -> Any:
    if not _is_text(array.type):
        raise InvalidArgument(name, f"expected text, got {array.type}")
    lengths = pc.min_max(pc.utf8_length(array))
    least, most = (bound.as_py() for bound in lengths.values())
    if least is not None and not 1 <= least <= most <= MAX_LABEL:
        raise InvalidArgument(name, f"expected some text of up to {MAX_LABEL} characters")
    if pc.all(pc.utf8_is_printable(array)).as_py() is False:
        raise InvalidArgument(name, "is not printable")
    return pc.cast(array, kind)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_CHECKS: dict[str, Callable[..., Any]] = {
    "payload": _payload,
    "priority": _priority,
    "eta": _time,
    "expires_at": _time,
    "headers": _headers,
    "group": _label,
    "key": _label,
    "codec": _label,
}
