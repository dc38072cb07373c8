"""Threads that nothing has to wait for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from pgqrs.stores.daemon_threads import DaemonThreads

LONG = 100


def test_they_call_return_and_raise() -> None:
    threads = DaemonThreads("t")
    assert threads.submit(pow, 2, 3).result(LONG) == 8
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(LONG)
    assert list(threads.map(abs, [-1, -2])) == [1, 2]


def test_calls_that_hang_hold_up_no_others_unless_there_is_a_limit() -> None:
    go_on, hung = threading.Event(), DaemonThreads("t")
    try:
        for _ in range(40):
            hung.submit(go_on.wait, LONG)
        assert hung.submit(pow, 2, 3).result(LONG) == 8
        limited = DaemonThreads("t", limit=2)
        waiting = [limited.submit(go_on.wait, LONG) for _ in range(4)]
        assert limited._count == 2
    finally:
        go_on.set()
    assert all(future.result(LONG) for future in waiting)


def test_a_stop_iteration_reaches_who_awaits() -> None:
    def raises() -> None:
        raise StopIteration

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await DaemonThreads("t").run(raises)

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_the_process_ends_though_one_hangs() -> None:
    program = """
import asyncio, time
from pgqrs.stores.daemon_threads import DaemonThreads
async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads("default"))
    asyncio.ensure_future(asyncio.to_thread(time.sleep, 3600))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
