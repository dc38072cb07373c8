"""Databases that pgqrs can live in, and how a URL or an engine finds its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sqlalchemy import Engine

from pgqrs.config import Config
from pgqrs.errors import InvalidConfig
from pgqrs.stores.base import Database, Remote, RowsLocked, Work

__all__ = ["Database", "Remote", "RowsLocked", "Work", "database_class", "open_database"]

DATABASES = {
    "sqlite": ("pgqrs.stores.sqlite", "SqliteDatabase"),
    "postgresql": ("pgqrs.stores.postgres", "PostgresDatabase"),
    "s3": ("pgqrs.stores.s3", "S3Database"),
}
"""By the name URLs start with. Imported when first used: drivers are slow to import."""


def database_class(name: str) -> Any:
    """The class for a database, by the name its URLs start with."""
    try:
        module, attribute = DATABASES[name]
    except KeyError:
        known = ", ".join(DATABASES)
        raise InvalidConfig(f"no store for {name!r}; there are stores for: {known}") from None
    return getattr(import_module(module), attribute)


def open_database(config: Config, engine: Engine | None = None, **options: Any) -> Database:
    """The database that the configuration names, or the one behind the application's engine."""
    name = engine.dialect.name if engine is not None else config.url.get_backend_name()
    kind = database_class(name).kind_for(config)
    database: Database = kind(config, engine=engine, **options)
    return database
