"""Drivers of a stream are killed where it hurts: each message is there once, on both sides."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pgqrs
from tests.spark.dying import start
from tests.spark.test_spark_crashes import PATIENCE, ROOT

MESSAGES = 25
"""Batches of ten: the third is the last."""


def die(url: str, checkpoint: Path, point: str) -> None:
    """A driver starts, or goes on, and gets as far as this."""
    with checkpoint.with_suffix(".log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.dying", url, str(checkpoint), point],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert driver.wait(PATIENCE) == -signal.SIGKILL
    finally:
        driver.kill()
        driver.wait()


def state(store: pgqrs.Store) -> tuple[int, int, int]:
    """How many came out, are acknowledged, and are claimed."""
    here, there = (store.admin().queue_stats(queue) for queue in ("tasks", "others"))
    return there.ready, here.archived[pgqrs.ArchiveReason.COMPLETED], here.leased


def written_down(checkpoint: Path, log: str) -> list[str]:
    return sorted(path.name for path in (checkpoint / log).glob("[0-9]*"))


def test_a_stream_survives_the_death_of_its_drivers(
    pg_url: str, spark: Any, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with pgqrs.Store(pg_url) as store:
        store.producer("tasks").enqueue_many(range(MESSAGES))

        die(pg_url, checkpoint, "claimed and not written down")
        assert written_down(checkpoint, "offsets") == []
        assert state(store) == (0, 0, 10)

        die(pg_url, checkpoint, "published and not complete")
        assert written_down(checkpoint, "offsets") == ["0", "1"]
        assert written_down(checkpoint, "commits") == ["0"]
        assert state(store) == (20, 10, 10)

        die(pg_url, checkpoint, "complete and not acknowledged")
        assert written_down(checkpoint, "commits") == ["0", "1", "2"]
        assert state(store) == (25, 20, 5)

        start(spark, pg_url, str(checkpoint), source="pgqrs").awaitTermination()
        assert state(store) == (25, 25, 0)
        came_out = [message.payload for message in store.admin().peek("others", 100)]
        assert sorted(came_out) == list(range(MESSAGES))
