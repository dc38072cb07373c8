"""Runs and tasks that begin inside a transaction of the application's own, with its rows."""

from __future__ import annotations

from typing import Any

import pytest

import pgqrs
from pgqrs import RunNotFound, RunStatus
from pgqrs.testing.conformance import transactions
from pgqrs.testing.conformance.harness import BESIDE, QUEUE, RUNS, Drain, Harness
from pgqrs.testing.conformance.transactions import Undo
from pgqrs.testing.portal import Synced

orders = transactions.orders


@pgqrs.task(queue=QUEUE)
def mail(to: str) -> str:
    return to


@pgqrs.workflow
def ship(order: int) -> int:
    return order


@pgqrs.workflow
def approval() -> Any:
    return pgqrs.wait_for_event("answer")


def begin(store: Any, transaction: Any, order: int, **options: Any) -> Any:
    """Start a run in a transaction, as the face of the store has it."""
    using, started = transaction.using, ship.options(**options)
    if isinstance(store, Synced):
        run = store._portal.run(lambda: started.start(order, store=using._wrapped))
        return Synced(store._portal, run)
    return started.start(order, store=using)


def send(store: Any, transaction: Any, to: str) -> Any:
    """Enqueue a task in a transaction."""
    using = transaction.using
    if isinstance(store, Synced):
        task = mail.options(store=using._wrapped)
        return Synced(store._portal, store._portal.run(lambda: task.aenqueue(to)))
    return mail.options(store=using).enqueue(to)


def test_what_is_committed_is_there(
    harness: Harness, store: Any, admin: Any, drain: Drain, orders: Any
) -> None:
    with harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        run = begin(store, transaction, 7)
        sent = send(store, transaction, "ada")
    assert orders() == 1
    assert run.status() is RunStatus.PENDING
    assert sent.status() is pgqrs.TaskStatus.QUEUED
    assert [message.id for message in admin.peek(QUEUE)] == [sent.id]
    drain(ship)
    assert run.result(timeout=0) == 7


def test_what_is_rolled_back_never_was(
    harness: Harness, store: Any, admin: Any, drain: Drain, orders: Any
) -> None:
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        run = begin(store, transaction, 7, key="one")
        send(store, transaction, "ada")
        raise Undo
    assert orders() == 0
    assert store.workflows.list_runs() == []
    assert admin.peek(QUEUE) == admin.peek(RUNS) == []
    with pytest.raises(RunNotFound):
        run.status()


def test_a_queue_that_is_missing_is_created_with_the_run(
    harness: Harness, store: Any, orders: Any
) -> None:
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        begin(store, transaction, 1, queue=BESIDE)
        raise Undo
    assert BESIDE not in [queue.queue_name for queue in store.admin().list_queues()]
    with harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        begin(store, transaction, 1, queue=BESIDE)
    assert (orders(), len(store.admin().peek(BESIDE))) == (1, 1)


def test_a_key_names_one_run_inside_and_outside(
    harness: Harness, store: Any, drain: Drain, orders: Any
) -> None:
    before = ship.options(key="a").start(1, store=store)
    with harness.transaction(store) as transaction:
        transaction.execute("INSERT INTO orders VALUES (1)")
        assert begin(store, transaction, 2, key="a").id == before.id
        inside = begin(store, transaction, 3, key="b")
        assert begin(store, transaction, 4, key="b").id == inside.id
    assert orders() == 1
    assert ship.options(key="b").start(5, store=store).id == inside.id
    assert len(store.workflows.list_runs()) == 2


def test_runs_are_created_and_signalled_in_a_transaction(
    harness: Harness, store: Any, drain: Drain
) -> None:
    run = approval.start(store=store)
    drain(approval)
    with pytest.raises(Undo), harness.transaction(store) as transaction:
        transaction.using.workflows.signal(run.id, "answer", "no")
        raise Undo
    with harness.transaction(store) as transaction:
        workflows = transaction.using.workflows
        workflows.start_many(ship, [(8,), (9,)], keys=["x", "x"])
        created = workflows.create(BESIDE, {"n": 1}, key="by hand")
        workflows.signal(run.id, "answer", "yes")
    drain(approval, ship)
    assert run.result(timeout=0) == "yes"
    assert store.workflows.list_runs(key="x")[0].output == 8
    assert (created.refresh().name, created.refresh().key) == (BESIDE, "by hand")
