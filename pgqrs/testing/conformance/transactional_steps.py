"""Transactional steps: their transaction is not theirs to end, and their time is limited."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Connection, text

import pgqrs
from pgqrs import Retry, RunFailed
from pgqrs.testing.conformance.harness import Drain

ADD = text("INSERT INTO effects VALUES (1)")
SLOW = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "postgresql": "SELECT pg_sleep(600)",
}


@pytest.fixture
def effects(harness: Any, store: Any, drain: Drain) -> Any:
    with harness.transaction(store) as transaction:
        transaction.execute("DROP TABLE IF EXISTS effects")
        transaction.execute("CREATE TABLE effects (n INTEGER)")

    @pgqrs.step(transactional=True)
    def count(connection: Connection) -> int:
        return int(connection.execute(text("SELECT count(*) FROM effects")).scalar_one())

    @pgqrs.workflow
    def counting() -> int:
        return count()

    return lambda: counting.run_inline(store=store)


WAYS = {
    "commit": lambda connection: connection.commit(),
    "rollback": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
    "its transaction": lambda connection: connection.get_transaction().rollback(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transactional_step_may_not_end_its_transaction(
    store: Any, drain: Drain, effects: Any, way: str
) -> None:
    called: list[int] = []

    @pgqrs.step(transactional=True, retry=Retry.fixed(0, max_attempts=3))
    def write(connection: Connection) -> None:
        called.append(1)
        connection.execute(ADD)
        WAYS[way](connection)

    @pgqrs.workflow
    def work() -> None:
        write()

    run = work.start(store=store)
    drain(work)
    with pytest.raises(RunFailed, match="may not commit"):
        run.result(timeout=0)
    assert (called, effects()) == ([1], 0)


def test_a_transactional_step_that_commits_in_another_way_has_its_effect_once(
    store: Any, drain: Drain, effects: Any
) -> None:
    @pgqrs.step(transactional=True, retry=Retry.fixed(0, max_attempts=3))
    def write(connection: Connection) -> None:
        connection.execute(ADD)
        connection.get_transaction().commit()  # type: ignore[union-attr]
        raise ValueError("and then it fails")

    @pgqrs.workflow
    def work() -> None:
        write()

    run = work.start(store=store)
    drain(work)
    with pytest.raises(RunFailed, match="may not commit"):
        run.result(timeout=0)
    assert effects() <= 1  # none where the commit is not the last word


def test_savepoints_are_fine(store: Any, drain: Drain, effects: Any) -> None:
    @pgqrs.step(transactional=True)
    def write(connection: Connection) -> int:
        connection.execute(ADD)
        with pytest.raises(ValueError), connection.begin_nested():
            connection.execute(ADD)
            raise ValueError("undone")
        with connection.begin_nested():
            connection.execute(ADD)
        return 2

    @pgqrs.workflow
    def work() -> int:
        return write()

    run = work.start(store=store)
    drain(work)
    assert run.result(timeout=0) == effects() == 2


@pytest.mark.parametrize("what", ["code", "statement"])
def test_the_timeout_of_a_transactional_step_counts(
    store: Any, drain: Drain, effects: Any, what: str
) -> None:
    @pgqrs.step(transactional=True, timeout=0.2)
    def slow(connection: Connection) -> None:
        connection.execute(ADD)
        if what == "code":
            time.sleep(0.3)
        else:
            connection.execute(text(SLOW[connection.dialect.name]))

    @pgqrs.step(transactional=True, timeout=600)
    def quick(connection: Connection) -> int:
        connection.execute(ADD)
        return 1

    @pgqrs.workflow
    def work() -> int:
        try:
            slow()
        except pgqrs.StepFailed as exc:
            errors.append(exc.error_type)
            return quick()
        return 0

    errors: list[str] = []

    run = work.start(store=store)
    drain(work)
    assert run.result(timeout=0) == effects() == 1
    assert errors == ["pgqrs.errors.StepTimedOut"]
