"""Schedules: each tick once, at the right time."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from pgqrs import InvalidArgument, QueueNotFound, ScheduleExists, ScheduleNotFound
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
    clock.advance(1500)
    total = 0
    while found := schedules.tick():
        assert found <= 1000
        total += found
    assert total == len(set(ticks(admin))) == 1500


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
