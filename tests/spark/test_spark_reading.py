"""Tables as data frames, from every kind of store."""

from __future__ import annotations

import gc
import json
import os
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import pgqrs
from pgqrs.repositories import scans
from pgqrs.repositories.scans import Bounds, Kind, Piece
from pgqrs.spark import source, workers
from pgqrs.spark.arrow import with_names
from pgqrs.spark.options import Where
from pgqrs.spark.places import PostgresPlace, place_of
from pgqrs.spark.reading import Reader, Wanted, balanced, put_together, ranges
from pgqrs.spark.session import source_for
from pgqrs.testing.conformance.buffering import until
from tests.conftest import s3_client
from tests.spark.conftest import URL_VARIABLE, install, s3_url


def read(spark: Any, url: str, **options: Any) -> Any:
    return spark.read.format("pgqrs").option("url", url).options(**options).load()


@pgqrs.step
def double(number: int) -> int:
    return 2 * number


@pgqrs.workflow(name="doubling")
def doubling(number: int) -> int:
    return double(number)


@pytest.fixture
def filled(url: str) -> str:
    """Thirty messages, of which ten have ended; and a run with one step."""
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many([{"n": n, "text": "ä'%"} for n in range(20)])
        store.producer("others").enqueue_many(
            [{"n": n} for n in range(10)], priority=7, headers={"h": 1}
        )
        with store.consumer("tasks") as consumer:
            for message in consumer.dequeue(10):
                consumer.ack(message, result={"doubled": 2 * message.payload["n"]})
        doubling.start(21, store=store)
        pgqrs.Worker(store, workflows=[doubling]).run(until_empty=True, signals=False)
    return url


@pytest.mark.smoke
def test_messages(spark: Any, filled: str) -> None:
    found = read(spark, filled).where("queue in ('tasks', 'others')").collect()
    assert len(found) == 20
    (others,) = {(row.priority, row.headers is not None) for row in found if row.queue == "others"}
    assert others == (7, True)
    assert sorted(json.loads(row.payload)["n"] for row in found if row.queue == "tasks") == [
        *range(10, 20)
    ]
    assert all(json.loads(row.payload)["text"] == "ä'%" for row in found if row.queue == "tasks")
    with pgqrs.Store(filled) as store:
        first = store.admin().peek("others", 1)[0]
    same = next(row for row in found if row.id == first.id)
    assert same.enqueued_at.astimezone(UTC) == first.enqueued_at
    assert same.ready is True


def test_archive(spark: Any, filled: str) -> None:
    found = read(spark, filled, table="archive", queue="tasks").collect()
    assert {row.archive_reason for row in found} == {"completed"}
    assert sorted(json.loads(row.result)["doubled"] for row in found) == [*range(0, 20, 2)]
    assert all(row.error is None and row.archived_at >= row.enqueued_at for row in found)


def test_workflows_and_steps(spark: Any, filled: str) -> None:
    (run,) = read(spark, filled, table="workflows").collect()
    assert (run["name"], run.status, json.loads(run.output)) == ("doubling", "completed", 42)
    (step,) = read(spark, filled, table="steps").collect()
    assert (step.workflow, step.workflow_id, step.status) == ("doubling", run.id, "completed")
    assert step.queue == run.queue is not None


def test_only_what_is_asked_for_is_read(spark: Any, filled: str) -> None:
    chosen = read(spark, filled, columns="queue, id", numPartitions=3)
    assert chosen.columns == ["queue", "id"]
    assert chosen.rdd.getNumPartitions() == 3
    assert chosen.where("queue <> 'tasks' and id is not null").count() >= 10
    by_hand = spark.read.schema("payload string, vt timestamp").format("pgqrs")
    assert by_hand.option("url", filled).option("queue", "tasks").load().count() == 10
    now = datetime.now(UTC)
    later, earlier = (now + timedelta(hours=1)).isoformat(), (now - timedelta(hours=1)).isoformat()
    assert read(spark, filled, queue="tasks", since=earlier, until=later).count() == 10
    assert read(spark, filled, queue="tasks", since=later).count() == 0
    assert read(spark, filled, queue="tasks", until=earlier).count() == 0


