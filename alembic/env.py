"""Runs the revisions on the database that `-x dsn=…` or `PGQRS_DSN` names."""

from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection

from pgqrs import schema
from pgqrs.config import Config
from pgqrs.models import Base
from pgqrs.stores import open_database


def run(connection: Connection, *, in_schema: str | None) -> None:
    schema.prepare(connection, in_schema)
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=schema.VERSION_TABLE,
        version_table_schema=in_schema,
        include_name=schema.include_name,
        compare_type=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def settings() -> Config:
    arguments = context.get_x_argument(as_dictionary=True)
    return Config.from_env(**{k: v for k, v in arguments.items() if k in ("dsn", "schema")})


def online() -> None:
    config = settings()
    database = open_database(config)
    try:
        database.write(
            lambda c: run(c, in_schema=config.schema), repeatable=True, needs_schema=False
        )
    finally:
        database.close()


def offline() -> None:
    config = settings()
    context.configure(
        dialect_name=config.url.get_backend_name(),
        target_metadata=Base.metadata,
        version_table=schema.VERSION_TABLE,
        literal_binds=True,
    )
    with context.begin_transaction():
        if config.schema is not None:
            name = context.get_context().dialect.identifier_preparer.quote(config.schema)
            context.execute(f"CREATE SCHEMA IF NOT EXISTS {name}")
            context.execute(f"SET LOCAL search_path TO {name}")
        context.run_migrations()


if context.config.file_config.has_section("formatters"):
    fileConfig(str(context.config.config_file_name), disable_existing_loggers=False)
(offline if context.is_offline_mode() else online)()
