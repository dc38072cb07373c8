"""A run of an async workflow, whose branches go on beside each other.

*What branches see* depends on which of two calls ended first. So calls end one at a time, in the order
that is recorded with them (`seq`), and the next one ends only when no task of the run can go on any
more without it. That is so in the first life of a run, where the order is made, as well as in all
later ones. When a run is resumed, all that is on record is handed back first. Whatever is not on record
waits for that (`_held`): nothing is done twice, or in vain, before it is known where the run stood.

*Waiting.* A call that waits for a time or for news is woken here while other branches go on. When
every branch waits for something that lasts, the run needs nobody any more, and is suspended. A branch
that waits for something else (`asyncio.sleep`, a request of its own) keeps it here, and the log says so.

*Being cancelled.* The workflow may cut a call short: by a timeout, or by cancelling its task. That is
recorded, as an end like any other, and is to happen again at the same place on replay. If it does not,
as after a retry, then the call is made again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar

from pgqrs.current import outside, store_of_call
from pgqrs.errors import InvalidArgument, LeaseLost, NotDurable, ReplayMismatch, StepTimedOut
from pgqrs.repositories.steps import Recorded
from pgqrs.types import StepInfo, StepStatus
from pgqrs.workflows.context import (
    Ask,
    Context,
    Flow,
    Invoke,
    Park,
    Persist,
    _branch,
    _current,
    _slot,
    persist,
)
from pgqrs.workflows.failures import E, Escaped, blame
from pgqrs.workflows.history import (
    EXPIRED,
    Arguments,
    Branch,
    Call,
    cut_short,
    is_cut_short,
    is_final,
    is_patch,
    level_of,
)
from pgqrs.workflows.interrupts import Closed, Interrupt, Lost, Mismatch, Pause, Suspend
from pgqrs.workflows.run_tasks import (
    DurableWait,
    RunTask,
    foreign_wait,
    is_blocked,
    place_of,
    tracked,
)
from pgqrs.workflows.threads import STEPS_OF_A_RUN, Offload, step_threads
from pgqrs.workflows.trampoline import drive_async

T = TypeVar("T")
logger = logging.getLogger("pgqrs.workflows")
STILL_FOR = 8
"""Turns of a busy event loop for which no task of a run could go on: callbacks between them take
some. In a loop with nothing else to do it is known at once.
"""
RESTLESS = 1000
"""Turns after which a task that never stops going on, without waiting for anything, is left alone."""
LOOK_AFTER, LOOK_EVERY = 0.05, 0.5
"""Seconds between two looks for news, and for the time, while a branch waits beside others."""
LEAVE_AFTER = 5.0
"""Seconds for the tasks of a run to end when they are cancelled."""


@dataclass(eq=False, slots=True)
class _Parked:
    """A call that waits."""

    until: datetime | None
    for_news: bool
    wait: DurableWait


@dataclass(eq=False, slots=True)
class _Asked:
    """A call whose end is on record."""

    call: Call
    task: asyncio.Task[Any]
    wait: DurableWait
    cut: asyncio.CancelledError | None = None
    """That the workflow cut it short, as it did before."""


@dataclass
class AsyncContext(Context):
    """A run of an async workflow."""

    offload: Offload = field(kw_only=True)
    """Calls the database for the event loop."""
    host: Offload = field(kw_only=True)
    """Does that for transactions which hold user code, and may hang."""
    is_async = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began = time.monotonic()
        self._nudge_ct = self.run.nudge_ct
        self._tasks: set[asyncio.Task[Any]] = set()
        self._task_numbers = count()
        self._script = self.history.ends(self.run.now)
        self._script.reverse()  # the next is the last
        self._passed: set[str] = set()
        self._made_again: set[str] = set()
        self.is_replaying = bool(self._script)
        self._asked: dict[str, _Asked] = {}
        self._held: list[DurableWait] = []
        self._executing: set[str] = set()
        self._at_work: set[asyncio.Task[Any]] = set()
        """Tasks in the code of a step, which is none of the workflow's."""
        self._parked: set[_Parked] = set()
        self._ordering = threading.Lock()
        self._ending: dict[str, int] = {}
        """Calls that have a place in the order, and of which the workflow does not know yet."""
        self._ended: dict[int, DurableWait] = {}
        """Those of them that are recorded."""
        self._room = asyncio.Semaphore(STEPS_OF_A_RUN)
        """For steps in threads."""
        self._stirred = asyncio.Event()
        self._named: set[asyncio.Task[Any]] = set()
        self._looks_in = LOOK_AFTER

    def time(self) -> datetime:
        """The time; as told by the database when the run was resumed, if it tells the time."""
        now = self.journal.database.now()
        return now or self.run.now + timedelta(seconds=time.monotonic() - self._began)

    def branch(self) -> Branch:
        task, here = asyncio.current_task(), _branch.get()
        if here is None or task is None:
            raise NotDurable(
                "step", "an async workflow makes durable calls from its coroutines only"
            )
        if here.owner is not task:
            here = here.fork(task)
            _branch.set(here)
        return here

    def blame(self, error: E, call: Call) -> E:
        # What other branches did meanwhile does not follow from it.
        return blame(error, call.step_id)

    def interrupted(self, interrupt: Interrupt) -> None:
        super().interrupted(interrupt)
        self._stir()

    def take(self, name: str, arguments: Arguments | None = None) -> Call:
        if not isinstance(self.interrupt, Pause):
            return super().take(name, arguments)
        self.check_place(name)
        return self.history.take(
            self.branch(), name, arguments
        )  # it does not begin: see `_perform`

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """This task is one of the run's."""
        if task not in self._tasks:
            self._tasks.add(task)
            task.add_done_callback(self._is_done)

    def next_task(self) -> int:
        return next(self._task_numbers)

    def is_call(self, coro: Any) -> bool:
        return getattr(coro, "cr_code", None) is _PERFORM

    def lost_order(self) -> None:
        reason = (
            "it begins coroutines in another order in each life; give it a list of them, or tasks"
        )
        self.interrupted(Mismatch(InvalidArgument("asyncio.as_completed", reason)))

    def _is_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._named.discard(task)
        if not task.cancelled() and isinstance(task._exception, Interrupt):
            task.exception()  # it was looked at: the run knows of it
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()

    # The order of ends

    def order(self, call: Call) -> int:
        with self._ordering:  # a transactional step asks from its thread
            if call.step_id not in self._ending:
                self._ending[call.step_id] = next(self._places)
            return self._ending[call.step_id]

    def release(self, call: Call) -> None:
        with self._ordering:
            seq = self._ending.pop(call.step_id, None)
        if seq is not None:
            self._ended.pop(seq, None)
            self._stir()

    async def _turn(self, call: Call) -> None:
        """Wait until it is this call's turn to end."""
        self._executing.discard(call.step_id)
        seq = self._ending.get(call.step_id)
        if seq is None or (len(self._tasks) == 1 and len(self._ending) == 1):
            return  # it is handed back, or there is nobody else
        wait = self._ended[seq] = DurableWait()
        self._stir()
        await wait

    # Durable calls

    def perform(self, flow: Flow[Any], call: Call | None = None) -> Coroutine[Any, Any, Any]:
        return self._perform(flow, call)

    async def _perform(self, flow: Flow[T], call: Call | None) -> T:
        if call is None:
            return await drive_async(flow, self._answer_none)
        task = asyncio.current_task()
        assert task is not None
        self.adopt(task)
        if isinstance(self.interrupt, Pause):
            await DurableWait()
        try:
            await self._admit(call, task)
            async with _place_among_others():
                if isinstance(self.interrupt, Pause):
                    await DurableWait()
                return await self._execute(flow, call)
        except Pause as exc:
            # Not raised: the workflow would end, and with it the steps of other branches.
            self.interrupted(exc)
            self._executing.discard(call.step_id)
            await DurableWait()
            raise
        except Interrupt as exc:
            self.interrupted(exc)
            raise
        except asyncio.CancelledError:
            # Also if it was held: that it is not on record says that it ended after all that is.
            if self.interrupt is None and not self._is_repeated(call):
                await self._record_cut(call, task)
            raise
        finally:
            self._executing.discard(call.step_id)
            self.release(call)
            self._stir()

    async def _execute(self, flow: Flow[T], call: Call) -> T:
        self._executing.add(call.step_id)
        try:
            value = await self._drive(flow, call)
        except Exception:
            await self._turn(call)
            raise
        await self._turn(call)
        return value

    async def _drive(self, flow: Flow[T], call: Call) -> T:
        return await drive_async(flow, partial(self._answer_async, call))

    async def _answer_none(self, ask: Ask) -> Any:
        raise AssertionError(ask)

    async def _admit(self, call: Call, task: asyncio.Task[Any]) -> None:
        """Wait until this call may end as it did before, or until the run is past its history."""
        if not self.is_replaying or call.step_id in self._passed:
            return
        asked = _Asked(call, task, DurableWait())
        if self._is_on_record(call):
            self._asked[call.step_id] = asked
        else:
            self._held.append(asked.wait)
        self._stir()
        try:
            await self._turn_on_record(asked)
        finally:
            self._asked.pop(call.step_id, None)
            self._passed.add(call.step_id)

    async def _turn_on_record(self, asked: _Asked) -> None:
        """Wait until it is this call's turn. One that is cut short as it was before gets to know it when
        it did then, not sooner.
        """
        while True:
            try:
                await asked.wait
            except asyncio.CancelledError as exc:
                if self.interrupt is not None or not self._is_repeated(asked.call):
                    raise
                asked.cut = asked.cut or exc
                asked.wait = DurableWait()
                self._stir()
                continue
            if asked.cut is not None:
                raise asked.cut
            return

    async def _answer_async(self, call: Call, ask: Ask) -> Any:
        if isinstance(ask, Persist):
            return await self._persist(ask)
        if isinstance(ask, Park):
            return await self._park(call, ask)
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        try:
            with outside():
                return await self._invoke(ask, task)
        finally:
            self._at_work.discard(task)

    async def _invoke(self, ask: Invoke, task: asyncio.Task[Any]) -> Any:
        """Call user code. What it raises that is no `Exception` is raised as `Escaped`, unless this
        task was cancelled meanwhile.
        """
        before = task.cancelling()
        try:
            if asyncio.iscoroutinefunction(ask.function):
                return await _in_time(ask, ask.function(*ask.args, **ask.kwargs))
            async with self._room:
                step = partial(self.invoke, ask.function, *ask.args, **ask.kwargs)
                return await _in_time(ask, step_threads.run(step))
        except asyncio.CancelledError as exc:
            if task.cancelling() > before:
                raise
            raise Escaped(exc) from exc
        except Exception:
            raise
        except BaseException as exc:
            if self.is_failure(exc):
                raise Escaped(exc) from exc
            raise

    async def _persist(self, ask: Persist) -> Any:
        """Call the database, to the end: what was sent cannot be taken back."""
        send = self.host if ask.holds_user_code else self.offload
        with outside():
            sent = asyncio.ensure_future(send(ask.call))
        cancelled = None
        while not sent.done():
            try:
                await asyncio.wait({sent})
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            if not sent.cancelled():
                sent.exception()  # it was looked at
            raise cancelled
        return sent.result()

    async def _park(self, call: Call, ask: Park) -> None:
        """Wait, until a time or for news, or until the run ends here."""
        self.release(call)
        self._executing.discard(call.step_id)
        parked = _Parked(ask.until, ask.for_news, DurableWait())
        self._parked.add(parked)
        self._stir()
        try:
            with _making_room() as room:
                await parked.wait
            await room()
        finally:
            self._parked.discard(parked)
        self._executing.add(call.step_id)

    def _is_on_record(self, call: Call) -> bool:
        return call.record is not None and is_final(call.record, self.run.now)

    def _is_repeated(self, call: Call) -> bool:
        """Whether it is on record that the workflow cut this call short."""
        record = call.record
        if record is None or call.step_id in self._made_again:
            return False
        return is_cut_short(record)

    async def _record_cut(self, call: Call, task: asyncio.Task[Any]) -> None:
        """The workflow does not wait for the end of this call."""
        if call.step_id.endswith(EXPIRED):
            return  # a timeout that is left in time
        level = task.level if isinstance(task, RunTask) else None
        step = self.step(call, StepStatus.CANCELLED, error=cut_short(level))
        flow = persist(partial(self.journal.record_cancelled, self.id, step))
        try:
            recorded: Recorded = await self._drive(flow, call)
            self.check(recorded)
            await self._turn(call)
        except Interrupt as exc:
            self.interrupted(exc)
            raise

    # The whole run

    async def run_main(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the workflow; returns its value, unless it was interrupted."""
        loop = asyncio.get_running_loop()
        with tracked(loop):
            main = RunTask(self._main(function, args, kwargs), owner=self, loop=loop)
            try:
                while not main.done():
                    self._stirred.clear()
                    await self._settle(loop)
                    if main.done() or await self._is_over():
                        break
                if main.done() and self.interrupt is None:
                    if main.cancelled():  # by its own code: nobody else has
                        raise Escaped(asyncio.CancelledError("the workflow cancelled itself"))
                    return main.result()
                return None
            finally:
                await self._clear_away(main)

    async def _main(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.root.owner = asyncio.current_task()
        _branch.set(self.root)
        _current.set(self)
        store_of_call.set(self.store)
        try:
            return await function(*args, **kwargs)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as exc:
            if self.is_failure(exc):
                raise Escaped(exc) from exc  # an exit would end the event loop
            raise

    async def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until no task of the run can go on."""
        ready = getattr(loop, "_ready", None)
        for turn in range(RESTLESS):
            await asyncio.sleep(0)
            if ready is not None and not ready:
                return  # nothing at all is about to go on
            if turn >= STILL_FOR and all(map(is_blocked, self._tasks - self._at_work)):
                return

    async def _is_over(self) -> bool:
        """Let one thing happen for which the tasks wait. True if nothing can happen here."""
        if self.interrupt is not None:
            # Steps that are being done are finished first if the run is only to pause.
            if not (isinstance(self.interrupt, Pause) and self._executing):
                return True
        elif self.is_replaying:
            if self._hand_back():
                return self.interrupt is not None
        elif self._end_next() or self._wake_next():
            return False
        elif self._rests():
            until = min((p.until for p in self._parked if p.until is not None), default=None)
            self.interrupt = Suspend(until, self._nudge_ct)
            return True
        await self._wait()
        return False

    def _hand_back(self) -> bool:
        """Let the next call on record end. False if the workflow has yet to ask for it."""
        record = self._next_on_record()
        if record is None:
            self._go_live()
            return True
        asked = self._asked.get(record.step_id)
        if asked is None:
            return self._miss(record)
        if asked.cut is not None or not is_cut_short(record):
            self._deliver(asked)
            return True
        level = level_of(record)
        if level is not None and isinstance(asked.task, RunTask) and asked.task.expire(level):
            return True
        if self._foreign_waits():
            return False  # it may be cut short yet
        self._made_again.add(record.step_id)  # it is not cut short this time
        self._deliver(asked)
        return True

    def _next_on_record(self) -> StepInfo | None:
        while self._script and self._script[-1].step_id in self._passed:
            self._script.pop()
        return self._script[-1] if self._script else None

    def _deliver(self, asked: _Asked) -> None:
        self._passed.add(asked.call.step_id)
        if not asked.wait.done():
            asked.wait.set_result(None)

    def _miss(self, record: StepInfo) -> bool:
        """The next call on record was not asked for."""
        if self._foreign_waits():
            return False  # it may be yet
        if is_patch(record) or is_cut_short(record):
            self._passed.add(record.step_id)  # it need not be: it was removed, or has no result
            return True
        if record.seq is None and self._asked:
            # From before the order was recorded: then it is not known that exactly.
            self._deliver(next(iter(self._asked.values())))
            return True
        asked = next(iter(self._asked), None) or "nothing that is on record"
        self.interrupted(Mismatch(ReplayMismatch(asked, f"step {record.step_id}")))
        return True

    def _go_live(self) -> None:
        """The run is where it was. What is not on record may begin."""
        self.is_replaying = False
        held, self._held = self._held, []
        for wait in held:
            if not wait.done():
                wait.set_result(None)
        for task in list(self._tasks):
            if isinstance(task, RunTask):
                task.catch_up()

    def _end_next(self) -> bool:
        """Let the call end that is next in the order, if it is recorded."""
        with self._ordering:
            seq = min(self._ending.values(), default=None)
        wait = None if seq is None else self._ended.pop(seq, None)
        if wait is None:
            return False
        if not wait.done():
            wait.set_result(None)
        return True

    def _wake_next(self) -> bool:
        """Let the call go on whose time has come first."""
        times = [parked for parked in self._parked if parked.until is not None]
        first = min(times, key=lambda parked: parked.until or self.run.now, default=None)
        if first is None or first.until is None or first.until > self.time():
            return False
        self._wake(first)
        return True

    def _wake(self, parked: _Parked) -> None:
        self._parked.discard(parked)
        if not parked.wait.done():
            parked.wait.set_result(None)

    def _rests(self) -> bool:
        """Whether all tasks wait for something that lasts."""
        if not self._parked or self._executing or self._ending:
            return False
        return not self._foreign_waits()

    def _foreign_waits(self) -> bool:
        """Whether a task waits for something that is not durable. The log names it once."""
        found = False
        for task in list(self._tasks):
            what = foreign_wait(task, self._tasks)
            if what is None:
                continue
            found = True
            if task not in self._named:
                self._named.add(task)
                logger.warning(
                    "run %d of %s is kept here by a branch that waits for something that is not "
                    "durable: %s waits for %s",
                    self.id,
                    self.run.name,
                    place_of(task),
                    what,
                )
        return found

    async def _wait(self) -> None:
        """Until something stirs, it is time, or there is news."""
        waits_for_news = any(parked.for_news for parked in self._parked)
        limit = self._looks_in if waits_for_news else LOOK_EVERY
        times = [parked.until for parked in self._parked if parked.until is not None]
        if times:
            limit = max(0.0, min(limit, (min(times) - self.time()).total_seconds()))
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._stirred.wait()
                return
        if waits_for_news and not self.is_replaying and self.interrupt is None:
            self._looks_in = min(2 * self._looks_in, LOOK_EVERY)
            await self._look()

    async def _look(self) -> None:
        """Look whether there is news. What else the run was told is seen at its next record, unless no
        step is being done.
        """
        try:
            told = await self.offload(partial(self.journal.look, self.id))
            if not self._executing:
                self.check(told)
        except LeaseLost:
            self.interrupted(Lost())
            return
        except Interrupt as exc:
            self.interrupted(exc)
            return
        except Exception:
            logger.exception("run %d could not look for news", self.id)
            return
        if told.nudge_ct != self._nudge_ct:
            self._nudge_ct, self._looks_in = told.nudge_ct, LOOK_AFTER
            for parked in [parked for parked in self._parked if parked.for_news]:
                self._wake(parked)

    async def _clear_away(self, main: asyncio.Task[Any]) -> None:
        """Nothing of the run goes on after this."""
        if self.interrupt is None:
            self.interrupt, is_closed = Closed(), True
        else:
            is_closed = False
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            _, stubborn = await asyncio.wait(left, timeout=LEAVE_AFTER)
            for task in stubborn:
                logger.error(
                    "a task of run %d does not end when it is cancelled: %s",
                    self.id,
                    place_of(task),
                )
        for task in (main, *left):
            if task.done() and not task.cancelled():
                task.exception()  # it was looked at
        if is_closed:
            self.interrupt = None
        self.has_ended = True


_PERFORM = AsyncContext._perform.__code__


async def _in_time(ask: Invoke, call: Awaitable[Any]) -> Any:
    if ask.timeout is None:
        return await call
    try:
        async with asyncio.timeout(ask.timeout) as limit:
            return await call
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise StepTimedOut(ask.step_id, ask.timeout) from exc


def _place_among_others() -> AbstractAsyncContextManager[Any]:
    """The place of a call among those of `map` that are made at the same time.

    It is taken inside of the call: one that is cut short while it waits for its place is on record
    like all others.
    """
    return _slot.get() or nullcontext()


@contextmanager
def _making_room() -> Iterator[Callable[[], Awaitable[None]]]:
    """Who waits leaves its place to others, and takes one again before it goes on."""
    slot = _slot.get()
    if slot is not None:
        slot.release()

    async def take_again() -> None:
        if slot is not None:
            await slot.acquire()

    yield take_again
