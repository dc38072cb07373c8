"""The run that is going on here: what its durable calls are made on.

A durable call is a generator (see `flows`) that yields what it needs: a call of the database, a call
of user code, or to wait. It is written once. A sync run answers it in its thread; an async run
awaits the answers, so that the event loop is never blocked.

*Waiting.* In a sync run a call that has to wait raises `Suspend`, and the run ends here until it is
resumed. An async run may have other branches that can go on: the call *parks*, and only when nothing
else goes on does the run end here (`AsyncContext.settle`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from pgqrs.errors import InvalidArgument, RunOverdue, StepTimedOut
from pgqrs.repositories.starting import ActiveRun
from pgqrs.repositories.steps import Recorded
from pgqrs.types import RunStatus
from pgqrs.workflows.history import Branch, Call, History
from pgqrs.workflows.interrupts import Cancel, Doom, Interrupt, Pause, Suspend
from pgqrs.workflows.journal import Journal
from pgqrs.workflows.trampoline import drive, drive_async

T = TypeVar("T")
QUIET_FOR = 50
"""Turns of the event loop without anything new, after which an async run with branches is idle."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Call the database."""

    call: Callable[[], Any]


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
    """Wait until a time, or for news; there is no answer while this run goes on here."""

    until: datetime | None


Ask = Persist | Invoke | Park
Flow = Generator[Ask, Any, T]
"""A durable call."""

_current: ContextVar[Context | None] = ContextVar("pgqrs_run", default=None)
_branch: ContextVar[Branch | None] = ContextVar("pgqrs_branch", default=None)
_slot: ContextVar[asyncio.Semaphore | None] = ContextVar("pgqrs_slot", default=None)
"""The place among those that may go on at the same time; who parks makes room."""


def current() -> Context | None:
    """The run that this code is part of; None outside, and inside of steps."""
    return _current.get()


@contextmanager
def outside() -> Iterator[None]:
    """Code in here is part of no run: a step is user code like any other."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def inside(context: Context) -> Iterator[None]:
    """Code in here is part of a run."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


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
    is_async = False

    @property
    def id(self) -> int:
        return self.run.id

    @property
    def now(self) -> datetime:
        """When this run was resumed."""
        return self.run.now

    def take(self, name: str) -> Call:
        """The workflow calls this."""
        if self.interrupt is not None:
            raise self.interrupt
        try:
            return self.history.take(self.branch(), name)
        except Interrupt as exc:
            self.interrupted(exc)
            raise

    def branch(self) -> Branch:
        """The line of execution this code is in."""
        return self.root

    def interrupted(self, interrupt: Interrupt) -> None:
        """The run does not go on here."""
        self.interrupt = self.interrupt or interrupt

    def check(self, recorded: Recorded) -> None:
        """A boundary between two steps: the run may have been told to stop."""
        if recorded.status is RunStatus.CANCELLING:
            raise Cancel
        if recorded.status is RunStatus.PAUSED:
            raise Pause
        if recorded.overdue:
            raise Doom(RunOverdue(self.id, self.run.deadline_at))

    def perform(self, flow: Flow[Any]) -> Any:
        """Make a durable call: its value, or in an async run what to await for it."""
        try:
            return self.drive(flow)
        except Interrupt as exc:
            self.interrupted(exc)
            raise

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
                return ask.function(*ask.args, **ask.kwargs)
            return _in_time(ask, ask.timeout)


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


@dataclass
class AsyncContext(Context):
    """A run of an async workflow."""

    offload: Callable[[Callable[[], Any]], Awaitable[Any]] = field(kw_only=True)
    """Calls the database for the event loop."""
    is_async = True

    def __post_init__(self) -> None:
        self._parked: list[datetime | None] = []
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._stirred = asyncio.Event()
        self._changes = 0

    def branch(self) -> Branch:
        task, here = asyncio.current_task(), _branch.get()
        if here is None or task is None:
            raise InvalidArgument(
                "step", "an async workflow calls its steps from coroutines, not from threads"
            )
        if here.owner is not task:
            here = here.fork(task)
            _branch.set(here)
        return here

    def interrupted(self, interrupt: Interrupt) -> None:
        super().interrupted(interrupt)
        self._stir()

    def perform(self, flow: Flow[Any]) -> Coroutine[Any, Any, Any]:
        return self._perform(flow)

    async def _perform(self, flow: Flow[T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        self._changes += 1
        try:
            return await drive_async(flow, self._answer_async)
        except Interrupt as exc:
            self.interrupted(exc)
            raise
        finally:
            self._in_flight.discard(task)
            self._stir()

    async def _answer_async(self, ask: Ask) -> Any:
        if isinstance(ask, Persist):
            return await self.offload(ask.call)
        if isinstance(ask, Park):
            return await self._park(ask.until)
        with outside():
            if asyncio.iscoroutinefunction(ask.function):
                call = ask.function(*ask.args, **ask.kwargs)
            else:
                call = asyncio.to_thread(ask.function, *ask.args, **ask.kwargs)
            if ask.timeout is None:
                return await call
            try:
                async with asyncio.timeout(ask.timeout) as limit:
                    return await call
            except TimeoutError as exc:
                if not limit.expired():
                    raise
                raise StepTimedOut(ask.step_id, ask.timeout) from exc

    async def _park(self, until: datetime | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.discard(task)
        self._parked.append(until)
        self._changes += 1
        slot = _slot.get()
        if slot is not None:
            slot.release()
        self._stir()
        await asyncio.Event().wait()

    def _stir(self) -> None:
        self._stirred.set()

    async def run_main(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the workflow; returns its value, unless it was interrupted."""
        main = asyncio.create_task(self._main(function, args, kwargs))
        stirred = None
        try:
            while not main.done():
                stirred = asyncio.ensure_future(self._stirred.wait())
                await asyncio.wait({main, stirred}, return_when=asyncio.FIRST_COMPLETED)
                stirred.cancel()
                self._stirred.clear()
                if main.done() or await self._is_over(main):
                    break
            if main.done() and self.interrupt is None:
                return main.result()
            return None
        finally:
            if stirred is not None:
                stirred.cancel()
            await self._clear_away(main)

    async def _main(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.root.owner = asyncio.current_task()
        _branch.set(self.root)
        _current.set(self)
        return await function(*args, **kwargs)

    async def _is_over(self, main: asyncio.Task[Any]) -> bool:
        """Whether nothing can go on here."""
        if self.interrupt is not None:
            # Steps that are being done are finished first if the run is only to pause.
            return not (isinstance(self.interrupt, Pause) and self._in_flight)
        if not self._parked or self._in_flight:
            return False
        if not await self._is_quiet(main):
            return False
        self.interrupt = Suspend(min((t for t in self._parked if t is not None), default=None))
        return True

    async def _is_quiet(self, main: asyncio.Task[Any]) -> bool:
        """Whether no branch is about to go on."""
        seen = self._changes
        for _ in range(QUIET_FOR):
            await asyncio.sleep(0)
            if main.done() or self._in_flight or self._changes != seen or self.interrupt:
                return False
        return True

    async def _clear_away(self, main: asyncio.Task[Any]) -> None:
        left = [task for task in (main, *self._in_flight) if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if main.done() and not main.cancelled():
            main.exception()  # it was looked at
