"""The runtime that applications start: claims messages, has them handled, ends them.

One loop claims and ends; handlers run in slots (`slots`). A keeper (`keeper`) renews leases in a thread
of its own, so nothing a handler does can stop that; and what else a worker has to do, its duties, have
a thread each (`duties`). A round of the loop:

1. end what handlers are done with, many at a time (`endings`);
2. claim as many messages as there are free slots, and a few more when handlers are quick, so that
   no slot waits for the database (`prefetch` is the most; a worker never claims more than its slots
   will begin within a tenth of a second);
3. wait: for a handler, for a doorbell (`stores.wakeups`), or for the next delayed message.

Errors of the database do not end the loop. Outcomes are kept until they can be stored, and leases are
renewed before anything new is claimed. Whoever lost its lease meanwhile cannot end the message: the
database refuses that, and the worker logs it. How a worker leaves, also if something hangs, is in
`leaving`.

*The seam for other kinds of work.* The loop knows nothing of tasks or workflows. `routes` are functions
that turn a message into a `Job`, or into None if it is not theirs; the first job counts (see
`pgqrs.handlers`). Its `run` is called with a `Delivery`: in a thread, or in the event loop if
`is_async`. It returns an outcome, a value (see `pgqrs.outcomes`):

- `Done(result)`: archived as completed;
- `Failed(error, retry=…, dead=…)`: delivered again when the policy says, or dead-lettered. Raising is
  the same, with the job's own `retry`;
- `GivenBack(delay=…, eta=…)`: suspended. Delivered again at that time, and the attempt does not count.
  With `delay=FOREVER` it waits until somebody changes its `vt`;
- `Settled()`: nothing is left to do, since the job ended the message itself, with
  `delivery.holder`, or in a transaction of its own (`Transaction(delivery.database, connection)`).

`delivery.message` is the claim, `delivery.database` the store's database, `delivery.when_lost(call)` and
`delivery.is_lost` tell of a lost lease; a coroutine is cancelled then as well.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from pgqrs.admin import Admin
from pgqrs.bell import Bell
from pgqrs.consumer import Consumer, Holder
from pgqrs.duties import Duty
from pgqrs.endings import Endings
from pgqrs.errors import (
    HandlerNotFound,
    HandlerTimedOut,
    InvalidArgument,
    PgqrsError,
    ProcessBroken,
    StoreClosed,
    WorkerStopped,
)
from pgqrs.handlers import Delivery, Handler, Job, Load, Route
from pgqrs.hooks import Hook, Hooks
from pgqrs.isolation import Isolation
from pgqrs.keeper import Keepers, grants
from pgqrs.leaving import Leaving, Running
from pgqrs.outcomes import Failed, GivenBack, Outcome
from pgqrs.presence import Presences
from pgqrs.processes import Processes
from pgqrs.retry import Retry
from pgqrs.schedules import Schedules
from pgqrs.slots import LoopSlots, ThreadSlots
from pgqrs.store import Store
from pgqrs.stores import Database
from pgqrs.stores.wakeups import SELDOM
from pgqrs.tasks import Task, TaskRoute, as_task
from pgqrs.types import Duration, Message, WorkerStatus, seconds, whole
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import registry
from pgqrs.workflows.routing import route as run_route

HORIZON = 0.1
"""Seconds of work that may be claimed ahead."""
PREFETCH = 200
LINGER = 0.01
"""Seconds that an outcome may wait for others, under load."""
SHORT = 0.002
"""Seconds: about as long as it takes to store outcomes and to claim."""
SETTLE = 0.002
"""Seconds after a claim that found less than it asked for. Quick handlers end meanwhile, and storing
their outcomes comes before looking again, which most probably finds nothing."""
LATE = 1.0
"""Seconds for which a message that was claimed ahead may wait for a slot; then others may have it."""
GRACE = 30.0
MAX_CONCURRENCY = 10_000
LONGEST_PAUSE = 5.0
"""Between attempts to go on after an error."""
PATIENCE = 0.5
"""Seconds to wait for a call of the database that is under way when the worker leaves."""
TICK = 1.0
logger = logging.getLogger("pgqrs.worker")


class Worker:
    """Handles the messages of some queues until it is told to stop.

    `handlers` are functions by the name of their queue, or `Handler`s to say more. `tasks` are tasks,
    or plain functions, themselves or as `"module:function"`: the worker runs these and no others, from
    their own queues and from `queues`. With `queues` alone it runs all tasks that are declared in this
    process. Tasks and workflows that it does not know it gives back uncounted, for workers that know
    them. Queues that do not exist yet are created. As a context manager it works in a thread of its own
    meanwhile.
    """

    def __init__(
        self,
        store: Store,
        *,
        queues: Iterable[str] = (),
        handlers: Mapping[str, Handler | Callable[[Any], Any]] | None = None,
        tasks: Iterable[Task[Any, Any] | Callable[..., Any] | str] = (),
        routes: Iterable[Route] = (),
        workflows: Iterable[Workflow[..., Any]] = (),
        codecs: Iterable[str] = (),
        hooks: Iterable[Hook] = (),
        concurrency: int = 8,
        prefetch: int = PREFETCH,
        lease: Duration | None = None,
        grace: Duration = GRACE,
        log_messages: bool = False,
        hostname: str | None = None,
        port: int = 0,
    ) -> None:
        """`grace` is how long handlers may go on after the worker was told to stop. `log_messages` logs
        every message that is finished; failures are always logged.
        """
        if not isinstance(store, Store):
            hint = "; an AsyncStore has an AsyncWorker" if hasattr(store, "_bridge") else ""
            raise InvalidArgument("store", f"expected a Store, got {type(store).__name__}{hint}")
        self._database = database = store._database
        self._concurrency = whole("concurrency", concurrency, low=1, high=MAX_CONCURRENCY)
        self._prefetch = whole("prefetch", prefetch, low=0, high=100_000)
        self._grace = seconds("grace", grace)
        self._jobs = {
            name: (given if isinstance(given, Handler) else Handler(given)).job()
            for name, given in (handlers or {}).items()
        }
        given = [as_task(one) for one in listed("tasks", tasks)]
        known = list(registry(listed("workflows", workflows)).values())
        self._processes = Processes(self._concurrency)
        named = _names(queues)
        self._routes: tuple[Route, ...] = (
            *routes,
            run_route(known),
            TaskRoute(given, open_queues=named, codecs=codecs, processes=self._processes),
        )
        own = [task.queue for task in given] + [workflow.queue for workflow in known]
        self.queues = tuple(dict.fromkeys([*self._jobs, *own, *named]))
        if not self.queues:
            raise InvalidArgument("queues", "a worker needs at least one queue")
        self._capacity = self._concurrency * max([1, *(job.batch for job in self._jobs.values())])

        self._presences = Presences(database, self.queues, hostname=hostname, port=port)
        self._sources = [
            _Source(Consumer(database, name, lease=lease, presence=self._presences.of(name)))
            for name in self.queues
        ]
        self._holder = Holder(database)
        self._isolation = Isolation(self._is_suspect, self._holder.release_many)
        self._aboard: set[Delivery] = set()
        self._timed: set[Load] = set()
        self._bell = Bell()
        around = Hooks(hooks)
        self._threads = ThreadSlots(self._concurrency, self._report, around)
        self._tasks = LoopSlots(self._concurrency, self._report, around)
        self._keeper = Keepers(database)
        self._endings = Endings(self._holder, self._keeper.forget, log_messages=log_messages)
        self._schedules = Schedules(database)
        self._timeouts = Duty("time limits", self._end_overdue)
        self._duties = (
            Duty("heartbeat", self._beat, longest_pause=database.config.heartbeat),
            self._timeouts,
            Duty("schedules", self._tick),
            Duty("showing long steps", self._pass_second),
        )
        self._average: float | None = None
        self._ahead = self._prefetch
        """How many messages may be claimed ahead now."""
        self._waited: float | None = None
        """For how long the message that ended last had waited for a slot."""
        self._lingers = False
        self._leaving = Leaving(self._grace)
        self._broken: ProcessBroken | None = None
        self._troubles = 0
        self._running: Running | None = None
        self._background: Running | None = None

    @property
    def worker_id(self) -> int | None:
        """Its row among the workers; None while it does not run."""
        return self._presences.worker_id

    # Running

    def run(self, *, until_empty: bool = False, signals: bool = True) -> None:
        """Work until told to stop: by `stop`, by SIGTERM or SIGINT, by an admin.

        A second signal makes it leave at once. With `until_empty` it ends when nothing is left to do
        now. A handler that raises `ProcessBroken` makes it stop and raise that. It returns when its
        grace is over, and two seconds more at the most, whatever hangs.
        """
        with self._listening_to_signals(signals):
            running = self._start_running(until_empty)
            try:
                running.wait()
            except BaseException:
                if running.goes_on:  # somebody interrupted this, and not the worker
                    self.stop(now=True)
                    running.wait()
                raise

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more, finish what was begun, give back the rest, and return from `run`.

        With `now` it gives back also what was begun. From any thread, and from a signal handler.
        """
        self._tell_to_stop(now=now)

    def _tell_to_stop(self, *, by: str = "", now: bool = False) -> None:
        self._leaving.tell(by=by, now=now)
        self._bell.ring()

    @property
    def _stopping(self) -> bool:
        return self._leaving.is_told

    def _start_running(self, until_empty: bool) -> Running:
        if self._running is not None and self._running.goes_on:
            raise InvalidArgument("worker", "it is at work already, or could not end; make another")
        self._running = Running(lambda: self._run(until_empty), self._leaving)
        return self._running

    def _run(self, until_empty: bool) -> None:
        self._broken = None
        try:
            self._create_queues()
            self._presences.open()
            logger.info("worker %s handles %s", self.worker_id, ", ".join(self.queues))
            for duty in self._duties:
                duty.start()
            with self._doorbells():
                self._work(until_empty)
            self._wind_down()
        finally:
            self._end_all()
            self._leaving = Leaving(self._grace)
            logger.info("worker has left")
        if self._broken is not None:
            raise self._broken

    def _end_all(self) -> None:
        """Nothing of it goes on after this but what hangs."""
        for duty in self._duties:
            duty.stop()
        deadline = time.monotonic() + PATIENCE
        self._keeper.forget_all(wait=PATIENCE)
        for duty in self._duties:
            duty.wait(deadline - time.monotonic())
        self._tasks.close()
        self._threads.close()
        self._processes.close()
        with suppress(PgqrsError):  # the row is purged with those of the dead
            self._presences.close()

    def _work(self, until_empty: bool) -> None:
        for source in self._sources:
            source.rung = True
        while not self._stopping:
            if not self._round():
                continue
            if until_empty and self._is_idle():
                return
            self._linger()
            self._bell.wait(self._pause())

    def _linger(self) -> None:
        """While slots have enough to do, let more of them end: storing many at once costs what storing
        one does. Handlers that end meanwhile do not ring until that is so: waking this loop costs more
        than a short handler (the rows `worker` of the benchmarks).
        """
        deadline = time.monotonic() + LINGER
        self._lingers = True
        while not self._is_wanted() and not self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._bell.wait(left)
        self._lingers = False

    def _is_wanted(self) -> bool:
        """True if this loop should store outcomes and claim now: slots will soon have nothing to do, or
        there are many outcomes, and slots are busy for as long as storing them takes. If handlers are
        so quick that they are done before that, larger batches are worth more.
        """
        aboard = len(self._aboard)
        if aboard <= self._capacity:
            return True
        many = len(self._endings) >= self._ahead // 2
        return many and aboard * (self._average or 0.0) > self._concurrency * SHORT

    def _create_queues(self) -> None:
        admin = Admin(self._database)
        for name in self.queues:
            admin.create_queue(name, if_not_exists=True)

    @contextmanager
    def _doorbells(self) -> Iterator[None]:
        with ExitStack() as stack:
            for source in self._sources:

                def ring(source: _Source = source) -> None:
                    source.rung = True
                    self._bell.ring()

                stack.enter_context(source.consumer._doorbell(ring))
            yield

    # One round of the loop

    def _round(self) -> bool:
        """End and claim. Whether that went well."""
        try:
            self._give_back_late()
            self._endings.flush()
            self._keep_pace()
            if self._troubles:
                self._keeper.renew(everything=True)
            self._claim()
            self._troubles = 0
        except WorkerStopped:
            self.stop()
        except StoreClosed:
            raise
        except Exception as exc:
            self._troubled(exc)
            return False
        return True

    def _troubled(self, error: Exception) -> None:
        self._troubles += 1
        pause = min(0.1 * 2 ** min(self._troubles, 10), LONGEST_PAUSE)
        known = isinstance(error, PgqrsError)
        logger.error("trouble, again in %.1f s: %s", pause, error, exc_info=not known)
        # Not by the bell: handlers that end meanwhile would make this a busy loop.
        deadline = time.monotonic() + pause
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._bell.wait(min(left, TICK))

    def _claim(self) -> None:
        """Fill the free slots, from each queue in turn."""
        for source in list(self._sources):
            room = self._room()
            if room <= 0 or self._stopping:  # in this order: who breaks the worker says so first
                return
            asked = time.monotonic()
            if source.sleeps_at(asked):
                continue
            source.rung = False
            found, pause = source.consumer._look(room, None, source.consumer._life)
            if found:
                pause = 0.0 if len(found) >= room else SETTLE
            source.look_at = time.monotonic() + pause
            chosen = self._isolation.sift(found, len(self._aboard))
            if chosen:
                self._start(chosen, asked, source.consumer._database)
            if len(chosen) < len(
                found
            ):  # some were given back: nothing more until they had their turn
                source.rung = True
                return
        self._sources.append(self._sources.pop(0))

    def _give_back_late(self) -> None:
        """Give back what was claimed ahead if handlers turn out to be slow: others may be idle. Claim
        nothing ahead until a handler is done, or this worker would take the same messages again.
        """
        for slots in (self._threads, self._tasks):
            oldest = slots.oldest()
            if oldest is not None and time.monotonic() - oldest > LATE:
                self._ahead, self._waited = 0, None
                self._give_back(slots.take_back())
                for source in self._sources:
                    source.rung = True  # it may be the only worker

    def _give_back(self, loads: Iterable[Load]) -> None:
        for load in loads:
            self._report(load, [GivenBack()] * len(load.deliveries))

    def _late_in(self) -> float:
        """Seconds until something that was claimed ahead has waited for too long."""
        waiting = [slots.oldest() for slots in (self._threads, self._tasks)]
        oldest = min((since for since in waiting if since is not None), default=None)
        return SELDOM if oldest is None else max(0.0, oldest + LATE - time.monotonic())

    def _keep_pace(self) -> None:
        """Claim fewer ahead if a message had to wait for longer than the horizon before it was begun,
        whatever the reason: handlers may be quick, and the machine busy.
        """
        waited, self._waited = self._waited, None
        if waited is None:
            return
        if waited > HORIZON:
            self._ahead = max(1, int(self._ahead * HORIZON / waited))
        elif waited < HORIZON / 2:
            self._ahead = min(self._prefetch, max(1, 2 * self._ahead))

    def _room(self) -> int:
        """How many more messages may come aboard."""
        ahead = 0
        if self._average is not None:
            soon = self._concurrency * HORIZON / max(self._average, 1e-6)
            ahead = min(self._ahead, int(soon))
        aboard = len(self._aboard)
        return self._isolation.room(self._capacity + ahead - aboard, aboard)

    def _is_idle(self) -> bool:
        now = time.monotonic()
        asleep = all(source.sleeps_at(now) for source in self._sources)
        return asleep and not self._aboard and self._endings.is_done

    def _pause(self) -> float:
        if self._endings or self._stopping:
            return 0.0
        again_in = min(self._late_in(), self._endings.again_in)
        if self._room() <= 0:
            return again_in  # a handler that is done rings
        now = time.monotonic()
        looks = [source.look_at - now if source.sleeps_at(now) else 0.0 for source in self._sources]
        return min(again_in, *looks)

    def _start(self, messages: list[Message], claimed_at: float, database: Database) -> None:
        holder = self._holder
        deliveries = [
            Delivery(message, holder=holder, database=database, claimed_at=claimed_at, lease=lease)
            for message, lease in zip(messages, grants(messages), strict=True)
        ]
        self._aboard.update(deliveries)
        self._keeper.keep(deliveries)
        functions: list[Load] = []
        coroutines: list[Load] = []
        for load in self._loads(deliveries):
            (coroutines if load.job.is_async else functions).append(load)
        if timed := [load for load in functions if load.job.timeout]:
            self._timed.update(timed)
            self._timeouts.ring()
        self._threads.start(functions)
        self._tasks.start(coroutines)

    def _loads(self, deliveries: Iterable[Delivery]) -> Iterator[Load]:
        now = time.monotonic()
        batches: dict[Job, list[Delivery]] = {}
        for delivery in deliveries:
            job = self._job_for(delivery.message)
            if job.batch == 1:
                yield Load(job, [delivery], now)
                continue
            batch = batches.setdefault(job, [])
            batch.append(delivery)
            if len(batch) == job.batch:
                yield Load(job, batches.pop(job), now)
        for job, batch in batches.items():
            yield Load(job, batch, now)

    def _is_suspect(self, message: Message) -> bool:
        """True if its handling may have killed workers."""
        if message.attempt <= 2:
            return False
        alone_from = self._job_for(message).alone_from
        return alone_from is not None and message.attempt >= alone_from

    def _job_for(self, message: Message) -> Job:
        job = self._jobs.get(message.queue)
        if job is not None:
            return job
        try:
            for route in self._routes:
                job = route(message)
                if job is not None:
                    return job
        except Exception as exc:
            return _refusal(exc)
        return _refusal(HandlerNotFound(message.queue))

    # What handlers report, from their threads

    def _report(self, load: Load, outcomes: list[Outcome]) -> None:
        ran = None if load.started_at is None else time.monotonic() - load.started_at
        for delivery, outcome in zip(load.deliveries, outcomes, strict=True):
            self._endings.add(delivery, outcome, name=load.job.name, took=ran)
            if isinstance(outcome, Failed) and isinstance(outcome.error, ProcessBroken):
                self._break(outcome.error)
        self._aboard.difference_update(load.deliveries)
        self._timed.discard(load)
        if load.started_at is not None and ran is not None:
            self._waited = load.started_at - load.given_at
            took = ran / len(load.deliveries)
            self._average = took if self._average is None else 0.9 * self._average + 0.1 * took
        if not self._lingers or self._is_wanted():
            self._bell.ring()

    def _break(self, error: ProcessBroken) -> None:
        """Whatever comes next would fail here as well: leave it to other processes."""
        logger.critical("the worker stops: %s", error)
        self._broken = error
        self.stop()

    # Its duties, each in a thread of its own

    def _beat(self) -> float:
        """Give a sign of life."""
        if (early := self._presences.beats_in()) > 0:
            return early
        if self._presences.heartbeat() is WorkerStatus.STOPPED:
            self.stop()
        return self._presences.beats_in()

    def _tick(self) -> float:
        """Enqueue what schedules have due."""
        self._schedules.tick()
        return max(0.001, self._schedules.next_in())

    def _pass_second(self) -> float:
        """Let those who handle messages do what is to be done each second."""
        failed: BaseException | None = None
        for delivery in self._aboard.copy():
            if not delivery.is_lost and not delivery.is_ended:
                try:
                    delivery.second_passed()
                except BaseException as exc:
                    failed = exc
        if failed is not None:
            raise failed
        return TICK

    def _end_overdue(self) -> float:
        """Fail what takes too long in a thread; the thread itself cannot be ended."""
        pause, now = SELDOM, time.monotonic()  # who starts one with a timeout rings
        for load in self._timed.copy():
            timeout = load.job.timeout
            if timeout is None or load.started_at is None:
                pause = min(pause, timeout or TICK)
            elif now - load.started_at < timeout:
                pause = min(pause, load.started_at + timeout - now)
            else:
                self._timed.discard(load)
                for delivery in load.deliveries:
                    error = HandlerTimedOut(load.job.name, timeout)
                    overdue = Failed(error, retry=load.job.retry)
                    self._endings.add(delivery, overdue, name=load.job.name, took=timeout)
                self._threads.abandon(load)
                self._aboard.difference_update(load.deliveries)
                self._bell.ring()
        return max(pause, 0.001)

    # Leaving

    def _wind_down(self) -> None:
        """Give back what was not begun, wait for the rest, and give back what is not done in time."""
        self._give_back(self._threads.take_back() + self._tasks.take_back())
        self._leaving.say()
        while self._aboard and self._leaving.left > 0:
            self._flush_if_possible()
            self._bell.wait(min(TICK, self._leaving.left))
        left = self._aboard.copy()
        if left:
            logger.warning("%d handlers are not done; their messages are given back", len(left))
        for delivery in left:
            self._endings.add(delivery, GivenBack())
        self._tasks.cancel()
        if not self._flush_if_possible():
            logger.error("outcomes could not be stored; their messages come back by themselves")

    def _flush_if_possible(self) -> bool:
        try:
            self._endings.flush(everything=True)
        except Exception as exc:
            logger.error("outcomes cannot be stored now: %s", exc)
        return self._endings.is_done

    # Signals, and a thread of its own

    @contextmanager
    def _listening_to_signals(self, wanted: bool) -> Iterator[None]:
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: FrameType | None) -> None:
            self._tell_to_stop(by=signal.Signals(number).name, now=self._stopping)

        before = {number: signal.signal(number, hear) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def open(self) -> Self:
        """Work in a thread of its own, until closed."""
        if self._background is None:
            self._background = self._start_running(until_empty=False)
        return self

    def close(self) -> None:
        """Stop, and wait until it has left. What ended it before is raised here."""
        background, self._background = self._background, None
        if background is not None:
            if background.goes_on:
                self.stop()
            background.wait()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Source:
    """A queue to claim from, and when to look into it again, if nobody rings."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.look_at = 0.0
        self.rung = False

    def sleeps_at(self, now: float) -> bool:
        return not self.rung and now < self.look_at


def listed(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(name, f"expected a list, got {given!r}; write [{given!r}]")
    return list(given)


def _names(queues: Iterable[str]) -> list[str]:
    if isinstance(queues, str):
        raise InvalidArgument("queues", f"expected names of queues, got the text {queues!r}")
    return list(queues)


def _refusal(error: Exception) -> Job:
    """Fails, and is tried again: by another worker perhaps, that knows more."""
    return Job(name="refusal", run=lambda delivery: Failed(error, retry=Retry()))
