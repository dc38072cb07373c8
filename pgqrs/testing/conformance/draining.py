"""The helpers for applications' tests, on a store of either kind."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import Retry, RunFailed, sleep, task, workflow
from pgqrs.testing import ManualClock, assert_enqueued, drain
from pgqrs.testing.conformance.harness import enqueue
from pgqrs.testing.conformance.working import PATIENCE
from pgqrs.testing.portal import Synced

HERE, THERE = "drained", "drained-later"


@task(queue=THERE)
def finish(word: str) -> str:
    return word.upper()


@task(queue=HERE)
def begin(word: str) -> int:
    return finish.enqueue(word).id


@task(queue=HERE, retry=Retry(max_attempts=1))
def fail(word: str) -> None:
    raise LookupError(word)


@workflow(queue=HERE)
def nap(word: str) -> str:
    sleep(60)
    return word.upper()


@workflow(queue=HERE)
def stumble() -> None:
    raise LookupError("stumbled")


def given(call: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
    """What a helper returns for a store of either kind."""
    if isinstance(store, Synced):
        return store._portal.run(lambda: call(store._wrapped, *args, **kwargs))
    return call(store, *args, **kwargs)


def test_what_is_enqueued_by_what_is_drained_is_drained_too(store: Any) -> None:
    """The second queue does not exist when the drain begins."""
    handle = enqueue(begin, store, "ada")
    assert given(drain, store) == 2
    assert store.admin().get_archived(handle.result(PATIENCE)).result == "ADA"


def test_a_queue_by_its_name(store: Any) -> None:
    enqueue(begin, store, "ada")
    assert given(drain, store, HERE) == 1
    assert store.admin().queue_stats(THERE).ready == 1
    assert given(drain, store, "no such queue") == 0


def test_the_error_of_a_task_is_raised_once_all_is_done(store: Any) -> None:
    failed, done = enqueue(fail, store, "not there"), enqueue(finish, store, "ada")
    with pytest.raises(LookupError, match="not there") as caught:
        given(drain, store)
    assert f"raised by {fail.name}" in str(caught.value.__notes__)
    assert failed.status() == "failed"
    assert done.result(PATIENCE) == "ADA"


def test_declared_workflows_are_known(store: Any, clock: ManualClock) -> None:
    run = store.workflows.start(nap, ["ada"])
    assert given(drain, store) == 0
    assert run.status() == "suspended"
    clock.advance(60)
    failed = store.workflows.start(stumble)
    with pytest.raises(RunFailed, match="stumbled"):
        given(drain, store)
    assert failed.status() == "failed"
    assert run.result(PATIENCE) == "ADA"


def test_what_was_enqueued_is_asserted(store: Any) -> None:
    with pytest.raises(AssertionError, match="at least one"):  # nor is there a queue
        given(assert_enqueued, store, finish)
    handle = enqueue(finish, store, "ada")
    enqueue(finish, store, "bob")
    given(assert_enqueued, store, finish, count=2)
    given(assert_enqueued, store, THERE, count=2)
    (message,) = given(assert_enqueued, store, finish, "ada")
    assert message.id == handle.id
    with pytest.raises(AssertionError, match=r"expected 1 of <task .*, found 0"):
        given(assert_enqueued, store, finish, "eve", count=1)
