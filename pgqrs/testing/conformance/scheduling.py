"""Schedules: each tick once, at the right time."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from pgqrs import (
    InvalidArgument,
    QueueNotFound,
    QueueScheduled,
    ScheduleExists,
    ScheduleNotFound,
    workflow,
)
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness, worker
from pgqrs.testing.conformance.tasking import add
from pgqrs.testing.conformance.working import until
from pgqrs.testing.portal import Synced


@pytest.fixture
def schedules(store: Any, admin: Any) -> Any:
    return _of(store)


def _of(store: Any) -> Any:
    if not hasattr(store, "_portal"):
        return store.schedules
    return Synced(store._portal, store._wrapped.schedules)


def ticks(admin: Any) -> list[str]:
    return [message.headers["pgqrs-tick"] for message in admin.peek(QUEUE, 10_000)]


def test_an_interval_ticks_once_each_time(schedules: Any, admin: Any, clock: ManualClock) -> None:
    start = clock.now()
    made = schedules.create("often", every=60, queue=QUEUE, payload={"n": 1}, priority=2)
    assert made.next_at == start + timedelta(seconds=60)
    assert schedules.tick() == 0
    for n in range(1, 4):
        clock.advance(60)
        assert (schedules.tick(), schedules.tick()) == (1, 0)
        assert ticks(admin)[-1] == (start + timedelta(seconds=60 * n)).isoformat()
    (message, *_) = admin.peek(QUEUE)
    assert (message.payload, message.priority) == ({"n": 1}, 2)
    assert message.headers["pgqrs-schedule"] == "often"
    assert schedules.get("often").last_at == clock.now()


def test_cron_is_meant_in_its_time_zone(schedules: Any, admin: Any, clock: ManualClock) -> None:
    made = schedules.create(
        "mornings", cron="30 8 * * *", timezone="Europe/Berlin", queue=QUEUE, payload=1
    )
    local = made.next_at.astimezone(ZoneInfo("Europe/Berlin"))
    assert (local.hour, local.minute) == (8, 30)
    assert clock.now() < made.next_at <= clock.now() + timedelta(days=1, hours=1)


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 10)])
def test_missed_ticks_are_treated_as_agreed(
    schedules: Any, admin: Any, clock: ManualClock, missed: str, count: int
) -> None:
    schedules.create("hourly", every=3600, queue=QUEUE, payload=1, missed=missed)
    clock.advance(10 * 3600 + 120)
    assert schedules.tick() == count
    clock.advance(3600 - 120)
    assert schedules.tick() == 1
    assert len(set(ticks(admin))) == count + 1


def test_many_missed_ticks_come_in_bounded_pieces(
    schedules: Any, admin: Any, clock: ManualClock
) -> None:
    schedules.create("often", every=1, queue=QUEUE, payload=1, missed="all")
    clock.advance(600)
    total = 0
    while found := schedules.tick():
        assert found <= 250
        total += found
    assert total == len(set(ticks(admin))) == 600


def test_a_paused_schedule_rests(schedules: Any, admin: Any, clock: ManualClock) -> None:
    schedules.create("often", every=60, queue=QUEUE, payload=1)
    assert schedules.pause("often").paused
    clock.advance(600)
    assert schedules.tick() == 0
    assert not schedules.resume("often").paused
    assert schedules.tick() == 1


def test_out_of_turn_and_for_the_past(schedules: Any, admin: Any, clock: ManualClock) -> None:
    schedules.create("daily", cron="0 0 * * *", queue=QUEUE, payload=1)
    id = schedules.trigger("daily")
    assert admin.get_message(id).headers == {"pgqrs-schedule": "daily"}
    start = datetime(2020, 1, 1, tzinfo=UTC)
    assert len(schedules.backfill("daily", start, start + timedelta(days=3))) == 3
    assert [message.headers.get("pgqrs-tick") for message in admin.peek(QUEUE)[1:]] == [
        f"2020-01-0{day}T00:00:00+00:00" for day in (1, 2, 3)
    ]


def test_schedules_have_names(schedules: Any, admin: Any) -> None:
    schedules.create("a", every=60, queue=QUEUE, payload=1)
    with pytest.raises(ScheduleExists):
        schedules.create("a", every=30, queue=QUEUE, payload=1)
    assert schedules.create("a", every=30, queue=QUEUE, payload=2, replace=True).every == 30
    assert [schedule.name for schedule in schedules.list_schedules()] == ["a"]
    schedules.delete("a")
    for ask in (schedules.get, schedules.delete, schedules.pause, schedules.trigger):
        with pytest.raises(ScheduleNotFound):
            ask("a")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "0 0 31 2 *"}, "cron"),
        ({"cron": "* * * * * *"}, "cron"),
        ({"cron": "* * * * *", "seconds": True}, "cron"),
        ({"every": 5, "seconds": True}, "seconds"),
        ({"every": 5, "args": [1]}, "args"),
        ({"every": 5, "task": add, "workflow": "w"}, "workflow"),
        ({"cron": "* * * * *", "every": 5}, "cron"),
        ({}, "cron"),
        ({"every": 0.1}, "every"),
        ({"every": 5, "timezone": "Mars/Crater"}, "timezone"),
        ({"every": 5, "missed": "some"}, "missed"),
        ({"every": 5, "queue": None}, "queue"),
    ],
)
def test_what_is_no_schedule_is_refused(schedules: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        schedules.create("wrong", **({"queue": QUEUE, "payload": 1} | wrong))
    assert caught.value.name == named
    with pytest.raises(QueueNotFound):
        schedules.create("wrong", every=5, queue="nowhere", payload=1)
    assert schedules.list_schedules() == []


def test_many_lookers_enqueue_a_tick_once(harness: Harness, admin: Any, clock: ManualClock) -> None:
    stores = [harness.open(clock=clock) for _ in range(4)]
    _of(stores[0]).create("often", every=1, queue=QUEUE, payload=1)
    for _ in range(5):
        clock.advance(1)
        threads = [threading.Thread(target=_of(store).tick) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ticks(admin)) == len(set(ticks(admin))) == 5


def test_workers_tick(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=None)
    _of(store).create("often", every=1, task=add, args=[20], kwargs={"b": 22})
    with worker(store, queues=[QUEUE]), worker(store, queues=[QUEUE]):
        until(lambda: len(store.admin().list_archive(QUEUE)) >= 2)
    ended = store.admin().list_archive(QUEUE)
    assert {found.result for found in ended} == {42}
    stamps = [found.headers["pgqrs-tick"] for found in ended]
    assert len(stamps) == len(set(stamps))


def test_creating_a_schedule_again_changes_nothing(
    schedules: Any, admin: Any, clock: ManualClock
) -> None:
    what = {"every": 3600, "queue": QUEUE, "payload": {"n": 1, "m": [True]}, "headers": {"a": 1}}
    made = schedules.create("hourly", **what)
    ticked = 0
    for _ in range(12):
        clock.advance(3000)
        schedules.create("hourly", replace=True, **what)
        ticked += schedules.tick()
    assert ticked == 10
    schedules.pause("hourly")
    again = schedules.create("hourly", replace=True, **what)
    assert again.paused
    assert (again.starts_at, again.created_at) == (made.starts_at, made.created_at)


def test_a_tick_that_is_due_survives_being_created_again(
    schedules: Any, admin: Any, clock: ManualClock
) -> None:
    what = {"queue": QUEUE, "payload": 1, "replace": True}
    due = schedules.create("nightly", cron="0 3 * * *", **what).next_at
    clock.advance(86_400)
    assert schedules.create("nightly", cron="0 3 * * *", **what).next_at == due
    assert schedules.create("nightly", cron="0 4 * * *", **what).next_at == due
    assert (schedules.tick(), schedules.tick()) == (1, 0)
    assert schedules.get("nightly").next_at.hour == 4


def test_a_changed_schedule_keeps_what_still_holds(
    schedules: Any, admin: Any, clock: ManualClock
) -> None:
    made = schedules.create("often", every=600, queue=QUEUE, payload=1)
    clock.advance(100)
    schedules.pause("often")
    other = schedules.create("often", every=600, queue=QUEUE, payload=True, replace=True)
    assert (other.payload, other.next_at, other.paused) == (True, made.next_at, True)
    quicker = schedules.create("often", every=60, queue=QUEUE, payload=True, replace=True)
    assert quicker.next_at == made.starts_at + timedelta(seconds=120)
    assert (quicker.created_at, quicker.paused) == (made.created_at, True)


@pytest.mark.parametrize("timing", [{"every": 1}, {"cron": "* * * * * *", "seconds": True}])
def test_years_of_missed_ticks_are_caught_up_with_at_once(
    schedules: Any, admin: Any, clock: ManualClock, timing: dict[str, Any]
) -> None:
    schedules.create("often", queue=QUEUE, payload=1, **timing)
    clock.advance(5 * 365 * 86_400)
    assert (schedules.tick(), schedules.tick()) == (1, 0)
    found = schedules.get("often")
    assert timedelta(0) <= clock.now() - found.last_at < timedelta(seconds=1)
    assert timedelta(0) < found.next_at - clock.now() <= timedelta(seconds=1)


def test_a_schedule_that_cannot_tick_says_so_and_rests(
    schedules: Any, admin: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_queue("gone")
    schedules.create("stuck", every=10, queue="gone", payload=1)
    schedules.create("well", every=10, queue=QUEUE, payload=1)
    admin.delete_queue("gone", force=True)
    pauses: list[float] = []
    clock.advance(10)
    for _ in range(10):
        schedules.tick()
        assert schedules.tick() == 0
        (stuck,) = (found for found in schedules.list_schedules() if found.name == "stuck")
        assert "QueueNotFound" in stuck.error
        pauses.append((stuck.retry_at - clock.now()).total_seconds())
        clock.advance(pauses[-1])
    assert (pauses[0], pauses[-1]) == (5, 300)
    assert pauses == sorted(pauses)
    said = [record for record in caplog.records if "schedule stuck cannot tick" in record.message]
    assert len(said) == 1
    assert schedules.get("well").last_at > stuck.failing_since
    admin.create_queue("gone")
    schedules.resume("stuck")
    assert schedules.tick() >= 1
    assert schedules.get("stuck").error is None
    assert len(admin.peek("gone")) == 1


def test_a_queue_that_schedules_use_is_deleted_by_force_only(schedules: Any, admin: Any) -> None:
    admin.create_queue("used")
    for name in ("b", "a"):
        schedules.create(name, every=60, queue="used", payload=1)
    with pytest.raises(QueueScheduled) as caught:
        admin.delete_queue("used")
    assert caught.value.schedules == ["a", "b"]
    schedules.delete("a")
    schedules.delete("b")
    admin.delete_queue("used")


def test_a_schedule_starts_workflows(
    schedules: Any, store: Any, admin: Any, clock: ManualClock
) -> None:
    schedules.create("given", every=60, workflow=multiply, args=[6], kwargs={"by": 7})
    schedules.create("named", every=60, workflow="multiply", args=[5])
    clock.advance(60)
    assert schedules.tick() == 2
    run = schedules.trigger("given")
    worker(store, workflows=[multiply]).run(until_empty=True)
    assert sorted(found.output for found in store.workflows.list_runs()) == [10, 42, 42]
    assert store.workflows.get(run).version == "1"
    assert schedules.get("given").workflow == "multiply"
    with pytest.raises(InvalidArgument):
        schedules.create("keyed", every=60, workflow=multiply.options(key="one"), args=[1])


@workflow(version="1", timeout=3600)
def multiply(n: int, by: int = 2) -> int:
    return n * by


def test_a_backfill_goes_on_where_it_was_cut_short(schedules: Any, admin: Any) -> None:
    schedules.create("often", cron="* * * * *", queue=QUEUE, payload=1)
    start = datetime(2020, 1, 1, tzinfo=UTC)
    past = start, start + timedelta(minutes=600)
    told: list[Any] = []

    def leave(progress: Any) -> None:
        told.append(progress)
        if len(told) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        schedules.backfill("often", *past, progress=leave)
    rest = schedules.backfill("often", *past, progress=told.append)
    assert len(rest) == 100
    assert [progress.enqueued for progress in told] == [250, 500, 100]
    assert [int(10 * progress.done) for progress in told] == [4, 8, 9]
    assert len(ticks(admin)) == len(set(ticks(admin))) == 600
    assert len(schedules.backfill("often", start, start + timedelta(minutes=2))) == 2
