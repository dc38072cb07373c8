"""What `format("pgqrs")` is made of. Spark finds it by the module `pyspark_pgqrs`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pgqrs.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"
"""The module of Spark that hands filters to a reader; it is loaded only where that is to happen."""


def schema(options: Mapping[str, str]) -> StructType:
    """The columns of what the options name."""
    from pgqrs.spark import reading, streaming, workers

    wanted = streaming.Wanted if streaming.is_stream(options) else reading.Wanted
    workers.settle()
    return wanted.of(options).schema


def reader(
    options: Mapping[str, str], schema: StructType, cores: int | None = None
) -> DataSourceReader:
    """Reads it. Spark refuses a reader that can filter, unless it has been allowed to."""
    from pgqrs.spark import streaming
    from pgqrs.spark.reading import FilteringReader, Reader, Wanted

    if streaming.is_stream(options):
        return streaming.claimed_reader(options, schema, cores)
    kind = FilteringReader if PUSHING in sys.modules else Reader
    return kind(Wanted.of(options, cores).only(schema))


def stream_reader(
    options: Mapping[str, str], schema: StructType, cores: int | None = None
) -> DataSourceStreamReader:
    """Reads a queue as it goes on."""
    from pgqrs.spark import streaming

    return streaming.stream_reader(options, schema, cores)


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """Writes to a queue. The write is begun here, once, before any task is."""
    from pgqrs.spark.writing import Writer, bulk_of

    if overwrite:
        raise InvalidArgument("mode", 'a queue is only added to: write with mode("append")')
    return Writer(bulk_of(options, schema).begin())


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Writes a stream to a queue."""
    from pgqrs.spark import sinks

    return sinks.sink(options, schema, overwrite)
