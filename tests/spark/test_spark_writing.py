"""Data frames as messages: exactly once, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import Connection, func, select

import pgqrs
from pgqrs.models import staged, write_parts, writes
from pgqrs.repositories import writes as repository
from pgqrs.spark import source
from pgqrs.spark.bulk import Bulk, _pieces, digest_of
from pgqrs.spark.options import Where
from pgqrs.types import WriteMode
from tests.spark.conftest import install
from tests.spark.flaky import FlakySource, numbers


def write(frame: Any, url: str, format: str = "pgqrs", **options: Any) -> None:
    given = {"url": url, "queue": "tasks"} | options
    frame.write.format(format).mode("append").options(**given).save()


def written(url: str, queue: str = "tasks") -> Counter[Any]:
    """The messages there are, counted; each is there once if it is."""
    found: list[pgqrs.Message] = []
    with pgqrs.Store(url) as store:
        while page := store.admin().peek(queue, 1000, after=found[-1].id if found else 0):
            found += page
    return Counter(json.dumps(message.payload) for message in found)


def once(count: int) -> Counter[str]:
    return Counter(json.dumps({"n": n}) for n in range(count))


def leftovers(url: str) -> tuple[int, int]:
    """Staged messages, and attempts that are remembered."""

    def count(connection: Connection) -> tuple[int, int]:
        # A row is as many messages as its array has, where there are arrays.
        is_many = connection.dialect.name == "postgresql"
        of_row = func.cardinality(staged.c.payload) if is_many else 1
        rows = func.coalesce(func.sum(of_row), 0)
        return (
            connection.execute(select(rows).select_from(staged)).scalar_one(),
            connection.execute(select(func.count()).select_from(write_parts)).scalar_one(),
        )

    with pgqrs.Store(url) as store:
        return store.read(count)


@pytest.fixture
def accidents(spark: Any, tmp_path: Path) -> Path:
    spark.dataSource.register(FlakySource)
    markers = tmp_path / "accidents"
    markers.mkdir()
    return markers


@pytest.mark.smoke
def test_all_at_once(spark: Any, url: str) -> None:
    write(numbers(spark), url)
    assert written(url) == once(3000)
    assert leftovers(url) == (0, 0)


def test_a_write_is_done_once(spark: Any, url: str) -> None:
    write(numbers(spark), url, writeId="night-1")
    write(numbers(spark, parts=2), url, writeId="night-1")
    assert written(url) == once(3000)
    write(numbers(spark, count=10), url, writeId="night-2")
    assert written(url).total() == 3010
    with pgqrs.Store(url) as store:
        found = store.read(
            lambda c: c.execute(select(writes.c.write_id, writes.c.message_ct)).all()
        )
    assert sorted(map(tuple, found)) == [("night-1", 3000), ("night-2", 10)]


def test_parts_by_key(spark: Any, url: str) -> None:
    options = {"writeMode": "part-key", "writeId": "parts", "numPartitions": 3}
    write(numbers(spark), url, **options)
    write(numbers(spark), url, **options)
    assert written(url) == once(3000)
    assert leftovers(url) == (0, 3)
    with pytest.raises(Exception, match="'parts' was begun with 3 parts"):
        write(numbers(spark, parts=2), url, **options | {"numPartitions": 2})


def test_columns_and_options(spark: Any, url: str) -> None:
    eta = datetime.now(UTC) + timedelta(hours=1)
    frame = spark.createDataFrame(
        [
            ({"a": 1}, 5, eta, None, {"h": "x"}, None),
            ({"a": 2}, None, None, eta, None, "g"),
            ({"a": 3}, None, None, None, None, "g"),
        ],
        "payload map<string,int>, priority int, eta timestamp, expires_at timestamp, "
        "headers map<string,string>, group string",
    ).coalesce(1)
    write(frame, url, priority=2)
    with pgqrs.Store(url) as store:
        first, second, third = store.admin().peek("tasks")
        assert [m.payload for m in (first, second, third)] == [{"a": 1}, {"a": 2}, {"a": 3}]
        assert [m.priority for m in (first, second, third)] == [5, 2, 2]
        assert [m.vt == eta for m in (first, second, third)] == [True, False, False]
        assert [m.expires_at for m in (first, second, third)] == [None, eta, None]
        assert first.headers == {"h": "x"}
        with store.consumer("tasks") as consumer:
            (only,) = consumer.dequeue(10)  # one is for later, one waits for the first of its group
            assert only.id == second.id
            consumer.ack(only)
            assert [m.id for m in consumer.dequeue(10)] == [third.id]


def test_delays_and_lifetimes_for_all(spark: Any, url: str) -> None:
    for mode in ({}, {"writeMode": "part-key", "numPartitions": 1}):
        write(numbers(spark, 1, 5), url, delay=3600, ttl=7200, priority=-3, **mode)
    with pgqrs.Store(url) as store:
        found = store.admin().peek("tasks", 20)
        assert len(found) == 10
        for message in found:
            assert message.vt - message.enqueued_at == timedelta(hours=1)
            assert message.expires_at == message.enqueued_at + timedelta(hours=2)
            assert message.priority == -3
        assert store.consumer("tasks").dequeue(20) == []


PAYLOADS = {
    '{"number": 1e16, "tiny": 1E-7}': {"number": 1e16, "tiny": 1e-7},
    ' [1, {"a": null}, "ä\\n\\""] ': [1, {"a": None}, 'ä\n"'],
    "12345678901234567890123": 12345678901234567890123,
    '"text, with commas"': "text, with commas",
    "null": None,
    '""': "",
}


@pytest.mark.parametrize("mode", ["staged", "part-key"])
def test_any_json_comes_back_unchanged(spark: Any, url: str, mode: str) -> None:
    frame = spark.createDataFrame([(text,) for text in PAYLOADS], "payload string").coalesce(1)
    parts = {"numPartitions": 1} if mode == "part-key" else {}
    write(frame, url, writeMode=mode, **parts)
    with pgqrs.Store(url) as store:
        found = [message.payload for message in store.admin().peek("tasks", 20)]
    assert found == list(PAYLOADS.values())
    assert list(map(type, found)) == list(map(type, PAYLOADS.values()))


def store(url: str, *payloads: str | None, write_id: str = "w", **columns: list[Any]) -> Any:
    """Store one part without Spark."""
    batch = pa.record_batch({"payload": pa.array(payloads, pa.string())} | columns)
    begun = Bulk(Where(url, ""), "tasks", write_id).begin()
    return begun, begun.store(0, [batch])


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("{'a': 1}", "JSON|json"),
        ('{"a": NaN}', "NaN|json"),
        ('"\\u0000"', "nul character|u0000"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
        ('"' + "x" * 1_100_000 + '"', "1100002 bytes of JSON"),
        ("1e400", "inf"),
        (None, "is null"),
    ],
)
def test_payloads_that_cannot_be(url: str, payload: str, problem: str) -> None:
    with pytest.raises(pgqrs.InvalidPayload, match=problem):
        store(url, "1", payload)
    assert leftovers(url) == (0, 0)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"priority": [40_000]}, "priority: expected -32768 to 32767"),
        ({"group": [""]}, "group: expected some text"),
        ({"group": ["x" * 600]}, "group: expected some text of up to 512"),
        ({"group": ["a\nb"]}, "group: is not printable"),
        ({"headers": ["[]"]}, "headers: expected a mapping"),
        ({"headers": ["{"]}, "headers: is not JSON"),
        ({"eta": [datetime(2026, 1, 1)]}, "eta: expected times with a zone"),
    ],
)
def test_values_that_cannot_be(
    sqlite_database: str, columns: dict[str, list[Any]], problem: str
) -> None:
    install(sqlite_database)
    with pytest.raises(pgqrs.PgqrsError, match=problem):
        store(sqlite_database, "1", **columns)


def test_a_job_that_fails_leaves_nothing(spark: Any, pg_url: str) -> None:
    frame = spark.createDataFrame([("1",), ("{'a': 1}",)], "payload string").repartition(2)
    with pytest.raises(Exception, match="invalid input syntax for type json"):
        write(frame, pg_url)
    assert written(pg_url) == Counter()
    assert leftovers(pg_url)[0] == 0


@pytest.mark.parametrize(
    ("frame", "options", "problem"),
    [
        ("select 1 as id", {}, "id: a message has no such column; there may be payload"),
        ("select 1 as priority", {}, "payload: the data frame has no such column"),
        ("select '1' as payload, 5 as delay", {}, "delay: .*give the time as eta"),
        ("select '1' as payload, 'k' as key", {}, "key: unique keys are for enqueue"),
        ("select '1' as payload, 'high' as priority", {}, "priority: expected whole numbers"),
        ("select '1' as payload, 5 as group", {}, "group: expected text, got int"),
        ("select '1' as payload, 5 as headers", {}, "headers: expected JSON, a map or a struct"),
        ("select '1' as payload, date'2026-01-01' as eta", {}, "eta: expected times with a zone"),
        ("select '1' as payload", {"queue": "nobody"}, "queue 'nobody' does not exist"),
        ("select '1' as payload", {"queue": ""}, "queue: this option must be given"),
        ("select '1' as payload", {"writeMode": "fast"}, "writeMode: expected one of staged"),
        ("select '1' as payload", {"writeMode": "part-key"}, "numPartitions: must be given"),
        ("select '1' as payload", {"delay": "-1"}, "delay: expected a number"),
        ("select '1' as payload", {"writeId": "auto-1"}, "writeId: must not begin"),
        ("select '1' as payload", {"table": "archive"}, "table: no such option"),
    ],
)
def test_writes_that_cannot_be(
    spark: Any, sqlite_database: str, frame: str, options: dict[str, str], problem: str
) -> None:
    install(sqlite_database)
    given = {"url": sqlite_database, "queue": "tasks"} | options
    with pytest.raises(pgqrs.PgqrsError, match=problem):
        source.writer(given, spark.sql(frame).schema, overwrite=False)


def test_queues_are_not_overwritten(spark: Any, sqlite_database: str) -> None:
    install(sqlite_database)
    with pytest.raises(Exception, match=r"mode: a queue is only added to"):
        numbers(spark).write.format("pgqrs").mode("overwrite").options(
            url=sqlite_database, queue="tasks"
        ).save()


def test_keys_for_limits(spark: Any, pg_url: str) -> None:
    frame = spark.sql("select '1' as payload, 'k' as key union all select '2', 'k'")
    write(frame, pg_url, unique="none")
    with pgqrs.Store(pg_url) as store:
        assert [message.key for message in store.admin().peek("tasks")] == ["k", "k"]


def test_who_waits_is_woken(spark: Any, pg_url: str) -> None:
    with (
        pgqrs.Store(pg_url) as opened,
        opened.consumer("tasks") as consumer,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(consumer.dequeue, 1, wait=300)
        write(numbers(spark, 1, 1), pg_url)
        assert [message.payload for message in waiting.result(300)] == [{"n": 0}]


# Accidents


@pytest.mark.parametrize("mode", ["staged", "part-key"])
def test_tasks_that_fail_after_they_have_stored_all(
    spark: Any, accidents: Path, url: str, mode: str
) -> None:
    parts = {"numPartitions": 3} if mode == "part-key" else {}
    options = {"testAccident": "task", "testMarker": str(accidents), "writeMode": mode}
    write(numbers(spark), url, "flaky", **options, **parts)
    assert sorted(path.name for path in accidents.iterdir()) == ["part-0", "part-1", "part-2"]
    assert written(url) == once(3000)
    assert leftovers(url)[0] == 0


def test_a_driver_that_is_killed(spark: Any, pg_url: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.spark.flaky", pg_url, str(tmp_path)],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=500,
    )
    assert child.returncode == -9, child.stderr
    assert "not killed" not in child.stdout
    # One write was published, and the other only staged.
    assert written(pg_url) == once(3000)
    assert leftovers(pg_url) == (3000, 3)
    # What is repeated need not be cut into the same parts.
    write(numbers(spark, parts=2), pg_url, writeId="after")
    assert written(pg_url) == once(3000)
    write(numbers(spark, parts=2), pg_url, writeId="before")
    assert written(pg_url) == once(3000) + once(3000)
    assert leftovers(pg_url) == (0, 0)


def batch(*values: int) -> list[Any]:
    return [pa.record_batch({"payload": pa.array([f'{{"n": {value}}}' for value in values])})]


def test_messages_keep_the_order_of_their_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqrs.spark.bulk.FOLDED", 3)
    begun = Bulk(Where(url, ""), "tasks", "w").begin()
    later = begun.store(1, [*batch(*range(20, 30)), *batch(*range(30, 37))])
    earlier = begun.store(0, batch(*range(20)))
    assert begun.publish([later, earlier]) == 37
    with pgqrs.Store(url) as store:
        found = store.admin().peek("tasks", 100)
    assert [message.payload["n"] for message in found] == [*range(37)]
    assert leftovers(url) == (0, 0)


def test_what_is_staged_as_one_row_is_not_too_large() -> None:
    small, large = batch(*range(2500)), [pa.record_batch({"payload": ["x" * 1_000_000] * 10})]
    assert [piece.num_rows for piece in _pieces(small)] == [1000, 1000, 500]
    assert [piece.num_rows for piece in _pieces(large)] == [3, 3, 3, 1]
    assert list(_pieces(batch())) == []


def test_a_part_must_be_the_same_when_it_is_repeated(url: str) -> None:
    begun = Bulk(Where(url, ""), "tasks", "w", WriteMode.PART_KEY, 2).begin()
    begun.store(0, batch(0, 1))
    begun.store(0, batch(0, 1))
    begun.store(0, [*batch(0), *batch(), *batch(1)])  # in how many batches does not matter
    for others in ([0, 1, 2], [1, 0], [0], [0, 11]):
        with pytest.raises(pgqrs.WriteMismatch, match="has other messages in part 0"):
            begun.store(0, batch(*others))
    with pytest.raises(pgqrs.WriteMismatch, match="has 2 parts, and this is 3"):
        begun.store(2, batch(2))
    with pytest.raises(pgqrs.WriteMismatch, match="has 2 parts, 1 are stored"):
        begun.publish([begun.store(0, batch(0, 1))])
    begun.publish([begun.store(0, batch(0, 1)), begun.store(1, batch(2))])
    assert written(url) == once(3)


def test_late_attempts_and_lost_rows(url: str) -> None:
    first, mine = store(url, '{"n": 0}', '{"n": 1}')
    second, theirs = store(url, '{"n": 0}', '{"n": 1}')
    with pgqrs.Store(url) as opened:
        opened.write(lambda c: c.execute(staged.delete().where(staged.c.attempt == mine.attempt)))
    with pytest.raises(pgqrs.WriteMismatch, match="of 2 staged messages 0 are left"):
        first.publish([mine])
    assert second.publish([theirs]) == 2
    first.store(0, batch(0, 1))  # by somebody who has not noticed
    assert first.publish([mine]) == 2
    assert written(url) == once(2)
    assert leftovers(url) == (0, 0)


def test_what_nobody_goes_on_with_is_swept(url: str) -> None:
    store(url, "1", write_id="old")
    begun, part = store(url, "1", write_id="new")
    with pgqrs.Store(url) as opened:
        long_ago = datetime.now(UTC) - timedelta(days=8)
        old = writes.update().where(writes.c.write_id == "old").values(created_at=long_ago)
        opened.write(lambda c: c.execute(old).close())
        assert opened.write(lambda c: repository.sweep(c, now=datetime.now(UTC))) == 1
    assert leftovers(url) == (1, 1)
    assert begun.publish([part]) == 1


@pytest.mark.parametrize("mode", list(WriteMode))
def test_rows_are_stored_while_others_are_being_made(
    sqlite_database: str, mode: WriteMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.bulk.PORTION", 1)
    install(sqlite_database)
    parts = 1 if mode is WriteMode.PART_KEY else None
    begun = Bulk(Where(sqlite_database, ""), "tasks", "w", mode, parts).begin()
    seen: list[int] = []

    def made() -> Any:
        for first in range(0, 50, 10):
            seen.append(leftovers(sqlite_database)[0])
            yield from batch(*range(first, first + 10))

    assert begun.publish([begun.store(0, made())]) == 50
    assert seen == [0, 0, 10, 20, 30]
    assert written(sqlite_database) == once(50)
    assert leftovers(sqlite_database) == (0, 0 if parts is None else 1)


def test_a_digest_knows_columns_and_what_is_not_there() -> None:
    def digest(**columns: Any) -> str:
        return digest_of([pa.record_batch(columns)])

    texts = pa.array(["a", "b"])
    told = {
        digest(payload=texts),
        digest(headers=texts),
        digest(payload=pa.array(["ab", ""])),
        digest(payload=pa.array(["ab", None])),
        digest(payload=texts, priority=pa.array([0, None], pa.int32())),
        digest(payload=texts, priority=pa.array([0, 0], pa.int32())),
    }
    assert len(told) == 6
