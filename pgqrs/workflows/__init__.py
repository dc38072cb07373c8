"""Durable workflows: functions whose runs survive what runs them."""

from pgqrs.workflows.calls import (
    map,
    now,
    patched,
    random,
    set_event,
    sleep,
    sleep_until,
    uuid,
    wait_for_event,
)
from pgqrs.workflows.children import Child
from pgqrs.workflows.decorators import AsyncWorkflow, Step, Workflow, step, workflow
from pgqrs.workflows.guards import StepGuard
from pgqrs.workflows.runs import Run, Workflows
from pgqrs.workflows.timeouts import timeout

__all__ = [
    "AsyncWorkflow",
    "Child",
    "Run",
    "Step",
    "StepGuard",
    "Workflow",
    "Workflows",
    "map",
    "now",
    "patched",
    "random",
    "set_event",
    "sleep",
    "sleep_until",
    "step",
    "timeout",
    "uuid",
    "wait_for_event",
    "workflow",
]
