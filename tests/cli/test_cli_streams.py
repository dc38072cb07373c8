"""`pgqrs stream …`."""

from __future__ import annotations

from typing import Any

import pgqrs
from pgqrs.streams import Stream


def test_list_and_release(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    assert run_json("stream", "list") == []
    assert "no streams" in run("stream", "list").stdout
    store.producer("tasks").enqueue_many(range(3))
    Stream(store._database, "nightly", "tasks").next_batch(0, limit=2)
    (stream,) = run_json("stream", "list")
    assert (stream["name"], stream["queue"], stream["messages"]) == ("nightly", "tasks", 2)
    assert "nightly" in run("stream", "list").stdout
    assert run_json("stream", "release", "nightly") == {"released": 2}
    assert "0 message" in run("stream", "release", "nightly").stdout
    assert store.admin().queue_stats("tasks").ready == 3


def test_unknown_streams_are_named(run: Any) -> None:
    failed = run("stream", "release", "unknown")
    assert failed.exit_code != 0
    assert "unknown" in failed.stderr
