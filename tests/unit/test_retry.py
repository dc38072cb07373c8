"""Retry policies decide purely."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pgqrs import Config, Handler, InvalidArgument, Retry, RetryAfter, task
from pgqrs.retry import OUTLASTING


def test_the_default_is_exponential_and_bounded() -> None:
    retry = Retry()
    assert [retry.next_delay(n) for n in (1, 2, 3, 4, 10, 11, 10_000)] == [
        1,
        2,
        4,
        8,
        512,
        600,
        600,
    ]


def test_what_counts_without_a_policy_outlasts_an_outage() -> None:
    assert task(lambda: None).retry is Handler(print).retry is OUTLASTING

    def hours(drawn: float) -> float:
        attempts = Config().max_read_ct
        delays = [OUTLASTING.next_delay(n, rand=lambda: drawn) or 0.0 for n in range(1, attempts)]
        return sum(delays) / 3600

    assert 0.9 < hours(0.5) < 1.1
    assert 0.6 < hours(1.0) < hours(0.0) < 1.4


def test_fixed() -> None:
    retry = Retry.fixed(timedelta(seconds=5))
    assert [retry.next_delay(n) for n in (1, 2, 99)] == [5, 5, 5]


def test_the_last_attempt_is_the_last() -> None:
    retry = Retry(max_attempts=3)
    assert [retry.next_delay(n) for n in (1, 2, 3, 4)] == [1, 2, None, None]


@pytest.mark.parametrize(("drawn", "wait"), [(0.0, 8.0), (0.5, 6.0), (1.0, 4.0)])
def test_jitter_only_shortens(drawn: float, wait: float) -> None:
    assert Retry.exponential(8, jitter=0.5).next_delay(1, rand=lambda: drawn) == wait


def test_an_error_may_say_when() -> None:
    retry = Retry(max_attempts=2)
    assert retry.next_delay(1, RetryAfter(42)) == 42
    assert retry.next_delay(1, RetryAfter(timedelta(minutes=1))) == 60
    assert retry.next_delay(2, RetryAfter(42)) is None


def test_a_function_may_decide() -> None:
    retry = Retry.custom(
        lambda attempt, error: None if isinstance(error, KeyError) else attempt * 7
    )
    assert retry.next_delay(3, ValueError()) == 21
    assert retry.next_delay(3, KeyError()) is None


@pytest.mark.parametrize(
    "options",
    [{"max_attempts": 0}, {"jitter": 2}, {"factor": 0.5}, {"delay": -1}, {"max_delay": "x"}],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Retry(**options)  # type: ignore[arg-type]
