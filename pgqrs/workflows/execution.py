"""Running a run whose message was claimed: from the claim to its end, or to where it waits.

`execute` and `execute_async` answer the same generator, as durable calls are answered (see `context`).
What becomes of the message is settled here, in the transactions that change the run; a worker has
nothing left to do with it. Errors of the database are raised: then the claim counts as an attempt, and
the run is resumed when the message comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pgqrs.codecs import Signature
from pgqrs.errors import InvalidPayload, LeaseLost, RunOverdue, StepFailed
from pgqrs.outcomes import GivenBack, Outcome, Settled
from pgqrs.payloads import error_text
from pgqrs.repositories.starting import ActiveRun
from pgqrs.stores import Database
from pgqrs.types import ENDED, Message, RunStatus
from pgqrs.workflows import values
from pgqrs.workflows.context import AsyncContext, Context, Persist, inside
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.history import History
from pgqrs.workflows.interrupts import Broken, Cancel, Doom, Interrupt, Lost, Pause, Suspend
from pgqrs.workflows.journal import Journal
from pgqrs.workflows.trampoline import drive, drive_async

logger = logging.getLogger("pgqrs.workflows")
UNKNOWN_FOR = 10.0
"""Seconds after which a run of a workflow that is not known here is offered again."""
Registry = Mapping[str, Workflow[..., Any]]
Reach = Callable[[Callable[[], Any]], Any]
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Go:
    """Run the workflow."""

    run: ActiveRun
    records: list[Any]
    workflow: Workflow[..., Any]


@dataclass(frozen=True, slots=True)
class Gone:
    """How the workflow went: it returned, raised, or was interrupted."""

    value: Any = None
    error: BaseException | None = None
    interrupt: Interrupt | None = None


Execution = Generator[Persist | Go, Any, Outcome]


def registry(workflows: Iterable[Workflow[..., Any]]) -> Registry:
    """Workflows by name."""
    return {workflow.name: workflow for workflow in workflows}


def is_run(message: Message) -> bool:
    """Whether a message is that of a run."""
    payload = message.payload
    return isinstance(payload, dict) and set(payload) == {"workflow"}


def is_async(message: Message, known: Registry) -> bool:
    """Whether the run of a message is to be run in an event loop."""
    workflow = known.get(message.payload["workflow"]) if is_run(message) else None
    return workflow is not None and workflow.is_async


def execute(
    database: Database,
    known: Registry,
    message: Message,
    *,
    begun: ActiveRun | None = None,
    reach: Reach = lambda call: call(),
) -> Outcome:
    """Run a sync workflow in this thread. `reach` calls the database, if that takes more than that.
    A run that has `begun` need not be looked for.
    """
    journal = Journal(database, message)

    def go(ask: Go) -> Gone:
        context = Context(ask.run, journal, History(ask.records), reach)
        with inside(context):
            try:
                args, kwargs = values.load_arguments(ask.workflow.signature, ask.run.input)
                return _gone(context, ask.workflow.function(*args, **kwargs))
            except BaseException as exc:
                return _gone(context, None, exc)

    return drive(
        _execution(journal, known, message, begun),
        lambda ask: reach(ask.call) if isinstance(ask, Persist) else go(ask),
    )


async def execute_async(
    database: Database,
    known: Registry,
    message: Message,
    *,
    begun: ActiveRun | None = None,
    offload: Offload,
) -> Outcome:
    """Run an async workflow in this event loop."""
    journal = Journal(database, message)

    async def go(ask: Go) -> Gone:
        context = AsyncContext(ask.run, journal, History(ask.records), offload=offload)
        try:
            args, kwargs = values.load_arguments(ask.workflow.signature, ask.run.input)
            return _gone(context, await context.run_main(ask.workflow.function, args, kwargs))
        except Exception as exc:
            return _gone(context, None, exc)

    return await drive_async(
        _execution(journal, known, message, begun),
        lambda ask: offload(ask.call) if isinstance(ask, Persist) else go(ask),
    )


def _gone(context: Context, value: Any, error: BaseException | None = None) -> Gone:
    """An interrupt counts, whatever the workflow made of it."""
    if context.interrupt is not None:
        return Gone(interrupt=context.interrupt)
    if error is not None:
        if not isinstance(error, Exception):
            raise error
        return Gone(error=error)
    try:
        context.history.check_end()
    except Interrupt as exc:
        return Gone(interrupt=exc)
    return Gone(value)


def _execution(
    journal: Journal, known: Registry, message: Message, begun: ActiveRun | None
) -> Execution:
    try:
        run: ActiveRun | None = begun or (yield Persist(journal.activate))
        if run is None or run.status in ENDED:
            yield Persist(journal.drop)
            return Settled()
        if (end := _told(run)) is not None:
            return (yield from _settle(journal, run, end))
        workflow = known.get(run.name)
        if workflow is None:
            logger.warning("run %d is of workflow %s, which is not known here", run.id, run.name)
            return GivenBack(delay=UNKNOWN_FOR)
        records = []
        if message.read_ct > 1 or run.has_past:
            records = yield Persist(partial(journal.history, run.id))
        gone = yield Go(run, records, workflow)
        return (yield from _settle(journal, run, gone, workflow.signature))
    except LeaseLost:
        logger.warning("lease lost on message %d: what its run did does not count", message.id)
        return Settled()


def _told(run: ActiveRun) -> Gone | None:
    """What a run was told while nobody ran it."""
    if run.status is RunStatus.CANCELLING:
        return Gone(interrupt=Cancel())
    if run.status is RunStatus.PAUSED:
        return Gone(interrupt=Pause())
    if run.deadline_at is not None and run.deadline_at <= run.now:
        return Gone(interrupt=Doom(RunOverdue(run.id, run.deadline_at)))
    return None


def _settle(
    journal: Journal, run: ActiveRun, gone: Gone, signature: Signature | None = None
) -> Execution:
    """Write down how it went."""
    match gone.interrupt:
        case None:
            ending = _ending(journal, run, gone, signature)
            return Settled((yield Persist(partial(journal.end, run, **ending))))
        case Suspend(until=until):
            return (yield from _wait(journal, run, until))
        case Pause():
            return (yield from _wait(journal, run, None))
        case Cancel():
            return (yield from _cancel(journal, run))
        case Doom(error=error):
            text = error_text(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
            ended = yield Persist(partial(journal.end, run, RunStatus.FAILED, error=text))
            logger.error("run %d of %s failed: %s", run.id, run.name, error)
            return Settled(ended)
        case Lost():
            raise LeaseLost(list(journal.hold.tokens))
        case Broken(error=error):
            raise error
    raise AssertionError(gone)


def _wait(journal: Journal, run: ActiveRun, until: Any) -> Execution:
    status = yield Persist(partial(journal.suspend, until=until, nudge_ct=run.nudge_ct))
    if status is RunStatus.CANCELLING:
        return (yield from _cancel(journal, run))
    return Settled()


def _cancel(journal: Journal, run: ActiveRun) -> Execution:
    return Settled((yield Persist(partial(journal.end, run, RunStatus.CANCELLED))))


def _ending(
    journal: Journal, run: ActiveRun, gone: Gone, signature: Signature | None
) -> dict[str, Any]:
    if gone.error is None:
        assert signature is not None
        try:
            text = values.dump_result(signature, gone.value, journal.database.config)
            return {"status": RunStatus.COMPLETED, "output": text}
        except InvalidPayload as exc:
            gone = Gone(error=exc)
    logger.error("run %d of %s failed", run.id, run.name, exc_info=gone.error)
    return {
        "status": RunStatus.FAILED,
        "error": error_text(gone.error),
        "failed_step": gone.error.step if isinstance(gone.error, StepFailed) else None,
    }
