"""Workflows in a worker: the job of a message that is a run's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from pgqrs.handlers import Delivery, Job, Route
from pgqrs.outcomes import GivenBack, Outcome
from pgqrs.types import Message
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import (
    UNKNOWN_FOR,
    Registry,
    execute,
    execute_async,
    is_run,
    registry,
)

logger = logging.getLogger("pgqrs.workflows")


def route(workflows: Iterable[Workflow[..., Any]]) -> Route:
    """Runs of these workflows are run; those of others wait for a worker that knows them."""
    known = registry(workflows)
    jobs = {name: _job(known, workflow) for name, workflow in known.items()}
    unknown = Job(name="workflow", run=_wait_for_another)

    def find(message: Message) -> Job | None:
        return jobs.get(message.payload["workflow"], unknown) if is_run(message) else None

    return find


def _job(known: Registry, workflow: Workflow[..., Any]) -> Job:
    run: Any = _run_async if workflow.is_async else _run
    return Job(name=workflow.name, run=partial(run, known), is_async=workflow.is_async)


def _run(known: Registry, delivery: Delivery) -> Outcome:
    return execute(delivery.database, known, delivery.message)


async def _run_async(known: Registry, delivery: Delivery) -> Outcome:
    return await execute_async(
        delivery.database, known, delivery.message, offload=asyncio.to_thread
    )


def _wait_for_another(delivery: Delivery) -> Outcome:
    logger.warning("workflow %s is not known here", delivery.message.payload["workflow"])
    return GivenBack(delay=UNKNOWN_FOR)
