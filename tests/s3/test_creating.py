"""`S3Store.create`: settings without a prefix, tables and queues that need not be there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import pgqrs
from tests.s3.conftest import Object


def test_settings_have_no_prefix(empty: Object) -> None:
    async def main() -> dict[str, Any]:
        store = await pgqrs.S3Store.create(
            "bucket",
            empty.key,
            mode="local",
            cache=":memory:",
            endpoint_url=empty.server,
            region="eu-central-1",
            sync_interval=7,
            max_staleness=3,
            timeout=11,
        )
        async with store:
            return vars(store._s3._settings)

    assert asyncio.run(main()) == {
        "bucket": "bucket",
        "key": empty.key,
        "mode": "local",
        "cache": ":memory:",
        "endpoint_url": empty.server,
        "region": "eu-central-1",
        "sync_interval": 7,
        "max_staleness": 3,
        "timeout": 11,
        "shards": None,
        "shard_by": "name",
    }


def test_a_setting_given_twice_is_refused(empty: Object) -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="timeout is given twice"):
        asyncio.run(pgqrs.S3Store.create("bucket", empty.key, timeout=1, s3_timeout=2))


def test_without_upgrade_nothing_is_created(empty: Object) -> None:
    async def main() -> None:
        place = {"endpoint_url": empty.server, "cache": ":memory:"}
        async with await pgqrs.S3Store.create("bucket", empty.key, upgrade=False, **place) as store:
            with pytest.raises(pgqrs.SchemaNotInstalled):
                await (await store.producer("jobs")).enqueue(1)
        async with await pgqrs.S3Store.create("bucket", empty.key, **place) as store:
            await store.admin().verify()
        async with await pgqrs.S3Store.create("bucket", empty.key, upgrade=False, **place) as store:
            with pytest.raises(pgqrs.QueueNotFound):
                await (await store.producer("jobs")).enqueue(1)

    asyncio.run(main())


@pytest.mark.parametrize("enqueue_first", [True, False])
def test_the_first_producer_creates_its_queue_on_any_store(
    enqueue_first: bool, sqlite_database: str
) -> None:
    with pgqrs.Store(sqlite_database, upgrade=True, create_queues=True, lease=7) as store:
        if enqueue_first:
            store.producer("jobs").enqueue_many([1, 2])
        else:
            store.producer("jobs").open()
        assert store.admin().get_queue("jobs").lease == 7
        with pytest.raises(pgqrs.InvalidArgument):
            store.producer("\n").enqueue(1)
        with pytest.raises(pgqrs.QueueNotFound):
            store.consumer("others").dequeue()
