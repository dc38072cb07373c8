"""The revisions lead exactly to what the models say, on both databases, up and down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, Inspector, create_engine, inspect, text

from pgqrs import schema
from pgqrs.config import parse_dsn
from pgqrs.models import Base
from tests.conftest import create_database

CATALOG = """
SELECT 'column', table_name, column_name,
       (row_number() OVER (PARTITION BY table_name ORDER BY ordinal_position))::text,
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
    inspector = inspect(connection)
    return [
        described
        for table in sorted(inspector.get_table_names())
        if table.startswith("pgqrs_") and table != schema.VERSION_TABLE
        for described in _describe_sqlite(connection, inspector, table)
    ]


def _describe_sqlite(connection: Connection, inspector: Inspector, table: str) -> Iterator[Any]:
    for pragma in (f"table_xinfo({table})", f"foreign_key_list({table})", "table_list"):
        rows = connection.exec_driver_sql(f"PRAGMA {pragma}").all()
        yield (
            table,
            pragma,
            [tuple(row) for row in rows if pragma != "table_list" or row[1] == table],
        )
    made = connection.execute(
        text("SELECT name, sql FROM sqlite_master WHERE tbl_name = :table ORDER BY name"),
        {"table": table},
    ).all()
    yield table, "indexes", [tuple(row) for row in made if row[0] != table]
    yield table, "autoincrement", ["AUTOINCREMENT" in sql for name, sql in made if name == table]
    for constraints in (inspector.get_check_constraints, inspector.get_unique_constraints):
        yield table, sorted(map(str, constraints(table)))


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
