"""Most runs and steps have statements of their own, which take less (`run_inline` in
`benchmarks.workflows`). What they write is what the others write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import pgqrs
from pgqrs.repositories import starting, steps, workflows
from pgqrs.workflows.journal import Journal

TABLES = ("pgqrs_messages", "pgqrs_workflows", "pgqrs_workflow_steps")
IN_FLIGHT: list[list[dict[str, Any]]] = []


@pgqrs.step
def look(n: int) -> dict[str, int]:
    (store,) = STORES
    IN_FLIGHT.append(rows(store))
    return {"n": n}


@pgqrs.workflow
def count(n: int) -> list[int]:
    return [look(n)["n"], look(n + 1)["n"]]


STORES: list[pgqrs.Store] = []


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'a.db'}"
    found: str = request.getfixturevalue("postgres_database")
    return found


def rows(store: pgqrs.Store) -> list[dict[str, Any]]:
    """All that is on record. Of a time, whether there is one; of ids, nothing."""

    def read(connection: Any) -> list[dict[str, Any]]:
        found = [connection.execute(text(f"SELECT * FROM {table}")).mappings() for table in TABLES]
        return [_without_chance(dict(row)) for result in found for row in result]

    return store.read(read)


def _without_chance(row: dict[str, Any]) -> dict[str, Any]:
    chance = ("id", "workflow_id", "message_id", "consumer_worker_id")
    return {
        name: value is not None if name.endswith("_at") or name in ("vt", *chance) else value
        for name, value in row.items()
    }


def records(store: pgqrs.Store) -> list[Any]:
    """What runs write: started here and elsewhere, while they are under way, and at their end."""
    IN_FLIGHT.clear()
    assert count.options(version="1").run_inline(1, store=store) == [1, 2]
    count.options(priority=3).start(1, store=store)
    started = rows(store)
    with store.consumer(count.queue) as consumer:
        (message,) = consumer.dequeue()
        store.workflows.execute(message, [count])
    found = [*IN_FLIGHT[:2], started, *IN_FLIGHT[2:], rows(store)]
    store.workflows.purge()
    return found


def test_what_is_on_record_does_not_depend_on_the_statement(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pgqrs.Store(url, upgrade=True) as store:
        store.admin().create_queue(count.queue)
        STORES[:] = [store]
        plain = records(store)
        for module in (starting, steps, workflows):
            monkeypatch.setattr(module, "by_own_clock", lambda *_: False)
        assert records(store) == plain
    # Two looks while the first run is under way, one at the second and two while that is, the end.
    assert [len(found) for found in plain] == [2, 3, 5, 5, 6, 6]


def test_a_run_that_is_told_to_stop_is_told_by_the_step(url: str) -> None:
    """Also by the statement that records a first attempt."""

    @pgqrs.step
    def cancel(run_id: int) -> None:
        store.workflows.cancel(run_id)

    @pgqrs.step
    def never() -> None:
        raise AssertionError("the run was cancelled")

    @pgqrs.workflow
    def cancelled() -> None:
        cancel(run.id)
        never()

    with pgqrs.Store(url, upgrade=True) as store:
        run = cancelled.start(store=store)
        pgqrs.Worker(store, workflows=[cancelled]).run(until_empty=True)
        assert run.status() == "cancelled"
        assert [step.step_id for step in run.steps()] == ["cancel"]


def test_a_step_that_is_on_record_by_accident_is_found(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the answer to its record got lost: the next one fails, and the record stays."""
    record = Journal.record

    def record_twice(self: Journal, *args: Any, **kwargs: Any) -> Any:
        first, second = (record(self, *args, **kwargs) for _ in range(2))
        assert (first.is_new, second.is_new) == (True, False)
        return second

    @pgqrs.step
    def same(n: int) -> int:
        return n

    @pgqrs.workflow
    def flow() -> int:
        return same(1) + same(2)

    monkeypatch.setattr(Journal, "record", record_twice)
    with pgqrs.Store(url, upgrade=True) as store:
        assert flow.run_inline(store=store) == 3
        (run,) = store.workflows.list_runs()
        found = store.workflows.steps(run.id)
    assert [(step.step_id, step.output) for step in found] == [("same", 1), ("same#2", 2)]
