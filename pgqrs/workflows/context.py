"""The run that is going on here: what its durable calls are made on.

A durable call is a generator (see `flows`) that yields what it needs: a call of the database, a call
of user code, or to wait. It is written once. A sync run answers it in its thread; an async run
awaits the answers, so that the event loop is never blocked (see `async_context`).

*Waiting.* In a sync run a call that has to wait raises `Suspend`, and the run ends here until it is
resumed. An async run may have other branches that can go on: there the call waits beside them, and
only when all of them wait does the run end here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

from pgqrs.current import StoreOfCall, outside, run_here, store_of_call, store_on
from pgqrs.errors import LeaseLost, NotDurable, RunOverdue, StepTimedOut
from pgqrs.producer import NewMessages
from pgqrs.repositories.starting import ActiveRun
from pgqrs.repositories.steps import FINAL, NewStep, Recorded
from pgqrs.stores import Database
from pgqrs.types import MessageId, RunStatus, StepStatus
from pgqrs.workflows.failures import E, Escaped, blame
from pgqrs.workflows.history import (
    PATCH,
    Arguments,
    Branch,
    Call,
    History,
    cut_short,
    is_cut_short,
    level_of,
)
from pgqrs.workflows.interrupts import (
    Broken,
    Cancel,
    Doom,
    Expired,
    Interrupt,
    Lost,
    Pause,
    Suspend,
)
from pgqrs.workflows.journal import Journal, RecordedBefore, StepError
from pgqrs.workflows.trampoline import drive

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Persist:
    """Call the database."""

    call: Callable[[], Any]
    holds_user_code: bool = False
    """True if user code is called in the transaction, and may hang there."""


@dataclass(frozen=True, slots=True)
class Invoke:
    """Call user code, for so long at most."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step_id: str
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """Wait until a time, or for news. There may be no answer while this run goes on here."""

    until: datetime | None
    for_news: bool = False
    """Whether news of the run end the wait, too."""


Ask = Persist | Invoke | Park
Flow = Generator[Ask, Any, T]
"""A durable call."""

_current: ContextVar[Context | None] = run_here
_branch: ContextVar[Branch | None] = ContextVar("pgqrs_branch", default=None)
_slot: ContextVar[asyncio.Semaphore | None] = ContextVar("pgqrs_slot", default=None)
"""The place among those that may go on at the same time; who waits makes room."""


def current() -> Context | None:
    """The run that this code is part of; None outside, and inside of steps."""
    return _current.get()


@contextmanager
def inside(context: Context) -> Iterator[None]:
    """Code in here is part of a run, up to its end."""
    token, store = _current.set(context), store_of_call.set(context.store)
    try:
        yield
    finally:
        context.has_ended = True
        store_of_call.reset(store)
        _current.reset(token)


LONG = 1.0
"""Seconds after which a step is shown to others while it is being done."""


class InFlight(Protocol):
    """An attempt at a step that is being made."""

    again: bool
    """True if there is a record of the step already."""
    began: float
    is_shown: bool

    def running(self) -> NewStep:
        """Returns what others see while it is being made."""


