"""`alembic upgrade head`, `admin.install()` and an application's own Alembic environment do the
same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, inspect, text

import pgqrs
from pgqrs import schema
from pgqrs.config import parse_dsn

ROOT = Path(__file__).parents[2]


def run_alembic(*arguments: str, cwd: Path = ROOT, **environ: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PGQRS_")}
    done = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def use(store: Any) -> None:
    store.admin().verify()
    store.admin().create_queue("tasks")
    store.producer("tasks").enqueue(1)
    with store.consumer("tasks") as consumer:
        consumer.ack_many(consumer.dequeue())


def test_the_alembic_command_installs(database: str) -> None:
    run_alembic("-x", f"dsn={database}", "upgrade", "head")
    with pgqrs.Store(database) as store:
        use(store)
        store.admin().install()


def test_the_alembic_command_reads_the_environment(database: str) -> None:
    run_alembic("upgrade", schema.revisions()[0].id, PGQRS_DSN=database)
    with pytest.raises(pgqrs.UpgradeRequired):
        pgqrs.Store(database)
    run_alembic("upgrade", "head", PGQRS_DSN=database)
    run_alembic("check", PGQRS_DSN=database)
    with pgqrs.Store(database) as store:
        use(store)


def test_after_install_the_alembic_command_has_nothing_to_do(database: str) -> None:
    with pgqrs.Store(database) as store:
        store.admin().install()
    run_alembic("upgrade", "head", PGQRS_DSN=database)
    assert "(head)" in run_alembic("current", PGQRS_DSN=database)
    run_alembic("downgrade", "base", PGQRS_DSN=database)
    with pgqrs.Store(database) as store, pytest.raises(pgqrs.SchemaNotInstalled):
        store.admin().verify()


def test_the_revisions_as_a_script_for_a_database_administrator(postgres_database: str) -> None:
    script = run_alembic("upgrade", "head", "--sql", PGQRS_DSN=postgres_database)
    with psycopg.connect(postgres_database) as connection:
        connection.execute(script)  # type: ignore[arg-type]
    with pgqrs.Store(postgres_database) as store:
        use(store)
    script = run_alembic(
        "-x", "schema=Line Up", "upgrade", "head", "--sql", PGQRS_DSN=postgres_database
    )
    with psycopg.connect(postgres_database) as connection:
        connection.execute(script)  # type: ignore[arg-type]
    with pgqrs.Store(postgres_database, schema="Line Up") as store:
        use(store)


APPLICATION_ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
from pgqrs import schema

metadata = MetaData()
Table("customers", metadata, Column("id", Integer, primary_key=True))
engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_name=schema.exclude_name
    )
    with context.begin_transaction():
        context.run_migrations()
"""
APPLICATION_REVISION = """
from alembic import op
import sqlalchemy as sa

revision = "customers"
down_revision = None
depends_on = None


def upgrade():
    op.create_table("customers", sa.Column("id", sa.Integer, primary_key=True))


def downgrade():
    op.drop_table("customers")
"""


@pytest.fixture
def application(database: str, tmp_path: Path) -> Path:
    """An application with an Alembic environment of its own, which knows our revisions."""
    scripts = tmp_path / "migrations"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(APPLICATION_ENV)
    (scripts / "script.py.mako").write_text("")
    (scripts / "versions" / "customers.py").write_text(APPLICATION_REVISION)
    url = parse_dsn(database).render_as_string(hide_password=False)
    locations = os.pathsep.join((str(scripts / "versions"), str(schema.versions_path())))
    (tmp_path / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {scripts}\npath_separator = os\n"
        f"version_locations = {locations}\nsqlalchemy.url = {url}\n"
    )
    return tmp_path


