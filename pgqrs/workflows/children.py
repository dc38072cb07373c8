"""Runs that a run starts, and waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pgqrs.errors import RunCancelled, RunFailed
from pgqrs.payloads import error_text
from pgqrs.repositories.steps import NewStep
from pgqrs.types import RunInfo, RunStatus, StepStatus
from pgqrs.workflows import values
from pgqrs.workflows.context import Context, Flow, Park
from pgqrs.workflows.flows import persist
from pgqrs.workflows.history import Call
from pgqrs.workflows.journal import RecordedBefore

if TYPE_CHECKING:
    from pgqrs.workflows.decorators import Workflow


class Child:
    """A run that this run has started. Asking for its result waits for it."""

    def __init__(self, context: Context, workflow: Workflow[..., Any], id: int) -> None:
        self._context = context
        self._workflow = workflow
        self.id = id

    def result(self) -> Any:
        """What it returned; in an async workflow what to await for it. `RunFailed` if it failed,
        `RunCancelled` if it was cancelled.
        """
        context = self._context
        call = context.take(f"pgqrs.result:{self._workflow.name}")
        return context.perform(_result(context, call, self._workflow, self.id))

    def __repr__(self) -> str:
        return f"<child run {self.id} of {self._workflow.name}>"


def start_child(
    context: Context, workflow: Workflow[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Start a child of the run; in an async workflow what to await for it."""
    call = context.take(f"pgqrs.start:{workflow.name}")
    return context.perform(_start(context, call, workflow, args, kwargs))


def _start(
    context: Context,
    call: Call,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Flow[Child]:
    if call.record is not None:
        return Child(context, workflow, call.record.output)
    arguments = workflow.start_arguments(args, kwargs, context.journal.database.config)
    step = NewStep(call.step_id, call.position, StepStatus.COMPLETED)
    try:
        id, recorded = yield from persist(
            partial(context.journal.start_child, context.id, arguments, step)
        )
    except RecordedBefore:
        record = yield from persist(partial(context.journal.get_step, context.id, call.step_id))
        return Child(context, workflow, record.output)
    context.check(recorded)
    return Child(context, workflow, id)


def _result(context: Context, call: Call, workflow: Workflow[..., Any], child_id: int) -> Flow[Any]:
    if call.record is None:
        child: RunInfo = yield from persist(partial(context.journal.find_run, child_id))
        if not child.has_ended:
            yield Park(None)  # its end is news
        ended = {"status": child.status, "output": child.output, "error": error_text(child.error)}
        text = values.dump(ended, context.journal.database.config)
        step = NewStep(call.step_id, call.position, StepStatus.COMPLETED, output=text)
        recorded = yield from persist(partial(context.journal.record, context.id, step))
        context.check(recorded)
    else:
        ended = call.record.output
    if ended["status"] == RunStatus.FAILED:
        raise RunFailed(child_id, ended["error"])
    if ended["status"] == RunStatus.CANCELLED:
        raise RunCancelled(child_id)
    return workflow.signature.decode_result(ended["output"])
