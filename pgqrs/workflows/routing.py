"""Workflows in a worker: the job of a message that is a run's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from pgqrs.handlers import Delivery, Job, Route
from pgqrs.outcomes import GivenBack, Outcome
from pgqrs.types import Message
from pgqrs.unknown import Unknown
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import (
    UNKNOWN_FOR,
    Registry,
    execute,
    execute_async,
    is_run,
    registry,
)
from pgqrs.workflows.threads import journal_threads, step_threads

ALONE_FROM = 3
"""The attempt from which on a run whose workers died is run alone."""


def route(workflows: Iterable[Workflow[..., Any]]) -> Route:
    """Runs of these workflows are run; those of others wait for a worker that knows them."""
    known = registry(workflows)
    jobs = {name: _job(known, workflow) for name, workflow in known.items()}
    unknown = Job(name="workflow", run=partial(_wait_for_another, Unknown()))

    def find(message: Message) -> Job | None:
        return jobs.get(message.payload["workflow"], unknown) if is_run(message) else None

    return find


def _job(known: Registry, workflow: Workflow[..., Any]) -> Job:
    run: Any = _run_async if workflow.is_async else _run
    return Job(
        name=workflow.name,
        run=partial(run, known),
        is_async=workflow.is_async,
        alone_from=ALONE_FROM,
    )


def _run(known: Registry, delivery: Delivery) -> Outcome:
    return execute(delivery.database, known, delivery.message, watch=delivery.each_second)


async def _run_async(known: Registry, delivery: Delivery) -> Outcome:
    return await execute_async(
        delivery.database,
        known,
        delivery.message,
        offload=journal_threads(delivery.database).run,
        host=step_threads.run,
        watch=delivery.each_second,
    )


def _wait_for_another(unknown: Unknown, delivery: Delivery) -> Outcome:
    message = delivery.message
    unknown.log(message, "workflow", message.payload["workflow"])
    # Not longer each time: a run gives its message back also whenever it sleeps.
    return GivenBack(delay=UNKNOWN_FOR)
