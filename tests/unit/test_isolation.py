"""Messages that may have killed their workers are handled one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pgqrs.isolation import PATIENCE, Isolation


class Bench:
    """An isolation whose suspects are the messages called x, and a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.given_back: list[str] = []
        self.isolation = Isolation(
            lambda message: message.name.startswith("x"),  # type: ignore[attr-defined]
            lambda some: self.given_back.extend(message.name for message in some),  # type: ignore[attr-defined]
            clock=lambda: self.now,
        )

    def sift(self, names: str, aboard: int = 0) -> str:
        claimed: list[Any] = [SimpleNamespace(name=name) for name in names]
        return "".join(message.name for message in self.isolation.sift(claimed, aboard))  # type: ignore[attr-defined]


def test_without_suspects_nothing_changes() -> None:
    bench = Bench()
    assert bench.isolation.room(8, 3) == 8
    assert bench.sift("abc") == "abc"
    assert bench.sift("") == ""


def test_suspects_are_given_back_and_met_one_by_one() -> None:
    bench = Bench()
    assert bench.sift("axbx") == "ab"
    assert bench.given_back == ["x", "x"]
    assert bench.isolation.room(8, 2) == 0  # a and b first
    assert bench.isolation.room(8, 0) == 1
    assert bench.sift("x") == "x"
    assert bench.isolation.room(8, 1) == 0
    assert bench.isolation.room(8, 0) == 1
    assert bench.sift("c") == "c"  # one that came before it
    assert bench.isolation.room(8, 0) == 1
    assert bench.sift("x") == "x"
    assert bench.isolation.room(8, 1) == 0
    assert bench.isolation.room(8, 0) == 8
    assert bench.given_back == ["x", "x"]


def test_suspects_that_others_took_are_not_waited_for() -> None:
    bench = Bench()
    bench.sift("ax")
    assert bench.isolation.room(8, 0) == 1
    assert bench.sift("") == ""
    assert bench.isolation.room(8, 0) == 8


def test_a_handler_that_does_not_end_does_not_block_the_worker() -> None:
    bench = Bench()
    bench.sift("ax")
    assert bench.isolation.room(7, 1) == 0
    bench.now += PATIENCE + 1
    assert bench.isolation.room(7, 1) == 7
    assert bench.sift("bx", aboard=1) == "bx"
    bench.now += PATIENCE + 1
    assert bench.sift("bx", aboard=1) == "b"


def test_beside_a_suspect_that_goes_well_others_are_claimed_after_a_while() -> None:
    bench = Bench()
    assert bench.sift("x") == "x"
    assert bench.isolation.room(7, 1) == 0
    bench.now += PATIENCE + 1
    assert bench.isolation.room(7, 1) == 7
