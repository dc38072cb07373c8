"""The small task queue and its backend."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import pgqrs
from pgqrs.taskqueue import StoreBackend, SyncTaskQueue, TaskQueue


def add(a: int, b: int = 1) -> int:
    return a + b


def fail() -> None:
    raise LookupError("nothing there")


def test_from_a_function_to_its_result(database: str) -> None:
    async def main() -> None:
        async with TaskQueue(database) as queue:
            done = await queue.enqueue(add, 40, b=2)
            failing = await queue.enqueue(fail)
            later = await queue.enqueue(add, 1, eta=datetime.now(UTC) + timedelta(hours=1))
            assert await queue.get_result(done) is None
            assert await queue.get_result(done, timeout=0.01) is None
            with pgqrs.Store(database) as store:
                store.admin().configure_queue("default", max_read_ct=1)
                pgqrs.Worker(store, queues=["default"]).run(until_empty=True, signals=False)
            result = await queue.get_result(done, timeout=30)
            assert result is not None
            assert (result.is_success, result.value, result.error) == (True, 42, None)
            result = await queue.get_result(failing, timeout=30)
            assert result is not None
            assert not result.is_success
            assert "nothing there" in (result.error or "")
            assert await queue.get_result(later, timeout=0.01) is None
            with pytest.raises(pgqrs.InvalidArgument, match="no name"):
                await queue.enqueue(lambda: None)

    asyncio.run(main())


def test_a_backend_is_used_by_hand(database: str) -> None:
    async def main() -> None:
        backend, rival = StoreBackend(database), StoreBackend(database)
        await backend.connect()
        await rival.connect()
        ids = [await backend.enqueue({"n": n}) for n in range(20)]
        taken = await asyncio.gather(*(b.reserve(3) for b in (backend, rival) for _ in range(3)))
        reserved = [task.task_id for part in taken for task in part]
        assert sorted(reserved) == sorted(set(reserved)), "nobody shares a task"
        mine = sorted(backend._reserved)
        await backend.mark_success(mine[0], {"answer": 42})
        await backend.mark_failure(mine[1], "broken")
        with pytest.raises(pgqrs.InvalidArgument, match="not reserved"):
            await backend.mark_success(mine[0])
        good, bad = await backend.get_result(mine[0]), await rival.get_result(mine[1])
        assert good is not None
        assert bad is not None
        assert (good.status, good.value) == ("success", {"answer": 42})
        assert (bad.status, bad.error) == ("failed", "broken")
        with pytest.raises(pgqrs.MessageNotFound):
            await backend.get_result(max(ids) + 1000)
        await backend.close()
        await rival.close()

    asyncio.run(main())


def test_without_awaiting(sqlite_database: str) -> None:
    with SyncTaskQueue(sqlite_database) as queue:
        id = queue.enqueue(add, 1)
        with pgqrs.Store(sqlite_database) as store:
            pgqrs.Worker(store, queues=["default"]).run(until_empty=True, signals=False)
        result = queue.get_result(id, timeout=30)
        assert result is not None
        assert result.value == 2
