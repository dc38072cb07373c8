"""The export: the archive as Parquet, by queue and day, and then perhaps no longer in the archive.

The rows are written below a directory of the attempt. What was written is counted against what was read,
and only then recorded: that record is what makes them the export. After it a *manifest* is put beside
them, `_exports/<run>.json` in the directory `out`, for who has only the directory: `exported(out)`
reads what manifests name, and so never what an attempt left behind.

What is to be deleted is deleted after that, by the ids in the files: what was archived meanwhile stays.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial, reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

from pgqrs.errors import InvalidArgument
from pgqrs.repositories import archive
from pgqrs.spark.allowing import allowed_root
from pgqrs.spark.delta import append_once
from pgqrs.spark.files import absolute, open_files
from pgqrs.spark.frames import Frame, write_counted
from pgqrs.spark.pipelines import QUEUE, database_options, read_text, write_text
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import current_attempt, spark_step
from pgqrs.workflows.decorators import workflow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELETED_QUEUE = "(deleted)"
MANIFESTS = "_exports"
AT_ONCE = 1000
"""Rows that are deleted in one transaction."""


def utc_day(time: str) -> str:
    """The day of a time in UTC, as SQL: `to_date` goes by the time zone of the session."""
    return f"date_from_unix_date(CAST(floor(unix_micros({time}) / 86400000000D) AS INT))"


def read_archive(
    spark: SparkSession,
    options: dict[str, str],
    queues: list[str] | None,
    since: datetime | None,
    until: datetime | None,
) -> DataFrame:
    """What ended in some queues, or in all, between two times."""
    options = options | {"table": "archive"}
    if queues is not None and len(queues) == 1:
        options["queue"] = queues[0]
    for name, when in (("since", since), ("until", until)):
        if when is not None:
            options[name] = when.isoformat()
    found = spark.read.format("pgqrs").options(**options).load()
    return found if queues is None else found.where(found["queue"].isin(queues))


@spark_step(name="write")
def write_archive(
    out: str, queues: list[str] | None, since: datetime | None, until: datetime | None
) -> Any:
    """The archive of the run's own store, by queue and day."""
    attempt, spark = current_attempt(), current_session("pgqrs export")
    found = read_archive(spark, database_options(attempt.store, spark), queues, since, until)
    return write_by_day(
        found.selectExpr(
            f"coalesce(queue, '{DELETED_QUEUE}') AS queue",
            "* EXCEPT (queue)",
            f"{utc_day('archived_at')} AS day",
        ),
        attempt.path(allowed_root(out)),
    )


def write_by_day(rows: DataFrame, path: str) -> Frame:
    """Write rows by queue and day to a path that nobody else uses, and count them on both sides."""

    def write(counted: DataFrame) -> None:
        # All rows of a day in one task first: else every task would have a file of its own for it.
        days = counted.repartition("queue", "day")
        days.write.partitionBy("queue", "day").parquet(path)

    return write_counted(rows, write, path)


@spark_step(name="publish")
def publish(out: str, frame: Frame, replaces: list[str] | None = None) -> str:
    """Say in the directory what was exported, and for what else it stands from now on. The same frame
    has the same manifest.
    """
    name = f"{current_attempt().run_id}-{frame.path.rpartition('-')[2]}"
    manifest = f"{allowed_root(out)}/{MANIFESTS}/{name}.json"
    files, inner = open_files(manifest)
    # One that is there stays: written again it would be younger than others it came before.
    if not files.get_file_info(inner).is_file:
        write_text(manifest, json.dumps(vars(frame) | {"replaces": replaces or []}))
    return manifest


@spark_step(name="append to delta")
def append_to_delta(table: str, frame: Frame) -> bool:
    """Append what was exported to a Delta table as well. No other frame has the same path."""
    return frame.rows > 0 and append_once(allowed_root(table), frame, app=f"pgqrs {frame.path}")


@spark_step(name="delete")
def delete_exported(frame: Frame) -> int:
    """Delete what was exported from the archive, a little at a time. Repeating it deletes the rest."""
    store = current_attempt().store
    rows = iter(frame.df().select("id").toLocalIterator(prefetchPartitions=True))
    while ids := [row.id for row in islice(rows, AT_ONCE)]:
        store.write(partial(archive.forget, ids=ids))
    return frame.rows


@workflow(name="spark-export", queue=QUEUE)
def export(
    out: str,
    queues: list[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    delete: bool = False,
    delta: str | None = None,
) -> dict[str, Any]:
    """Export what ended in some queues, or in all, between two times, to the directory `out`; then, if
    so wanted, append it to the table `delta`, and delete it from the archive.
    """
    out = absolute(out)
    frame = write_archive(out, queues, since, until)
    manifest = publish(out, frame)
    if delta is not None:
        append_to_delta(absolute(delta), frame)
    deleted = delete_exported(frame) if delete else 0
    return {"path": frame.path, "manifest": manifest, "rows": frame.rows, "deleted": deleted}


def manifests(out: str) -> dict[str, Frame]:
    """The exports in a directory, by the names of their manifests; without those that another one
    stands for. Of two that stand for the same, which happens when both are made at once, the first
    counts, and the other is as if it were not there.
    """
    from pyarrow.fs import FileSelector

    root = f"{absolute(out)}/{MANIFESTS}"
    files, inner = open_files(root)
    there = files.get_file_info(FileSelector(inner, allow_not_found=True))
    frames: dict[str, Frame] = {}
    replaced: set[str] = set()
    for found in sorted(there, key=lambda info: (info.mtime_ns or 0, info.base_name)):
        if found.extension != "json":
            continue
        manifest = json.loads(read_text(f"{root}/{found.base_name}"))
        names = set(manifest.pop("replaces"))
        if replaced.isdisjoint(names):
            frames[found.base_name] = Frame(**manifest)
            replaced |= names
    return {name: frame for name, frame in frames.items() if name not in replaced}


def exported(out: str, spark: SparkSession | None = None) -> DataFrame:
    """All that was exported to a directory; what two exports have in common is there twice."""
    session = spark or current_session("pgqrs export")
    frames = [frame.df(session) for frame in manifests(out).values() if frame.rows]
    if not frames:
        raise InvalidArgument("out", f"nothing was exported to {out}")
    return together(frames)


def together(frames: list[DataFrame]) -> DataFrame:
    """The rows of all; a column that some do not have is empty there."""
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
