"""The Python examples that the project was asked for, verbatim."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path

import pytest

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
