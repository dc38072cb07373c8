"""The replay: what was exported, or any other Parquet of messages, into a queue again, exactly once.

Each run is one write in bulk, whose id is recorded before anything is written (see `bulk`). A run that
is resumed writes under the same id, and finds out whether that was done already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgqrs.errors import InvalidArgument
from pgqrs.repositories import writes
from pgqrs.spark.export import exported, manifests
from pgqrs.spark.files import absolute
from pgqrs.spark.pipelines import QUEUE, database_options
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import current_attempt, spark_step
from pgqrs.types import ArchiveReason
from pgqrs.workflows.calls import uuid
from pgqrs.workflows.decorators import workflow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = {
    "payload": "payload",
    "priority": "priority",
    "headers": "headers",
    "codec": "codec",
    "group_key": "group",
    "dedup_key": "key",
}
"""What a message keeps, and what it is called when it is written."""


def read_messages(spark: SparkSession, source: str) -> DataFrame:
    """The exports in a directory, or else the Parquet that is there."""
    if any(frame.rows for frame in manifests(source).values()):
        return exported(source, spark)
    return spark.read.parquet(source)


def chosen(rows: DataFrame, queues: list[str] | None, reasons: list[str] | None) -> DataFrame:
    """Rows of these queues that ended for these reasons, as messages."""
    for column, words in (("queue", queues), ("archive_reason", reasons)):
        if words is not None:
            rows = rows.where(rows[column].isin(words))
    if "payload" not in rows.columns:
        raise InvalidArgument("source", "has no column payload")
    return rows.select(
        *(rows[stored].alias(name) for stored, name in COLUMNS.items() if stored in rows.columns)
    )


@spark_step(name="write")
def write_messages(
    source: str,
    queue: str,
    write_id: str,
    queues: list[str] | None,
    reasons: list[str] | None,
) -> int:
    """Write them all at once, unless that was done. Returns how many there are."""
    spark, store = current_session("pgqrs replay"), current_attempt().store
    rows = chosen(read_messages(spark, source), queues, reasons)
    options = database_options(store, spark) | {
        "queue": queue,
        "writeId": write_id,
        "unique": "none",
    }
    rows.write.format("pgqrs").mode("append").options(**options).save()
    return store.read(lambda connection: writes.message_count(connection, write_id))


@workflow(name="spark-replay", queue=QUEUE)
def replay(
    source: str,
    queue: str,
    queues: list[str] | None = None,
    reasons: list[str] | None = None,
) -> dict[str, Any]:
    """Enqueue anew, into `queue`, what is in the directory `source`; of an export perhaps only what was
    in some queues, or ended for some reasons.
    """
    for reason in reasons or ():
        if reason not in list(ArchiveReason):
            raise InvalidArgument("reasons", f"expected some of {', '.join(ArchiveReason)}")
    write_id = f"replay-{uuid()}"
    messages = write_messages(absolute(source), queue, write_id, queues, reasons)
    return {"queue": queue, "messages": messages, "write_id": write_id}
