"""Payloads: a faithful round trip or a clear error, the same answer on every backend."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from pgqrs import InvalidPayload, PayloadTooLarge
from pgqrs.testing.conformance.harness import QUEUE, Harness


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for _ in range(depth):
        value = [value]
    return value


def circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


GOOD = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**64),
    10**1000,
    0.1,
    -2.5e-300,
    1e16,
    -1e22,
    1.7976931348623157e308,
    5e-324,
    1e-7,
    -0.0,
    [0.0, -0.0, {"-0.0": "-0.0"}, -0.05, [-0.0]],
    "",
    "plain",
    "e+10 1e+16 \\u0000 \\",
    'quotes " and \\ backslashes \n\t\x01\x7f',
    "ünïcödé 漢字 \U0001f600 \u2028",
    [],
    {},
    {"": ""},
    [None, True, 1, 1.5, "x", [], {}],
    {"a": {"b": [{"c": None}]}, "1e+20": 1e20, "\\u0000": ["\\u0000"]},
    {"zz": 1, "a": 2, "b": {"y": 1, "x": 2}},
    ["1", 1, "1.0", 1.0],
    nested(100),
    "x" * 500_000,
]

BAD = {
    "bytes": ({"a": b"raw"}, "payload.a"),
    "nan": ({"a": [1.0, math.nan]}, "payload.a[1]"),
    "infinity": (math.inf, "payload"),
    "naive datetime": ({"when": datetime(2030, 1, 1)}, "payload.when"),
    "aware datetime": ({"when": datetime(2030, 1, 1, tzinfo=UTC)}, "payload.when"),
    "set": ([1, {2, 3}], "payload[1]"),
    "object": ({"a": {"b": object()}}, "payload.a.b"),
    "decimal": (Decimal("1.1"), "payload"),
    "uuid": ([UUID(int=1)], "payload[0]"),
    "nul": ({"a": ["ok", "nul \0 here"]}, "payload.a[1]"),
    "nul in a key": ({"a": {"nul \0": 1}}, "payload.a"),
    "surrogate": (["half \ud83d pair"], "payload[0]"),
    "surrogate in a key": ({"\udc00": 1}, "payload"),
    "integer key": ({"a": {1: "one"}}, "payload.a"),
    "none key": ({None: 1}, "payload"),
    "tuple key": ({(1, 2): 1}, "payload"),
    "too deep": (nested(101), "payload" + "[0]" * 100),
    "circular": (circular(), "payload" + "[0]" * 100),
    "too many digits": ({"n": 10**5000}, "payload.n"),
}
bad = pytest.mark.parametrize(("payload", "path"), BAD.values(), ids=BAD)


def same(left: Any, right: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return repr(left) == repr(right)  # tells one zero from the other
    return bool(left == right)


@pytest.mark.parametrize("payload", GOOD, ids=lambda value: repr(value)[:40])
def test_a_good_payload_comes_back_unchanged(
    admin: Any, producer: Any, consumer: Any, payload: Any
) -> None:
    producer.enqueue(payload)
    producer.enqueue_many([payload, payload])
    claimed = consumer.dequeue(3)
    assert all(same(message.payload, payload) for message in claimed)
    consumer.ack(claimed[0])
    assert same(admin.get_archived(claimed[0].id).payload, payload)


def test_a_tuple_comes_back_as_the_array_that_json_has(producer: Any, consumer: Any) -> None:
    producer.enqueue({"pair": (1, (2, 3))})
    assert [message.payload for message in consumer.dequeue()] == [{"pair": [1, [2, 3]]}]


@bad
def test_a_bad_payload_is_refused_and_the_place_is_named(
    admin: Any, producer: Any, payload: Any, path: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        producer.enqueue(payload)
    assert caught.value.path == path
    assert caught.value.index is None
    assert str(caught.value).startswith(path + ":")
    assert admin.peek(QUEUE) == []


@bad
def test_one_bad_payload_refuses_the_whole_batch(
    admin: Any, producer: Any, payload: Any, path: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        producer.enqueue_many([{"good": 1}, {"good": 2}, payload, {"good": 3}])
    assert caught.value.index == 2
    assert caught.value.path == path
    assert "payloads[2]" in str(caught.value)
    assert admin.peek(QUEUE) == []


def test_a_payload_too_large_is_refused(admin: Any, producer: Any) -> None:
    with pytest.raises(PayloadTooLarge):
        producer.enqueue("x" * 1024 * 1024)
    with pytest.raises(PayloadTooLarge) as caught:
        producer.enqueue_many([1, "ü" * 600_000])
    assert caught.value.index == 1
    assert admin.peek(QUEUE) == []


def test_the_limits_are_settings(harness: Harness, admin: Any) -> None:
    strict = harness.open(clock=harness.clock, max_payload_bytes=10, max_payload_depth=1)
    producer = strict.producer(QUEUE)
    producer.enqueue("12345678")
    producer.enqueue([1])
    with pytest.raises(PayloadTooLarge):
        producer.enqueue("123456789")
    with pytest.raises(InvalidPayload, match="nested"):
        producer.enqueue([[1]])


@pytest.mark.parametrize("number", [1e308, -1e-300, 5e-324, -0.0])
def test_the_size_is_that_of_what_is_stored(harness: Harness, admin: Any, number: float) -> None:
    """Numbers that are short in Python and are stored with all their digits."""
    strict = harness.open(clock=harness.clock, max_payload_bytes=10_000)
    producer = strict.producer(QUEUE)
    producer.enqueue([number] * 10)
    with pytest.raises(PayloadTooLarge):
        producer.enqueue([number] * 100)
    with pytest.raises(PayloadTooLarge):
        producer.enqueue_many([[1], [number] * 100])
    assert len(admin.peek(QUEUE)) == 1
