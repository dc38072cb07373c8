"""A stream from one queue to another, in a process that kills itself at a certain point:
`python -m tests.spark.dying URL CHECKPOINT POINT`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pgqrs.spark import session
from pgqrs.spark.sinks import Sink, sink
from pgqrs.spark.streaming import ClaimReader, Wanted
from pyspark_pgqrs import DefaultSource
from tests.spark.conftest import SETTINGS

GROUP, POINT = "PGQRS_TEST_GROUP", "PGQRS_TEST_POINT"
"""In the environment, which the workers of Spark inherit."""
STREAM = {"mode": "claim", "queue": "tasks", "stream": "nightly", "maxRowsPerBatch": "10"}


def die_at(point: str) -> None:
    """The driver and Java are a group of processes; this one is not in it."""
    if os.environ[POINT] == point:
        os.killpg(int(os.environ[GROUP]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class DyingReader(ClaimReader):
    def latestOffset(self, start: Any, limit: Any) -> Any:  # noqa: N802
        if start["batch"] == 3:
            die_at("complete and not acknowledged")
        found = super().latestOffset(start, limit)
        die_at("claimed and not written down")
        return found


class DyingSink(Sink):
    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        super().commit(messages, batchId)
        if batchId == 1:
            die_at("published and not complete")


class DyingSource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamReader(self, schema: Any) -> Any:  # noqa: N802
        return DyingReader(Wanted.of(self.options).only(schema))

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        return DyingSink(sink(self.options, schema, overwrite)._bulk)


def start(spark: Any, url: str, checkpoint: str, *, source: str) -> Any:
    """A query that takes what is there now."""
    return (
        spark.readStream.format(source)
        .options(url=url, **STREAM)
        .load()
        .select("payload")
        .writeStream.format(source)
        .options(url=url, queue="others", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    url, checkpoint, point = sys.argv[1:]
    os.environ |= {GROUP: str(os.getpgrp()), POINT: point}
    spark = session("dying", **SETTINGS)
    spark.dataSource.register(DyingSource)
    start(spark, url, checkpoint, source="dying").awaitTermination()
