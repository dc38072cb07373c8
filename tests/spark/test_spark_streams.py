"""Streams from queues: claimed batch by batch, or read along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType
from sqlalchemy import select

import pgqrs
from pgqrs.models import writes
from pgqrs.spark import finish, sinks, source

ENQUEUE = """
INSERT INTO pgqrs_messages (queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at, payload)
SELECT id, 0, true, now(), 0, 0, now(), '"early"' FROM pgqrs_queues WHERE queue_name = 'tasks'
"""


class Seen:
    """What came in which batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}

    def __call__(self, frame: Any, number: int) -> None:
        self.batches[number] = [row.payload for row in frame.select("payload").collect()]

    @property
    def counts(self) -> Counter[str]:
        return Counter(payload for batch in self.batches.values() for payload in batch)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches.values()]


Start = Callable[..., Any]


@pytest.fixture
def start(spark: Any, tmp_path: Path) -> Start:
    """Start a query that goes on where the last one ended."""

    def start_query(url: str, mode: str, each: Any, trigger: Any, **options: Any) -> Any:
        return (
            spark.readStream.format("pgqrs")
            .options(url=url, mode=mode, queue="tasks", stream="nightly", **options)
            .load()
            .writeStream.foreachBatch(each)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(**trigger)
            .start()
        )

    return start_query


def completed(store: pgqrs.Store) -> int:
    return store.admin().queue_stats("tasks").archived[pgqrs.ArchiveReason.COMPLETED]


NOW = {"availableNow": True}


@pytest.mark.smoke
def test_claiming_what_is_there_now(url: str, start: Start) -> None:
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many(range(25))
        seen = Seen()
        query = start(url, "claim", seen, NOW, maxRowsPerBatch=10, numPartitions=3)
        query.awaitTermination()
        assert (seen.sizes, completed(store)) == ([10, 10, 5], 25)
        assert seen.counts == Counter(map(str, range(25)))
        store.producer("tasks").enqueue_many(range(25, 30))
        start(url, "claim", seen, NOW).awaitTermination()
        assert (seen.sizes, completed(store)) == ([10, 10, 5, 5], 30)
        assert len(store.admin().list_workers()) <= 1


def test_what_is_there_now_in_groups(url: str) -> None:
    """One message of a group in a batch, in as many batches as it takes. Without Spark: it would take
    long to tell the same.
    """
    groups = [f"group {n % 3}" for n in range(12)]
    options = {"url": url, "mode": "claim", "queue": "tasks", "stream": "nightly", "columns": "id"}
    with pgqrs.Store(url) as store:
        ids = store.producer("tasks").enqueue_many(range(12), groups=groups)
        reader: Any = source.stream_reader(options, source.schema(options))
        reader.prepareForTriggerAvailableNow()
        store.producer("tasks").enqueue_many(["late"] * 3, groups=groups[:3])
        taken: list[list[int]] = []
        start = reader.initialOffset()
        while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
            parts = reader.partitions(start, end)
            batches = [batch for part in parts for batch in reader.read(part)]
            taken.append(sorted(id for batch in batches for id in batch["id"].to_pylist()))
            start = end
        reader.stop()
        assert taken == [ids[first : first + 3] for first in range(0, 12, 3)]
        assert completed(store) == 12
        assert store.admin().queue_stats("tasks").ready == 3


