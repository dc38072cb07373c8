"""Delta tables, through `deltalake`: no Java of their own is needed.

An append carries a transaction, an application's id and a number. A table that has it already was
appended to before, so that a step which is repeated appends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from pgqrs.errors import InvalidConfig
from pgqrs.spark.files import open_files
from pgqrs.spark.frames import Frame

VERSION = 1


def append_once(table: str, frame: Frame, *, app: str) -> bool:
    """Append an export to a Delta table, by queue and day. False if that was done before."""
    if find_spec("deltalake") is None:
        raise InvalidConfig("Delta tables need deltalake: `pip install 'pgqrs[delta]'`")
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    if DeltaTable.is_deltatable(table) and DeltaTable(table).transaction_version(app) is not None:
        return False
    write_deltalake(
        table,
        _reader(frame),
        mode="append",
        partition_by=["queue", "day"],
        commit_properties=CommitProperties(app_transactions=[Transaction(app, VERSION)]),
    )
    return True


def _reader(frame: Frame) -> Any:
    import pyarrow as pa
    import pyarrow.dataset as parquet

    files, inner = open_files(frame.path)
    # Told, and not guessed: a queue may be called 1.
    days = pa.schema([("queue", pa.string()), ("day", pa.date32())])
    found = parquet.dataset(
        inner,
        filesystem=files,
        format=parquet.ParquetFileFormat(read_options={"coerce_int96_timestamp_unit": "us"}),
        partitioning=parquet.partitioning(days, flavor="hive"),
    )
    wanted = pa.schema([_field(field) for field in found.schema])

    def batches() -> Iterator[Any]:
        for batch in found.to_batches():
            yield from pa.Table.from_batches([batch]).cast(wanted).to_batches()

    return pa.RecordBatchReader.from_batches(wanted, batches())


def _field(field: Any) -> Any:
    """Spark writes times in UTC without saying so."""
    import pyarrow as pa

    if pa.types.is_timestamp(field.type):
        return field.with_type(pa.timestamp("us", tz="UTC"))
    return field
