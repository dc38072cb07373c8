"""A driver that tests kill: `python -m tests.spark.stepping URL` works on runs of `nightly`.

What happened is noted in files of a directory, and files there tell it what to do: while `slow` is
there, one half of a write takes forever; while `hold` is there, the workflow stops between its steps.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pgqrs
from pgqrs.spark import Frame, session, spark_step
from tests.spark.conftest import SETTINGS

FOREVER = 300.0
ROWS = 1000


def note(directory: str, what: str) -> None:
    with (Path(directory) / "notes").open("a") as notes:
        notes.write(f"{what}\n")


def notes(directory: Path) -> list[str]:
    found = directory / "notes"
    return found.read_text().splitlines() if found.exists() else []


def here() -> Any:
    return session("driver", **SETTINGS)


def data(directory: str, *_: Any) -> Path:
    return Path(directory) / "data"


@spark_step(materialize=data, session=here)
def extract(directory: str) -> Any:
    note(directory, "extract")
    return here().range(ROWS, numPartitions=2)


@spark_step(materialize=data, session=here)
def transform(directory: str, frame: Frame) -> Any:
    from pyspark.sql.functions import udf

    note(directory, "transform")
    slow = Path(directory) / "slow"

    @udf("long")
    def doubled(n):  # type: ignore[no-untyped-def]
        if n == ROWS - 1 and slow.exists():
            (Path(directory) / "writing").touch()
            time.sleep(FOREVER)
        return 2 * n

    return frame.df().select(doubled("id").alias("id"))


@spark_step
def total(directory: str, frame: Frame) -> int:
    note(directory, "total")
    return int(frame.groupBy().sum("id").first()[0])


@pgqrs.workflow
def nightly(directory: str) -> dict[str, int]:
    raw = extract(directory)
    clean = transform(directory, raw)
    while (Path(directory) / "hold").exists():
        (Path(directory) / "between").touch()
        time.sleep(0.05)
    return {"raw": raw.rows, "clean": clean.rows, "total": total(directory, clean)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with pgqrs.Store(sys.argv[1]) as store:
        pgqrs.Worker(store, workflows=[nightly], concurrency=1).run()
