"""Workers in which something hangs for ever. `python -m tests.acceptance.hanging HOW URL`.

They say `hangs` when it does. The parent tells them to leave.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import Any, NoReturn

import pgqrs

GRACE = 0.5
FOR_EVER = 3600


def hang(*_: Any) -> None:
    print("hangs", flush=True)
    time.sleep(FOR_EVER)


async def block(*_: Any) -> None:
    hang()


async def wait_for_thread(*_: Any) -> None:
    await asyncio.to_thread(hang)


async def never_ends(*_: Any) -> None:
    while True:
        try:
            print("hangs", flush=True)
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            continue


step = pgqrs.step(hang, name="hang")


@pgqrs.workflow
def in_step() -> None:
    step()


@pgqrs.workflow
async def in_async_step() -> None:
    await asyncio.gather(step(), step())  # type: ignore[arg-type]


@pgqrs.workflow
def in_map() -> None:
    pgqrs.map(step, [1, 2])


HANDLERS = {
    "handler": hang,
    "coroutine": block,
    "thread of a coroutine": wait_for_thread,
    "coroutine that ignores its end": never_ends,
}
WORKFLOWS = {"step": in_step, "step in a loop": in_async_step, "map": in_map}
ASYNC_WORKER = "loop of the application"


def main(how: str, url: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if how == ASYNC_WORKER:
        asyncio.run(block_application(url))
        return
    with pgqrs.Store(url) as store:
        if how in WORKFLOWS:
            worker = pgqrs.Worker(store, workflows=[WORKFLOWS[how]], grace=GRACE)
            WORKFLOWS[how].start(store=store)
        else:
            worker = pgqrs.Worker(store, handlers={"tasks": HANDLERS[how]}, grace=GRACE)
        worker.run()


async def block_application(url: str) -> None:
    async with pgqrs.AsyncStore(url) as store:
        await pgqrs.AsyncWorker(store, handlers={"tasks": block}, grace=GRACE).run()


def work(url: str) -> NoReturn:
    """Handle messages until told to leave, or until the database is away for ever."""
    with pgqrs.Store(url) as store:
        handled = threading.Event()

        def handle(message: pgqrs.Message) -> None:
            if not handled.is_set():
                handled.set()
                print("hangs", flush=True)

        pgqrs.Worker(store, handlers={"tasks": handle}, grace=GRACE).run()
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "database":
        work(sys.argv[2])
    main(sys.argv[1], sys.argv[2])
