"""One thread shows the long steps of all runs that a script runs itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pgqrs.workflows.step_watch import StepWatch

OFTEN = 0.01
LONG = 100


class Shown:
    """Counts, and rings when it was called often enough."""

    def __init__(self, *, fails: bool = False) -> None:
        self.count, self.enough, self._fails = 0, threading.Event(), fails

    def __call__(self) -> None:
        self.count += 1
        if self.count == 3:
            self.enough.set()
        if self._fails:
            raise RuntimeError("unexpected")


@contextmanager
def watching(watch: StepWatch, show: Shown, *, every: float) -> Iterator[None]:
    watched = watch.watch(show, every=every)
    yield
    watch.forget(watched)


def test_a_run_is_watched_until_it_ends() -> None:
    watch, show = StepWatch(), Shown()
    with watching(watch, show, every=OFTEN):
        assert show.enough.wait(LONG)
    count, later = show.count, Shown()
    with watching(watch, later, every=OFTEN):
        assert later.enough.wait(LONG)
    assert show.count <= count + 1  # one may have been under way


def test_one_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch, broken, sound = StepWatch(), Shown(fails=True), Shown()
    with watching(watch, broken, every=OFTEN):
        assert broken.enough.wait(LONG)
        with watching(watch, sound, every=OFTEN):
            assert sound.enough.wait(LONG)
    assert "could not be shown" in caplog.text
