"""Writing a data frame to a queue, exactly once.

Tasks store their parts, the driver publishes them (see `bulk`). A task that is tried again stores its
part again, and only what the last attempt said counts. A job that is run again under the same `writeId`
finds what the first has done: if that was published, there is nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from pgqrs.errors import InvalidArgument
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY
from pgqrs.repositories.writes import NAMELESS, Part, Settings
from pgqrs.spark.bulk import Bulk, new_write_id
from pgqrs.spark.options import Options
from pgqrs.spark.rows import check_columns
from pgqrs.types import WriteMode

OPTIONS = ("queue", "writeId", "writeMode", "numPartitions", "priority", "delay", "ttl", "unique")

KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "priority": ("whole numbers", (ByteType, ShortType, IntegerType, LongType)),
    "eta": ("times with a zone", (TimestampType,)),
    "expires_at": ("times with a zone", (TimestampType,)),
    "headers": ("JSON, a map or a struct", (StringType, MapType, StructType)),
    "group": ("text", (StringType,)),
    "key": ("text", (StringType,)),
    "codec": ("text", (StringType,)),
}
"""What columns may be of; a payload may be of anything."""


@dataclass
class Stored(WriterCommitMessage):
    """What a task has stored."""

    part: Part


class Writer(DataSourceArrowWriter):
    """One write."""

    def __init__(self, bulk: Bulk) -> None:
        self.bulk = bulk

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """What a task does."""
        context = TaskContext.get()
        return Stored(self.bulk.store(0 if context is None else context.partitionId(), iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """What is done when all tasks have ended well."""
        self.bulk.publish(_parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What is done when one has not."""
        self.bulk.discard(_parts(messages))


def _parts(messages: list[WriterCommitMessage | None]) -> list[Part]:
    return [message.part for message in messages if isinstance(message, Stored)]


def bulk_of(given: Mapping[str, str], schema: StructType) -> Bulk:
    """The write that the options name."""
    options = Options(given, OPTIONS)
    check_columns(schema.fieldNames())
    for field in schema.fields:
        expected, kinds = KINDS.get(field.name, ("", (DataType,)))
        if not isinstance(field.dataType, kinds):
            raise InvalidArgument(
                field.name, f"expected {expected}, got {field.dataType.simpleString()}"
            )
    if "key" in schema.fieldNames() and options.text("unique") != "none":
        raise InvalidArgument(
            "key",
            "unique keys are for enqueue(); with the option unique=none keys are kept for limits "
            "only, and keep nobody out",
        )
    mode = WriteMode(options.choice("writeMode", WriteMode, WriteMode.STAGED))
    parts = options.whole("numPartitions", low=1)
    if (mode is WriteMode.PART_KEY) != (parts is not None):
        raise InvalidArgument(
            "numPartitions", "must be given in the mode part-key, and in no other: it is checked"
        )
    return Bulk(
        options.where(),
        options.required("queue"),
        _write_id(options, mode),
        mode,
        parts,
        Settings(
            options.whole("priority", low=LOWEST_PRIORITY, high=HIGHEST_PRIORITY) or 0,
            options.number("delay") or 0.0,
            options.number("ttl"),
        ),
    )


def _write_id(options: Options, mode: WriteMode) -> str:
    given = options.text("writeId")
    if given is None:
        return new_write_id()
    if given.startswith(NAMELESS):
        raise InvalidArgument("writeId", f"must not begin with {NAMELESS!r}")
    return given