FILTERS = {
    "queue = 'tasks' and id > 12 and id <= 18 and not (id = 14)": 5,
    "queue in ('tasks', 'nobody') and priority = 0 and ready": 10,
    "headers is not null and expires_at is null and queue like 'oth%'": 10,
    "enqueued_at > timestamp'2020-01-01 00:00:00' and queue < 'p'": 10,
    "payload like '%\"n\": 3%' or payload like '%\"n\":3%'": 1,
    "queue = 'it''s 100% nobody'": 0,
}


@pytest.mark.parametrize("pushing", ["true", "false"])
def test_filters_find_the_same_whoever_filters(spark: Any, filled: str, pushing: str) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushing)
    try:
        table = read(spark, filled).where("queue in ('tasks', 'others')")
        assert {text: table.where(text).count() for text in FILTERS} == FILTERS
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_filters_are_done_by_the_database(spark: Any, pg_url: str, capsys: Any) -> None:
    table = read(spark, pg_url).where("queue = 'tasks' and id > 5 and payload <> '1'")
    table.explain()
    plan = capsys.readouterr().out
    assert "payload" in plan.partition("Filter")[2].partition("\n")[0]
    assert "tasks" not in plan  # nothing is left of it for Spark to do


@pytest.mark.parametrize("kinds", ["usual", "unusual", "both"])
@pytest.mark.parametrize("table", ["messages", "archive"])
def test_adbc_reads_what_psycopg_reads(
    pg_url: str, table: str, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pgqrs.Store(pg_url) as store:
        for _ in range(3):
            fill(store, usual=kinds != "unusual", unusual=kinds != "usual")
    reader = Reader(Wanted.of({"url": pg_url, "table": table, "numPartitions": "1"}))
    (part,) = reader.partitions()
    by_adbc = [row for batch in reader.read(part) for row in batch.to_pylist()]
    monkeypatch.setattr(PostgresPlace, "_by_adbc", PostgresPlace._by_psycopg)
    by_psycopg = [row for batch in reader.read(part) for row in batch.to_pylist()]
    assert by_adbc == by_psycopg
    assert by_adbc
    assert by_adbc[0]["queue"] == "tasks"


def test_numbers_in_records_are_as_wide_as_they_are(pg_url: str) -> None:
    place = place_of(Where(pg_url, ""))
    numbers = "n::smallint AS priority, n::bigint AS read_ct, n AS blocked"
    text = f"SELECT {numbers} FROM (VALUES (1), (0)) AS given (n)"
    columns = dict.fromkeys(("priority", "read_ct", "blocked"), Kind.INT)
    (batch,) = place.batches(text, columns)
    assert batch.to_pydict() == {name: [1, 0] for name in columns}


def fill(store: pgqrs.Store, *, usual: bool, unusual: bool) -> None:
    """Messages, and as many that have ended, that are as most are, or in all ways different."""
    with store.producer("tasks") as producer, store.consumer("tasks") as consumer:
        if usual:
            producer.enqueue_many(range(50))
            consumer.ack_many(consumer.dequeue(25))
        if unusual:
            producer.enqueue_many(range(4), headers={"a": "ü"}, priority=3, ttl=60)
            producer.enqueue("grouped", group="größer", key="k", unique=None, delay=60)
            first, *_, last = consumer.dequeue(3)
            consumer.ack(first, result={"text": "a 'quoted' one"})
            consumer.fail(last, "bad", dead=True)


def test_a_queue_that_is_gone_has_no_name() -> None:
    ids = pa.array([1, 2, None, 1], pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, ids], ["queue", "id"])
    named = with_names(batch, "queue", {1: "tasks"})
    assert named.to_pydict() == {"queue": ["tasks", None, None, "tasks"], "id": ids.to_pylist()}


def test_what_a_worker_of_spark_has_imported_is_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    workers.settle.__wrapped__()
    assert gc.get_freeze_count() == before  # this process is not Spark's
    monkeypatch.setattr(workers, "is_worker", lambda: True)
    try:
        workers.settle.__wrapped__()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_workers_of_spark_know_what_they_are(spark: Any) -> None:
    assert spark.sparkContext.range(1).map(lambda _: workers.is_worker()).collect() == [True]


