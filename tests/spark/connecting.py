"""All of it on Spark Connect: `python -m tests.spark.connecting DATABASE DIRECTORY` must say `fine`.

A process of its own, since Connect takes hold of a whole process. Nothing of what it uses may reach for
the Java process.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pgqrs
from pgqrs.spark import (
    Claim,
    Frame,
    acknowledge,
    claim,
    current_session,
    session,
    spark_step,
    sweep,
)
from pgqrs.spark.export import export
from pgqrs.spark.replay import replay

LONG = 10**13
"""Rows that nobody has counted before the test is over."""

root = Path(sys.argv[2])


@spark_step(materialize=root)
def numbers(n: int) -> Any:
    return current_session().range(n)


@spark_step
def total(frame: Frame) -> int:
    return int(frame.groupBy().sum("id").first()[0])


@pgqrs.workflow
def work(n: int) -> list[int]:
    frame = numbers(n)
    pgqrs.sleep(0.01)  # goes on from what is on record
    return [frame.rows, total(frame)]


@spark_step
def endless() -> int:
    counting.set()
    return int(current_session().range(LONG).selectExpr("sum(hash(id))").first()[0])


@pgqrs.workflow
def forever() -> int:
    return endless()


counting = threading.Event()


@pgqrs.workflow
def taking() -> list[int]:
    claimed = claim("tasks")
    return [size(claimed), acknowledge(claimed)]


@spark_step
def size(claimed: Claim) -> int:
    return int(claimed.df().count())


def use_the_source(spark: Any, store: pgqrs.Store, url: str) -> None:
    """Write twice, of which once counts; read, filter, and take out of one queue into another."""
    for queue in ("tasks", "others"):
        store.admin().create_queue(queue)
    numbers = spark.range(100).selectExpr("named_struct('n', id) AS payload")
    for _ in range(2):
        writing = numbers.write.format("pgqrs").mode("append")
        writing.options(url=url, queue="tasks", writeId="once").save()
    reading = spark.read.format("pgqrs").options(url=url, table="messages").load()
    assert reading.where("queue = 'tasks' AND id > 0").count() == 100
    stream = spark.readStream.format("pgqrs")
    query = (
        stream.options(url=url, mode="claim", queue="tasks", stream="connect")
        .load()
        .select("payload")
        .writeStream.format("pgqrs")
        .options(url=url, queue="others", checkpointLocation=str(root / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert store.admin().queue_stats("others").ready == 100


def use_pipelines(store: pgqrs.Store) -> None:
    out = str(root / "exports")
    assert export.run_inline(out, ["tasks"], delete=True, store=store)["rows"] == 100
    assert replay.run_inline(out, "tasks", store=store)["messages"] == 100
    assert taking.run_inline(store=store) == [100, 100]


def main() -> None:
    spark = session("connect", remote="local[2]", sql_shuffle_partitions=2, ui_enabled=False)
    assert "connect" in type(spark).__module__
    with pgqrs.Store(sys.argv[1], upgrade=True) as store:
        assert work.run_inline(100, store=store) == [100, 4950]
        use_the_source(spark, store, sys.argv[1])
        use_pipelines(store)
        with pgqrs.Worker(store, workflows=[forever]):
            run = forever.start(store=store)
            assert counting.wait(240)
            time.sleep(1)
            run.cancel()
            try:
                run.result(timeout=240)
            except pgqrs.RunCancelled:
                pass
            else:
                raise AssertionError("it was not cancelled")
        assert sweep(store, root).recorded == 1
    print("fine", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