@dataclass
class Context:
    """A run that goes on here."""

    run: ActiveRun
    journal: Journal
    history: History
    reach: Callable[[Callable[[], Any]], Any] = lambda call: call()
    """Calls the database for a thread."""
    interrupt: Interrupt | None = None
    root: Branch = field(default_factory=Branch)
    in_script: bool = False
    """True if a script runs it, not a worker: then an exit or an interrupt is meant for the script."""
    given_store: StoreOfCall | None = None
    is_async = False

    def __post_init__(self) -> None:
        self.store = self.given_store or store_on(self.journal.database)
        """The store of the run, for its steps."""
        self.has_ended = False
        self._thread = threading.get_ident()
        self._places = count(self.history.last_seq + 1)
        self.in_flight: dict[str, InFlight] = {}
        self.limits: list[tuple[datetime, object]] = []
        """When the timeouts are over that this code is in, the outermost first."""

    @property
    def id(self) -> int:
        return self.run.id

    def time(self) -> datetime:
        """The time; in a sync run that at which it was resumed, since it cannot wait here."""
        return self.run.now

    def take(self, name: str, arguments: Arguments | None = None) -> Call:
        """The workflow calls this."""
        self.check_place(name)
        if self.interrupt is not None:
            raise self.interrupt
        try:
            return self.history.take(self.branch(), name, arguments)
        except Interrupt as exc:
            self.interrupted(exc)
            raise

    def take_patch(self, name: str) -> Call | None:
        """The workflow asks whether to take a new way; None if it has been past this place before."""
        self.check_place(PATCH + name)
        branch, history = self.branch(), self.history
        if history.is_behind(branch) and not history.has_patch(branch, name):
            return None
        return self.take(PATCH + name)

    def check_place(self, what: str) -> None:
        """Refuse a call that comes from where its place in the history could not be known."""
        if threading.get_ident() != self._thread:
            raise NotDurable(
                what,
                "a run does not record what threads of the workflow's own do; call it in the workflow "
                "itself (pgqrs.map has threads for steps), or start the thread in a step",
            )
        if self.has_ended:
            raise NotDurable(what, f"run {self.id} has ended, or goes on elsewhere")

    def branch(self) -> Branch:
        """The line of execution this code is in."""
        return self.root

    # Effects: see `effects`, which needs what is here

    def enqueue(self, database: Database | None, new: NewMessages) -> list[MessageId]:
        """Add messages, once. They are in the run's store, which `database` has to be, if given."""
        from pgqrs.workflows.effects import enqueue

        return enqueue(self, database, new)

    async def enqueue_async(
        self,
        database: Database | None,
        new: NewMessages,
        *,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
        sender: Callable[[], int | None] | None = None,
    ) -> list[MessageId]:
        """The same in an async workflow. `call` reaches the database, and `sender` is who sends."""
        from pgqrs.workflows.effects import enqueue_async

        return await enqueue_async(self, database, new, call=call, sender=sender)

    def interrupted(self, interrupt: Interrupt) -> None:
        """The run does not go on here."""
        self.interrupt = self.interrupt or interrupt

    def invoke(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call user code. What it raises that is no `Exception` is raised as `Escaped`."""
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as exc:
            if self.is_failure(exc):
                raise Escaped(exc) from exc
            raise

    def is_failure(self, error: BaseException) -> bool:
        """True if what user code raised is its failure, and not meant for others."""
        if isinstance(error, Interrupt):
            return False
        if isinstance(error, asyncio.CancelledError):
            return not in_event_loop()  # there a statement raises that the task was cancelled
        return not self.in_script

    def blame(self, error: E, call: Call) -> E:
        """The error that a durable call raises, as the failure of that call."""
        return blame(error, call.step_id, after=self.root.position)

    def check(self, recorded: Recorded) -> None:
        """A boundary between two steps: the run may have been told to stop."""
        if recorded.status is RunStatus.CANCELLING:
            raise Cancel
        if recorded.status is RunStatus.PAUSED:
            raise Pause
        if recorded.overdue:
            raise Doom(RunOverdue(self.id, self.run.deadline_at))

    # Records

    def step(self, call: Call, status: StepStatus, **values: Any) -> NewStep:
        """What is to be recorded of a call. One that ends gets its place among the others."""
        seq = self.order(call) if status in FINAL else None
        return NewStep(call.step_id, call.position, status, seq=seq, digest=call.digest, **values)

    def order(self, call: Call) -> int:
        """The place of a call that ends now among all that the run gets to know."""
        return next(self._places)

    def release(self, call: Call) -> None:
        """The call did not end after all."""

    def show_long_steps(self) -> None:
        """Write down which steps have been at work for long. Whoever renews the lease of the run calls
        this every second or so, from a thread of its own: steps that are quick cost nothing more.
        """
        now = time.monotonic()
        for step in list(self.in_flight.values()):
            if not step.is_shown and now - step.began >= LONG:
                step.is_shown = True
                self.journal.show(self.id, step.running(), again=step.again)

    # Durable calls

    def perform(self, flow: Flow[Any], call: Call | None = None) -> Any:
        """Make a durable call: its value, or in an async run what to await for it."""
        try:
            return self.drive_call(flow, call)
        except Expired:
            raise
        except Interrupt as exc:
            self.interrupted(exc)
            raise

    def directly(self, call: Callable[..., T], *args: Any) -> T:
        """Make a durable call that is a plain function of the run."""
        try:
            return call(self, *args)
        except Interrupt as exc:
            self.interrupted(exc)
            raise

    def record(self, step: NewStep, *, is_first: bool) -> None:
        """Write down a step; what `write_down` does, without a generator."""
        record = partial(self.journal.record, self.run.id, step, is_first=is_first)
        try:
            recorded: Recorded = self.reach(record)
        except LeaseLost as exc:
            raise Lost from exc
        except Exception as exc:
            raise Broken(exc) from exc
        self.check(recorded)

    def drive_call(self, flow: Flow[T], call: Call | None) -> T:
        """Answer what a durable call asks for, which a timeout may cut short."""
        if self.limits and call is not None:
            return self._drive_limited(flow, call)
        return self.drive(flow)

    def drive(self, flow: Flow[T]) -> T:
        """Answer what a durable call asks for."""
        return drive(flow, self._answer)

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Persist):
            return self.reach(ask.call)
        if isinstance(ask, Park):
            raise Suspend(ask.until)
        with outside():
            if ask.timeout is None:
                return self.invoke(ask.function, *ask.args, **ask.kwargs)
            return self.invoke(_in_time, ask, ask.timeout)

    def _drive_limited(self, flow: Flow[T], call: Call) -> T:
        """A call inside of a timeout: where it would wait beyond the limit, it is cut short. That is on
        record, so that it is cut short whenever the run is replayed.
        """
        level = _limit_of(call)
        if level is not None and level < len(self.limits):
            raise Expired(self.limits[level][1])
        try:
            return self.drive(flow)
        except Suspend as exc:
            level = min(range(len(self.limits)), key=lambda level: self.limits[level][0])
            limit, timer = self.limits[level]
            if limit > self.time():
                until = limit if exc.until is None else min(limit, exc.until)
                raise Suspend(until) from None
            step = self.step(call, StepStatus.CANCELLED, error=cut_short(level))
            self.check(self.drive(persist(lambda: self.journal.record_cancelled(self.id, step))))
            raise Expired(timer) from None


def persist(call: Callable[[], T], *, holds_user_code: bool = False) -> Flow[T]:
    """Call the database. Its errors are none of the workflow's: they end the run here."""
    try:
        result: T = yield Persist(call, holds_user_code)
    except (StepError, RecordedBefore):
        raise
    except LeaseLost as exc:
        raise Lost from exc
    except Exception as exc:
        raise Broken(exc) from exc
    return result


def in_event_loop() -> bool:
    """True if this is the thread of an event loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _limit_of(call: Call) -> int | None:
    """Which timeout cut the call short when it was recorded."""
    record = call.record
    return level_of(record) if record is not None and is_cut_short(record) else None


def _in_time(ask: Invoke, timeout: float) -> Any:
    """In a thread that is left behind if it takes too long: nothing can end it."""
    outcome: list[Any] = []
    context = copy_context()

    def call() -> None:
        try:
            outcome.append((True, context.run(ask.function, *ask.args, **ask.kwargs)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=call, name=f"pgqrs step {ask.step_id}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise StepTimedOut(ask.step_id, timeout)
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value
