"""How many statements things take: each waits for the network, and most of them for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, event

import pgqrs

STEPS = 3


@pgqrs.step
def add(n: int) -> int:
    return n + 1


@pgqrs.workflow
def count(n: int) -> int:
    for _ in range(STEPS):
        n = add(n)
    return n


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue(count.queue)
        yield store


def statements(use: Callable[[], object]) -> int:
    """Those of this thread: another may renew a lease if this takes long."""
    executed: list[str] = []
    here = threading.get_ident()

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if threading.get_ident() == here:
            executed.append(statement)

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        use()
    finally:
        event.remove(Engine, "before_cursor_execute", listen)
    return len(executed)


def test_a_run_is_started_by_one_statement(store: pgqrs.Store) -> None:
    assert statements(lambda: count.start(0, store=store)) == 1


def test_a_step_is_one_statement_and_a_run_two_more(store: pgqrs.Store) -> None:
    with store.consumer(count.queue) as consumer:
        count.start(0, store=store)
        (message,) = consumer.dequeue()
        assert statements(lambda: store.workflows.execute(message, [count])) == STEPS + 2


def test_a_run_of_a_script_is_one_statement_to_start_and_one_to_end(store: pgqrs.Store) -> None:
    assert statements(lambda: count.run_inline(0, store=store)) == STEPS + 2