def test_an_application_runs_the_revisions_in_its_own_environment(
    database: str, application: Path
) -> None:
    run_alembic("upgrade", "customers", cwd=application)
    run_alembic("upgrade", "pgqrs@head", cwd=application)
    with pgqrs.Store(database) as store:
        use(store)
        store.admin().install()
        store.admin().verify()
    run_alembic("check", cwd=application)
    run_alembic("upgrade", "head", PGQRS_DSN=database)
    run_alembic("downgrade", "pgqrs@base", cwd=application)
    engine = create_engine(parse_dsn(database))
    left = inspect(engine).get_table_names()
    engine.dispose()
    assert "customers" in left
    assert [name for name in left if name.startswith("pgqrs_") and "alembic" not in name] == []


def test_an_applications_environment_finds_what_was_installed_before(
    database: str, application: Path
) -> None:
    with pgqrs.Store(database) as store:
        store.admin().install()
    run_alembic("upgrade", "heads", cwd=application)
    assert "pgqrs" in run_alembic("current", cwd=application)
    with pgqrs.Store(database) as store:
        use(store)


def test_one_call_in_an_applications_environment(database: str, application: Path) -> None:
    env = application / "migrations" / "env.py"
    call = "with engine.begin() as connection:\n    schema.upgrade(connection)\n"
    env.write_text(APPLICATION_ENV.replace("with engine.connect", call + "with engine.connect"))
    url = parse_dsn(database).render_as_string(hide_password=False)
    (application / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {application / 'migrations'}\nsqlalchemy.url = {url}\n"
    )
    run_alembic("upgrade", "head", cwd=application)
    run_alembic("check", cwd=application)
    with pgqrs.Store(database) as store:
        use(store)


def test_an_upgrade_that_is_rolled_back_leaves_nothing(database: str) -> None:
    engine = create_engine(parse_dsn(database))
    with engine.connect() as connection:
        schema.upgrade(connection)
        connection.rollback()
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_schema_on_a_connection_of_the_applications(postgres_database: str) -> None:
    engine = create_engine(parse_dsn(postgres_database))
    with engine.begin() as connection:
        schema.upgrade(connection, schema="queues")
        assert not connection.get_execution_options().get("schema_translate_map")
    assert inspect(engine).get_table_names("public") == []
    engine.dispose()
    with pgqrs.Store(postgres_database, schema="queues") as store:
        use(store)


def test_many_installers_at_once_install_once(database: str) -> None:
    def install(_: int) -> None:
        with pgqrs.Store(database) as store:
            store.admin().install()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(install, range(6)))
    with pgqrs.Store(database) as store:
        use(store)


def test_a_schema_of_its_own_on_postgres(postgres_database: str) -> None:
    with pgqrs.Store(postgres_database, schema="Line Up") as store:
        with pytest.raises(pgqrs.SchemaNotInstalled):
            store.admin().verify()
        store.admin().install()
        use(store)
        with store.engine.begin() as connection:
            inspector = inspect(connection)
            assert inspector.get_table_names("public") == []
            assert "pgqrs_messages" in inspector.get_table_names("Line Up")
            path = connection.execute(text("SHOW search_path")).scalar_one()
            assert "Line Up" not in path
    with pgqrs.Store(postgres_database) as elsewhere, pytest.raises(pgqrs.SchemaNotInstalled):
        elsewhere.admin().verify()
    run_alembic("-x", f"dsn={postgres_database}", "-x", "schema=Line Up", "upgrade", "head")


def test_a_schema_is_used_in_the_applications_transaction_and_left_as_it_was(
    postgres_database: str,
) -> None:
    engine = create_engine(parse_dsn(postgres_database))
    with pgqrs.Store(engine, schema="queues") as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id INTEGER)"))
            store.using(connection).enqueue("tasks", 1)
            assert not connection.get_execution_options().get("schema_translate_map")
            connection.execute(text("INSERT INTO orders VALUES (1)"))
        assert store.admin().queue_stats("tasks").ready == 1
    assert inspect(engine).get_table_names("public") == ["orders"]
    engine.dispose()


def test_sqlite_has_no_schemas(sqlite_database: str) -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="schemas"):
        pgqrs.Store(sqlite_database, schema="other")
