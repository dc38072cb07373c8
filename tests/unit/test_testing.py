"""The helpers for applications' tests."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path
from threading import Thread
from typing import Any

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


@pgqrs.task(queue="mails")
async def later(n: int) -> int:
    await asyncio.sleep(0)
    return n + 1


@pgqrs.task(queue="mails")
def unsendable() -> object:
    return {1}


@pgqrs.task(queue="mails")
def give_up() -> object:
    return pgqrs.Failed("no use", dead=True)


@pgqrs.workflow
def approve(name: str) -> str:
    began = pgqrs.now()
    pgqrs.sleep(3600)
    approved = pgqrs.wait_for_event("approved", timeout=3600, default=None)
    return f"{name}: {approved} after {(pgqrs.now() - began).total_seconds():.0f} s"


@pgqrs.workflow
def endless() -> None:
    pgqrs.wait_for_event("never")


@pgqrs.workflow
def broken() -> None:
    raise LookupError("nothing there")


@pgqrs.workflow
def family() -> str:
    result: str = approve.start("c").result()
    return result


@pgqrs.workflow
async def twice(n: int) -> int:
    return 2 * n


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
    assert handle.result(60) == "ada Monday"
    pgqrs_clock.advance(60)
    assert drain(store, "mails") == 1
    assert later.result(60) == "bob Monday"


def test_errors_are_raised_unless_they_are_not_wanted(store: pgqrs.Store) -> None:
    fail.enqueue()
    assert drain(store, raise_errors=False) == 1
    give_up.enqueue()
    with pytest.raises(pgqrs.TaskFailed, match="no use"):
        drain(store)


def test_runs_that_end_count(store: pgqrs.Store, pgqrs_clock: ManualClock) -> None:
    run = approve.start("ada")
    assert drain(store) == 0
    pgqrs_clock.advance(3600)
    run.signal("approved", False)
    assert drain(store) == 1
    assert run.result(60) == "ada: False after 3600 s"


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


def test_async_tasks_run_in_place() -> None:
    async def ask() -> list[object]:
        handle = await send.aenqueue("ada", day=DAY)
        many = await later.aenqueue_many([(1,), (2,)])
        failed = await fail.aenqueue()
        with pytest.raises(LookupError):
            await failed.result()
        # The sync way inside of an event loop: the coroutine runs in a loop of its own.
        inside = later.enqueue(4).result()
        return [
            await handle.result(timeout=1),
            *[await one.result() for one in many],
            await failed.status(),
            inside,
        ]

    with inline() as calls:
        assert asyncio.run(ask()) == ["ada Monday", 2, 3, "failed", 5]
        assert later.enqueue(3).result() == 4
        assert [one.result() for one in later.enqueue_many([(7,), (8,)])] == [8, 9]
    assert len(calls) == 8


def test_no_thread_of_the_process_reaches_a_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGQRS_DSN", f"sqlite:///{tmp_path / 'real.db'}")
    results: list[str] = []
    with inline():
        thread = Thread(target=lambda: results.append(send.enqueue("ada", day=DAY).result()))
        thread.start()
        thread.join()
    assert results == ["ada Monday"]
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_sent_or_kept_is_refused_in_place() -> None:
    with inline() as calls:
        with pytest.raises(pgqrs.InvalidPayload):
            send.enqueue("ada", day=object())  # type: ignore[arg-type]
        with pytest.raises(pgqrs.InvalidPayload, match="set is not JSON"):
            unsendable.enqueue().result()
        with pytest.raises(pgqrs.InvalidArgument):
            send.enqueue()  # type: ignore[call-arg]
    assert len(calls) == 1


def test_runs_go_on_in_place() -> None:
    with inline() as calls:
        run = approve.start("ada")
        assert run.status() == "suspended"
        run.signal("approved", True)
        assert run.result() == "ada: True after 3600 s"
        patient = approve.start("bob")
        assert patient.result(timeout=1) == "bob: None after 7200 s"
        stuck = endless.start()
        with pytest.raises(pgqrs.ResultTimedOut):
            stuck.result()
        with pytest.raises(pgqrs.RunFailed, match="nothing there"):
            broken.start().result()
        assert [one.result() for one in approve.start_many([("a",), ("b",)])] == [
            "a: None after 7200 s",
            "b: None after 7200 s",
        ]
        assert family.run_inline() == "c: None after 7200 s"
        assert approve.start("x", key="k").id == approve.start("x", key="k").id
    assert calls[0] == (approve, (("ada",), {}))


def test_async_runs_go_on_in_place() -> None:
    async def ask() -> list[str]:
        run = await approve.start("ada")
        await run.signal("approved", True)
        others = await twice.start_many([(2,), (3,)])
        return [await run.result(), *[await other.result() for other in others]]

    with inline():
        assert asyncio.run(ask()) == ["ada: True after 3600 s", 4, 6]


def test_the_async_fixture(pgqrs_async_store: pgqrs.AsyncStore, pgqrs_clock: ManualClock) -> None:
    async def ask() -> str:
        handle = await send.options(delay=60).aenqueue("ada", day=DAY)
        await assert_enqueued(pgqrs_async_store, send, count=1)
        assert await drain(pgqrs_async_store) == 0
        pgqrs_clock.advance(60)
        assert await drain(pgqrs_async_store) == 1
        return await handle.result(60)

    assert asyncio.run(ask()) == "ada Monday"


@pgqrs.task(queue="mails", timeout=60)
def whoami() -> str:
    here = pgqrs.current_message()
    assert here is not None
    assert here.deadline is not None
    return f"{here.queue} {here.attempt} {here.headers}"


def test_a_task_in_place_is_told_its_message() -> None:
    with inline():
        assert whoami.options(headers={"a": "b"}).enqueue().result() == "mails 1 {'a': 'b'}"
    assert pgqrs.current_message() is None


def test_tasks_in_the_body_of_a_workflow_run_in_place_too(store: pgqrs.Store) -> None:
    @pgqrs.step
    def plain(n: int) -> int:
        return n

    @pgqrs.task(queue="q")
    def double(n: int) -> int:
        return 2 * plain(n)  # no step of the run: a worker would run it elsewhere

    @pgqrs.workflow
    def body() -> Any:
        return double.enqueue(4).result()

    run = body.start(store=store)
    with inline() as calls, store.consumer("workflows") as consumer:
        (message,) = consumer.dequeue()
        store.workflows.execute(message, [body])
        assert run.result(timeout=0) == 8
    assert len(calls) == 1
    assert run.steps() == []