@pytest.mark.smoke
def test_reading_along_and_writing_to_a_queue(url: str, spark: Any, tmp_path: Path) -> None:
    def copy() -> Any:
        query = (
            spark.readStream.format("pgqrs")
            .options(url=url, mode="tail", queue="tasks", maxRowsPerBatch=20, numPartitions=2)
            .load()
            .select("payload", "priority")
            .writeStream.format("pgqrs")
            .options(url=url, queue="others", checkpointLocation=str(tmp_path / "checkpoint"))
            .queryName("copy")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many(range(25), priority=3)
        store.producer("others").enqueue_many(["is not in the queue that is read"] * 10)
        store.admin().purge_queue("others")
        with store.consumer("tasks") as consumer:
            consumer.ack_many(consumer.dequeue(7))
        copy()
        store.producer("tasks").enqueue_many(range(25, 30), priority=3)
        last = copy()
        found = store.admin().peek("others", 100)
        assert Counter(message.payload for message in found) == Counter(range(30))
        assert {message.priority for message in found} == {3}
        assert completed(store) == 7
        # Two batches and one: of a query only the number of the last is remembered.
        kept = store.read(lambda c: c.execute(select(writes.c.write_id, writes.c.message_ct)).all())
        assert kept == [(last.id, 2)]


class Task:
    """What a task is told of its batch."""

    def __init__(self, batch: int) -> None:
        self._properties = {sinks.QUERY: "a-query", sinks.BATCH: str(batch)}

    def getLocalProperty(self, name: str) -> str:  # noqa: N802 (Spark's name)
        return self._properties[name]

    def partitionId(self) -> int:  # noqa: N802
        return 0


def test_a_driver_that_was_held_up_adds_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drivers of one query, of which the second has taken the checkpoint over."""
    schema = StructType([StructField("payload", StringType())])
    options = {"url": url, "queue": "tasks", "queryname": "copy"}
    first, second = (source.stream_writer(options, schema, False) for _ in range(2))

    def store(sink: Any, batch: int) -> Any:
        monkeypatch.setattr(sinks.TaskContext, "get", lambda: Task(batch))
        return sink.write(iter([pa.RecordBatch.from_pydict({"payload": [str(batch)] * 3})]))

    def work(sink: Any, batch: int) -> None:
        sink.commit([store(sink, batch)], batch)

    with pgqrs.Store(url) as opened:
        ready = lambda: opened.admin().queue_stats("tasks").ready  # noqa: E731
        work(first, 0)
        held_up = store(first, 1)
        work(second, 1)
        first.commit([held_up], 1)  # the same batch: it is there already
        assert ready() == 6
        work(second, 2)
        with pytest.raises(pgqrs.WriteMismatch, match="older than batch 2 of the same query"):
            first.commit([held_up], 1)
        with pytest.raises(pgqrs.WriteMismatch, match="older than batch 2 of the same query"):
            store(first, 1)
        work(second, 2)  # Spark works on the last one again
        work(second, 3)
        assert ready() == 12


def test_an_id_that_is_committed_late_is_not_skipped(pg_url: str, start: Start) -> None:
    with pgqrs.Store(pg_url) as store, psycopg.connect(pg_url) as slow:
        store.producer("tasks").enqueue("first")
        seen = Seen()
        query = start(pg_url, "tail", seen, {"processingTime": "0 seconds"})
        query.processAllAvailable()
        assert seen.counts == Counter(['"first"'])
        slow.execute(ENQUEUE)
        store.producer("tasks").enqueue("late")
        query.processAllAvailable()
        assert seen.counts == Counter(['"first"'])
        slow.commit()
        query.processAllAvailable()
        query.stop()
        assert seen.counts == Counter(['"first"', '"early"', '"late"'])


def test_the_last_batch_of_a_stopped_query(pg_url: str, start: Start) -> None:
    with pgqrs.Store(pg_url) as store:
        store.producer("tasks").enqueue_many(range(5))
        seen = Seen()
        query = start(pg_url, "claim", seen, {"processingTime": "1 hour"})
        while query.lastProgress is None or not seen.batches:
            query.awaitTermination(0.1)
        query.stop()
        assert (seen.sizes, completed(store)) == ([5], 0)
        assert store.admin().queue_stats("tasks").leased == 5
        assert (finish(query, store), finish(query, store)) == (5, 0)
        assert completed(store) == 5


def test_a_batch_that_failed_is_the_same_when_it_is_tried_again(pg_url: str, start: Start) -> None:
    def fail(_frame: Any, _number: int) -> None:
        raise RuntimeError("as if the work had failed")

    with pgqrs.Store(pg_url) as store:
        store.producer("tasks").enqueue_many(range(5))
        with pytest.raises(Exception, match="as if the work had failed"):
            start(pg_url, "claim", fail, NOW).awaitTermination()
        store.producer("tasks").enqueue_many(range(5, 8))
        seen = Seen()
        start(pg_url, "claim", seen, NOW).awaitTermination()
        assert seen.sizes == [5, 3]
        assert seen.counts == Counter(map(str, range(8)))


def test_where_to_begin_and_which_columns(pg_url: str, spark: Any, start: Start) -> None:
    with pgqrs.Store(pg_url) as store:
        ids = store.producer("tasks").enqueue_many(range(5))
        seen = Seen()
        options = {"startingId": ids[3], "columns": "id,payload"}
        start(pg_url, "tail", seen, NOW, **options).awaitTermination()
        assert seen.counts == Counter(["3", "4"])


def test_a_batch_of_a_stream_has_no_id_to_choose(pg_url: str, spark: Any, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("'1' AS payload").writeStream
    options = {"url": pg_url, "queue": "others", "writeId": "mine"}
    query = stream.format("pgqrs").options(checkpointLocation=str(tmp_path), **options).start()
    with pytest.raises(Exception, match="writeId"):
        query.awaitTermination()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "claim", "queue": "tasks"}, "stream"),
        ({"mode": "both", "queue": "tasks"}, "mode"),
        ({"mode": "tail"}, "queue"),
        ({"mode": "tail", "queue": "tasks", "columns": "vt"}, "vt"),
    ],
)
def test_options_are_checked(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(pgqrs.InvalidArgument, match=complaint):
        source.schema({"url": "sqlite:///x.db"} | options)
