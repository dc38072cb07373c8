"""Noticing a pooler between us and the server.

A pooler in transaction mode gives each transaction any session of the server that is free. What a
session remembers is then somebody else's: a prepared statement may be missing, or, worse, be another
one of the same name; whoever listens hears nothing, and leaves a session that goes on listening.

When a client connects, the server tells it the number of its process. A pooler makes one up, since
it cannot know which processes will serve this client. So the two numbers tell them apart.
"""

from __future__ import annotations

from typing import Any

PROCESS = "pg_backend_pid()"
"""The SQL that asks the server itself."""


def is_pooled(driver: Any, process: int) -> bool:
    """Whether the process that answers is another than the one that was announced."""
    return bool(driver.pgconn.backend_pid != process)
