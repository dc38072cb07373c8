"""Workflows whose workers are killed and frozen; `main` is such a worker.

Every effect is a row. A plain step writes it by itself, and looks first whether the step was on record
before this life of its run began, which would be wrong. By chance a step kills its own process, after
its effect and before its record.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, text

import pgqrs

DEADLY = 0.01
TABLES = (
    "CREATE TABLE effects (name TEXT NOT NULL, kind TEXT NOT NULL)",
    "CREATE TABLE wrongs (name TEXT NOT NULL, what TEXT NOT NULL)",
)
ADD = "INSERT INTO {} VALUES (:name, :more)"
ON_RECORD = """
SELECT s.completed_at, m.dequeued_at FROM pgqrs_workflow_steps s
JOIN pgqrs_workflows w ON w.id = s.workflow_id JOIN pgqrs_messages m ON m.id = w.message_id
WHERE CAST(s.output AS TEXT) = :output AND s.status = 'completed'
"""
dice = random.Random()
store: pgqrs.Store
_life_began: ContextVar[datetime] = ContextVar("life_began")


def perhaps_die() -> None:
    if dice.random() < DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)


def when(found: Any) -> datetime:
    return found if isinstance(found, datetime) else datetime.fromisoformat(found)


def begin_life() -> None:
    """The code of a run begins, for the first time or once more."""
    _life_began.set(datetime.now(UTC))


def plain_effect(name: str) -> str:
    began = _life_began.get()

    def work(connection: Connection) -> None:
        for ended, claimed in connection.execute(text(ON_RECORD), {"output": f'"{name}"'}):
            # Who was frozen may do once more what others have done since: its claim is not this one.
            if when(ended) < when(claimed) <= began:
                more = f"{os.getpid()}: ended {ended}, claimed {claimed}, began {began}"
                connection.execute(text(ADD.format("wrongs")), {"name": name, "more": more})
        connection.execute(text(ADD.format("effects")), {"name": name, "more": "plain"})

    store.write(work)
    perhaps_die()
    return name


AGAIN = pgqrs.Retry.fixed(0.05, max_attempts=50)
"""An effect of a plain step may fail while the server is restarted."""


@pgqrs.step(retry=AGAIN)
def plain(name: str) -> str:
    return plain_effect(name)


@pgqrs.step(retry=AGAIN)
async def fetch(name: str) -> str:
    await asyncio.sleep(dice.random() * 0.02)
    return await asyncio.to_thread(plain_effect, name)


@pgqrs.step(retry=AGAIN)
def flaky(name: str) -> str:
    if dice.random() < 0.3:
        raise ValueError("not this time")
    return plain_effect(name)


@pgqrs.step(transactional=True)
def transactional(connection: Connection, name: str) -> str:
    connection.execute(text(ADD.format("effects")), {"name": name, "more": "transactional"})
    perhaps_die()
    return name


@pgqrs.step(transactional=True)
def undone(connection: Connection, name: str) -> str:
    connection.execute(text(ADD.format("effects")), {"name": name, "more": "undone"})
    raise ValueError(name)


@pgqrs.workflow
def line(run: str) -> list[str]:
    """A sync run: steps, a timer, a signal, a child that fails."""
    begin_life()
    found = [plain(f"{run} a"), transactional(f"{run} b"), flaky(f"{run} c")]
    pgqrs.sleep(0.1)
    found.append(transactional(f"{run} d"))
    found.append(pgqrs.wait_for_event("go"))
    child = failing.start(f"{run} child")
    try:
        child.result()
    except pgqrs.RunFailed:
        found.append(plain(f"{run} e"))
    with pgqrs.timeout(0.1):
        pgqrs.set_event("nearly done", run)
    return found


@pgqrs.workflow
def failing(run: str) -> None:
    """A child that fails."""
    begin_life()
    transactional(f"{run} a")
    undone(f"{run} b")


@pgqrs.workflow
async def net(run: str) -> list[str]:
    """An async run: a pool, branches with timers, signals and children, a timeout that is over."""
    begin_life()
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(4):
        queue.put_nowait(number)
    found: list[str] = []

    async def worker() -> None:
        while not queue.empty():
            name = f"{run} pool {queue.get_nowait()}"
            found.append(await fetch(name))
            found.append(await transactional(f"{name} after"))  # type: ignore[misc]

    async def waiting() -> None:
        found.append(await pgqrs.wait_for_event("go"))
        found.append(await transactional(f"{run} told"))  # type: ignore[misc]

    async def family() -> None:
        child = await leaf.start(f"{run} child")
        await pgqrs.sleep(0.1)
        found.extend(await child.result())

    async def late() -> None:
        try:
            async with pgqrs.timeout(0.2):
                await pgqrs.sleep(3600)
        except TimeoutError:
            found.append(await fetch(f"{run} late"))

    async with asyncio.TaskGroup() as group:
        for branch in (worker(), worker(), waiting(), family(), late()):
            group.create_task(branch)
    return sorted(found)


@pgqrs.workflow
async def leaf(run: str) -> list[str]:
    """A child that takes a while."""
    begin_life()
    await pgqrs.sleep(0.1)
    return list(await asyncio.gather(fetch(f"{run} a"), transactional(f"{run} b")))  # type: ignore[arg-type]


WORKFLOWS = [line, failing, net, leaf]
PLAIN = {
    line: ("a", "c", "e"),
    net: (*(f"pool {n}" for n in range(4)), "late", "child a"),
}
"""The effects of a run and its children, by workflow."""
TRANSACTIONAL = {
    line: ("b", "d", "child a"),
    net: (*(f"pool {n} after" for n in range(4)), "told", "child b"),
}


def main(url: str, seed: float, errors: str) -> None:
    """A worker, until it is told to end."""
    global store
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    dice.seed(seed)
    with pgqrs.Store(url, retry_for=120) as store:
        pgqrs.Worker(store, workflows=WORKFLOWS, concurrency=4, prefetch=0).run()
