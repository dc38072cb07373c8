"""Batches are checked in a hurry; that must not change what is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqrs.errors import InvalidPayload
from pgqrs.payloads import encode, encode_many

texts = st.text(st.sampled_from('ab{}[],:"\\é'), max_size=5)
scalars = texts | st.integers() | st.floats() | st.booleans() | st.none()
keys = texts | st.integers() | st.none()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def one_by_one(payloads: list[Any], depth: int) -> list[Any] | str:
    """What each payload is when it is encoded by itself, or the place of the first error."""
    found = []
    for index, payload in enumerate(payloads):
        try:
            found.append(json.loads(encode(payload, max_bytes=10_000, max_depth=depth)))
        except InvalidPayload as exc:
            return str(exc.at(index))
    return found


def together(payloads: list[Any], depth: int) -> list[Any] | str:
    try:
        batch = encode_many(payloads, max_bytes=10_000, max_depth=depth)
    except InvalidPayload as exc:
        return str(exc)
    if batch.whole is not None:
        return list(json.loads(batch.whole))
    return [json.loads(text) for text in batch.texts]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(values, max_size=4), st.integers(1, 4))
def test_a_batch_is_what_its_payloads_are(payloads: list[Any], depth: int) -> None:
    assert together(payloads, depth) == one_by_one(payloads, depth)


@pytest.mark.parametrize("payload", [{"a": {1: 2}}, {"a": [{2: 1}]}, {None: 1}, {"a": {"b": {}}}])
def test_keys_and_depth_are_checked_in_batches_too(payload: Any) -> None:
    with pytest.raises(InvalidPayload):
        encode_many([{"fine": 1}, payload], max_bytes=10_000, max_depth=2)
