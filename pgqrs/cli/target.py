"""The database that a command works on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from pgqrs import Config, Store

PATIENCE = 5.0
"""Seconds to keep trying an unreachable database. A person waits; the library's default is made for services."""


@dataclass(frozen=True)
class Target:
    """What the command line was pointed at. It is opened by the command that needs it, not by `--help`."""

    dsn: str | None = field(default=None, repr=False)
    schema: str | None = None

    def open(self, **settings: Any) -> Store:
        """The store; `settings` are fields of `Config`."""
        if "PGQRS_RETRY_FOR" not in os.environ:
            settings.setdefault("retry_for", PATIENCE)
        return Store(Config.from_env(dsn=self.dsn, schema=self.schema, **settings))


def name_of(store: Store) -> str:
    """The URL of a store without its secrets: libpq also takes a password among the URL's parameters."""
    return str(store.config.url.set(query={}))
