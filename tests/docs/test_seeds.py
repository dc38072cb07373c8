"""The Python examples that the project was asked for, verbatim."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path

import pytest

import pgqrs
from tests.conftest import prepare_bucket

SQLITE = """
import pgqrs

# SQLite backend
store = await pgqrs.connect("sqlite://./queues.db")

# Check we're in single-process mode
assert store.concurrency_model == "single_process"

async with store.admin() as admin:
    await admin.install()
    await admin.create_queue("tasks")

async with store.producer("tasks") as producer:
    await producer.enqueue({"job": "hello"})

async with store.consumer("tasks") as consumer:
    messages = await consumer.dequeue(10)
    for msg in messages:
        print(f"Processing: {msg.payload}")
        await consumer.ack(msg.id)
"""


def run(source: str, **names: object) -> dict[str, object]:
    """Run code that awaits at its top level."""
    code = compile(source, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    namespace: dict[str, object] = dict(names)

    async def main() -> None:
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            await result
        await namespace["store"].close()  # type: ignore[attr-defined]

    asyncio.run(main())
    return namespace


def test_the_sqlite_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(SQLITE)
    assert capsys.readouterr().out == "Processing: {'job': 'hello'}\n"
    assert (tmp_path / "queues.db").exists()


S3_DURABLE = """
# Create a deeply durable store (the default behavior)
store = await S3Store.create(bucket="my-pgqrs-bucket", mode="durable")

# Producer
producer = await store.producer("jobs")

# Write executes locally, loops in wait until S3 Sync Task Completes
await producer.enqueue({"data": 1})

# Consumer reads are strictly evaluating the S3-confirmed state
consumer = await store.consumer("jobs")
job = await consumer.dequeue()
"""

S3_LOCAL = """
# Create a local optimistic store
store = await S3Store.create(bucket="my-pgqrs-bucket", mode="local")

producer = await store.producer("jobs")
consumer = await store.consumer("jobs")

# Returns instantly. Sync Task will upload in background
await producer.enqueue({"data": 2})

# Returns instantly, capable of reading the un-synced "data: 2" message
job = await consumer.dequeue()
"""


@pytest.mark.parametrize(("source", "data"), [(S3_DURABLE, 1), (S3_LOCAL, 2)])
def test_the_s3_examples(
    source: str, data: int, moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_bucket(moto, tmp_path, monkeypatch)
    (message,) = run(source, S3Store=pgqrs.S3Store)["job"]  # type: ignore[misc]
    assert message.payload == {"data": data}
    assert not list(tmp_path.rglob("set-aside"))


AWAITED = """
import pgqrs

store = await pgqrs.connect(dsn)
async with store.admin() as admin:
    await admin.install()
    await admin.create_queue("jobs")

producer = await store.producer("jobs")
await producer.enqueue({"data": 1})

consumer = await store.consumer("jobs")
job = await consumer.dequeue()
"""


def test_facades_are_awaited_as_well_as_entered(database: str) -> None:
    found = run(AWAITED, dsn=database)["job"]
    assert [message.payload for message in found] == [{"data": 1}]  # type: ignore[attr-defined]
