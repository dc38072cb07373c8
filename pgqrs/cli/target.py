"""The database that a command works on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgqrs import Config, InvalidConfig, Store

PATIENCE = 5.0
"""Seconds to keep trying an unreachable database: a person waits, not a service."""


@dataclass(frozen=True)
class Target:
    """What the command line was pointed at. The command that needs it opens it."""

    dsn: str | None = field(default=None, repr=False)
    schema: str | None = None

    def open(self, **settings: Any) -> Store:
        """Returns the store; `settings` are fields of `Config`. Only a command that may create tables
        creates a SQLite file: a mistyped path is an error.
        """
        if "PGQRS_RETRY_FOR" not in os.environ:
            settings.setdefault("retry_for", PATIENCE)
        config = Config.from_env(dsn=self.dsn, schema=self.schema, **settings)
        if not config.upgrade:
            _check_file(config)
        return Store(config)


def _check_file(config: Config) -> None:
    """Refuse a SQLite file that does not exist."""
    path = config.url.database or ""
    if config.url.drivername != "sqlite" or path == ":memory:":
        return
    if not Path(path).expanduser().exists():
        raise InvalidConfig(f"there is no file {path}; `pgqrs install` creates it")


def name_of(store: Store) -> str:
    """The URL of a store without its secrets, which may also be among its parameters."""
    return str(store.config.url.set(query={}))
