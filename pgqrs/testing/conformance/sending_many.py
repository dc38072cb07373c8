"""Many tasks and many runs at once, and queues that come into being with the first of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgqrs import InvalidArgument, InvalidPayload, task, workflow
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import Drain, Harness, enqueue, enqueue_many, worker
from pgqrs.testing.conformance.working import PATIENCE

FRESH = "brand new"
"""A queue that is not there, on the shard of `QUEUE` in a store of two shards."""


@task(queue=FRESH)
def add(a: int, b: int = 1) -> int:
    return a + b


@task(queue=FRESH, codec="cloudpickle")
def call(function: Any) -> Any:
    return function()


@workflow(queue=FRESH)
def shout(word: str, times: int = 1) -> str:
    return word.upper() * times


@workflow
def parent() -> list[str]:
    children = shout.options(queue="workflows").start_many([("a",), {"word": "b", "times": 2}])
    return [child.result() for child in children]


@workflow
async def async_parent() -> list[str]:
    children = await shout.options(queue="workflows").start_many([("a",), ("b",)])
    return [await child.result() for child in children]


def run(store: Any, **options: Any) -> None:
    worker(store, queues=[FRESH], **options).run(until_empty=True)


def test_a_task_creates_its_queue(store: Any) -> None:
    handle = enqueue(add, store, 1)
    assert store.admin().get_queue(FRESH).max_read_ct == store.config.max_read_ct
    run(store)
    assert handle.result(PATIENCE) == 2


def test_in_a_transaction_the_queue_is_created_with_it(harness: Harness, store: Any) -> None:
    class Undone(Exception):
        pass

    with pytest.raises(Undone), harness.transaction(store) as transaction:
        enqueue(add, transaction.using, 1)
        raise Undone
    assert [queue.queue_name for queue in store.admin().list_queues()] == []
    with harness.transaction(store) as transaction:
        one = enqueue(add, transaction.using, 1)
        two, three = enqueue_many(add, transaction.using, [(2,), (3,)])
    assert store.admin().queue_stats(FRESH).ready == 3
    run(store)
    assert [handle.result(PATIENCE) for handle in (one, two, three)] == [2, 3, 4]


def test_many_calls_of_a_task(store: Any) -> None:
    handles = enqueue_many(add, store, [(1,), (1, 2), {"a": 5, "b": 6}])
    ids = [handle.id for handle in handles]
    assert ids == sorted(ids)
    run(store)
    assert [handle.result(PATIENCE) for handle in handles] == [2, 3, 11]
    assert enqueue_many(add, store, []) == []


def test_many_calls_have_the_options_of_the_task(store: Any, clock: ManualClock) -> None:
    later = add.options(delay=60, priority=3, headers={"a": "b"})
    handles = enqueue_many(later, store, [(1,), (2,)], groups=["x", None])
    for handle, group in zip(handles, ("x", None), strict=True):
        message = store.admin().get_message(handle.id)
        assert (message.priority, message.headers, message.group) == (3, {"a": "b"}, group)
    run(store)
    assert [handle.status() for handle in handles] == ["delayed"] * 2
    clock.advance(60)
    run(store)
    assert [handle.result(PATIENCE) for handle in handles] == [2, 3]


def test_keys_of_many_calls(store: Any) -> None:
    first = enqueue_many(add, store, [(1,), (2,), (3,)], keys=["a", "a", None])
    again = enqueue_many(add, store, [(4,)], keys=["a"])
    assert first[0].id == first[1].id == again[0].id != first[2].id
    with pytest.raises(InvalidArgument, match="give keys="):
        enqueue_many(add.options(key="k"), store, [(1,)])
    with pytest.raises(InvalidArgument, match="1 for 2"):
        enqueue_many(add, store, [(1,), (2,)], keys=["a"])


def test_many_pickled_calls(store: Any) -> None:
    handles = enqueue_many(call, store, [(lambda: 1,), (lambda: {2},)])
    run(store, codecs=["cloudpickle"])
    assert [handle.result(PATIENCE) for handle in handles] == [1, {2}]


def test_one_bad_call_refuses_all_and_is_named(store: Any) -> None:
    store.admin().create_queue(FRESH)
    for calls, error, match in (
        ([(1,), "ab"], InvalidArgument, r"calls\[1\]: expected a tuple .* got str"),
        ([(1,), ()], InvalidArgument, r"calls\[1\]: .*missing a required argument: 'a'"),
        ([(1,), {"c": 1}], InvalidArgument, r"calls\[1\]"),
        ([(1,), (object(),)], InvalidPayload, r"\[1\].*: object is not JSON"),
        ("ab", InvalidArgument, "expected a list of calls, got str"),
    ):
        with pytest.raises(error, match=match):
            enqueue_many(add, store, calls)
    assert store.admin().queue_stats(FRESH).ready == 0


def test_many_runs(store: Any) -> None:
    runs = store.workflows.start_many(shout, [("a",), {"word": "b", "times": 2}, ("c",)])
    ids = [run.id for run in runs]
    assert ids == sorted(set(ids))
    assert [store.workflows.get(id).queue for id in ids] == [FRESH] * 3
    run(store, workflows=[shout])
    assert [one.result(PATIENCE) for one in runs] == ["A", "BB", "C"]
    assert store.workflows.start_many(shout, []) == []


def test_keys_of_many_runs(store: Any) -> None:
    known = store.workflows.start(shout.options(key="k"), ["there"])
    calls, keys = [("a",), ("b",), ("c",), ("d",)], ["k", "new", "new", None]
    runs = store.workflows.start_many(shout, calls, keys=keys)
    ids = [run.id for run in runs]
    assert ids[0] == known.id
    assert ids[1] == ids[2]
    assert len({*ids}) == 3
    again = store.workflows.start_many(shout, [("a",), ("b",)], keys=["new", "k"])
    assert [run.id for run in again] == [ids[1], ids[0]]
    run(store, workflows=[shout])
    assert [one.result(PATIENCE) for one in runs] == ["THERE", "B", "B", "D"]
    with pytest.raises(InvalidArgument, match="1 for 2 calls"):
        store.workflows.start_many(shout, [("a",), ("b",)], keys=["a"])


def test_many_runs_have_the_options_of_the_workflow(store: Any, clock: ManualClock) -> None:
    later = shout.options(delay=60, priority=3, timeout=600, version="2")
    runs = store.workflows.start_many(later, [("a",), ("b",)])
    for one in runs:
        info = store.workflows.get(one.id)
        assert (info.version, info.deadline_at) == ("2", clock.now() + timedelta(seconds=600))
        assert store.admin().get_message(info.message_id).priority == 3
    run(store, workflows=[shout])
    assert [one.status() for one in runs] == ["pending"] * 2
    clock.advance(60)
    run(store, workflows=[shout])
    assert [one.result(PATIENCE) for one in runs] == ["A", "B"]


def test_one_bad_input_starts_no_run(store: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"calls\[1\].*: object is not JSON"):
        store.workflows.start_many(shout, [("a",), (object(),)])
    assert store.workflows.list_runs() == []


def test_a_run_starts_many_children(store: Any, drain: Drain) -> None:
    one, two = store.workflows.start(parent), store.workflows.start(async_parent)
    drain(parent, async_parent, shout)
    assert one.result(PATIENCE) == ["A", "BB"]
    assert two.result(PATIENCE) == ["A", "B"]