def test_the_schema_of_postgres(spark: Any, pg_url: str) -> None:
    with pgqrs.Store(pg_url, schema="elsewhere") as store:
        store.admin().install()
        store.admin().create_queue("apart")
        store.producer("apart").enqueue({"n": 1})
    assert read(spark, pg_url, databaseSchema="elsewhere", queue="apart").count() == 1
    assert read(spark, pg_url).count() == 0


def test_an_empty_table(spark: Any, url: str) -> None:
    assert read(spark, url, table="archive").collect() == []


def test_a_url_in_the_environment(spark: Any, capsys: Any) -> None:
    url = os.environ[URL_VARIABLE]
    install(url)
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue("hello")
    found = spark.read.format("pgqrs").option("urlEnv", URL_VARIABLE).load()
    assert [row.payload for row in found.collect()] == ['"hello"']
    found.explain(True)
    assert url not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tabel": "messages"}, "tabel: no such option"),
        ({"table": "queues"}, "table: expected one of messages, archive, workflows, steps"),
        ({"columns": "id,colour"}, "columns: messages has no 'colour'"),
        ({"numPartitions": "none"}, "numPartitions: expected a whole number"),
        ({"since": "yesterday"}, "since: expected a time like"),
        ({"until": "2026-01-01"}, "until: .* has no time zone"),
        ({"queue": "nobody"}, "queue 'nobody' does not exist"),
        ({"urlEnv": "OTHER"}, "urlEnv: give url or urlEnv, not both"),
        ({"url": "sqlite::memory:"}, "url: a database in memory"),
        ({"url": "mysql://x"}, "scheme 'mysql' is not accepted"),
    ],
)
def test_options_that_cannot_be(
    sqlite_database: str, options: dict[str, str], problem: str
) -> None:
    install(sqlite_database)
    given = {"url": sqlite_database} | options
    with pytest.raises(pgqrs.PgqrsError, match=problem):
        source.reader(given, source.schema(given)).partitions()


def test_schemas_that_cannot_be(spark: Any, sqlite_database: str) -> None:
    install(sqlite_database)
    reading = spark.read.format("pgqrs").option("url", sqlite_database)
    with pytest.raises(Exception, match="schema: messages has no 'colour'"):
        reading.schema("colour string").load().count()
    with pytest.raises(Exception, match="schema: id is bigint, not string"):
        reading.schema("id string").load().count()


def test_an_object_stays_what_it_was_when_the_read_was_planned(spark: Any, moto: str) -> None:

    url = s3_url(moto)
    install(url)
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue(1)
        reader = Reader(Wanted.of({"url": url}))
        (part,) = reader.partitions()
        store.producer("tasks").enqueue(2)
    assert sum(batch.num_rows for batch in reader.read(part)) == 1
    # A host that has no copy finds that it was replaced.
    from pgqrs.config import Config, S3Settings
    from pgqrs.spark.places import _cached

    _cached(S3Settings.of(Config.from_dsn(url)), part.place.etag).unlink()
    with pytest.raises(pgqrs.ConflictError, match="was replaced"):
        list(reader.read(part))


def test_an_object_that_has_versions(spark: Any, moto: str) -> None:
    from pgqrs.config import Config, S3Settings
    from pgqrs.spark.places import _cached

    client = s3_client(moto)
    client.create_bucket(Bucket="versions")
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    url = s3_url(moto).replace("bucket", "versions")
    install(url)
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue(1)
        reader = Reader(Wanted.of({"url": url}))
        (part,) = reader.partitions()
        store.producer("tasks").enqueue(2)
    _cached(S3Settings.of(Config.from_dsn(url)), part.place.etag).unlink()
    assert sum(batch.num_rows for batch in reader.read(part)) == 1


