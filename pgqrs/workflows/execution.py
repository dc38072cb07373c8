"""Running a run whose message was claimed: from the claim to its end, or to where it waits.

`execute` and `execute_async` answer the same generator, as durable calls are answered (see `context`).
What becomes of the message is settled here, in the transactions that change the run; a worker has
nothing left to do with it. Errors of the database are raised: then the claim counts as an attempt, and
the run is resumed when the message comes back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pgqrs.codecs import Call, Signature
from pgqrs.current import StoreOfCall
from pgqrs.error_texts import as_logged, error_text
from pgqrs.errors import (
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    PgqrsError,
    RecordUnreadable,
    RunOverdue,
)
from pgqrs.outcomes import GivenBack, Outcome, Settled
from pgqrs.repositories.starting import ActiveRun
from pgqrs.repositories.workflows import Ending
from pgqrs.stores import Database
from pgqrs.types import ENDED, Message, RunStatus
from pgqrs.workflows import values
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import Context, Persist, inside
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.failures import Escaped, failures_of
from pgqrs.workflows.history import History
from pgqrs.workflows.inheriting import watch_threads
from pgqrs.workflows.interrupts import (
    Broken,
    Cancel,
    Doom,
    Interrupt,
    Lost,
    Mismatch,
    Pause,
    Suspend,
)
from pgqrs.workflows.journal import Journal
from pgqrs.workflows.threads import Offload
from pgqrs.workflows.trampoline import drive, drive_async

logger = logging.getLogger("pgqrs.workflows")
UNKNOWN_FOR = 10.0
"""Seconds after which a run of a workflow that is not known here is offered again."""
Registry = Mapping[str, Workflow[..., Any]]
Reach = Callable[[Callable[[], Any]], Any]
Watch = Callable[[Callable[[], None]], object]


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
    """Workflows by name. What is none is refused by its name."""
    known = list(workflows)
    for given in known:
        if not isinstance(given, Workflow):
            hint = (
                "give it as tasks=[…]"
                if hasattr(given, "enqueue")
                else "decorate it with @workflow"
            )
            raise InvalidArgument("workflows", f"{given!r} is no workflow; {hint}")
    return {workflow.name: workflow for workflow in known}


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
    watch: Watch = lambda show: None,
    in_script: bool = False,
    store: StoreOfCall | None = None,
) -> Outcome:
    """Run a sync workflow in this thread. `reach` calls the database, if that takes more than that.
    A run that has `begun` need not be looked for. `watch` is given what to call every second or so, to
    show which steps take long. `store` is that of its steps, if threads cannot use the database.
    """
    journal = Journal(database, message)
    watch_threads()

    def go(ask: Go) -> Gone:
        context = Context(
            *(ask.run, journal, History(ask.records), reach),
            in_script=in_script,
            given_store=store,
        )
        watch(context.show_long_steps)
        with inside(context):
            try:
                args, kwargs = _arguments(ask)
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
    host: Offload | None = None,
    watch: Watch = lambda show: None,
    in_script: bool = False,
    store: StoreOfCall | None = None,
) -> Outcome:
    """Run an async workflow in this event loop. `offload` calls the database; `host` does that for
    transactions which hold user code.
    """
    journal = Journal(database, message)
    watch_threads()

    async def go(ask: Go) -> Gone:
        context = AsyncContext(
            *(ask.run, journal, History(ask.records)),
            given_store=store,
            offload=offload,
            host=host or offload,
            in_script=in_script,
        )
        watch(context.show_long_steps)
        try:
            args, kwargs = _arguments(ask)
            return _gone(context, await context.run_main(ask.workflow.function, args, kwargs))
        except (Exception, Interrupt) as exc:
            return _gone(context, None, exc)

    return await drive_async(
        _execution(journal, known, message, begun),
        lambda ask: offload(ask.call) if isinstance(ask, Persist) else go(ask),
    )


def _arguments(ask: Go) -> Call:
    """The arguments of the run. If they cannot be read, and the run has done something already, then it
    is the code that was changed.
    """
    signature = ask.workflow.signature
    try:
        call = values.load_arguments(signature, ask.run.input)
        signature.bind(call)
    except Exception as exc:
        if not ask.records:
            raise
        reason = f"{type(exc).__name__}: {exc}"
        raise Mismatch(RecordUnreadable("its arguments", reason)) from exc
    return call


def _gone(context: Context, value: Any, error: BaseException | None = None) -> Gone:
    """An interrupt counts, whatever the workflow made of it."""
    if context.interrupt is not None:
        return Gone(interrupt=context.interrupt)
    if isinstance(error, Mismatch):
        return Gone(interrupt=error)
    if isinstance(error, Escaped):
        error = error.error
    elif error is not None and not isinstance(error, Exception) and not context.is_failure(error):
        raise error
    if error is not None:
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
        if run is None:
            name = message.payload["workflow"]
            error = f"the message names the workflow {name}, but no run has this message"
            if (yield Persist(partial(journal.refuse, error))):
                logger.error("message %d was archived as failed: %s", message.id, error)
            return Settled()
        if run.status in ENDED:
            yield Persist(journal.drop)
            return Settled()
        if (end := _told(run)) is not None:
            return (yield from _settle(journal, run, end))
        workflow = known.get(run.name)
        if workflow is None:
            logger.warning("run %d is of workflow %s, which is not known here", run.id, run.name)
            return GivenBack(delay=UNKNOWN_FOR)
        if message.attempt > 1:
            yield Persist(journal.forgive)
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
            return Settled((yield Persist(partial(journal.end, run, ending))))
        case Suspend(until=until, nudge_ct=nudge_ct):
            seen = run.nudge_ct if nudge_ct is None else nudge_ct
            return (yield from _wait(journal, run, until, seen))
        case Pause():
            return (yield from _wait(journal, run, None, run.nudge_ct))
        case Mismatch(error=error):
            return (yield from _park(journal, run, error))
        case Cancel():
            return (yield from _cancel(journal, run))
        case Doom(error=error):
            failed = Ending(RunStatus.FAILED, error=_said(journal, error))
            ended = yield Persist(partial(journal.end, run, failed))
            logger.error("run %d of %s failed: %s", run.id, run.name, error)
            return Settled(ended)
        case Lost():
            raise LeaseLost(list(journal.hold.tokens))
        case Broken(error=error):
            raise error
    raise AssertionError(gone)


def _park(journal: Journal, run: ActiveRun, error: PgqrsError) -> Execution:
    """The run cannot go on with this code. It is not failed for that: it goes on with other code."""
    reason = _said(journal, error)
    logger.error("run %d of %s is paused: %s", run.id, run.name, reason)
    status = yield Persist(partial(journal.park, reason))
    if status is RunStatus.CANCELLING:
        return (yield from _cancel(journal, run))
    return Settled()


def _said(journal: Journal, error: PgqrsError) -> str:
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    return error_text(text, journal.database.config) or ""


def _wait(journal: Journal, run: ActiveRun, until: Any, nudge_ct: int) -> Execution:
    status = yield Persist(partial(journal.suspend, until=until, nudge_ct=nudge_ct))
    if status is RunStatus.CANCELLING:
        return (yield from _cancel(journal, run))
    return Settled()


def _cancel(journal: Journal, run: ActiveRun) -> Execution:
    return Settled((yield Persist(partial(journal.end, run, Ending(RunStatus.CANCELLED)))))


def _ending(journal: Journal, run: ActiveRun, gone: Gone, signature: Signature | None) -> Ending:
    if gone.error is None:
        assert signature is not None
        try:
            text = values.dump_result(signature, gone.value, journal.database.config)
            return Ending(RunStatus.COMPLETED, output=text)
        except InvalidPayload as exc:
            gone = Gone(error=exc)
    text, traceback = as_logged(gone.error, journal.database.config)
    logger.error("run %d of %s failed%s", run.id, run.name, text, exc_info=traceback)
    failures = failures_of(gone.error)
    return Ending(
        RunStatus.FAILED,
        error=error_text(gone.error, journal.database.config),
        failed_step=failures.steps[0] if failures.steps else None,
        failed_by=json.dumps(failures._asdict()) if failures.steps else None,
    )
