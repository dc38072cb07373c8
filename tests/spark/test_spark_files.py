"""Files of a driver in a bucket. (What Spark itself puts there goes through Hadoop.)"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import pgqrs
from pgqrs.spark import allow, sweep
from pgqrs.spark.allowing import _Allowed, allowed_root
from pgqrs.spark.export import manifests
from pgqrs.spark.files import count_rows, open_files
from pgqrs.spark.frames import Frame
from pgqrs.spark.pipelines import read_text, write_text
from pgqrs.spark.steps import run_directory


@pgqrs.workflow(name="short")
def short() -> None:
    pass


@pytest.fixture(params=["bucket", "directory"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "lake")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("moto"))
    return f"s3a://bucket/{uuid.uuid4().hex}"


def put(path: str, rows: int) -> None:
    files, inner = open_files(path)
    files.create_dir(inner)
    parquet.write_table(pa.table({"n": range(rows)}), f"{inner}/part.parquet", filesystem=files)


def test_rows_are_counted_by_footers(root: str) -> None:
    put(f"{root}/numbers", 3)
    put(f"{root}/numbers/day=1", 4)
    assert count_rows(f"{root}/numbers") == 7


def test_manifests(root: str) -> None:
    assert manifests(root) == {}
    for name, replaces in {"a": [], "b": [], "c": ["a.json"]}.items():
        frame = {"path": f"{root}/{name}", "schema_json": {}, "rows": 1, "replaces": replaces}
        write_text(f"{root}/_exports/{name}.json", json.dumps(frame))
    assert manifests(root)["c.json"] == Frame(f"{root}/c", {}, 1)
    assert sorted(manifests(root)) == ["b.json", "c.json"]
    write_text(f"{root}/note", "ä")
    assert read_text(f"{root}/note") == "ä"


def test_sweeping(root: str, sqlite_database: str) -> None:
    with pgqrs.Store(sqlite_database, upgrade=True) as store:
        short.run_inline(store=store)
        (run,) = store.workflows.list_runs()
        mine = f"{run_directory(run.id, run.created_at)}/step-write/1-{0xABC:016x}"
        put(f"{root}/{mine}", 1)
        put(f"{root}/run-77-20260101T000000000000/step-write/1-{0xDEF:016x}", 1)
        swept = sweep(store, root)
        assert (swept.removed, swept.unknown) == ((mine,), 1)
        assert sweep(store, root).removed == ()
    assert count_rows(root) == 1


def test_only_where_a_worker_allows_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.allowing._allowed", _Allowed())
    assert allowed_root("/etc") == "/etc"
    monkeypatch.setenv("PGQRS_SPARK_ROOTS", f"{tmp_path}/lake,s3a://bucket/lake")
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "link").symlink_to("/etc")
    for allowed in (f"{tmp_path}/lake", f"{tmp_path}/lake/new/day", "s3a://bucket/lake/day/"):
        assert allowed_root(allowed) == allowed.rstrip("/")
    for refused in (
        "/etc",
        f"{tmp_path}/lakes",
        f"{tmp_path}/lake/../other",
        f"{tmp_path}/lake/link/cron.d",
        "s3a://bucket/lakes",
        "s3a://bucket/lake/../other",
        "s3a://other/lake",
    ):
        with pytest.raises(pgqrs.InvalidArgument, match="this worker does not allow"):
            allowed_root(refused)
    allow(roots=[tmp_path])
    assert allowed_root(tmp_path / "other") == f"{tmp_path}/other"
