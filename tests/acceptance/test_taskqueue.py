"""The small task queue and its backend."""

from __future__ import annotations

import asyncio
import functools
import statistics
import subprocess
import sys
import types
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
            result = await queue.get_result(done, timeout=100)
            assert result is not None
            assert (result.is_success, result.value, result.error) == (True, 42, None)
            result = await queue.get_result(failing, timeout=100)
            assert result is not None
            assert not result.is_success
            assert "nothing there" in (result.error or "")
            assert await queue.get_result(later, timeout=0.01) is None

    asyncio.run(main())


def test_what_no_other_process_could_run_is_refused(sqlite_database: str) -> None:
    def inner() -> None: ...

    script = types.FunctionType(add.__code__, {"__name__": "__main__"}, "script")
    hidden = types.FunctionType(add.__code__, {"__name__": __name__}, "add")
    with SyncTaskQueue(sqlite_database) as queue:
        for bad, why in (
            (lambda: None, "no name"),
            (inner, "no name"),
            (functools.partial(add, 1), "no name"),
            (script, "is in the script"),
            (hidden, "something else"),
        ):
            with pytest.raises(pgqrs.InvalidArgument, match=why):
                queue.enqueue(bad)
        with pgqrs.Store(sqlite_database) as store:
            assert store.admin().peek("default") == []


WORKER = """
import sys, pgqrs
with pgqrs.Store(sys.argv[1]) as store:
    pgqrs.Worker(store, tasks=[{given}]).run(until_empty=True, signals=False)
"""


@pytest.mark.parametrize("given", ["statistics.mean", "'statistics:mean'"])
def test_a_function_runs_in_another_process_that_was_given_it(database: str, given: str) -> None:
    with SyncTaskQueue(database) as queue:
        id = queue.enqueue(statistics.mean, [40, 44])
        script = "import statistics" + WORKER.format(given=given)
        subprocess.run([sys.executable, "-c", script, database], check=True, timeout=500)
        result = queue.get_result(id)
    assert result is not None
    assert result.value == 42


def test_a_worker_refuses_paths_that_lead_nowhere(sqlite_database: str) -> None:
    with pgqrs.Store(sqlite_database, upgrade=True) as store:
        for path in ("statistics", "statistics:nothing", "no_such_module:mean", "statistics:"):
            with pytest.raises(pgqrs.InvalidArgument, match=path):
                pgqrs.Worker(store, tasks=[path])


def test_a_task_that_ends_while_it_is_asked_for_is_found(database: str) -> None:
    """It moves from the messages to the archive: whoever looks into both must not miss it."""

    async def main() -> None:
        asking, working = StoreBackend(database), StoreBackend(database)
        await asking.connect()
        await working.connect()
        for n in range(60):
            id = await asking.enqueue({"n": n})

            async def finish(n: int = n) -> None:
                (reserved,) = await working.reserve(1)
                await asyncio.sleep(0.002 * (n % 3))
                await working.mark_success(reserved.task_id, n)

            finishing = asyncio.create_task(finish())
            while (result := await asking.get_result(id)) is None:
                pass
            assert result.value == n
            await finishing
        await asking.close()
        await working.close()

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
        result = queue.get_result(id, timeout=100)
        assert result is not None
        assert result.value == 2
