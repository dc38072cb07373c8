"""Fixtures for an application's tests: `pytest_plugins = ["pgqrs.testing.plugin"]`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgqrs import current
from pgqrs.store import Store
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.tasks import inline


@pytest.fixture
def pgqrs_clock() -> ManualClock:
    """A clock that stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def pgqrs_store(pgqrs_clock: ManualClock) -> Iterator[Store]:
    """A store in memory, with its tables, that tasks use; its time is `pgqrs_clock`."""
    with Store("sqlite::memory:", clock=pgqrs_clock) as store:
        store.admin().install()
        with current.use(store):
            yield store


@pytest.fixture
def pgqrs_inline() -> Iterator[object]:
    """Tasks run in place when they are enqueued; gives the list of calls."""
    with inline() as calls:
        yield calls
