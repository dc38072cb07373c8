"""Delta tables, through `deltalake`: no Java of their own is needed.

An append carries a transaction, an application's id and a number. A table that has it already was
appended to before, so that a step which is repeated appends nothing. That is looked up and appended to
in one and the same version of the table: if another driver appends the same meanwhile, the commit
fails, and the next look finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from pgqrs.errors import InvalidConfig
from pgqrs.spark.files import open_files
from pgqrs.spark.frames import Frame

VERSION = 1
DAYS = ["queue", "day"]
ATTEMPTS = 10
"""How often an append is tried while others are quicker."""


def append_once(table: str, frame: Frame, *, app: str) -> bool:
    """Append an export to a Delta table, by queue and day. False if that was done before."""
    if find_spec("deltalake") is None:
        raise InvalidConfig("Delta tables need deltalake: `pip install 'pgqrs[delta]'`")
    from deltalake.exceptions import CommitFailedError

    trying = Retrying(
        retry=retry_if_exception_type(CommitFailedError),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.02, max=1.0),
        reraise=True,
    )
    appended: bool = trying(_append, table, frame, app)
    return appended


def _append(table: str, frame: Frame, app: str) -> bool:
    from deltalake import CommitProperties, Transaction, write_deltalake

    rows = _reader(frame)
    seen = _open(table, rows.schema)
    if seen.transaction_version(app) is not None:
        return False
    # Not to `table`: that would be read anew, and an append of the same in between go unnoticed.
    write_deltalake(
        seen,
        rows,
        mode="append",
        partition_by=DAYS,
        commit_properties=CommitProperties(app_transactions=[Transaction(app, VERSION)]),
    )
    return True


def _open(table: str, columns: Any) -> Any:
    """The table as it is now. If there is none it is made, with nothing in it: a first append that
    makes it could not be told from another one.
    """
    from deltalake import CommitProperties, DeltaTable

    if not DeltaTable.is_deltatable(table):
        DeltaTable.create(
            table,
            columns,
            mode="ignore",
            partition_by=DAYS,
            # Else, if another was quicker, deltalake makes it again in its second version.
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    return DeltaTable(table)


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