def test_ranges_are_disjoint_and_complete() -> None:
    for first, last, parts in [(1, 1, 4), (5, 14, 3), (1, 100_000, None), (7, 1_000_006, 13)]:
        found = ranges(Bounds(first, last), parts, 4)
        assert found[0].first == first
        assert found[-1].last == last
        assert all(a.last + 1 == b.first for a, b in pairwise(found))
    assert ranges(Bounds(1, 10), 3, 4) == [(1, 3), (4, 6), (7, 10)]


def test_a_task_that_has_read_leaves_no_connection(pg_url: str) -> None:
    with pgqrs.Store(pg_url) as store:
        store.producer("tasks").enqueue("a message")
    for _ in range(2):  # what is known of the server is kept for the next task
        reader = Reader(Wanted.of({"url": pg_url}))
        (part,) = reader.partitions()
        assert [batch.num_rows for batch in reader.read(part)] == [1]
    with psycopg.connect(pg_url, autocommit=True) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        until(lambda: connection.execute(query).fetchone() == (1,))  # a server takes leave slowly


def planned(options: dict[str, str], cores: int | None = None) -> tuple[Reader, list[Any]]:
    """A reader without Spark, and what it plans."""
    reader = Reader(Wanted.of(options, cores))
    return reader, list(reader.partitions())


def sizes(reader: Reader, parts: list[Any]) -> tuple[list[int], int]:
    """The rows of each part, and how many different ids they have."""
    ids = [[id for batch in reader.read(p) for id in batch["id"].to_pylist()] for p in parts]
    return [len(some) for some in ids], len(set().union(*ids))


def test_parts_have_about_the_same_number_of_rows(url: str) -> None:
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue("old")
        store.producer("others").enqueue_many(["other"] * 4000)
        store.producer("tasks").enqueue_many(range(799))
    options = {"url": url, "queue": "tasks", "columns": "id", "numPartitions": "8"}
    reader, parts = planned(options)
    found, different = sizes(reader, parts)
    assert (sum(found), different, len(found)) == (800, 800, 8)
    assert max(found) <= 150
    reader, parts = planned({"url": url, "columns": "id", "numPartitions": "5"})
    found, different = sizes(reader, parts)
    assert (sum(found), different, len(found)) == (4800, 4800, 5)
    assert max(found) <= 1200


def test_looking_closer_where_many_rows_are() -> None:
    pieces = [Piece(1, 1, 1), Piece(900, 950, 40), Piece(951, 999, 30), Piece(2000, 2010, 9)]
    assert put_together(pieces, 2) == [(1, 950), (951, 2010)]
    assert put_together(pieces, 1) == [(1, 2010)]
    assert put_together([], 3) == []


def test_one_task_for_each_core_of_the_cluster(
    sqlite_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.reading.FEW", 10)
    install(sqlite_database)
    with pgqrs.Store(sqlite_database) as store:
        store.producer("tasks").enqueue_many(range(100))
    chosen = source_for(7)({"url": sqlite_database, "columns": "id"})
    reader: Any = chosen.reader(source.schema(chosen.options))
    assert len(reader.partitions()) == 7


READ = """
SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'pgqrs_messages'
"""


def test_reading_one_queue_reads_no_others(pg_url: str) -> None:
    """By the statistics of the transaction that plans and reads."""
    with pgqrs.Store(pg_url) as store:
        store.producer("others").enqueue_many(["other"] * 10_000)
        store.producer("tasks").enqueue_many(range(50))
        store.producer("others").enqueue_many(["other"] * 10_000)
        store.producer("tasks").enqueue_many(range(50), delay=3600)
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE) pgqrs_messages")
        wanted = Wanted.of({"url": pg_url, "queue": "tasks", "numPartitions": "2"})

        def work(connection: Any) -> tuple[int, int]:
            before = connection.exec_driver_sql(READ).scalar_one()
            scan = scans.found(connection, wanted.scan)
            parts = balanced(connection, scan, 2, 2)
            texts = [scans.text(scans.statement(scan, p), connection.dialect) for p in parts]
            rows = sum(len(connection.exec_driver_sql(text).all()) for text in texts)
            return rows, connection.exec_driver_sql(READ).scalar_one() - before

        rows, read = store.read(work)
        assert rows == 100
        assert read < 5000
