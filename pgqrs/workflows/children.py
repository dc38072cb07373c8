"""Runs that a run starts, waits for, and tells what to do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pgqrs.error_texts import error_text
from pgqrs.errors import NotDurable, RunCancelled, RunEnded, RunFailed, RunNotFound
from pgqrs.stores import Database
from pgqrs.types import RunInfo, RunStatus, StepStatus
from pgqrs.workflows import values
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import Context, Flow, Park, current, persist
from pgqrs.workflows.effects import (
    check_queue,
    check_run,
    check_store,
    check_store_async,
    refuse_transaction,
)
from pgqrs.workflows.flows import decode, is_done, remember
from pgqrs.workflows.history import Call, escaped
from pgqrs.workflows.journal import MISSING, RecordedBefore

if TYPE_CHECKING:
    from pgqrs.workflows.decorators import Workflow

T_co = TypeVar("T_co", covariant=True)


class Child(Generic[T_co]):
    """A run that this run has started. Whatever is asked of it here is durable; in an async workflow it
    is awaited.
    """

    def __init__(self, context: Context, workflow: Workflow[..., T_co], id: int) -> None:
        self._context = context
        self._workflow = workflow
        self.id = id

    def result(self) -> Any:
        """What it returned; in an async workflow what to await for it. `RunFailed` if it failed,
        `RunCancelled` if it was cancelled.
        """
        context = self._here("result")
        call = context.take(f"pgqrs.result:{self._workflow.name}")
        return context.perform(_result(context, call, self._workflow, self.id), call)

    def signal(self, name: str, payload: Any = None) -> Any:
        """Say something to it: one `wait_for_event` of this name gets the payload. `RunEnded` if it has
        ended.
        """
        return signal_run(self._here("signal"), self.id, name, payload)

    def cancel(self) -> Any:
        """Let it and its children end. Returns what it is then; one that has ended stays as it is."""
        context = self._here("cancel")
        call = context.take(f"pgqrs.cancel:{self._workflow.name}")
        return context.perform(_status(context, call, self.id, context.journal.cancel), call)

    def status(self) -> Any:
        """Where it stands. A run that is resumed gets the same answer again."""
        context = self._here("status")
        call = context.take(f"pgqrs.status:{self._workflow.name}")
        return context.perform(_status(context, call, self.id, context.journal.find_run), call)

    def _here(self, what: str) -> Context:
        if current() is not self._context:
            raise NotDurable(
                what,
                "the handle of a child is for the workflow that started it; elsewhere, as in a step, "
                f"use store.workflows.handle({self.id})",
            )
        return self._context

    def __repr__(self) -> str:
        return f"<child run {self.id} of {self._workflow.name}>"


def start_child(
    context: Context,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    store: Any = None,
) -> Any:
    """Start a child of the run; in an async workflow what to await for it. A `store` that is named has
    to be that of the run.
    """
    refuse_transaction(store, "start")
    database, bridge = getattr(store, "_database", None), getattr(store, "_bridge", None)
    if not isinstance(context, AsyncContext):
        check_store(context, database, "start")
    call = context.take(f"pgqrs.start:{workflow.name}", (tuple(args), dict(kwargs)))
    started = context.perform(_start(context, call, workflow, args, kwargs), call)
    if store is None or not isinstance(context, AsyncContext):
        return started
    return _checked(context, database, "start", bridge, started)


def signal_run(
    context: Context,
    run_id: int,
    name: str,
    payload: Any,
    *,
    database: Database | None = None,
    bridge: Any = None,
) -> Any:
    """Say something to another run, once; in an async workflow what to await for it. A `database` that
    is given has to be that of the run.
    """
    if not isinstance(context, AsyncContext):
        check_store(context, database, "signal")
    text = values.dump(payload, context.journal.database.config)
    call = context.take(f"pgqrs.signal:{escaped(name)}", ((run_id, text), {}))
    told = context.perform(_signal(context, call, run_id, name, text), call)
    if database is None or not isinstance(context, AsyncContext):
        return told
    return _checked(context, database, "signal", bridge, told)


async def _checked(
    context: AsyncContext,
    database: Database | None,
    what: str,
    bridge: Any,
    call: Coroutine[Any, Any, Any],
) -> Any:
    """Make a durable call of an async workflow, if it is on the run's store."""
    try:
        run = None if bridge is None else bridge.run
        await check_store_async(context, database, what, run)
    except BaseException:
        call.close()
        raise
    return await call


def _signal(context: Context, call: Call, run_id: int, name: str, payload: str) -> Flow[None]:
    found = call.record
    if found is not None and is_done(call):
        ended = found.output
    else:
        check_run(context, call, run_id, "signal")
        step = context.step(call, StepStatus.COMPLETED)
        try:
            ended, recorded = yield from persist(
                partial(
                    context.journal.signal,
                    context.id,
                    run_id,
                    name,
                    payload,
                    step,
                    again=found is not None,
                )
            )
            context.check(recorded)
        except RecordedBefore:
            found = yield from persist(partial(context.journal.get_step, context.id, call.step_id))
            ended = found.output
    if ended == MISSING:
        raise context.blame(RunNotFound(run_id), call)
    if ended is not None:
        raise context.blame(RunEnded(run_id, RunStatus(ended), "get a signal"), call)


def _status(
    context: Context, call: Call, run_id: int, ask: Callable[[int], RunInfo]
) -> Flow[RunStatus]:
    """What a run is, once it was asked or told what to do. None is on record if it is no more."""

    def status() -> str | None:
        try:
            return ask(run_id).status.value
        except RunNotFound:
            return None

    found = yield from remember(context, call, status)
    if found is None:
        raise context.blame(RunNotFound(run_id), call)
    return RunStatus(found)


def _start(
    context: Context,
    call: Call,
    workflow: Workflow[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Flow[Child[Any]]:
    if call.record is not None and is_done(call):
        return Child(context, workflow, call.record.output)
    check_queue(context, call, workflow.queue, "start")
    arguments = workflow.start_arguments(args, kwargs, context.journal.database.config)
    step = context.step(call, StepStatus.COMPLETED)
    try:
        id, recorded = yield from persist(
            partial(
                context.journal.start_child,
                context.id,
                arguments,
                step,
                again=call.record is not None,
            )
        )
    except RecordedBefore:
        record = yield from persist(partial(context.journal.get_step, context.id, call.step_id))
        return Child(context, workflow, record.output)
    context.check(recorded)
    return Child(context, workflow, id)


def _result(context: Context, call: Call, workflow: Workflow[..., Any], child_id: int) -> Flow[Any]:
    if call.record is None or not is_done(call):
        look = partial(context.journal.find_awaited, context.id, child_id)
        child: RunInfo | None = yield from persist(look)
        while child is None:
            yield Park(None, for_news=True)  # its end is news
            child = yield from persist(look)
        config = context.journal.database.config
        ended = {
            "status": child.status,
            "output": child.output,
            "error": error_text(child.error, config),
        }
        step = context.step(call, StepStatus.COMPLETED, output=values.dump_stored(ended))
        again = call.record is not None
        recorded = yield from persist(
            partial(context.journal.record, context.id, step, again=again)
        )
        context.check(recorded)
    else:
        ended = call.record.output
    if ended["status"] == RunStatus.FAILED:
        raise context.blame(RunFailed(child_id, ended["error"]), call)
    if ended["status"] == RunStatus.CANCELLED:
        raise context.blame(RunCancelled(child_id), call)
    return decode(workflow.signature, call, ended["output"])
