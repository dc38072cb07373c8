"""Writing a stream to a queue, each batch exactly once.

A batch is a write in bulk (see `bulk`) whose id is that of the query and the number of the batch. Spark
works on a batch again when it died before it wrote down that the batch is complete; then the write is
found to be finished, and nothing is added. A batch before the last one that was published is refused:
a driver that was held up, and replaced by another one meanwhile, ends with `WriteMismatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pgqrs.errors import InvalidArgument
from pgqrs.repositories.writes import Batch, Part
from pgqrs.spark.bulk import Bulk
from pgqrs.spark.writing import bulk_of

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""What Spark tells tasks of the batch they work on."""
ITS_OWN = ("writeId", "writeMode", "numPartitions")


@dataclass
class StoredOfBatch(WriterCommitMessage):
    """What a task has stored, and for which query."""

    query: str
    part: Part


class Sink(DataSourceStreamArrowWriter):
    """The queue that a stream is written to."""

    def __init__(self, bulk: Bulk) -> None:
        self._bulk = bulk

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """What a task does."""
        context = TaskContext.get()
        query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(BATCH)
        # Whoever comes first begins the write.
        bulk = self._of(query, int(batch)).begin()
        return StoredOfBatch(query, bulk.store(context.partitionId(), iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is done when all tasks have ended well."""
        stored = _stored(messages)
        if stored:
            query = stored[0].query
            self._of(query, batchId).begin().publish([message.part for message in stored])

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is done when one has not."""
        stored = _stored(messages)
        if stored:
            self._of(stored[0].query, batchId).discard([message.part for message in stored])

    def _of(self, query: str, batch: int) -> Bulk:
        which = Batch(query, batch)
        return replace(self._bulk, write_id=which.write_id, batch=which)


def _stored(messages: list[WriterCommitMessage | None]) -> list[StoredOfBatch]:
    return [message for message in messages if isinstance(message, StoredOfBatch)]


def sink(options: Mapping[str, str], schema: StructType, overwrite: bool) -> Sink:
    """The queue that the options name."""
    if overwrite:
        raise InvalidArgument("outputMode", "a queue is only added to: use append or update")
    for name in ITS_OWN:
        if name.lower() in map(str.lower, options):
            raise InvalidArgument(name, "is not for streams: each batch is a write of its own")
    return Sink(bulk_of(options, schema))
