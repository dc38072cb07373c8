"""Directories of exports and Delta tables: drivers are killed, and two append at once."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from threading import Barrier
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as parquet
import pytest
from deltalake import DeltaTable

import pgqrs
from pgqrs.spark import delta
from pgqrs.spark.compact import compact
from pgqrs.spark.delta import append_once
from pgqrs.spark.export import MANIFESTS, export, exported, manifests
from pgqrs.spark.frames import Frame
from pgqrs.spark.pipelines import QUEUE, write_text
from tests.spark.conftest import install
from tests.spark.test_spark_export import fill, killed_at_once

Job = tuple[str, Frame]
TABLES = 8
PATIENCE = 240.0


def ids_of(out: str) -> Counter[int]:
    """How often each id is in a directory of exports."""
    return Counter(row.id for row in exported(out).select("id").collect())


def ids_in(table: str) -> Counter[int]:
    """How often each id is in a Delta table."""
    return Counter(DeltaTable(table).to_pyarrow_table()["id"].to_pylist())


def files_in(path: str) -> int | None:
    """How many files of data a directory has; None if it is gone."""
    return len(list(Path(path).rglob("*.parquet"))) if Path(path).exists() else None


def stamps(out: str) -> dict[str, int]:
    """When each manifest of a directory was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(out, MANIFESTS).glob("*.json")}


def write_frame(path: Path, ids: range) -> Frame:
    """What an export writes, without Spark: an id, by queue and day. It has two files."""
    rows = pa.table(
        {
            "id": list(ids),
            "queue": ["tasks" if n % 2 else "others" for n in ids],
            "day": [date(2024, 1, 1)] * len(ids),
        }
    )
    parquet.write_dataset(
        rows,
        path,
        format="parquet",
        partitioning=["queue", "day"],
        partitioning_flavor="hive",
    )
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("queue", "string"), ("day", "date"))
    ]
    return Frame(str(path), {"type": "struct", "fields": fields}, len(ids))


def write_export(out: str, name: str, ids: range) -> str:
    """An export that is there already. Returns its directory."""
    frame = write_frame(Path(out, name), ids)
    write_text(f"{out}/{MANIFESTS}/{name}.json", json.dumps(vars(frame) | {"replaces": []}))
    return frame.path


def test_compacting_drivers_that_are_killed(
    spark: Any, sqlite_database: str, tmp_path: Path
) -> None:
    install(sqlite_database)
    outs = {at: str(tmp_path / at) for at in ("written", "published", "deleting files")}
    old = {
        at: [write_export(out, f"old-{n}", range(n, n + 4)) for n in (0, 4, 8)]
        for at, out in outs.items()
    }
    ids = Counter(range(12))
    with pgqrs.Store(sqlite_database) as store:
        store.admin().create_queue(QUEUE, lease=3)
        killed_at_once(
            sqlite_database,
            [(at, at, "compact", {"out": out, "delete": True}) for at, out in outs.items()],
        )
        assert [ids_of(out) for out in outs.values()] == [ids] * 3
        assert [len(manifests(out)) for out in outs.values()] == [3, 1, 1]
        left = [[files_in(path) for path in paths] for paths in old.values()]
        assert left == [[2, 2, 2], [2, 2, 2], [None, 1, 2]]
        for at, out in outs.items():
            before = stamps(out)
            done = compact.run_inline(out, delete=True, key=at, store=store)
            assert (done["exports"], done["rows"]) == (3, 12)
            assert [frame.path for frame in manifests(out).values()] == [done["path"]]
            assert ids_of(out) == ids
            assert [files_in(path) for path in (*old[at], done["path"])] == [None] * 3 + [2]
            assert before.items() <= stamps(out).items()


def test_appending_drivers_that_are_killed(
    spark: Any, sqlite_database: str, tmp_path: Path
) -> None:
    install(sqlite_database)
    fill(sqlite_database, 6)
    runs = {
        at: {"out": str(tmp_path / "out"), "delta": str(tmp_path / at)}
        for at in ("appending", "appended")
    }
    killed_at_once(sqlite_database, [(at, at, "export", given) for at, given in runs.items()])
    half, whole = (given["delta"] for given in runs.values())
    assert not ids_in(half)
    assert files_in(half)
    ids = ids_in(whole)
    assert (len(ids), ids.total()) == (12, 12)
    commits = DeltaTable(whole).version()
    with pgqrs.Store(sqlite_database) as store:
        for at, given in runs.items():
            assert export.run_inline(**given, key=at, store=store)["rows"] == 12
            assert ids_in(given["delta"]) == ids
    assert DeltaTable(whole).version() == commits


def meet_at_data(barrier: Barrier) -> None:
    """From now on both look at the table before either commits: their data waits for the other."""
    read = delta._reader

    def batches(found: Any) -> Iterator[Any]:
        barrier.wait(PATIENCE)
        yield from found

    def reader(frame: Frame) -> Any:
        found = read(frame)
        return pa.RecordBatchReader.from_batches(found.schema, batches(found))

    delta._reader = reader


def append_all(barrier: Barrier, answers: Any, jobs: list[Job], at_data: bool) -> None:
    """A driver. It does each job when the other one does its own."""
    if at_data:
        meet_at_data(barrier)
    try:
        for table, frame in jobs:
            barrier.wait(PATIENCE)
            if append_once(table, frame, app=frame.path):
                answers.put((table, frame.path))
    except BaseException:
        barrier.abort()
        raise


def jobs_of(tables: list[str], own: Frame, common: Frame) -> list[Job]:
    """Half of the tables get one's own first, and so are made by it; the others what both have."""
    pairs = [(own, common) if n % 2 else (common, own) for n in range(len(tables))]
    return [(table, frame) for table, pair in zip(tables, pairs, strict=True) for frame in pair]


@pytest.mark.parametrize("at_data", [False, True])
def test_two_append_at_once(tmp_path: Path, at_data: bool) -> None:
    *own, common = (write_frame(tmp_path / str(n), range(n, n + 3)) for n in (0, 3, 6))
    tables = [str(tmp_path / f"table-{n}") for n in range(TABLES)]
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(2), spawn.SimpleQueue()
    drivers = [
        spawn.Process(
            target=append_all, args=(barrier, answers, jobs_of(tables, mine, common), at_data)
        )
        for mine in own
    ]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert [driver.exitcode for driver in drivers] == [0, 0]
    said = []
    while not answers.empty():
        said.append(answers.get())
    assert sorted(said) == sorted((t, frame.path) for t in tables for frame in (*own, common))
    for table in tables:
        assert ids_in(table) == Counter(range(9))
        commits = Path(table, "_delta_log").glob("*.json")
        assert sum('"metaData"' in commit.read_text() for commit in commits) == 1


@pytest.mark.parametrize("exists", [False, True])
def test_somebody_else_appends_the_same_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    table, frame = str(tmp_path / "table"), write_frame(tmp_path / "frame", range(3))
    if exists:
        append_once(table, write_frame(tmp_path / "other", range(3, 6)), app="other")
    write = deltalake.write_deltalake

    def write_late(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(deltalake, "write_deltalake", write)
        assert append_once(table, frame, app="same")
        write(*args, **kwargs)

    monkeypatch.setattr(deltalake, "write_deltalake", write_late)
    assert not append_once(table, frame, app="same")
    assert ids_in(table) == Counter(range(6 if exists else 3))
