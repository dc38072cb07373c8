"""Tasks: from a function to its result."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from pgqrs import (
    CodecRefused,
    InvalidArgument,
    InvalidPayload,
    MessageNotFound,
    ResultTimedOut,
    Retry,
    Task,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskMismatch,
    task,
)
from pgqrs.stores import wakeups
from pgqrs.tasks import declare
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Harness, enqueue, handle, worker
from pgqrs.testing.conformance.working import PATIENCE


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    at: datetime


@dataclass
class Order:
    id: UUID
    total: Decimal
    colour: Colour
    placed: datetime
    lines: list[Order] = field(default_factory=list)
    note: str | None = None


NOW = datetime(2026, 11, 16, 12, 30, 0, 123456, tzinfo=UTC)
ORDER = Order(UUID(int=7), Decimal("1.10"), Colour.BLUE, NOW)


@task(queue=QUEUE)
def add(a: int, b: int = 1) -> int:
    return a + b


@task(queue=QUEUE)
async def greet(name: str, *, polite: bool = False) -> str:
    await asyncio.sleep(0)
    return f"dear {name}" if polite else name


@task(queue=QUEUE)
def same(
    order: Order,
    when: date | datetime | None,
    span: timedelta,
    points: dict[int, Point],
    *rest: Decimal,
    clock: time = time(0),
    colours: frozenset[Colour] = frozenset(),
    path: PurePosixPath | None = None,
    data: bytes = b"",
) -> tuple[
    Order, date | datetime | None, timedelta, dict[int, Point], tuple[Decimal, ...], list[Any]
]:
    assert (type(clock), type(colours), type(data)) == (time, frozenset, bytes)
    return order, when, span, points, rest, [clock.isoformat(), sorted(c.value for c in colours)]


@task(queue=QUEUE, retry=Retry(max_attempts=1))
def fail(message: str) -> None:
    raise LookupError(message)


@task(queue=QUEUE)
def unsendable() -> Any:
    return {1, 2}


@task(queue=QUEUE, codec="cloudpickle")
def call(function: Any, *args: Any) -> Any:
    return function(*args)


@task(queue=QUEUE)
def add_elsewhere(a: int) -> int:
    return add.enqueue(a).id


def run(store: Any, **options: Any) -> None:
    """Run what there is now."""
    worker(store, queues=[QUEUE], **options).run(until_empty=True)


@pytest.fixture
def real_time(harness: Harness, admin: Any) -> Any:
    return harness.open(clock=None)


def test_a_task_is_still_a_function() -> None:
    assert add(2, b=3) == 5
    assert asyncio.run(greet("Ada", polite=True)) == "dear Ada"
    assert add.name == f"{__name__}:add"


def test_a_result_comes_back(store: Any, admin: Any) -> None:
    handles = [
        enqueue(add, store, 1, b=2),
        enqueue(add, store, 4),
        enqueue(greet, store, "Ada", polite=True),
    ]
    run(store)
    assert [handle.result(PATIENCE) for handle in handles] == [3, 5, "dear Ada"]
    assert [handle.status() for handle in handles] == ["completed"] * 3


def test_arguments_and_results_come_back_as_their_hints_say(store: Any, admin: Any) -> None:
    nested = Order(UUID(int=8), Decimal(0), Colour.RED, NOW, [ORDER], "nested")
    points = {1: Point(2, NOW), -3: Point(4, NOW - timedelta(days=1))}
    rest = (Decimal("0.10"), Decimal("1e5"))
    for when in (date(2026, 1, 2), NOW, None):
        handle = enqueue(
            same,
            store,
            nested,
            when,
            timedelta(days=1, microseconds=1),
            points,
            *rest,
            clock=time(1, 2, 3),
            colours=frozenset(Colour),
            path=PurePosixPath("/a/b"),
            data=b"\0\xff",
        )
        run(store)
        result = handle.result(PATIENCE)
        assert result == (
            *(nested, when, timedelta(days=1, microseconds=1), points, rest),
            ["01:02:03", ["blue", "red"]],
        )
        assert type(result[1]) is type(when)


def test_pydantic_models_come_back(store: Any, admin: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str
        born: date

    def older(person: Any, years: int) -> Any:
        return person.model_copy(
            update={"born": person.born.replace(year=person.born.year - years)}
        )

    older.__annotations__ = {"person": Person, "years": int, "return": Person}
    handle = enqueue(
        task(queue=QUEUE)(older), store, Person(name="Ada", born=date(1815, 12, 10)), 5
    )
    run(store)
    assert handle.result(PATIENCE) == Person(name="Ada", born=date(1810, 12, 10))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (((1,), {"c": 2}), InvalidArgument, "unexpected keyword argument 'c'"),
        (((), {}), InvalidArgument, "missing a required argument: 'a'"),
        (((object(),), {}), InvalidPayload, "object is not JSON"),
    ],
)
def test_what_cannot_be_called_or_sent_is_refused_at_once(
    store: Any, admin: Any, arguments: Any, error: Any, match: str
) -> None:
    args, kwargs = arguments
    with pytest.raises(error, match=match):
        enqueue(add, store, *args, **kwargs)
    assert admin.peek(QUEUE) == []


def test_what_would_come_back_as_something_else_is_refused(store: Any, admin: Any) -> None:
    plain = task(queue=QUEUE, name="plain")(lambda value: value)
    for value in (NOW, Decimal(1), {"deep": [Colour.RED]}, {1, 2}, ORDER):
        with pytest.raises(InvalidPayload, match="no type hint"):
            enqueue(plain, store, value)


def test_a_failed_task_says_why(store: Any, admin: Any) -> None:
    handle = enqueue(fail, store, "not there")
    run(store)
    with pytest.raises(TaskFailed, match="LookupError: not there") as caught:
        handle.result(PATIENCE)
    assert "in fail" in (caught.value.error or "")
    assert handle.status() == "failed"


def test_a_result_that_cannot_be_kept_fails_the_task_once(store: Any, admin: Any) -> None:
    handle = enqueue(unsendable, store)
    run(store)
    with pytest.raises(TaskFailed, match="result: set is not JSON"):
        handle.result(PATIENCE)
    assert admin.get_archived(handle.id).read_ct == 1


def test_options_say_when_and_where(store: Any, admin: Any, clock: ManualClock) -> None:
    admin.create_queue("other")
    handle = enqueue(add.options(queue="other", delay=60, priority=3, headers={"a": "b"}), store, 1)
    assert handle.status() == "delayed"
    (message,) = admin.peek("other")
    assert (message.id, message.priority, message.headers) == (handle.id, 3, {"a": "b"})
    clock.advance(60)
    assert handle.status() == "queued"
    worker(store, queues=["other"]).run(until_empty=True)
    assert handle.result(PATIENCE) == 2


def test_an_expired_task_has_no_result(store: Any, admin: Any, clock: ManualClock) -> None:
    handle = enqueue(add.options(ttl=10), store, 1)
    clock.advance(10)
    run(store)
    with pytest.raises(TaskExpired):
        handle.result(PATIENCE)
    assert handle.status() == "expired"


def test_a_task_can_be_cancelled_before_it_runs(store: Any, admin: Any) -> None:
    handle = enqueue(add, store, 1)
    assert handle.status() == "queued"
    assert handle.cancel()
    assert not handle.cancel()
    run(store)
    with pytest.raises(TaskCancelled):
        handle.result(PATIENCE)
    assert handle.status() == "cancelled"


def test_a_handle_is_of_one_task(store: Any, admin: Any) -> None:
    id = enqueue(add, store, 1).id
    plain = store.producer(QUEUE).enqueue({"job": 1})
    for wrong, found in ((id, add.name), (plain, None)):
        foreign = handle(greet, store, wrong)
        for ask in (foreign.status, foreign.cancel):
            with pytest.raises(TaskMismatch, match=f"message {wrong} is of") as caught:
                ask()
            assert (caught.value.task, caught.value.found) == (greet.name, found)
    run(store)
    with pytest.raises(TaskMismatch):
        handle(greet, store, id).result(PATIENCE)
    assert handle(add, store, id).result(PATIENCE) == 2
    assert handle(add, store, id).status() == "completed"


def test_a_key_of_another_task_gives_no_result_of_it(store: Any, admin: Any) -> None:
    first = enqueue(add.options(key="k"), store, 1)
    second = enqueue(greet.options(key="k"), store, "Ada")
    assert second.id == first.id
    run(store)
    assert first.result(PATIENCE) == 2
    with pytest.raises(TaskMismatch):
        second.result(PATIENCE)


def test_what_comes_of_a_cancelled_task_does_not_count(store: Any, admin: Any) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    @task(queue=QUEUE)
    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cancelled.set()

    handle = enqueue(endless, store)
    with worker(store, queues=[QUEUE], lease=0.3):
        assert begun.wait(PATIENCE)
        assert handle.status() == "running"
        assert handle.cancel()
        assert cancelled.wait(PATIENCE)
    assert handle.status() == "cancelled"


def test_waiting_has_an_end(store: Any, admin: Any) -> None:
    handle = enqueue(add, store, 1)
    with pytest.raises(ResultTimedOut, match=r"after 0\.05 s"):
        handle.result(0.05)
    with pytest.raises(TimeoutError):
        handle.result(timeout=timedelta(seconds=0))
    admin.purge_queue(QUEUE)
    with pytest.raises(MessageNotFound):
        handle.result(PATIENCE)
    with pytest.raises(MessageNotFound):
        handle.status()


def test_a_result_that_is_there_needs_no_waiting(store: Any) -> None:
    done, failed = enqueue(add, store, 1), enqueue(fail, store, "not there")
    run(store)
    assert done.result(0) == 2
    assert done.result(timeout=timedelta(seconds=0)) == 2
    with pytest.raises(TaskFailed, match="not there"):
        failed.result(0)


def test_who_waits_for_a_result_hears_of_it(
    real_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "SELDOM", 2 * PATIENCE)  # nobody looks by himself
    monkeypatch.setattr(wakeups, "OFTEN", 2 * PATIENCE)
    monkeypatch.setattr("pgqrs.stores.results.SELDOM", PATIENCE)  # so long workers know who waits
    with worker(real_time, queues=[QUEUE]):
        for n in range(5):
            assert enqueue(add, real_time, n).result(PATIENCE) == n + 1
        handle = enqueue(add, real_time, 1)
        assert handle.result(PATIENCE) == handle.result(PATIENCE) == 2


def test_many_may_wait_for_many(real_time: Any) -> None:
    handles = [enqueue(add, real_time, n) for n in range(30)]
    results: dict[int, int] = {}

    def wait(n: int) -> None:
        results[n] = handles[n].result(PATIENCE)

    threads = [threading.Thread(target=wait, args=[n]) for n in range(30)]
    for thread in threads:
        thread.start()
    run(real_time)
    for thread in threads:
        thread.join()
    assert results == {n: n + 1 for n in range(30)}


def test_a_pickled_task_runs_only_where_that_is_accepted(
    store: Any, admin: Any, clock: ManualClock
) -> None:
    offset = 5
    handle = enqueue(call, store, lambda a: {a + offset}, 1)
    assert admin.get_message(handle.id).codec == "cloudpickle"
    run(store)
    assert handle.status() == "delayed"  # refused, and left to a worker that accepts it
    clock.advance(60)
    run(store, codecs=["cloudpickle"])
    assert handle.result(PATIENCE) == {6}


def test_a_task_that_takes_json_never_unpickles(
    harness: Harness, store: Any, admin: Any, clock: ManualClock
) -> None:
    bomb = task(queue=QUEUE, name=add.name, codec="cloudpickle")(lambda: None)
    declare(add)  # what was declared last counts
    handle = enqueue(bomb, store)
    for _ in range(3):
        run(store, codecs=["cloudpickle"])
        clock.advance(1000)
    assert CodecRefused.__name__ in admin.get_archived(handle.id).error


def test_a_task_enqueues_into_the_store_it_runs_from(store: Any, admin: Any) -> None:
    handle = enqueue(add_elsewhere, store, 41)
    run(store)
    inner = handle.result(PATIENCE)
    assert admin.get_archived(inner).result == 42


UNKNOWN = {"task": "elsewhere:unknown", "args": [], "kwargs": {}}


def test_an_unknown_task_is_left_to_others(
    store: Any, admin: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    ids = store.producer(QUEUE).enqueue_many([UNKNOWN] * 3)
    neighbour = enqueue(add, store, 1)
    delays: list[float] = []
    run(store)
    said = [record for record in caplog.records if "elsewhere:unknown" in record.getMessage()]
    assert len(said) == 1
    for _ in range(12):
        run(store)
        found = admin.get_message(ids[0])
        delays.append((found.vt - clock.now()).total_seconds())
        clock.advance(delays[-1])
    assert neighbour.result(PATIENCE) == 2
    assert [admin.get_message(id).attempt for id in ids] == [0] * 3
    assert delays == sorted(delays)
    assert (delays[0], delays[1], delays[-1]) == (2.0, 4.0, 600.0)
    declared: Task[[], int] = Task(lambda: 42, name="elsewhere:unknown", queue=QUEUE)
    worker(store, tasks=[declared]).run(until_empty=True)
    assert {admin.get_archived(id).result for id in ids} == {42}


def test_a_task_that_nobody_ever_knows_ends_as_a_dead_letter(
    store: Any, admin: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.unknown.MOST", 2)
    id = store.producer(QUEUE).enqueue(UNKNOWN)
    for _ in range(3):
        run(store)
        clock.advance(1000)
    assert "no task 'elsewhere:unknown' is known" in admin.get_archived(id).error


def test_max_releases_ends_an_unknown_task(store: Any, admin: Any, clock: ManualClock) -> None:
    admin.configure_queue(QUEUE, max_releases=1)
    id = store.producer(QUEUE).enqueue(UNKNOWN)
    for _ in range(2):
        run(store)
        clock.advance(1000)
    assert "max_releases" in admin.get_archived(id).error


def test_a_worker_runs_the_tasks_it_was_given_from_their_own_queues(store: Any, admin: Any) -> None:
    admin.create_queue("other")
    elsewhere = add.options(queue="other")
    mine, not_mine = enqueue(greet, store, "Ada"), enqueue(add, store, 1)
    misplaced = enqueue(greet.options(queue="other"), store, "Bob")
    other = enqueue(elsewhere, store, 2)
    worker(store, tasks=[greet, elsewhere]).run(until_empty=True)
    assert mine.result(PATIENCE) == "Ada"
    assert other.result(PATIENCE) == 3
    assert [admin.get_message(handle.id).attempt for handle in (not_mine, misplaced)] == [0, 0]
    worker(store, tasks=[greet], queues=["other"]).run(until_empty=True)
    assert [admin.get_message(handle.id).attempt for handle in (not_mine, misplaced)] == [0, 0]


def test_a_queue_given_by_name_serves_every_task_of_the_worker(store: Any, admin: Any) -> None:
    admin.create_queue("urgent")
    handle = enqueue(add.options(queue="urgent"), store, 1)
    worker(store, tasks=[add, greet], queues=["urgent"]).run(until_empty=True)
    assert handle.result(PATIENCE) == 2


def test_a_worker_of_handlers_runs_no_tasks(store: Any, admin: Any) -> None:
    admin.create_queue("plain")
    handle = enqueue(add, store, 1)
    worker(store, handlers={"plain": print}, queues=[]).run(until_empty=True)
    assert admin.get_message(handle.id).read_ct == 0


def test_a_run_that_a_worker_does_not_know_is_left_to_others(store: Any, admin: Any) -> None:
    created = store.workflows.create("elsewhere", queue=QUEUE)
    worker(store, queues=[QUEUE]).run(until_empty=True)
    (message,) = admin.peek(QUEUE)
    assert (message.payload, message.attempt) == ({"workflow": "elsewhere"}, 0)
    assert created.status() == "pending"
