"""One thread renews the leases of all runs that a script runs itself."""

from __future__ import annotations

import threading

import pytest

from pgqrs.workflows.renewals import Renewals

OFTEN = 0.01


class Renewed:
    """Counts, and rings when it was called often enough."""

    def __init__(self, *, fails: bool = False) -> None:
        self.count, self.enough, self._fails = 0, threading.Event(), fails

    def __call__(self) -> None:
        self.count += 1
        if self.count == 3:
            self.enough.set()
        if self._fails:
            raise RuntimeError("unexpected")


def test_a_lease_is_renewed_until_it_is_given_up() -> None:
    renewals, renew = Renewals(), Renewed()
    with renewals.keep(renew, every=OFTEN):
        assert renew.enough.wait(30)
    count, later = renew.count, Renewed()
    with renewals.keep(later, every=OFTEN):
        assert later.enough.wait(30)
    assert renew.count == count


def test_one_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    renewals, broken, sound = Renewals(), Renewed(fails=True), Renewed()
    with renewals.keep(broken, every=OFTEN):
        assert broken.enough.wait(30)
        with renewals.keep(sound, every=OFTEN):
            assert sound.enough.wait(30)
    assert "could not be renewed" in caplog.text
