"""Signatures: what hints apply to which argument."""

from __future__ import annotations

from datetime import date
from typing import Any

from pgqrs.codecs import Call, Signature

DAY = date(2026, 1, 2)


def test_each_argument_has_its_own_hint() -> None:
    def function(a: date, /, b: int, *rest: date, c: str, **others: date) -> Any: ...

    signature = Signature(function)
    call = Call((DAY, 1, DAY, DAY), {"c": "2026-01-02", "d": DAY})
    encoded = signature.encode(call)
    assert encoded == {
        "args": ["2026-01-02", 1, "2026-01-02", "2026-01-02"],
        "kwargs": {"c": "2026-01-02", "d": "2026-01-02"},
    }
    assert signature.decode(encoded) == call


def test_a_result_without_a_hint_is_not_taken_for_a_keyword_argument() -> None:
    def function(**days: date):  # type: ignore[no-untyped-def]
        return len(days)

    assert Signature(function).encode_result(3) == 3
