"""The database that a command works on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from pgqrs import Config, Store

PATIENCE = 5.0
"""Seconds to keep trying an unreachable database: a person waits, not a service."""


@dataclass(frozen=True)
class Target:
    """What the command line was pointed at. The command that needs it opens it."""

    dsn: str | None = field(default=None, repr=False)
    schema: str | None = None

    def open(self, **settings: Any) -> Store:
        """The store; `settings` are fields of `Config`."""
        if "PGQRS_RETRY_FOR" not in os.environ:
            settings.setdefault("retry_for", PATIENCE)
        return Store(Config.from_env(dsn=self.dsn, schema=self.schema, **settings))


def name_of(store: Store) -> str:
    """The URL of a store without its secrets, which may also be among its parameters."""
    return str(store.config.url.set(query={}))
