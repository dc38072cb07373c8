"""A run in the process that starts it, for scripts.

It is a run like any other: its message is there, and held by this process from the start. Should the
process die, the lease lapses and any worker goes on. Where the run waits, this waits; whoever resumes
it first, this process or a worker, the result is the same.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pgqrs.current import StoreOfCall
from pgqrs.errors import RunPaused
from pgqrs.outcomes import Settled
from pgqrs.repositories import workflows
from pgqrs.repositories.starting import ActiveRun, Started
from pgqrs.repositories.workflows import Ended
from pgqrs.stores import Database
from pgqrs.types import Message, RunInfo, RunStatus
from pgqrs.workflows.context import Persist
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import Reach, execute, execute_async, registry
from pgqrs.workflows.holding import Hold
from pgqrs.workflows.starting import start_once
from pgqrs.workflows.threads import Offload
from pgqrs.workflows.trampoline import drive, drive_async

LOOK_EVERY = 0.1


@dataclass(frozen=True, slots=True)
class Carry:
    """Run the run of this message, which may have begun."""

    message: Message
    begun: ActiveRun | None


@dataclass(frozen=True, slots=True)
class Nap:
    """Wait a little."""

    seconds: float


Inline = Generator[Persist | Carry | Nap, Any, RunInfo | Ended]


def run_inline(
    database: Database,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hold: Hold,
    reach: Reach = lambda call: call(),
    store: StoreOfCall | None = None,
) -> RunInfo | Ended:
    """Run a sync workflow in this thread, to its end."""

    def answer(ask: Persist | Carry | Nap) -> Any:
        if isinstance(ask, Persist):
            return reach(ask.call)
        if isinstance(ask, Nap):
            return time.sleep(ask.seconds)
        with hold(ask.message, reach) as watch:
            return execute(
                database,
                registry([workflow]),
                ask.message,
                begun=ask.begun,
                reach=reach,
                watch=watch,
                in_script=True,
                store=store,
            )

    return drive(inline(database, workflow, args, kwargs), answer)


async def run_inline_async(
    database: Database,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hold: Hold,
    offload: Offload,
    host: Offload | None = None,
    reach: Reach = lambda call: call(),
    store: StoreOfCall | None = None,
) -> RunInfo | Ended:
    """Run an async workflow in this event loop, to its end. Threads call the database by `reach`."""

    async def answer(ask: Persist | Carry | Nap) -> Any:
        if isinstance(ask, Persist):
            return await offload(ask.call)
        if isinstance(ask, Nap):
            return await asyncio.sleep(ask.seconds)
        with hold(ask.message, reach) as watch:
            return await execute_async(
                database,
                registry([workflow]),
                ask.message,
                begun=ask.begun,
                offload=offload,
                host=host,
                watch=watch,
                in_script=True,
                store=store,
            )

    return await drive_async(inline(database, workflow, args, kwargs), answer)


def inline(
    database: Database,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Inline:
    """The way of a run from its start to its end."""
    arguments = workflow.start_arguments(args, kwargs, database.config)
    worker = -secrets.randbits(62)  # a holder like any other, but too short-lived for a row
    started: Started = yield Persist(partial(start_once, database, arguments, holder=worker))
    carry = None if started.begun is None else Carry(*started.begun)
    while True:
        if carry is not None:
            outcome = yield carry
            if isinstance(outcome, Settled) and outcome.ending is not None:
                return cast(Ended, outcome.ending)
        run: RunInfo = yield Persist(lambda: database.read(lambda c: workflows.get(c, started.id)))
        if run.has_ended:
            return run
        if run.status is RunStatus.PAUSED and run.error is not None:
            raise RunPaused(run.id, run.error)  # it waits for other code than this
        message = yield Persist(partial(_claim, database, worker, started.id))
        carry = None if message is None else Carry(message, None)
        if carry is None:
            yield Nap(LOOK_EVERY)


def _claim(database: Database, worker: int, run_id: int) -> Message | None:
    return database.write(
        lambda c: workflows.claim(c, run_id, worker=worker, now=database.now()), repeatable=True
    )
