"""Fixtures for an application's tests: `pytest_plugins = ["pgqrs.testing.plugin"]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pgqrs import current
from pgqrs.aio.store import AsyncStore
from pgqrs.codecs import Call
from pgqrs.store import Store
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.inlining import inline


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
def pgqrs_async_store(pgqrs_clock: ManualClock) -> Iterator[AsyncStore]:
    """The same for asyncio. A plain fixture, so that it works with pytest-asyncio, with anyio, and with
    neither: the store opens itself, in whichever event loop uses it first.
    """
    store = AsyncStore("sqlite::memory:", clock=pgqrs_clock, upgrade=True)
    try:
        with current.use(store):
            yield store
    finally:
        store._database.close()
        store._bridge.close()


@pytest.fixture
def pgqrs_inline() -> Iterator[list[tuple[Any, Call]]]:
    """Tasks and runs go on in place when they are enqueued or started; gives the list of calls."""
    with inline() as calls:
        yield calls
