"""A WSGI application with a store that is opened, and used, before gunicorn forks its workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pgqrs

store = pgqrs.Store(upgrade=True, s3_retry_conflicts=True)
store.admin().create_queue("q", if_not_exists=True)
store.producer("q").enqueue("preloaded")
if "mode=local" in os.environ["PGQRS_DSN"]:
    store.admin().flush_to_s3()  # a child begins with what is in the bucket


def enqueue(payload: Any, **options: Any) -> None:
    """In local mode the first write after a conflict raises, to say that earlier ones were set aside."""
    try:
        store.producer("q").enqueue(payload, **options)
    except pgqrs.ConflictError:
        store.producer("q").enqueue(payload, **options)


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    enqueue({"path": environ["PATH_INFO"]})
    enqueue("with a key", key=environ["PATH_INFO"])
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
