"""Steps on Spark Connect: `python -m tests.spark.connecting DATABASE DIRECTORY`, which must say `fine`.

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
from pgqrs.spark import Frame, current_session, session, spark_step, sweep

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


def main() -> None:
    spark = session("connect", remote="local[2]", sql_shuffle_partitions=2, ui_enabled=False)
    assert "connect" in type(spark).__module__
    with pgqrs.Store(sys.argv[1], upgrade=True) as store:
        assert work.run_inline(100, store=store) == [100, 4950]
        with pgqrs.Worker(store, workflows=[forever]):
            run = forever.start(store=store)
            assert counting.wait(60)
            time.sleep(1)
            run.cancel()
            try:
                run.result(timeout=60)
            except pgqrs.RunCancelled:
                pass
            else:
                raise AssertionError("it was not cancelled")
        assert sweep(store, root).recorded == 1
    print("fine", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
