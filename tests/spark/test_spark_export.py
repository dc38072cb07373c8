"""The archive as files, and files as messages again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pgqrs
from pgqrs.cli.app import app
from pgqrs.spark.export import (
    append_to_delta,
    export,
    exported,
    manifests,
    write_by_day,
)
from pgqrs.spark.pipelines import QUEUE
from pgqrs.spark.replay import replay
from tests.spark.conftest import install


def fill(url: str, ended: int = 30) -> None:
    """Messages that have ended: two of three well, the others badly."""
    with pgqrs.Store(url) as store:
        store.admin().create_queue(QUEUE, lease=3, if_not_exists=True)
        for queue in ("tasks", "others"):
            store.producer(queue).enqueue_many(
                [{"n": n} for n in range(ended)], priority=4, headers={"from": queue}
            )
            with store.consumer(queue) as consumer:
                for number, message in enumerate(consumer.dequeue(ended)):
                    if number % 3:
                        consumer.ack(message)
                    else:
                        consumer.fail(message, "bad", dead=True)


def archived(url: str) -> int:
    with pgqrs.Store(url) as store:
        return sum(
            sum(stats.archived.values())
            for stats in store.admin().stats()
            if stats.queue in ("tasks", "others")
        )


def waiting(url: str, queue: str) -> Counter[str]:
    with pgqrs.Store(url) as store:
        found = store.admin().peek(queue, 1000)
    return Counter(json.dumps(message.payload) for message in found)


@pytest.mark.smoke
def test_export_and_replay(spark: Any, url: str, tmp_path: Path) -> None:
    fill(url)
    out = str(tmp_path / "out")
    with pgqrs.Store(url) as store:
        first = export.run_inline(out, ["tasks"], key="night", store=store)
        assert (first["rows"], first["deleted"]) == (30, 0)
        assert export.run_inline(out, ["tasks"], key="night", store=store) == first
        (queue,) = Path(first["path"]).glob("queue=*")
        assert queue.name == "queue=tasks"
        (day,) = queue.glob("day=*")
        assert len(list(day.glob("*.parquet"))) == 1
        second = export.run_inline(out, ["others"], delete=True, store=store)
        assert (second["rows"], second["deleted"]) == (30, 30)
        rows = exported(out, spark)
        assert rows.groupBy("queue").count().collect().__len__() == 2
        assert rows.where("archive_reason = 'failed'").count() == 20
        done = replay.run_inline(
            out, "tasks", queues=["others"], reasons=["failed"], key="again", store=store
        )
        assert done["messages"] == 10
        assert replay.run_inline(out, "tasks", key="again", store=store) == done
        found = store.admin().peek("tasks", 100)
    assert Counter(m.payload["n"] for m in found) == Counter(range(0, 30, 3))
    assert {(m.priority, json.dumps(m.headers)) for m in found} == {(4, '{"from": "others"}')}
    assert archived(url) == 30


def test_delta_tables(spark: Any, sqlite_database: str, tmp_path: Path) -> None:
    from deltalake import DeltaTable

    install(sqlite_database)
    fill(sqlite_database, 6)
    table = str(tmp_path / "delta")
    with pgqrs.Store(sqlite_database) as store:
        done = export.run_inline(str(tmp_path / "out"), delta=table, delete=True, store=store)
        assert done["rows"] == 12
        (frame,) = manifests(str(tmp_path / "out")).values()
        assert append_to_delta(table, frame) is False  # outside of a run a step is a plain call
    found = DeltaTable(table).to_pyarrow_table()
    assert sorted(set(found["queue"].to_pylist())) == ["others", "tasks"]
    assert len(set(found["id"].to_pylist())) == found.num_rows == 12
    assert str(found["archived_at"].type) == "timestamp[us, tz=UTC]"
    assert archived(sqlite_database) == 0


def test_counts_are_compared(
    spark: Any, sqlite_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.frames.count_rows", lambda _path: 1)
    rows = spark.sql("select 'q' as queue, current_date() as day, id from range(2)")
    with pytest.raises(pgqrs.ExportMismatch, match="has 1 rows, and 2 were read"):
        write_by_day(rows, str(tmp_path / "out"))


def test_nothing_to_export(spark: Any, sqlite_database: str, tmp_path: Path) -> None:
    install(sqlite_database)
    with pgqrs.Store(sqlite_database) as store:
        done = export.run_inline(str(tmp_path / "out"), delete=True, store=store)
    assert (done["rows"], done["deleted"]) == (0, 0)
    with pytest.raises(pgqrs.InvalidArgument, match="nothing was exported"):
        exported(str(tmp_path / "out"), spark)


def test_of_two_that_compact_at_once_the_first_counts(tmp_path: Path) -> None:
    out = str(tmp_path)
    for number, (name, replaces) in enumerate(
        {"a": [], "b": [], "c": [], "9": ["a", "b"], "8": ["a", "b", "c"], "7": ["8"]}.items()
    ):
        path = tmp_path / "_exports" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        replaced = [f"{other}.json" for other in replaces]
        frame = {"path": name, "schema_json": {}, "rows": 1, "replaces": replaced}
        path.write_text(json.dumps(frame))
        os.utime(path, (number, number))
        if name == "8":
            assert sorted(manifests(out)) == ["9.json", "c.json"]
    assert sorted(manifests(out)) == ["7.json", "9.json", "c.json"]


def killed_at_once(url: str, runs: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    """A driver is killed when each of its runs has come to its moment."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.spark.exporting", url, json.dumps(runs)],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=500,
    )
    assert child.returncode == -9, child.stderr


