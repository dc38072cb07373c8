"""What a store costs, going back to an older version, and servers that ignore conditions."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

import pgqrs
from pgqrs import S3Load, S3Prices
from pgqrs.cli.app import app
from pgqrs.s3_cost import MONTH, measured, predicted
from tests.s3.conftest import QUEUE, Object
from tests.s3.proxy import Exchange, answered, served


def test_what_was_measured_is_extrapolated(object: Object) -> None:
    store = object.other()
    store.producer(QUEUE).enqueue(1)
    stats = replace(store.admin().s3_stats(), seconds=MONTH / 1000, puts=5, gets=20, pages=250)
    cost = measured(stats, S3Prices(thousand_puts=2, thousand_gets=1, gigabyte_month=100))
    assert (cost.puts, cost.gets) == pytest.approx((5000, 20_000))
    assert cost.stored_bytes == 250 * 4096
    assert (cost.put_dollars, cost.get_dollars) == pytest.approx((10, 20))
    assert cost.dollars == pytest.approx(10 + 20 + 100 * 250 * 4096 / 1e9)
    assert store.admin().s3_cost().puts > 0


def test_writes_that_come_during_a_put_share_the_next() -> None:
    slow = predicted(S3Load(writes=1, object_bytes=1000))
    quick = predicted(S3Load(writes=1000, object_bytes=1000, put_seconds=0.1))
    assert slow.puts == MONTH
    assert quick.puts == pytest.approx(10 * MONTH)
    assert quick.uploaded_bytes == pytest.approx(10 * MONTH * 1000)
    assert predicted(S3Load(writes=0, object_bytes=0, processes=2)).gets == 2 * MONTH


@pytest.mark.parametrize("wrong", [{"writes": -1}, {"put_seconds": 0}, {"shards": 0}])
def test_a_load_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(pgqrs.InvalidArgument):
        predicted(S3Load(**{"writes": 1, "object_bytes": 1} | wrong))


def run(object: Object, *arguments: str) -> Any:
    environment = {"PGQRS_S3_ENDPOINT_URL": object.server, "PGQRS_S3_CACHE": ":memory:"}
    command = ["--dsn", object.url(), "s3", *arguments]
    done = CliRunner().invoke(app, command, env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_stats_and_cost(object: Object) -> None:
    stats = json.loads(run(object, "stats", "--json"))
    assert stats["state"] == "in_sync"
    assert stats["pages"] > 1
    found = json.loads(run(object, "cost", "--watch", "0", "--writes", "2", "--json"))
    assert found["measured"]["puts"] == 0
    assert found["predicted"]["puts"] == 2 * MONTH
    assert found["predicted"]["dollars"] > 20
    assert "GB uploaded" in run(object, "cost", "--watch", "0")


@pytest.fixture
def versioned(object: Object, installed: bytes) -> Object:
    """The same in a bucket that keeps versions."""
    bucket = f"versioned-{uuid.uuid4().hex}"
    object.client.create_bucket(Bucket=bucket)
    object.client.put_bucket_versioning(
        Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    object.bucket = bucket  # type: ignore[attr-defined]
    object.url = lambda mode="durable": f"s3://{bucket}/{object.key}?mode={mode}"  # type: ignore[method-assign]
    object.client.put_object(Bucket=bucket, Key=object.key, Body=installed)
    return object


def test_an_older_version_is_restored(versioned: Object) -> None:
    store = versioned.other()
    store.producer(QUEUE).enqueue("kept")
    kept = store.admin().s3_versions()[0]
    store.producer(QUEUE).enqueue("undone")
    assert [v.is_latest for v in store.admin().s3_versions()] == [True, False, False]
    with pytest.raises(pgqrs.InvalidArgument):
        store.admin().restore_s3("no such version")
    assert "Restored" in run(versioned, "restore", "--version", kept.id, "--yes")
    assert [m.payload for m in store.admin().peek(QUEUE)] == ["kept"]
    store.producer(QUEUE).enqueue("goes on")
    assert [m.payload for m in store.admin().peek(QUEUE)] == ["kept", "goes on"]


def test_a_deleted_object_is_restored(versioned: Object) -> None:
    store = versioned.other()
    store.producer(QUEUE).enqueue("kept")
    kept = store.admin().s3_versions()[0]
    store.close()
    versioned.client.delete_object(Bucket=versioned.bucket, Key=versioned.key)  # type: ignore[attr-defined]
    listed = json.loads(run(versioned, "versions", "--json"))
    assert listed[0]["size"] is None
    store = versioned.other()
    store.admin().restore_s3(kept.id)
    assert [m.payload for m in store.admin().peek(QUEUE)] == ["kept"]


def test_a_server_that_ignores_conditions_is_refused(object: Object) -> None:
    def without_conditions(exchange: Exchange) -> None:
        """Store it whatever is there. The condition is part of the signature, and cannot be left out."""
        if exchange.command != "PUT":
            return served(exchange)
        key = f"{object.key}.if-match"
        stored = object.client.put_object(Bucket="bucket", Key=key, Body=exchange.body)
        exchange.answer(200, [("ETag", stored["ETag"])], b"")
        return None

    object.proxy.of_the_check = without_conditions
    with pytest.raises(pgqrs.InvalidConfig, match="ignores If-Match"):
        object.open()
    listed = object.client.list_objects_v2(Bucket="bucket", Prefix=object.key)["Contents"]
    assert [each["Key"] for each in listed] == [object.key]
    object.proxy.of_the_check = served
    object.open()


def test_a_server_is_checked_once(object: Object) -> None:
    tried: list[str] = []

    def noted(exchange: Exchange) -> None:
        tried.append(exchange.path)
        served(exchange)

    object.proxy.of_the_check = noted
    object.open()
    object.open()
    assert len(tried) == 1


def test_a_server_that_cannot_be_asked_is_used(object: Object) -> None:
    object.proxy.of_the_check = answered(403, "AccessDenied")
    object.open().admin().verify()
