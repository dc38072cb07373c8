"""A duty of a worker that fails costs it no lease."""

from __future__ import annotations

import threading
import time

import pytest

import pgqrs

LONG = 60


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
def test_leases_are_renewed_though_schedules_cannot_be_looked_at(
    database: str,
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: pgqrs.Message) -> None:
        begun.set()
        go_on.wait(LONG)

    def fail() -> None:
        raise raised("permission denied for table pgqrs_schedules")

    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=0.5)
        id = store.producer("tasks").enqueue(1)
        worker = pgqrs.Worker(store, handlers={"tasks": handle})
        monkeypatch.setattr(worker._schedules, "tick", fail)
        with worker:
            assert begun.wait(LONG)
            seen, deadline = set(), time.monotonic() + LONG
            while len(seen) < 4:
                assert time.monotonic() < deadline, "nobody renewed the lease"
                seen.add(store.admin().get_message(id).vt)
                time.sleep(0.02)
            go_on.set()
    assert caplog.text.count("schedules failed, trying again in 1 s") == 1
