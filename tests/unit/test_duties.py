"""Duties: each in a thread of its own, told of once when they fail."""

from __future__ import annotations

import logging
import threading

import pytest

from pgqrs.duties import Duty, Trouble

LONG = 100


def test_trouble_is_told_once_for_each_reason_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pgqrs.worker")
    trouble = Trouble("the thing", longest=5)
    assert [trouble.failed(ValueError("no")) for _ in range(5)] == [1, 2, 4, 5, 5]
    trouble.failed(ValueError("never"))
    trouble.worked()
    trouble.worked()
    first, second, over = [record.getMessage() for record in caplog.records]
    assert first == "the thing failed, trying again in 1 s: ValueError: no"
    assert second.endswith("ValueError: never")
    assert over == "the thing works again"


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_duty_goes_on_whatever_it_raises(raised: type[BaseException]) -> None:
    count, enough = 0, threading.Event()

    def do() -> float:
        nonlocal count
        count += 1
        if count == 3:
            enough.set()
        if count == 1:
            raise raised("at first")
        return 0.0

    duty = Duty("something", do, longest_pause=0.001)
    duty.start()
    assert enough.wait(LONG)
    duty.stop()


def test_one_that_hangs_is_not_waited_for() -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def do() -> float:
        hangs.set()
        go_on.wait(LONG)
        return 0.0

    duty = Duty("something", do)
    duty.start()
    assert hangs.wait(LONG)
    duty.stop()
    hangs.clear()
    duty.start()  # again, beside the one that still hangs
    assert hangs.wait(LONG)
    duty.stop()
    go_on.set()
