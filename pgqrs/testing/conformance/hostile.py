"""Rows that were written past this library: each is judged by itself, and harms no other."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import sleep, step, task, workflow
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, Drain, Harness, worker

DEEP = "[" * 3000 + "]" * 3000
DIGITS = "9" * 5000
HOSTILE = {
    "too deep": f"payload = '{DEEP}'",
    "too many digits": f"payload = '[{DIGITS}]'",
    "deep headers": f"headers = '{DEEP}'",
    "headers that are no object": "headers = '[1]'",
    "negative count": "read_ct = -5",
    "more given back than claimed": "released_ct = 100",
}


def write(harness: Harness, store: Any, table: str, change: str, where: str) -> None:
    with harness.transaction(store) as transaction:
        transaction.execute(f"UPDATE pgqrs_{table} SET {change} WHERE {where}")


def fullest_count(store: Any) -> str:
    """The largest `read_ct` that the column can hold: one more fails in the database."""
    return str(2**31 - 1 if store.backend_name == "postgres" else 2**63 - 1)


@pytest.fixture(params=[*HOSTILE, "largest count"])
def change(request: pytest.FixtureRequest, store: Any) -> str:
    found = HOSTILE.get(request.param)
    return f"read_ct = {fullest_count(store)}" if found is None else found


@pytest.mark.parametrize("limits", [{}, {"max_in_flight": 100}], ids=["no limits", "limits"])
@pytest.mark.parametrize("at_once", [1, 10])
def test_the_others_are_handed_out_and_the_bad_one_is_archived(
    harness: Harness, store: Any, admin: Any, change: str, limits: Any, at_once: int
) -> None:
    admin.configure_queue(QUEUE, **limits)
    bad, *others = store.producer(QUEUE).enqueue_many(range(4))
    write(harness, store, "messages", change, f"id = {bad}")
    assert [message.id for message in admin.peek(QUEUE)] == [bad, *others]
    seen: list[Any] = []
    with store.consumer(QUEUE) as consumer:
        while found := consumer.dequeue(at_once):
            seen += found
            consumer.ack_many(found)
    assert [message.id for message in seen] == others
    assert {message.attempt for message in seen} == {1}
    (dead,) = admin.dead_letters(QUEUE)
    assert dead.original_message_id == bad
    assert "the stored" in dead.error
    assert admin.get_archived(bad).error == dead.error
    assert len(admin.list_archive(QUEUE)) == 4


@pytest.mark.parametrize("limits", [{}, {"max_in_flight": 500}], ids=["no limits", "limits"])
def test_a_bad_message_is_found_behind_any_number_of_others(
    harness: Harness, store: Any, admin: Any, limits: Any
) -> None:
    admin.configure_queue(QUEUE, **limits)
    ids = store.producer(QUEUE).enqueue_many(range(480))
    change = f"read_ct = {fullest_count(store)}"
    with store.consumer(QUEUE) as consumer:
        held = consumer.dequeue(210)  # these come first when the bad one is looked for
        write(harness, store, "messages", change, f"id = {ids[220]}")
        held += consumer.dequeue(15)
        write(harness, store, "messages", change, f"id = {ids[460]}")
        held += consumer.dequeue(300)
        assert [message.id for message in held] == [*ids[:220], *ids[221:460], *ids[461:]]
    assert len(admin.dead_letters(QUEUE)) == 2


def test_messages_that_come_back_are_judged_too(
    harness: Harness, store: Any, admin: Any, clock: ManualClock, change: str
) -> None:
    ids = store.producer(QUEUE).enqueue_many(range(3), delay=10)
    write(harness, store, "messages", change, f"id = {ids[1]}")
    clock.advance(11)
    with store.consumer(QUEUE) as consumer:
        assert [message.id for message in consumer.dequeue(10)] == [ids[0], ids[2]]
    assert admin.get_archived(ids[1]).archive_reason == "failed"


def test_a_group_goes_on_after_a_bad_message(
    harness: Harness, store: Any, admin: Any, change: str
) -> None:
    first, second = (store.producer(QUEUE).enqueue(n, group="one") for n in range(2))
    write(harness, store, "messages", change, f"id = {first}")
    with store.consumer(QUEUE) as consumer:
        assert [message.id for message in consumer.dequeue(10)] == [second]


def test_a_buffer_goes_on_after_a_bad_message(
    harness: Harness, store: Any, admin: Any, change: str
) -> None:
    ids = store.producer(QUEUE).enqueue_many(range(20))
    write(harness, store, "messages", change, f"id IN ({ids[0]}, {ids[7]})")
    with store.consumer(QUEUE) as consumer, consumer.buffer(5, wait=0) as buffer:
        seen = []
        for message in buffer:
            seen.append(message.id)
            buffer.ack(message)
    assert seen == [id for id in ids if id not in (ids[0], ids[7])]


def test_a_worker_refuses_a_codec_that_nobody_knows(
    harness: Harness, store: Any, admin: Any
) -> None:
    admin.configure_queue(QUEUE, max_read_ct=1)
    seen: list[Any] = []
    known = task(name="hostile:known", queue=QUEUE)(seen.append)
    bad = store.producer(QUEUE).enqueue(known.payload("in JSON"))
    write(harness, store, "messages", "codec = 'nonsense'", f"id = {bad}")
    good = store.producer(QUEUE).enqueue("plain")
    admin.create_queue("other")
    fine = store.producer("other").enqueue("fine")
    worker(store, queues=[QUEUE], handlers={"other": seen.append}).run(until_empty=True)
    assert [message.id for message in seen] == [fine]
    assert "nonsense" in admin.get_archived(bad).error
    assert admin.get_archived(good).archive_reason == "failed"


@pytest.mark.parametrize("column", ["payload", "result"])
def test_a_bad_row_of_the_archive_breaks_no_listing(
    harness: Harness, store: Any, admin: Any, column: str
) -> None:
    ids = store.producer(QUEUE).enqueue_many(range(3))
    with store.consumer(QUEUE) as consumer:
        consumer.ack_many(consumer.dequeue(10), results=range(3))
    write(harness, store, "archive", f"{column} = '{DEEP}'", f"original_message_id = {ids[0]}")
    found = admin.list_archive(QUEUE)
    assert [message.original_message_id for message in found] == ids
    assert [message.result for message in found[1:]] == [1, 2]
    assert getattr(found[0], column) == DEEP
    assert admin.get_archived(ids[0]).read_ct == 1


def test_one_claim_takes_no_more_bytes_than_it_may(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=harness.clock, max_dequeue_bytes=250_000)
    ids = store.producer(QUEUE).enqueue_many([[n, "x" * 100_000] for n in range(7)])
    small = store.producer(QUEUE).enqueue_many(range(50))
    seen: list[list[int]] = []
    with store.consumer(QUEUE) as consumer:
        while found := consumer.dequeue(100):
            seen.append([message.id for message in found])
            assert {message.attempt for message in found} == {1}
    assert [len(batch) for batch in seen[:2]] == [3, 3]
    assert [id for batch in seen for id in batch] == [*ids, *small]
    assert len(seen[2]) == 51


def test_one_message_is_always_handed_out(harness: Harness, admin: Any) -> None:
    store = harness.open(clock=harness.clock, max_dequeue_bytes=1)
    ids = store.producer(QUEUE).enqueue_many(["x" * 5000, "y" * 5000])
    with store.consumer(QUEUE) as consumer:
        assert [[m.id for m in consumer.dequeue(10)] for _ in range(3)] == [[ids[0]], [ids[1]], []]


def test_delayed_messages_keep_to_the_bytes_too(
    harness: Harness, admin: Any, clock: ManualClock
) -> None:
    store = harness.open(clock=clock, max_dequeue_bytes=250_000)
    store.producer(QUEUE).enqueue_many([[n, "x" * 100_000] for n in range(4)], delay=10)
    clock.advance(11)
    with store.consumer(QUEUE) as consumer:
        assert [len(consumer.dequeue(10)) for _ in range(3)] == [3, 1, 0]


@step
def fetch(n: int) -> int:
    return n


@workflow
def flow(n: int) -> int:
    fetched: int = fetch(n)
    sleep(60)
    return fetched


def test_a_run_with_a_bad_input_fails_and_the_others_do_not(
    harness: Harness, store: Any, drain: Drain, clock: ManualClock
) -> None:
    bad, good = (store.workflows.start(flow, [n]) for n in range(2))
    write(harness, store, "workflows", f"input = '{DEEP}'", f"id = {bad.id}")
    assert {run.id for run in store.workflows.list_runs()} == {bad.id, good.id}
    drain(flow)
    clock.advance(61)
    drain(flow)
    assert store.workflows.get(good.id).output == 1
    assert store.workflows.get(bad.id).output is None
    assert "not JSON" in store.workflows.get(bad.id).error


def test_a_run_with_a_bad_record_does_not_go_on_with_it(
    harness: Harness, store: Any, drain: Drain, clock: ManualClock
) -> None:
    bad, good = (store.workflows.start(flow, [n]) for n in range(2))
    drain(flow)
    change = f"output = '{DEEP}'"
    write(harness, store, "workflow_steps", change, f"workflow_id = {bad.id} AND step_id = 'fetch'")
    assert len(bad.steps()) == 2
    clock.advance(61)
    drain(flow)
    assert store.workflows.get(good.id).output == 1
    assert store.workflows.get(bad.id).output is None
    parked = store.workflows.get(bad.id)
    assert parked.status == "paused"
    assert "the result of fetch cannot be read by this code: it is not JSON" in parked.error
