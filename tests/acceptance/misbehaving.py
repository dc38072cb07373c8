"""User code that does what it must not: exits, interrupts, cancels, hangs, blocks its event loop, kills
its process. It ends by failing, and harms nobody else.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from typing import Any

import pgqrs

FULL = os.environ.get("PGQRS_ACCEPTANCE") == "full"
LEASE = 3
BLOCK = LEASE + 0.5 if FULL else 0.1
"""Seconds for which an event loop is blocked. In the full size longer than a lease."""
TWICE = pgqrs.Retry.fixed(0, max_attempts=2)
WAYS = ("exit", "interrupt", "cancel", "generator", "hang", "exit in a task", "block")
WAYS_OF_STEPS = ("exit", "interrupt", "cancel", "generator", "hang")
RUNS, PROCESSES, TICKS = "misbehaving runs", "processes", "ticks"


def act(way: str) -> None:
    """Do what a handler or a step must not do."""
    match way:
        case "exit" | "exit in a task":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "generator":
            raise GeneratorExit
        case "hang":
            time.sleep(3600)
        case "block":
            time.sleep(BLOCK)
            raise ValueError("after a while")


def misbehave(message: pgqrs.Message) -> None:
    act(message.payload)


async def misbehave_async(message: pgqrs.Message) -> None:
    match message.payload:
        case "exit in a task":
            await asyncio.create_task(misbehave_async(replace(message, payload="exit")))
        case "hang":
            await asyncio.sleep(3600)
        case "cancel":
            task = asyncio.ensure_future(asyncio.sleep(3600))
            task.cancel()
            await task
        case way:
            act(way)


HANDLERS = {
    "misbehaving": pgqrs.Handler(misbehave, retry=TWICE, timeout=0.2),
    "misbehaving coroutines": pgqrs.Handler(misbehave_async, retry=TWICE, timeout=0.2),
}


@pgqrs.step(timeout=0.2, retry=TWICE)
def misbehaving_step(way: str) -> None:
    act(way)


@pgqrs.workflow(queue=RUNS)
def misbehaving_run(way: str) -> None:
    misbehaving_step(way)


@pgqrs.workflow(queue=RUNS)
async def misbehaving_async_run(way: str) -> None:
    await misbehaving_step.acall(way)


WORKFLOWS = [misbehaving_run, misbehaving_async_run]


@pgqrs.task(queue=PROCESSES, process=True, retry=TWICE)
def die() -> None:
    os._exit(3)


@pgqrs.task(queue=PROCESSES, process=True)
def double(n: int) -> int:
    return 2 * n


TASKS: list[pgqrs.Task[..., Any]] = [die, double]
