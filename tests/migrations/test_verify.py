"""`verify` compares the tables with the models; opening a store looks for tables and indexes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text

import pgqrs
from pgqrs.config import parse_dsn

DROPPED_INDEX = "DROP INDEX {}ix_pgqrs_messages_ready"
QUICK = [
    (DROPPED_INDEX, "pgqrs_messages: index ix_pgqrs_messages_ready is missing"),
    ("DROP TABLE {}pgqrs_slots", "table pgqrs_slots is missing"),
]
WHOLE = [
    ("ALTER TABLE {}pgqrs_messages ADD COLUMN sneaky TEXT", "column sneaky was added"),
    ("ALTER TABLE {}pgqrs_messages DROP COLUMN codec", "pgqrs_messages: column codec is missing"),
    (
        "ALTER TABLE {}pgqrs_queues DROP COLUMN retention;"
        "ALTER TABLE {}pgqrs_queues ADD COLUMN retention INTEGER",
        "pgqrs_queues: column retention is INTEGER, not ",
    ),
    (
        "DROP INDEX {}ix_pgqrs_messages_expiring;"
        "CREATE INDEX {new}ix_pgqrs_messages_expiring ON {table}pgqrs_messages (queue_id, expires_at)",
        "index ix_pgqrs_messages_expiring is on queue_id, expires_at, not on queue_id, expires_at where",
    ),
    (
        "DROP INDEX {}ix_pgqrs_keys_look;"
        "CREATE INDEX {new}ix_pgqrs_keys_look ON {table}pgqrs_keys (look_at)",
        "index ix_pgqrs_keys_look is on look_at, not on queue_id, look_at",
    ),
    (
        "DROP INDEX {}ix_pgqrs_messages_parked;"
        "CREATE INDEX {new}ix_pgqrs_messages_parked"
        " ON {table}pgqrs_messages (queue_id, dedup_key, priority, id) WHERE blocked = 2",
        "dedup_key, priority, id where blocked = 2, not on queue_id, dedup_key, priority DESC, id",
    ),
    (
        "CREATE UNIQUE INDEX {new}ix_other ON {table}pgqrs_messages (vt)",
        "pgqrs_messages: index ix_other was added",
    ),
]
POSTGRES = [
    (
        "ALTER TABLE {}pgqrs_archive DROP CONSTRAINT ck_pgqrs_archive_archive_reason",
        "pgqrs_archive: constraint ck_pgqrs_archive_archive_reason is missing",
    ),
    (
        "ALTER TABLE {}pgqrs_archive DROP CONSTRAINT uq_pgqrs_archive_original_message_id",
        "constraint uq_pgqrs_archive_original_message_id is missing",
    ),
    (
        "ALTER TABLE {}pgqrs_workflow_events DROP CONSTRAINT fk_pgqrs_workflow_events_workflow_id",
        "foreign key fk_pgqrs_workflow_events_workflow_id is missing",
    ),
    (
        "ALTER TABLE {}pgqrs_slots DROP CONSTRAINT pk_pgqrs_slots",
        "pgqrs_slots: the primary key is [], not ['message_id']",
    ),
    (
        "ALTER TABLE {}pgqrs_messages ALTER COLUMN blocked DROP DEFAULT",
        "column blocked is SMALLINT NOT NULL, not SMALLINT NOT NULL with a default",
    ),
    (
        "ALTER TABLE {}pgqrs_messages ALTER COLUMN vt DROP NOT NULL",
        "column vt is TIMESTAMP WITH TIME ZONE, not TIMESTAMP WITH TIME ZONE NOT NULL",
    ),
    (
        "ALTER TABLE {}pgqrs_messages ALTER COLUMN id DROP IDENTITY",
        "column id is BIGINT NOT NULL, not BIGINT NOT NULL with an identity",
    ),
    ("ALTER TABLE {}pgqrs_messages SET UNLOGGED", "table pgqrs_messages is unlogged"),
    (
        "ALTER FUNCTION {}pgqrs_claim_within_limits RESET jit",
        "function pgqrs_claim_within_limits was altered",
    ),
    (
        "UPDATE pg_proc SET prosrc = replace(prosrc, 'SKIP LOCKED', '') "
        "WHERE oid = CAST('{}pgqrs_claim_within_limits' AS regproc)",
        "function pgqrs_claim_within_limits was altered",
    ),
    (
        "UPDATE pg_index SET indisvalid = false "
        "WHERE indexrelid = CAST('{}ix_pgqrs_messages_ready' AS regclass)",
        "index ix_pgqrs_messages_ready is not valid: build it again",
    ),
]


def change(database: str, sql: str, schema: str = "") -> None:
    """Run SQL whose `{}` stands for the schema of a table or an index."""
    engine = create_engine(parse_dsn(database))
    place = f"{schema}." if schema else ""
    with engine.begin() as connection:
        for statement in sql.format(place, place, new="", table=place).split(";"):
            connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def installed(database: str) -> str:
    pgqrs.Store(database, upgrade=True).close()
    return database


def refused(database: str, **settings: Any) -> pgqrs.TablesAltered:
    with pgqrs.Store(database, **settings) as store, pytest.raises(pgqrs.TablesAltered) as caught:
        store.admin().verify()
    return caught.value


@pytest.mark.parametrize(("sql", "said"), WHOLE)
def test_a_difference_is_named(installed: str, sql: str, said: str) -> None:
    change(installed, sql)
    error = refused(installed)
    assert said in str(error)
    assert len(error.differences) == 1
    assert isinstance(error, pgqrs.SchemaError)


@pytest.mark.parametrize(("sql", "said"), [*WHOLE, *POSTGRES[:-1]])
def test_a_difference_in_a_schema_of_its_own_is_named(
    postgres_database: str, sql: str, said: str
) -> None:
    pgqrs.Store(postgres_database, schema="here", upgrade=True).close()
    with pgqrs.Store(postgres_database, schema="here") as store:
        store.admin().verify()
    change(postgres_database, sql, schema="here")
    error = refused(postgres_database, schema="here")
    assert said in str(error)
    assert len(error.differences) == 1


@pytest.mark.parametrize(("sql", "said"), QUICK)
def test_opening_a_store_misses_tables_and_indexes(installed: str, sql: str, said: str) -> None:
    with pgqrs.Store(installed) as store:
        change(installed, sql)
        with pytest.raises(pgqrs.TablesAltered) as caught:
            store.admin().verify()
        assert caught.value.differences == (said,)
    for settings in ({}, {"upgrade": True}):
        with pytest.raises(pgqrs.TablesAltered) as caught:
            pgqrs.Store(installed, **settings)
        assert caught.value.differences == (said,)

    async def open_async() -> None:
        await pgqrs.connect(installed)

    with pytest.raises(pgqrs.TablesAltered):
        asyncio.run(open_async())


def test_an_index_that_cannot_be_used_is_as_good_as_none(postgres_database: str) -> None:
    pgqrs.Store(postgres_database, upgrade=True).close()
    with pgqrs.Store(postgres_database) as store:
        change(postgres_database, POSTGRES[-1][0])
        with pytest.raises(pgqrs.TablesAltered, match=POSTGRES[-1][1]):
            store.admin().verify()
    with pytest.raises(pgqrs.TablesAltered, match="ix_pgqrs_messages_ready is missing"):
        pgqrs.Store(postgres_database)


@pytest.mark.parametrize("schema", [None, "here"])
def test_opening_a_store_misses_functions(postgres_database: str, schema: str | None) -> None:
    said = "function pgqrs_claim_within_limits is missing"
    with pgqrs.Store(postgres_database, schema=schema, upgrade=True) as store:
        store.admin().verify()
        change(postgres_database, "DROP FUNCTION {}pgqrs_claim_within_limits", schema=schema or "")
        with pytest.raises(pgqrs.TablesAltered) as caught:
            store.admin().verify()
        assert caught.value.differences == (said,)
    with pytest.raises(pgqrs.TablesAltered, match=said):
        pgqrs.Store(postgres_database, schema=schema)


def test_the_async_twin_verifies_the_same(installed: str) -> None:
    async def verify() -> None:
        async with pgqrs.AsyncStore(installed) as store:
            await store.admin().verify()
            change(installed, WHOLE[0][0])
            with pytest.raises(pgqrs.TablesAltered, match="column sneaky was added"):
                await store.admin().verify()

    asyncio.run(verify())


def test_tables_and_indexes_of_others_are_no_difference(installed: str) -> None:
    change(
        installed,
        "CREATE TABLE customers (id INTEGER); CREATE UNIQUE INDEX ix_customers ON customers (id);"
        "CREATE INDEX for_reports ON pgqrs_archive (queue_id, enqueued_at)",
    )
    with pgqrs.Store(installed) as store:
        store.admin().verify()


def test_a_table_of_the_same_name_elsewhere_is_not_ours(postgres_database: str) -> None:
    pgqrs.Store(postgres_database, upgrade=True).close()
    pgqrs.Store(postgres_database, schema="here", upgrade=True).close()
    change(postgres_database, DROPPED_INDEX, schema="here")
    pgqrs.Store(postgres_database).close()
    with pytest.raises(pgqrs.TablesAltered):
        pgqrs.Store(postgres_database, schema="here")


def test_opening_a_store_takes_two_queries(installed: str) -> None:
    engine = create_engine(parse_dsn(installed))
    engine.connect().close()  # what SQLAlchemy asks a server once
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    with pgqrs.Store(engine):
        queries = [sql for sql in seen if ("SELECT" in sql and "pgqrs" in sql) or "sqlite_m" in sql]
        assert len(queries) == 2
    engine.dispose()


@pytest.fixture
def bucket_store(s3_server: str, tmp_path: Any) -> Iterator[Any]:
    name = f"{tmp_path.name}.sqlite"
    settings = {"s3_endpoint_url": s3_server, "s3_cache": str(tmp_path), "upgrade": True}
    with pgqrs.Store(f"s3://bucket/{name}", **settings) as store:
        yield store


def test_a_store_in_a_bucket_is_verified_too(bucket_store: Any) -> None:
    bucket_store.admin().verify()
    bucket_store.write(
        lambda c: c.execute(text("ALTER TABLE pgqrs_messages ADD COLUMN sneaky TEXT"))
    )
    with pytest.raises(pgqrs.TablesAltered, match="column sneaky was added"):
        bucket_store.admin().verify()
