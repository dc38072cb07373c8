"""The revisions lead exactly to what the models say, on both databases, up and down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, inspect, text

from pgqrs import schema
from pgqrs.config import parse_dsn
from pgqrs.models import Base
from tests.conftest import create_database

CATALOG = """
SELECT 'column', table_name, column_name, ordinal_position::text,
       concat_ws(' ', data_type, is_nullable, column_default, is_identity, identity_generation)
FROM information_schema.columns WHERE table_schema = 'public' AND table_name LIKE 'pgqrs%'
UNION ALL
SELECT 'index', tablename, indexname, '', indexdef FROM pg_indexes WHERE tablename LIKE 'pgqrs%'
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, '', pg_get_constraintdef(oid)
FROM pg_constraint WHERE conrelid::regclass::text LIKE 'pgqrs%'
ORDER BY 1, 2, 3
"""


def describe(connection: Connection) -> list[Any]:
    """Everything the database knows of our tables, in a form that two databases can be compared by."""
    if connection.dialect.name == "postgresql":
        rows = connection.execute(text(CATALOG)).all()
        return [tuple(row) for row in rows if row[1] != schema.VERSION_TABLE]
    rows = connection.execute(
        text("SELECT name, sql FROM sqlite_master WHERE name LIKE '%pgqrs%' ORDER BY name")
    ).all()
    # Constraints may be listed in any order.
    return [
        (name, sorted(line.strip().rstrip(",") for line in (sql or "").splitlines()))
        for name, sql in rows
        if schema.VERSION_TABLE not in name
    ]


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = create_engine(parse_dsn(database))
    yield engine
    engine.dispose()


@pytest.fixture
def modelled(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A second database, made from the models."""
    if engine.dialect.name == "postgresql":
        server: str = request.getfixturevalue("postgres")
        other = create_engine(parse_dsn(create_database(server)))
    else:
        other = create_engine("sqlite://")
    Base.metadata.create_all(other)
    yield other
    other.dispose()


def test_the_revisions_make_what_the_models_say(engine: Engine, modelled: Engine) -> None:
    with engine.begin() as connection:
        schema.upgrade(connection)
        migrated = describe(connection)
    with modelled.connect() as connection:
        wanted = describe(connection)
    assert migrated == wanted
    assert len(wanted) > 10


def test_alembic_finds_nothing_to_do_and_leaves_other_tables_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE customers (id INTEGER)"))
        schema.upgrade(connection)
        context = MigrationContext.configure(
            connection,
            opts={
                "include_name": schema.include_name,
                "compare_type": True,
                "version_table": schema.VERSION_TABLE,
            },
        )
        assert compare_metadata(context, Base.metadata) == []


def test_down_and_up_again(engine: Engine) -> None:
    with engine.begin() as connection:
        schema.upgrade(connection)
        first = describe(connection)
    for revision in reversed(["base", *(known.id for known in schema.revisions()[:-1])]):
        with engine.begin() as connection:
            schema.downgrade(connection, to=revision)
    with engine.begin() as connection:
        left = [name for name in inspect(connection).get_table_names() if "pgqrs" in name]
        assert left == [schema.VERSION_TABLE]
        schema.upgrade(connection)
        assert describe(connection) == first


def test_one_step_at_a_time_is_the_same(engine: Engine) -> None:
    for revision in schema.revisions():
        with engine.begin() as connection:
            schema.upgrade(connection, to=revision.id)
            assert max(schema.applied(connection)) == revision.id
    with engine.begin() as connection:
        schema.verify(connection)
