"""Moving house: every table, between databases of both kinds, killed on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import Column, Table

import pgqrs
from pgqrs import moving
from pgqrs.cli.app import app
from pgqrs.repositories import moving as rows
from pgqrs.sqltypes import EnumText, Flag, Json, UTCDateTime
from tests.acceptance.test_processes import children
from tests.conftest import create_database

ROWS = 45
DOCUMENTS = (
    "null",
    '{"b": [1, 1.0, -0.5, 10000000000000000.0], "a": {"é": "\\u2028", "": null}}',
    '"text"',
    "123456789012345678901234567890",
    "[]",
)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "PAGE", 10)


@pytest.fixture(params=["sqlite-postgres", "postgres-sqlite", "sqlite-sqlite", "postgres-postgres"])
def urls(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[str, str]:
    """Where from, and where to."""

    def url(kind: str, name: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        return create_database(request.getfixturevalue("postgres"))

    source, target = request.param.split("-")
    return url(source, "source"), url(target, "target")


@pytest.fixture
def here(urls: tuple[str, str]) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(urls[0], upgrade=True) as store:
        yield store


@pytest.fixture
def there(urls: tuple[str, str]) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(urls[1], upgrade=True) as store:
        yield store


def value(column: Column[Any], n: int) -> Any:
    """Some value that the column takes, another one for each n."""
    if column.nullable and n % 3 == 0:
        return None
    if isinstance(column.type, UTCDateTime):
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(hours=n, microseconds=n)
    if isinstance(column.type, Json):
        return DOCUMENTS[n % len(DOCUMENTS)]
    if isinstance(column.type, EnumText):
        return list(column.type.words)[n % len(column.type.words)]
    if isinstance(column.type, Flag):
        return n % 2 == 0
    kind = column.type.python_type
    return f"{column.name} {'aB_é'[n % 4]}{n}" if kind is str else kind(n)


def fill(store: pgqrs.Store) -> None:
    """Rows in every table that moves, also in those that do not exist yet."""

    def row(table: Table, n: int) -> tuple[Any, ...]:
        return tuple(value(column, n) for column in table.columns)

    for table in rows.tables():
        made = [row(table, n) for n in range(1, ROWS + 1)]
        store.write(lambda c, table=table, made=made: rows.put(c, table, made))  # type: ignore[misc]
    for table in rows.counted_tables():
        store.write(lambda c, table=table: rows.set_counter(c, table, 1000))  # type: ignore[misc]


def everything(store: pgqrs.Store) -> dict[str, Any]:
    return {
        table.name: store.read(
            lambda c, table=table: rows.digests(table, rows.page(c, table, after=None, limit=9999))  # type: ignore[misc]
        )
        for table in rows.tables()
    }


def test_every_row_of_every_table_moves(here: pgqrs.Store, there: pgqrs.Store) -> None:
    fill(here)
    told: list[pgqrs.CopyProgress] = []
    copied = here.admin().copy_to(there, progress=told.append)
    assert everything(there) == everything(here)
    assert [table.table for table in copied] == [table.name for table in rows.tables()]
    assert {table.rows for table in copied} == {ROWS}
    assert len({table.checksum for table in copied}) == len(copied)
    done = [progress.done for progress in told]
    assert done == sorted(done)
    assert done[-1] == told[-1].total
    for table in rows.counted_tables():
        assert there.read(lambda c, table=table: rows.counter(c, table)) == 1000  # type: ignore[misc]
    assert here.admin().copy_to(there) == copied  # once more is fine


def test_life_goes_on_where_it_was(here: pgqrs.Store, there: pgqrs.Store) -> None:
    admin = here.admin()
    admin.create_queue("tasks", lease=77, max_read_ct=9, retention=3600)
    admin.pause_queue(admin.create_queue("paused").queue_name)
    producer = here.producer("tasks")
    ids = producer.enqueue_many([{"n": n} for n in range(6)], headers={"trace": "x"})
    producer.enqueue("later", delay=3600, priority=3)
    consumer = here.consumer("tasks").open()
    done, dead, held = consumer.dequeue(3)
    consumer.ack(done)
    consumer.fail(dead, ValueError("boom"), dead=True)
    last = producer.enqueue("the last one")
    (found,) = [message for message in admin.peek("tasks", 99) if message.id == last]
    with here.consumer("tasks") as other:
        taken = other.dequeue(99)
        other.delete_many([message for message in taken if message.id == last])
        other.release_many([message for message in taken if message.id != last])
    assert found.payload == "the last one"

    admin.copy_to(there)
    moved = there.admin()
    assert moved.list_queues() == admin.list_queues()
    assert moved.peek("tasks", 99) == admin.peek("tasks", 99)
    assert moved.list_archive("tasks") == admin.list_archive("tasks")
    assert moved.list_workers() == []  # processes do not move
    with there.consumer("tasks") as newcomer:
        assert newcomer.worker_id is not None
        assert held.consumer_worker_id is not None
        assert newcomer.worker_id > held.consumer_worker_id  # nobody is taken for the old holder
        newcomer.ack(held)  # the claim was made there, and counts here
        assert [message.id for message in newcomer.dequeue(99)] == ids[3:]
    assert there.producer("tasks").enqueue("new") > last
    assert moved.replay_dead_letters("tasks") == 1


def test_a_target_with_other_data_is_refused(here: pgqrs.Store, there: pgqrs.Store) -> None:
    here.admin().create_queue("tasks")
    there.admin().create_queue("other")
    for _ in range(2):
        with pytest.raises(pgqrs.CopyRefused) as caught:
            here.admin().copy_to(there)
        assert caught.value.table == "pgqrs_queues"
    assert [queue.queue_name for queue in there.admin().list_queues()] == ["other"]
    assert "empty store" in str(caught.value)


def test_a_message_of_the_targets_own_is_refused(here: pgqrs.Store, there: pgqrs.Store) -> None:
    here.admin().create_queue("tasks")
    here.producer("tasks").enqueue(1)
    here.admin().copy_to(there)
    there.producer("tasks").enqueue(2)
    with pytest.raises(pgqrs.CopyRefused) as caught:
        here.admin().copy_to(there)
    assert caught.value.table == "pgqrs_messages"


def test_who_changes_the_source_meanwhile_is_noticed(here: pgqrs.Store, there: pgqrs.Store) -> None:
    here.admin().create_queue("tasks")
    here.producer("tasks").enqueue_many(range(30))

    def meddle(progress: pgqrs.CopyProgress) -> None:
        if progress.table == "pgqrs_messages" and progress.doing == "copying":
            with here.consumer("tasks") as consumer:
                consumer.delete_many(consumer.dequeue())

    with pytest.raises(pgqrs.CopyMismatch) as caught:
        here.admin().copy_to(there, progress=meddle)
    assert caught.value.table == "pgqrs_messages"
    assert caught.value.here < caught.value.there


def test_killed_on_the_way_it_goes_on(
    urls: tuple[str, str], here: pgqrs.Store, there: pgqrs.Store
) -> None:
    fill(here)
    before: set[int] = set()
    for answers in (3, 8, 20):
        with children("copy", " ".join(urls)) as (victim,):
            said = [victim.answer() for _ in range(answers)]
        before.add(sum(len(found) for found in everything(there).values()))
        assert said
    assert len(before) > 1, "it was never killed in the middle"
    here.admin().copy_to(there)
    assert everything(there) == everything(here)


def test_the_async_way(urls: tuple[str, str], here: pgqrs.Store, there: pgqrs.Store) -> None:
    fill(here)

    async def main() -> list[pgqrs.CopiedTable]:
        async with pgqrs.AsyncStore(urls[0]) as source, pgqrs.AsyncStore(urls[1]) as target:
            with pytest.raises(pgqrs.InvalidArgument, match="AsyncStore"):
                await source.admin().copy_to(there)
            with pytest.raises(pgqrs.InvalidArgument, match="expected a Store"):
                here.admin().copy_to(target)
            return await source.admin().copy_to(target)

    copied = asyncio.run(main())
    assert everything(there) == everything(here)
    assert {table.rows for table in copied} == {ROWS}


def test_into_a_schema_and_back(postgres_database: str, sqlite_database: str) -> None:
    with pgqrs.Store(sqlite_database, upgrade=True) as here:
        fill(here)
        wanted = everything(here)
    with (
        pgqrs.Store(sqlite_database) as here,
        pgqrs.Store(postgres_database, schema="Queues", upgrade=True) as there,
        pgqrs.Store(postgres_database, schema="copy", upgrade=True) as back,
    ):
        here.admin().copy_to(there)
        there.admin().copy_to(back)
        assert everything(there) == everything(back) == wanted
    with psycopg.connect(postgres_database) as connection:
        found = connection.execute("SELECT to_regclass('public.pgqrs_messages')").fetchone()
        assert found == (None,)


def test_the_command(urls: tuple[str, str], here: pgqrs.Store) -> None:
    fill(here)
    result = CliRunner().invoke(app, ["copy", *urls])
    assert result.exit_code == 0, result.output
    assert "pgqrs_messages" in result.stdout
    again = CliRunner().invoke(app, ["copy", *urls, "--json"])
    assert {table["rows"] for table in json.loads(again.stdout)} == {ROWS}
    with pgqrs.Store(urls[1]) as there:
        assert everything(there) == everything(here)
        there.admin().create_queue("other")
    refused = CliRunner().invoke(app, ["copy", *urls])
    assert refused.exit_code == 1
    assert "other data" in refused.output
