"""Steps that are Spark jobs, in this process: results, replay, cancelling, fencing, sweeping."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

import pgqrs
from pgqrs.spark import Frame, current_attempt, spark_step, sweep
from pgqrs.spark.jobs import cause_of

LONG = 240.0
"""Longer than any test waits: what runs so long must have been cancelled."""


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[pgqrs.Store]:
    """SQLite, where a test does not ask for more."""
    kind = getattr(request, "param", "sqlite")
    with pgqrs.Store(request.getfixturevalue(f"{kind}_database"), upgrade=True) as store:
        yield store


on_both = pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
"""What depends on the SQL of a database."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


def attempts_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("run-*/step-*/*"))


def sleepy(spark: Any, seconds: float = LONG, began: Path | None = None) -> Any:
    """Two rows that take their time; says when the first has begun."""
    from pyspark.sql.functions import udf

    @udf("long")
    def slow(n):  # type: ignore[no-untyped-def]  # hints make it a function of whole columns
        if began is not None:
            began.touch()
        time.sleep(seconds)
        return n

    return spark.range(2, numPartitions=2).select(slow("id").alias("id"))


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def active_jobs(spark: Any) -> int:
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


@on_both
@pytest.mark.smoke
def test_a_dataframe_becomes_a_frame_that_is_recorded(
    spark: Any, store: pgqrs.Store, root: Path
) -> None:
    seen: list[Any] = []

    @spark_step(materialize=root)
    def numbers(n: int) -> Any:
        return spark.range(n).selectExpr("id", "id % 3 AS third", "named_struct('a', id) AS nested")

    @spark_step
    def total(frame: Frame) -> int:
        return int(frame.groupBy().sum("id").first()[0])

    @pgqrs.workflow
    def work(n: int) -> dict[str, Any]:
        frame = numbers(n)
        seen.append(frame)
        return {"total": total(frame), "rows": frame.rows, "columns": frame.columns}

    result = work.run_inline(100, store=store)
    assert result == {"total": 4950, "rows": 100, "columns": ["id", "third", "nested"]}
    (frame,) = seen
    assert frame.schema == frame.df().schema
    assert frame["third"] is not None
    (run,) = store.workflows.list_runs()
    record = store.workflows.handle(run.id).steps()[0]
    assert record.output == {
        "pgqrs.frame": {"path": frame.path, "schema_json": frame.schema_json, "rows": 100}
    }
    (directory,) = attempts_in(root)
    assert frame.path == str(root / directory)
    assert numbers(3).count() == 3  # outside of a run it is the function it was
    assert attempts_in(root) == [directory]


def test_an_empty_dataframe_is_a_frame_too(spark: Any, store: pgqrs.Store, root: Path) -> None:
    @spark_step(materialize=lambda where: where)
    def nothing(where: str) -> Any:
        return spark.range(0)

    @pgqrs.workflow
    def work(where: str) -> Frame:
        return nothing(where)

    frame = work.run_inline(str(root), store=store)
    assert isinstance(frame, Frame)
    assert (frame.rows, frame.df().count(), frame.columns) == (0, 0, ["id"])


