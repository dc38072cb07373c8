"""Which conditions the database decides."""

from __future__ import annotations

from pgqrs.repositories.scans import MOST_VALUES, Condition, can_compare


def test_a_condition_of_too_many_values_is_left_to_others() -> None:
    few, many = tuple(range(MOST_VALUES)), tuple(range(MOST_VALUES + 1))
    assert can_compare("archive", Condition("id", "in", few))
    assert not can_compare("archive", Condition("id", "in", many))
