"""Which message a task is handling."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime, timedelta
from typing import Any

from pgqrs import Retry, current_message, task
from pgqrs.testing import ManualClock
from pgqrs.testing.conformance.harness import QUEUE, enqueue, worker
from pgqrs.testing.conformance.working import PATIENCE

Told = tuple[int, str, int, dict[str, Any], str | None, datetime | None]


def told() -> Told:
    here = current_message()
    assert here is not None
    return here.id, here.task, here.attempt, dict(here.headers), here.key, here.deadline


@task(queue=QUEUE, retry=Retry.fixed(0))
def tell() -> Told:
    if told()[2] == 1:
        raise LookupError("once more")
    return told()


@task(queue=QUEUE, timeout=60)
async def tell_later() -> Told:
    await asyncio.sleep(0)
    assert await asyncio.to_thread(told) == told()
    return told()


def test_a_task_is_told_its_message(store: Any, admin: Any, clock: ManualClock) -> None:
    one = enqueue(tell.options(headers={"a": 1}, key="k"), store)
    two = enqueue(tell_later, store)
    worker(store, queues=[QUEUE]).run(until_empty=True)
    assert one.result(PATIENCE) == (one.id, tell.name, 2, {"a": 1}, "k", None)
    deadline = clock.now() + timedelta(seconds=60)
    assert two.result(PATIENCE) == (two.id, tell_later.name, 1, {}, None, deadline)


def test_outside_of_a_task_there_is_none(store: Any, admin: Any) -> None:
    assert current_message() is None
    heard: list[object] = []
    done = threading.Event()

    def handle(message: object) -> None:
        heard.append(current_message())
        done.set()

    store.producer(QUEUE).enqueue(1)
    worker(store, handlers={QUEUE: handle}).run(until_empty=True)
    assert done.is_set()
    assert heard == [None]