def test_a_replayed_frame_is_lazy(
    spark: Any, store: pgqrs.Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @spark_step(materialize=root)
    def first() -> Any:
        done.append("first")
        return spark.range(5)

    started: list[str] = []
    monkeypatch.setattr(
        "pgqrs.spark.frames.current_session", lambda: started.append("Spark") or spark
    )

    @pgqrs.workflow
    def twice() -> list[Any]:
        frame = first()
        pgqrs.sleep(0.01)  # from here on in another execution, by what is on record
        return [frame.rows, frame.columns, len(frame.path) > 0]

    assert twice.run_inline(store=store) == [5, ["id"], True]
    assert done == ["first"]
    assert started == []


def test_results_that_are_json_are_ordinary_results(store: pgqrs.Store, spark: Any) -> None:
    @spark_step(name="some facts")
    def facts() -> dict[str, Any]:
        attempt = current_attempt()
        return {"count": spark.range(7).count(), "run": attempt.run_id, "step": attempt.step_id}

    @pgqrs.workflow
    def work() -> dict[str, Any]:
        return facts()

    (result, run) = (work.run_inline(store=store), store.workflows.list_runs()[0])
    assert result == {"count": 7, "run": run.id, "step": "some facts"}
    with pytest.raises(pgqrs.InvalidArgument):
        current_attempt()


def test_steps_in_threads_of_a_worker_write_to_queues(
    spark: Any, store: pgqrs.Store, sqlite_database: str
) -> None:
    store.admin().create_queue("tasks")

    @spark_step
    def fill(n: int) -> None:
        writing = spark.range(n).selectExpr("id AS payload").write.format("pgqrs").mode("append")
        writing.options(url=sqlite_database, queue="tasks").save()

    @pgqrs.workflow
    def work(n: int) -> None:
        fill(n)

    with pgqrs.Worker(store, workflows=[work]):
        work.start(5, store=store).result(timeout=LONG)
    assert store.admin().queue_stats("tasks").ready == 5


def test_a_dataframe_needs_a_place(store: pgqrs.Store, spark: Any) -> None:
    @spark_step
    def nowhere() -> Any:
        return spark.range(1)

    @pgqrs.workflow
    def work() -> None:
        nowhere()

    with pytest.raises(pgqrs.RunFailed, match="say where"):
        work.run_inline(store=store)


def test_an_async_function_is_refused() -> None:
    with pytest.raises(pgqrs.InvalidArgument, match="blocks"):

        @spark_step
        async def wrong() -> None: ...


def test_a_failed_attempt_is_repeated_elsewhere(spark: Any, store: pgqrs.Store, root: Path) -> None:
    from pyspark.sql.functions import raise_error

    tried: list[int] = []

    @spark_step(materialize=root, retry=pgqrs.Retry(max_attempts=3, delay=0.01))
    def flaky() -> Any:
        tried.append(1)
        if len(tried) == 1:  # fails while it is written
            return spark.range(10).select(raise_error("no luck").alias("id").cast("long"))
        return spark.range(10)

    @pgqrs.workflow
    def work() -> int:
        return flaky().rows

    assert work.run_inline(store=store) == 10
    assert len(tried) == 2
    (run,) = store.workflows.list_runs()
    (step,) = store.workflows.handle(run.id).steps()
    kept = step.output["pgqrs.frame"]["path"]
    assert Path(kept).name.startswith("2-")
    swept = sweep(store, root)
    assert swept.recorded == 1
    assert attempts_in(root) == [str(Path(kept).relative_to(root))]


def test_workflows_in_an_event_loop_and_map(spark: Any, postgres_database: str, root: Path) -> None:
    @spark_step(materialize=root)
    def numbers(n: int) -> Any:
        return spark.range(n)

    @pgqrs.workflow
    async def work() -> list[int]:
        frames = await pgqrs.map(numbers, [1, 2, 3], concurrency=2)
        return [frame.rows for frame in frames]

    async def main() -> list[int]:
        async with pgqrs.AsyncStore(postgres_database, upgrade=True) as store:
            result: list[int] = await work.run_inline(store=store)
            return result

    assert asyncio.run(main()) == [1, 2, 3]
    assert len(attempts_in(root)) == 3


# Cancelling


@on_both
def test_cancelling_a_run_cancels_its_job(
    spark: Any, store: pgqrs.Store, root: Path, tmp_path: Path
) -> None:
    began = tmp_path / "began"

    @spark_step(materialize=root)
    def slow() -> Any:
        return sleepy(spark, began=began)

    @pgqrs.workflow
    def work() -> int:
        return slow().rows

    with pgqrs.Worker(store, workflows=[work]):
        run = work.start(store=store)
        wait_until(began.exists)
        assert run.cancel() is pgqrs.RunStatus.CANCELLING
        with pytest.raises(pgqrs.RunCancelled):
            run.result(timeout=240)
    wait_until(lambda: active_jobs(spark) == 0)
    # A step that takes longer than a second is on record while it goes on.
    assert {step.status for step in run.steps()} <= {pgqrs.StepStatus.CANCELLED}
    sweep(store, root)
    assert attempts_in(root) == []


def test_a_timeout_cancels_the_job(spark: Any, store: pgqrs.Store, tmp_path: Path) -> None:
    began = tmp_path / "began"

    @spark_step(timeout=3)
    def slow() -> int:
        return len(sleepy(spark, began=began).collect())

    @pgqrs.workflow
    def work() -> int:
        return slow()

    with pytest.raises(pgqrs.RunFailed, match="StepTimedOut"):
        work.run_inline(store=store)
    wait_until(lambda: active_jobs(spark) == 0)


def test_a_deadline_of_the_run_cancels_the_job(spark: Any, store: pgqrs.Store) -> None:
    @spark_step
    def slow() -> int:
        return len(sleepy(spark).collect())

    @pgqrs.workflow(timeout=3)
    def work() -> int:
        return slow()

    with pytest.raises(pgqrs.RunFailed, match="RunOverdue"):
        work.run_inline(store=store)
    wait_until(lambda: active_jobs(spark) == 0)


# Leases


def test_a_step_longer_than_the_lease_keeps_it(spark: Any, store: pgqrs.Store, root: Path) -> None:
    @spark_step(materialize=root)
    def slow() -> Any:
        return sleepy(spark, seconds=7)

    @pgqrs.workflow
    def work() -> int:
        return slow().rows

    store.admin().create_queue(work.queue, lease=5)
    with pgqrs.Worker(store, workflows=[work]), pgqrs.Worker(store, workflows=[work]):
        run = work.start(store=store)
        assert run.result(timeout=240) == 2
    assert len(attempts_in(root)) == 1


@on_both
def test_who_lost_the_lease_records_nothing(
    spark: Any, store: pgqrs.Store, root: Path, tmp_path: Path
) -> None:
    """Its job is cancelled; who holds the run now does the step anew, and that counts."""
    began, done = tmp_path / "began", threading.Event()

    @spark_step(materialize=root)
    def first() -> Any:
        return sleepy(spark, began=began) if not began.exists() else spark.range(11)

    @pgqrs.workflow
    def work() -> int:
        return first().rows

    run = work.start(store=store)
    consumer = store.consumer(work.queue, lease=LONG)
    (message,) = consumer.dequeue(1)
    outcomes: list[Any] = []

    def execute() -> None:
        outcomes.append(store.workflows.execute(message, [work]))
        done.set()

    threading.Thread(target=execute, daemon=True).start()
    wait_until(began.exists)
    consumer.release(message)  # as if the lease had lapsed
    (again,) = store.consumer(work.queue, lease=LONG).dequeue(1)
    assert again.id == message.id
    store.workflows.execute(again, [work])
    assert run.result(timeout=0) == 11
    assert done.wait(240)
    assert len(run.steps()) == 1
    wait_until(lambda: active_jobs(spark) == 0)
    kept = run.steps()[0].output["pgqrs.frame"]["path"]
    sweep(store, root)
    assert attempts_in(root) == [str(Path(kept).relative_to(root))]
    assert spark.read.parquet(kept).count() == 11


# Sweeping


@on_both
def test_sweeping_removes_what_no_record_names(
    spark: Any, store: pgqrs.Store, root: Path, tmp_path: Path
) -> None:
    @spark_step(materialize=root)
    def numbers() -> Any:
        return spark.range(4)

    @pgqrs.workflow
    def work() -> int:
        rows: int = numbers().rows
        pgqrs.wait_for_event("go")
        return rows

    with pgqrs.Worker(store, workflows=[work]):
        run = work.start(store=store)
        wait_until(lambda: run.status() is pgqrs.RunStatus.SUSPENDED)
        (kept,) = attempts_in(root)
        orphan = f"{Path(kept).parent}/1-{'0' * 16}"
        foreign = f"run-{run.id}-20200101T000000000000/step-numbers/1-{'0' * 16}"
        for left in (orphan, foreign):
            shutil.copytree(root / kept, root / left)
        (root / "mine").mkdir()

        swept = sweep(store, root)  # the run goes on, and the orphan is young
        assert (swept.removed, swept.recorded, swept.recent, swept.unknown) == ((), 1, 1, 1)
        swept = sweep(store, str(root) + "/", grace=timedelta(0))
        assert (swept.removed, swept.recorded, swept.recent, swept.unknown) == ((orphan,), 1, 0, 1)

        shutil.copytree(root / kept, root / orphan)
        fork = run.fork()
        run.signal("go")
        assert run.result(timeout=240) == 4
        assert sweep(store, root).removed == (orphan,)  # its run has ended
        fork.signal("go")
        assert fork.result(timeout=240) == 4
    store.write(  # the fork still names what the run has written
        lambda c: c.exec_driver_sql(
            f"DELETE FROM pgqrs_workflow_steps WHERE workflow_id = {run.id}"
        )
    )
    assert sweep(store, root).recorded == 1
    assert attempts_in(root) == sorted([kept, foreign])
    assert (root / "mine").is_dir()
    assert sweep(store, tmp_path / "not there").removed == ()


ON_CONNECT = """(org.apache.spark.api.python.PythonException) Job aborted due to stage failure: \
Task 0 in stage 0.0 failed: org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
ValueError: customer 17 has no address

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:1)

Driver stacktrace:

JVM stacktrace:
org.apache.spark.SparkException
SQLSTATE: 38000"""
IN_SQL = """[TABLE_OR_VIEW_NOT_FOUND] The table or view `orders` cannot be found; line 1 pos 14;
'Project [*]
+- 'UnresolvedRelation [orders], [], false
"""
IN_JAVA = """An error occurred while calling o42.save.
: org.apache.spark.SparkException: Job aborted.
\tat org.apache.spark.Job.run(Job.scala:1)
Caused by: java.io.IOException: No space left on device
\tat java.base/java.io.FileOutputStream.write(FileOutputStream.java:1)
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (ON_CONNECT, "ValueError: customer 17 has no address"),
        (IN_SQL, IN_SQL.partition("\n")[0]),
        (IN_JAVA, "java.io.IOException: No space left on device"),
        ("one line", None),
    ],
)
def test_what_spark_says_at_length_has_a_cause(said: str, cause: str | None) -> None:
    assert cause_of(PySparkException(said)) == cause
    assert cause_of(ValueError(said)) is None


def test_the_error_of_a_run_is_its_cause(spark: Any, store: pgqrs.Store) -> None:
    def fail(batches: Any) -> Any:
        for _ in batches:
            raise ValueError("customer 17 has no address")
        yield from ()

    @spark_step
    def bill() -> int:
        return int(spark.range(1).mapInArrow(fail, "id long").count())

    @spark_step
    def look_up() -> int:
        return int(spark.sql("SELECT * FROM nowhere").count())

    @pgqrs.workflow
    def billing(names: list[str]) -> int:
        return bill() if names else look_up()

    with pytest.raises(pgqrs.RunFailed, match=r"failed: ValueError: customer 17 has no address$"):
        billing.run_inline(["c17"], store=store)
    with pytest.raises(pgqrs.RunFailed, match=r"failed: \[TABLE_OR_VIEW_NOT_FOUND\] .*`nowhere`"):
        billing.run_inline([], store=store)
