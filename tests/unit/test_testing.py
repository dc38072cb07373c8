"""The helpers for applications' tests."""

from __future__ import annotations

from datetime import date

import pytest

import pgqrs
from pgqrs.testing import ManualClock, assert_enqueued, drain, inline

pytest_plugins = ["pgqrs.testing.plugin"]


@pgqrs.task(queue="mails")
def send(to: str, day: date) -> str:
    return f"{to} {day:%A}"


@pgqrs.task(queue="mails", retry=pgqrs.Retry(max_attempts=1))
def fail() -> None:
    raise LookupError("nothing there")


DAY = date(2026, 11, 16)


@pytest.fixture
def store(pgqrs_store: pgqrs.Store) -> pgqrs.Store:
    pgqrs_store.admin().create_queue("mails")
    return pgqrs_store


def test_what_is_enqueued_can_be_asserted_and_run_off(
    store: pgqrs.Store, pgqrs_clock: ManualClock
) -> None:
    with pytest.raises(AssertionError, match="at least one"):
        assert_enqueued(store, send)
    handle = send.enqueue("ada", day=DAY)
    later = send.options(delay=60).enqueue("bob", day=DAY)
    assert_enqueued(store, send, count=2)
    (message,) = assert_enqueued(store, send, "ada", day=DAY)
    assert message.id == handle.id
    assert_enqueued(store, "mails", count=1, matching=lambda m: m.id == later.id)
    assert drain(store) == 1
    assert handle.result(5) == "ada Monday"
    pgqrs_clock.advance(60)
    assert drain(store, "mails") == 1
    assert later.result(5) == "bob Monday"


def test_tasks_can_run_in_place() -> None:
    with inline() as calls:
        assert send.enqueue("ada", day=DAY).result() == "ada Monday"
        failed = fail.enqueue()
        assert failed.status() == "failed"
        with pytest.raises(LookupError):
            failed.result()
    assert [task.name for task, _ in calls] == [send.name, fail.name]
    assert calls[0][1].kwargs == {"day": DAY}


def test_the_fixture_runs_tasks_in_place(pgqrs_inline: list[object]) -> None:
    assert send.enqueue("ada", DAY).status() == "completed"
    assert len(pgqrs_inline) == 1
