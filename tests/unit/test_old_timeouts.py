"""A run with `asyncio.timeout` replays the same on Python 3.11.0 to 3.11.2, whose timeouts do not ask
their task how often it was cancelled.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPLAY = """
import asyncio
from asyncio import timeouts

async def enter(self):  # as Python 3.11.2 does it
    self._state = timeouts._State.ENTERED
    self._task = asyncio.current_task()
    self._cancelling = 0
    self.reschedule(self._when)
    return self

asyncio.Timeout.__aenter__ = enter

import pgqrs
from pgqrs.testing import ManualClock

outer, inner = iter([0.05, 3600]), iter([3600, 1800])

@pgqrs.step
async def ask():
    await asyncio.sleep(3600)

@pgqrs.workflow
async def flow():
    which = "none"
    try:
        async with asyncio.timeout(next(outer)):
            try:
                async with asyncio.timeout(next(inner)):
                    await ask()
            except TimeoutError:
                which = "inner"
    except TimeoutError:
        which = "outer"
    await pgqrs.sleep(10)
    return which

clock = ManualClock()
with pgqrs.Store("sqlite::memory:", upgrade=True, clock=clock) as store:
    run = flow.start(store=store)
    with store.consumer(flow.queue) as consumer:
        for life in range(2):
            (message,) = consumer.dequeue()
            store.workflows.execute(message, [flow])
            clock.advance(10)
    print(run.result(timeout=10))
"""


def test_a_timeout_that_does_not_ask_its_task_is_over_again_on_replay() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", REPLAY], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["outer"]
