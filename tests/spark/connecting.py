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
    register,
    session,
    spark_step,
    sweep,
)
from pgqrs.spark.export import export
from pgqrs.spark.replay import replay

LONG = 10**13
"""Rows that nobody has counted before the test is over."""

root = Path(sys.argv[2])
EVENTS, PASSWORD = root.with_name("events"), "Tr0ub4dor-and-3"


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


def leave_no_password(spark: Any) -> None:
    """There is no such server; what was asked for is in the log of events all the same."""
    url = f"postgresql://user:{PASSWORD}@127.0.0.1:1/nowhere"
    try:
        spark.read.format("pgqrs").options(url=url, columns="id").load().count()
    except Exception:
        return
    raise AssertionError("it was read")


def logged() -> str:
    return "".join(path.read_text() for path in EVENTS.rglob("*") if path.is_file())


def use_what_was_sent(spark: Any) -> None:
    """The server has pgqrs of its own, and uses the one that this session has sent."""

    def look(batches: Any) -> Any:
        import pyarrow as pa

        import pgqrs

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [pgqrs.__file__]})

    (found,) = spark.range(1).mapInArrow(look, "file string").collect()
    assert ".zip/pgqrs/__init__.py" in found.file, found.file


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
    EVENTS.mkdir()
    settings = {
        "eventLog_enabled": True,
        "eventLog_dir": EVENTS.as_uri(),
        "eventLog_compress": False,
    }
    spark = session(
        "connect", remote="local[2]", sql_shuffle_partitions=2, ui_enabled=False, **settings
    )
    assert "connect" in type(spark).__module__
    register(spark)
    use_what_was_sent(spark)
    leave_no_password(spark)
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
    spark.stop()
    assert "SparkListenerConnectOperationStarted" in logged()
    assert "127.0.0.1:1/nowhere" in logged()
    assert PASSWORD not in logged()
    print("fine", flush=True)


if __name__ == "__main__":
    main()
