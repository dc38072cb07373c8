"""Runs that wait for other runs, and what becomes of children when their parents end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import pgqrs
from pgqrs import InvalidArgument, RunFailed, RunStatus
from pgqrs.testing.conformance.harness import BESIDE, RUNS, Drain


@pgqrs.workflow
def waiting_child() -> int:
    return pgqrs.wait_for_event("go")  # type: ignore[no-any-return]


@pgqrs.step
def prepare() -> int:
    return 1


def test_all_parents_of_a_shared_child_are_woken(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        return waiting_child.start(key="shared").result()

    runs = [parent.start(store=store) for _ in range(3)]
    drain(parent, waiting_child)
    (child,) = store.workflows.list_runs(name="waiting_child")
    assert [run.status() for run in runs] == [RunStatus.SUSPENDED] * 3
    store.workflows.signal(child.id, "go", 7)
    drain(parent, waiting_child)
    assert [run.result(timeout=0) for run in runs] == [7, 7, 7]


def test_who_waits_for_a_run_that_was_started_outside_is_woken(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    async def parent() -> Any:
        started = await waiting_child.start(key="outside")
        return await asyncio.gather(started.result(), started.result())

    outside = waiting_child.start(key="outside", store=store)
    run = parent.start(store=store)
    drain(parent, waiting_child)
    assert run.status() is RunStatus.SUSPENDED
    outside.signal("go", 8)
    drain(parent, waiting_child)
    assert run.result(timeout=0) == [8, 8]
    assert outside.refresh().parent_id is None


def test_a_fork_that_waits_for_a_child_is_woken(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        started = waiting_child.start()
        prepare()
        return started.result()

    run = parent.start(store=store)
    drain(parent, waiting_child)
    fork = run.fork()
    drain(parent, waiting_child)
    (child,) = store.workflows.list_runs(name="waiting_child")
    store.workflows.signal(child.id, "go", 9)
    drain(parent, waiting_child)
    assert (run.result(timeout=0), fork.result(timeout=0)) == (9, 9)


@pytest.mark.parametrize("how", ["by hand", "cancelled", "purged", "queue deleted"])
def test_every_end_of_a_run_wakes_who_waits(store: Any, drain: Drain, how: str) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        try:
            return other.start(key="one").result()
        except (RunFailed, pgqrs.RunCancelled) as exc:
            return type(exc).__name__

    @pgqrs.workflow(queue=BESIDE)
    def other() -> None:
        pgqrs.wait_for_event("never")

    by_hand = how == "by hand"
    store.admin().create_queue(BESIDE)
    awaited = store.workflows.create("other", key="one", queue=None if by_hand else BESIDE)
    run = parent.start(store=store)
    drain(parent)
    assert run.status() is RunStatus.SUSPENDED
    if by_hand:
        awaited.start()
        awaited.complete(5)
    elif how == "cancelled":
        awaited.cancel()
    elif how == "purged":
        store.admin().purge_queue(BESIDE)
    else:
        store.admin().delete_queue(BESIDE, force=True)
    drain(parent)
    wanted = {"by hand": 5, "cancelled": "RunCancelled"}.get(how, "RunFailed")
    assert run.result(timeout=0) == wanted


def test_a_run_that_another_waits_for_is_not_purged(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        return waiting_child.start(key="shared").result()

    runs = [parent.start(store=store) for _ in range(2)]
    drain(parent, waiting_child)
    runs[1].pause()
    (child,) = store.workflows.list_runs(name="waiting_child")
    store.workflows.signal(child.id, "go", 1)
    drain(parent, waiting_child)
    assert store.workflows.purge() == 1  # the first parent, whose child is the second parent's, too
    runs[1].resume()
    drain(parent, waiting_child)
    assert runs[1].result(timeout=0) == 1
    assert store.workflows.purge() == 2


def test_many_children_wake_their_parent_once_each(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def child(n: int) -> int:
        return n + int(pgqrs.wait_for_event("go"))

    @pgqrs.workflow
    async def parent() -> Any:
        children = [await child.start(n) for n in range(5)]
        return await asyncio.gather(*(one.result() for one in children))

    run = parent.start(store=store)
    drain(parent, child)
    for found in store.workflows.list_runs(name="child"):
        store.workflows.signal(found.id, "go", 10)
    drain(parent, child)
    assert run.result(timeout=0) == [10, 11, 12, 13, 14]


# Children and the end of their parents


def test_cancelling_reaches_children_and_theirs(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def middle() -> Any:
        return waiting_child.start().result()

    @pgqrs.workflow
    def parent() -> Any:
        children = [middle.start() for _ in range(3)]
        return [child.result() for child in children]

    run = parent.start(store=store)
    drain(parent, middle, waiting_child)
    assert run.cancel() is RunStatus.CANCELLED
    for name in ("parent", "middle", "waiting_child"):
        found = store.workflows.list_runs(name=name)
        assert {each.status for each in found} == {RunStatus.CANCELLED}
    assert store.admin().peek(RUNS) == []


def test_cancelling_reaches_a_child_that_is_just_being_started(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def parent() -> Any:
        cancel.pop()()
        return waiting_child.start().result()

    run = parent.start(store=store)
    cancel = [run.cancel]
    drain(parent, waiting_child)
    assert run.status() is RunStatus.CANCELLED
    found = store.workflows.list_runs(name="waiting_child")
    assert {child.status for child in found} <= {RunStatus.CANCELLED}
    assert store.admin().peek(RUNS) == []


def test_a_parent_that_returns_while_it_is_cancelled_takes_its_children_along(
    store: Any, drain: Drain
) -> None:
    @pgqrs.workflow
    def parent() -> None:
        waiting_child.start()
        cancel.pop()()

    run = parent.start(store=store)
    cancel = [run.cancel]
    drain(parent, waiting_child)
    assert run.status() is RunStatus.CANCELLED
    (child,) = store.workflows.list_runs(name="waiting_child")
    assert child.status is RunStatus.CANCELLED


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
@pytest.mark.parametrize("policy", ["cancel", "leave", None])
def test_parent_close_says_what_becomes_of_children(
    store: Any, drain: Drain, policy: Any, end: str
) -> None:
    @pgqrs.workflow
    def parent() -> None:
        waiting_child.options(parent_close=policy).start()
        if end == "cancel":
            pgqrs.wait_for_event("never")
        if end == "fail":
            raise ValueError("broken")

    run = parent.start(store=store)
    drain(parent, waiting_child)
    if end == "cancel":
        run.cancel()
    drain(parent, waiting_child)
    assert run.refresh().has_ended
    (child,) = store.workflows.list_runs(name="waiting_child")
    cancelled = policy == "cancel" or (policy is None and end == "cancel")
    assert (child.status is RunStatus.CANCELLED) == cancelled
    if not cancelled:
        assert child.status is RunStatus.SUSPENDED


def test_parent_close_knows_two_words() -> None:
    with pytest.raises(InvalidArgument, match="parent_close"):
        waiting_child.options(parent_close="abandon")


def test_children_of_a_run_whose_message_is_lost_are_closed(store: Any, drain: Drain) -> None:
    @pgqrs.workflow(queue=BESIDE)
    def parent() -> None:
        waiting_child.options(parent_close="cancel").start()
        pgqrs.wait_for_event("never")

    run = parent.start(store=store)
    with store.consumer(BESIDE) as consumer:
        for message in consumer.dequeue(1):
            store.workflows.execute(message, [parent])
    drain(waiting_child)
    store.admin().purge_queue(BESIDE)
    drain(waiting_child)
    assert run.status() is RunStatus.FAILED
    (child,) = store.workflows.list_runs(name="waiting_child")
    assert child.status is RunStatus.CANCELLED
