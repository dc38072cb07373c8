"""The runtime that applications start: claims messages, has them handled, ends them.

One loop claims and ends; handlers run in slots (`slots`), and a keeper (`keeper`) renews leases in
a thread of its own, so nothing a handler does can stop that. A round of the loop:

1. end what handlers are done with, many at a time (`endings`);
2. claim as many messages as there are free slots, and a few more when handlers are quick, so that
   no slot waits for the database (`prefetch` is the most; a worker never claims more than its slots
   will begin within a tenth of a second);
3. wait: for a handler, for a doorbell (`stores.wakeups`), or for the next delayed message.

Errors of the database do not end the loop. Outcomes are kept until they can be stored, and leases are
renewed before anything new is claimed. Whoever lost its lease meanwhile cannot end the message: the
database refuses that, and the worker logs it.

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
from pgqrs.keeper import TICK, Keeper
from pgqrs.outcomes import Failed, GivenBack, Outcome
from pgqrs.presence import Presence
from pgqrs.retry import Retry
from pgqrs.schedules import Schedules
from pgqrs.slots import LoopSlots, Processes, ThreadSlots
from pgqrs.store import Store
from pgqrs.stores.wakeups import SELDOM
from pgqrs.tasks import Task, TaskRoute
from pgqrs.types import Duration, Message, seconds, whole
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.routing import route as run_route

HORIZON = 0.1
"""Seconds of work that may be claimed ahead."""
PREFETCH = 200
LINGER = 0.01
"""Seconds that an outcome may wait for others, under load."""
GRACE = 30.0
MAX_CONCURRENCY = 10_000
LONGEST_PAUSE = 5.0
"""Between attempts to go on after an error."""
logger = logging.getLogger("pgqrs.worker")


class Worker:
    """Handles the messages of some queues until it is told to stop.

    `handlers` are functions by the name of their queue, or `Handler`s to say more. Tasks that are
    declared in this process are found by their names; `tasks` adds the queues of these. Queues that do
    not exist yet are created. As a context manager it works in a thread of its own meanwhile.
    """

    def __init__(
        self,
        store: Store,
        *,
        queues: Iterable[str] = (),
        handlers: Mapping[str, Handler | Callable[[Any], Any]] | None = None,
        tasks: Iterable[Task[Any, Any]] = (),
        routes: Iterable[Route] = (),
        workflows: Iterable[Workflow[..., Any]] = (),
        codecs: Iterable[str] = (),
        hooks: Iterable[Hook] = (),
        concurrency: int = 8,
        prefetch: int = PREFETCH,
        lease: Duration | None = None,
        grace: Duration = GRACE,
        hostname: str | None = None,
        port: int = 0,
    ) -> None:
        """`grace` is how long handlers may go on after the worker was told to stop."""
        self._database = database = store._database
        self._concurrency = whole("concurrency", concurrency, low=1, high=MAX_CONCURRENCY)
        self._prefetch = whole("prefetch", prefetch, low=0, high=100_000)
        self._grace = seconds("grace", grace)
        self._jobs = {
            name: (given if isinstance(given, Handler) else Handler(given)).job()
            for name, given in (handlers or {}).items()
        }
        given, known = list(tasks), list(workflows)
        self._processes = Processes(self._concurrency)
        self._routes: tuple[Route, ...] = (
            *routes,
            *([run_route(known)] if known else []),
            TaskRoute(given, codecs=codecs, processes=self._processes),
        )
        own = [task.queue for task in given] + [workflow.queue for workflow in known]
        self.queues = tuple(dict.fromkeys([*self._jobs, *own, *_names(queues)]))
        if not self.queues:
            raise InvalidArgument("queues", "a worker needs at least one queue")
        self._capacity = self._concurrency * max([1, *(job.batch for job in self._jobs.values())])

        only = self.queues[0] if len(self.queues) == 1 else None
        self._presence = Presence(database, only, hostname=hostname, port=port)
        self._sources = [
            _Source(Consumer(database, name, lease=lease, presence=self._presence))
            for name in self.queues
        ]
        self._holder = Holder(database)
        self._aboard: set[Delivery] = set()
        self._timed: set[Load] = set()
        self._bell = Bell()
        around = Hooks(hooks)
        self._threads = ThreadSlots(self._concurrency, self._report, around)
        self._tasks = LoopSlots(self._concurrency, self._report, around)
        self._keeper = Keeper(
            self._presence,
            self._holder,
            heartbeat=database.config.heartbeat,
            check=self._check,
            told_to_stop=self.stop,
        )
        self._endings = Endings(self._holder, self._keeper.held.discard)
        self._schedules, self._tick_at = Schedules(database), 0.0
        self._average: float | None = None
        self._stopping = self._leaving = False
        self._broken: ProcessBroken | None = None
        self._troubles = 0
        self._background: _Background | None = None

    @property
    def worker_id(self) -> int | None:
        """Its row among the workers; None while it does not run."""
        return self._presence.worker_id

    # Running

    def run(self, *, until_empty: bool = False, signals: bool = True) -> None:
        """Work until told to stop: by `stop`, by SIGTERM or SIGINT, by an admin.

        A second signal makes it leave at once. With `until_empty` it ends when nothing is left to do
        now. A handler that raises `ProcessBroken` makes it stop and raise that.
        """
        with self._listening_to_signals(signals):
            self._run(until_empty)

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more, finish what was begun, give back the rest, and return from `run`.

        With `now` it gives back also what was begun. From any thread, and from a signal handler.
        """
        self._leaving = self._leaving or now
        self._stopping = True
        self._bell.ring()

    def _run(self, until_empty: bool) -> None:
        self._broken = None
        self._create_queues()
        self._presence.open()
        logger.info("worker %s handles %s", self.worker_id, ", ".join(self.queues))
        self._keeper.start()
        try:
            with self._doorbells():
                self._work(until_empty)
            self._wind_down()
        finally:
            self._keeper.stop()
            self._tasks.close()
            self._threads.close()
            self._processes.close()
            with suppress(PgqrsError):  # the row is purged with those of the dead
                self._presence.close()
            self._stopping = self._leaving = False
            logger.info("worker has left")
        if self._broken is not None:
            raise self._broken

    def _work(self, until_empty: bool) -> None:
        for source in self._sources:
            source.rung = True
        while not self._stopping:
            if not self._round():
                continue
            if until_empty and self._is_idle():
                return
            self._bell.wait(self._pause())
            self._linger()

    def _linger(self) -> None:
        """While slots have enough to do, let more of them end: storing many at once costs what storing
        one does.
        """
        deadline = time.monotonic() + LINGER
        while (
            len(self._aboard) > self._capacity
            and len(self._endings) < self._prefetch // 2
            and time.monotonic() < deadline
            and not self._stopping
        ):
            time.sleep(LINGER / 20)

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
            self._endings.flush()
            if self._troubles:
                self._keeper.renew(everything=True)
            self._claim()
            self._troubles = 0
        except WorkerStopped:
            logger.info("worker %s was told to stop", self.worker_id)
            self._stopping = True
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
            source.look_at = 0.0 if found else time.monotonic() + pause
            if found:
                self._start(found, asked)
        self._sources.append(self._sources.pop(0))

    def _room(self) -> int:
        """How many more messages may come aboard."""
        ahead = 0
        if self._average is not None:
            soon = self._concurrency * HORIZON / max(self._average, 1e-6)
            ahead = min(self._prefetch, int(soon))
        return self._capacity + ahead - len(self._aboard)

    def _is_idle(self) -> bool:
        now = time.monotonic()
        asleep = all(source.sleeps_at(now) for source in self._sources)
        return asleep and not self._aboard and not self._endings

    def _pause(self) -> float:
        if self._endings or self._stopping:
            return 0.0
        if self._room() <= 0:
            return SELDOM  # a handler that is done rings
        now = time.monotonic()
        return min(
            source.look_at - now if source.sleeps_at(now) else 0.0 for source in self._sources
        )

    def _start(self, messages: list[Message], claimed_at: float) -> None:
        deliveries = [
            Delivery(message, holder=self._holder, database=self._database, claimed_at=claimed_at)
            for message in messages
        ]
        self._aboard.update(deliveries)
        self._keeper.keep(deliveries)
        functions: list[Load] = []
        coroutines: list[Load] = []
        for load in self._loads(deliveries):
            (coroutines if load.job.is_async else functions).append(load)
        self._timed.update(load for load in functions if load.job.timeout)
        self._threads.start(functions)
        self._tasks.start(coroutines)

    def _loads(self, deliveries: Iterable[Delivery]) -> Iterator[Load]:
        batches: dict[Job, list[Delivery]] = {}
        for delivery in deliveries:
            job = self._job_for(delivery.message)
            if job.batch == 1:
                yield Load(job, [delivery])
                continue
            batch = batches.setdefault(job, [])
            batch.append(delivery)
            if len(batch) == job.batch:
                yield Load(job, batches.pop(job))
        for job, batch in batches.items():
            yield Load(job, batch)

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
        for delivery, outcome in zip(load.deliveries, outcomes, strict=True):
            self._endings.add(delivery, outcome)
            if isinstance(outcome, Failed) and isinstance(outcome.error, ProcessBroken):
                self._break(outcome.error)
        self._aboard.difference_update(load.deliveries)
        self._timed.discard(load)
        if load.started_at is not None:
            took = (time.monotonic() - load.started_at) / len(load.deliveries)
            self._average = took if self._average is None else 0.9 * self._average + 0.1 * took
        self._bell.ring()

    def _break(self, error: ProcessBroken) -> None:
        """Whatever comes next would fail here as well: leave it to other processes."""
        logger.critical("the worker stops: %s", error)
        self._broken = error
        self.stop()

    # What the keeper calls, from its thread

    def _check(self) -> float:
        return min(self._end_overdue(), self._tick())

    def _tick(self) -> float:
        """Enqueue what schedules have due."""
        now = time.monotonic()
        if now >= self._tick_at:
            self._schedules.tick()
            self._tick_at = now + self._schedules.next_in()
        return max(0.001, self._tick_at - now)

    def _end_overdue(self) -> float:
        """Fail what takes too long in a thread; the thread itself cannot be ended."""
        pause, now = TICK, time.monotonic()
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
                    self._endings.add(delivery, Failed(error, retry=load.job.retry))
                self._bell.ring()
        return max(pause, 0.001)

    # Leaving

    def _wind_down(self) -> None:
        """Give back what was not begun, wait for the rest, and give back what is not done in time."""
        for load in self._threads.take_back() + self._tasks.take_back():
            self._report(load, [GivenBack()] * len(load.deliveries))
        deadline = time.monotonic() + self._grace
        while self._aboard and not self._leaving and time.monotonic() < deadline:
            self._flush_if_possible()
            self._bell.wait(min(TICK, deadline - time.monotonic()))
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
            self._endings.flush()
        except Exception as exc:
            logger.error("outcomes cannot be stored now: %s", exc)
        return not self._endings

    # Signals, and a thread of its own

    @contextmanager
    def _listening_to_signals(self, wanted: bool) -> Iterator[None]:
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: FrameType | None) -> None:
            self.stop(now=self._stopping)

        before = {number: signal.signal(number, hear) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def open(self) -> Self:
        """Work in a thread of its own, until closed."""
        if self._background is None:
            self._background = _Background(self)
        return self

    def close(self) -> None:
        """Stop, and wait until it has left. What ended it before is raised here."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

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


class _Background:
    """A worker in a thread; what ended it is raised by `stop`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pgqrs-worker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._worker._run(until_empty=False)
        except BaseException as exc:
            self._error = exc

    def stop(self) -> None:
        if self._thread.is_alive():
            self._worker.stop()
        self._thread.join()
        if self._error is not None:
            raise self._error


def _names(queues: Iterable[str]) -> list[str]:
    if isinstance(queues, str):
        raise InvalidArgument("queues", f"expected names of queues, got the text {queues!r}")
    return list(queues)


def _refusal(error: Exception) -> Job:
    """Fails, and is tried again: by another worker perhaps, that knows more."""
    return Job(name="refusal", run=lambda delivery: Failed(error, retry=Retry()))
