"""The report: how each queue did, hour by hour, from its archive.

An hour counts what ended in it. *Wait* is from when a message was enqueued until it was claimed for
the last time; *run* from then until it ended. Percentiles are approximate, by less than a percent of
their rank. Retries are attempts beyond the first; messages that were given back have not been
attempted.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pgqrs.spark.allowing import allowed_root
from pgqrs.spark.frames import Frame
from pgqrs.spark.hours import Hour, as_json
from pgqrs.spark.pages import page
from pgqrs.spark.pipelines import QUEUE, database_options, write_text
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import current_attempt, spark_step
from pgqrs.types import ArchiveReason
from pgqrs.workflows.decorators import workflow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = (
    "queue",
    "archive_reason",
    "read_ct",
    "released_ct",
    "enqueued_at",
    "dequeued_at",
    "archived_at",
)
ACCURACY = 1000
"""Of percentiles: the rank is off by at most one in so many."""
RANKS = ("p50", "p90", "p99")
HOUR = 3_600_000_000
"""Microseconds of an hour."""


def summarize(archive: DataFrame) -> DataFrame:
    """The archive by queue and hour; the columns are the fields of `Hour`."""
    from pyspark.sql.functions import expr

    attempts = archive.selectExpr(
        "coalesce(queue, '(deleted)') AS queue",
        # Not date_trunc: that goes by the time zone of the session.
        f"timestamp_micros(unix_micros(archived_at) - pmod(unix_micros(archived_at), {HOUR})) AS hour",
        "archive_reason AS reason",
        "greatest(read_ct - released_ct - 1, 0) AS retries",
        "(unix_micros(dequeued_at) - unix_micros(enqueued_at)) / 1e6D AS wait",
        "(unix_micros(archived_at) - unix_micros(dequeued_at)) / 1e6D AS run",
    )
    counts = [f"count_if(reason = '{reason}') AS {reason}" for reason in ArchiveReason]
    percentiles = [
        f"percentile_approx({what}, array(0.5, 0.9, 0.99), {ACCURACY}) AS {what}"
        for what in ("wait", "run")
    ]
    wanted = ["count(*) AS ended", *counts, "sum(retries) AS retries", *percentiles]
    return (
        attempts.groupBy("queue", "hour")
        .agg(*map(expr, wanted))
        .selectExpr(
            "queue",
            "hour",
            "ended",
            *ArchiveReason,
            "retries",
            *(
                f"{what}[{n}] AS {what}_{name}"
                for what in ("wait", "run")
                for n, name in enumerate(RANKS)
            ),
        )
    )


@spark_step(name="summarize", materialize=lambda out, *_: f"{allowed_root(out)}/steps")
def summarize_archive(
    out: str, queues: list[str] | None, since: datetime | None, until: datetime | None
) -> Any:
    """The archive of the run's own store, by queue and hour."""
    allowed_root(out)  # before there is work for nothing
    spark = current_session("pgqrs report")
    options = database_options(current_attempt().store, spark) | {
        "table": "archive",
        "columns": ",".join(COLUMNS),
    }
    if queues is not None and len(queues) == 1:
        options["queue"] = queues[0]
    for name, when in (("since", since), ("until", until)):
        if when is not None:
            options[name] = when.isoformat()
    archive = spark.read.format("pgqrs").options(**options).load()
    if queues is not None and len(queues) > 1:
        archive = archive.where(archive["queue"].isin(queues))
    return summarize(archive)


@spark_step(name="render")
def render(out: str, frame: Frame) -> dict[str, str]:
    """Write the report down. The same rows make the same files, so this may be repeated."""
    hours = read(frame)
    allowed_root(out)
    write_text(f"{out}/report.json", as_json(hours))
    write_text(f"{out}/report.html", page(hours))
    return {"json": f"{out}/report.json", "html": f"{out}/report.html"}


@workflow(name="spark-report", queue=QUEUE)
def report(
    out: str,
    queues: list[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> dict[str, Any]:
    """Report on what ended in some queues, or in all, between two times: `report.json` and
    `report.html` in the directory `out`, and the table itself as Parquet.
    """
    frame = summarize_archive(out, queues, since, until)
    files = render(out, frame)
    return {**files, "parquet": frame.path, "rows": frame.rows}


def read(frame: Frame) -> list[Hour]:
    """The rows of the table."""
    names = [field.name for field in fields(Hour)]
    rows = frame.df().select(*names).orderBy("queue", "hour").collect()
    return [_hour(row.asDict()) for row in rows]


def _hour(values: dict[str, Any]) -> Hour:
    # Spark gives times without a zone, in that of the host.
    return Hour(**values | {"hour": values["hour"].astimezone(UTC)})