def test_drivers_that_are_killed(spark: Any, pg_url: str, tmp_path: Path) -> None:
    fill(pg_url)
    first, second, source = (str(tmp_path / name) for name in ("first", "second", "source"))
    exporting_first = {"out": first, "queues": ["tasks"], "delete": True}
    exporting_second = {"out": second, "queues": ["others"], "delete": True}
    replaying = {"source": source, "queue": "tasks"}
    with pgqrs.Store(pg_url) as store:
        export.run_inline(source, store=store)
        killed_at_once(
            pg_url,
            [
                ("first", "written", "export", exporting_first),
                ("second", "deleting", "export", exporting_second),
                ("again", "enqueued", "replay", replaying),
            ],
        )
        assert archived(pg_url) == 60 - 10
        for out, arguments in ((first, exporting_first), (second, exporting_second)):
            key = Path(out).name
            assert export.run_inline(**arguments, key=key, store=store)["rows"] == 30
            rows = exported(out, spark)
            assert rows.count() == rows.select("id").distinct().count() == 30
        assert archived(pg_url) == 0
        assert replay.run_inline(**replaying, key="again", store=store)["messages"] == 60
    assert waiting(pg_url, "tasks") == Counter({json.dumps({"n": n}): 2 for n in range(30)})


def test_on_the_command_line(spark: Any, sqlite_database: str, tmp_path: Path) -> None:
    install(sqlite_database)
    fill(sqlite_database, 9)
    runner, start = CliRunner(), ["--dsn", sqlite_database, "spark"]
    out = str(tmp_path / "out")
    done = runner.invoke(app, [*start, "export", out, "--queue", "tasks", "--delete"])
    assert done.exit_code == 0, done.output
    assert "Exported 9 message(s)" in done.output
    done = runner.invoke(app, [*start, "replay", out, "others", "--reason", "failed", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["messages"] == 3
    assert waiting(sqlite_database, "others").total() == 3
    done = runner.invoke(app, [*start, "replay", out, "nobody"])
    assert done.exit_code == 1
    done = runner.invoke(app, [*start, "export", out, "--queue", "others"])
    assert done.exit_code == 0, done.output
    before = {frame.path for frame in manifests(out).values()}
    done = runner.invoke(app, [*start, "compact", out, "--delete"])
    assert done.exit_code == 0, done.output
    assert "2 exports are one now: 18 message(s)" in done.output
    (frame,) = manifests(out).values()
    assert exported(out, spark).select("id").distinct().count() == frame.rows == 18
    assert len(list(Path(frame.path).rglob("*.parquet"))) == 2
    assert not any(Path(path).exists() for path in before)
    done = runner.invoke(app, [*start, "compact", out])
    assert "nothing to put together" in done.output
