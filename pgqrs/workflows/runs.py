"""Runs from outside: starting them, asking how they are, telling them what to do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from pgqrs.codecs import Calls, calls_of
from pgqrs.error_texts import error_text
from pgqrs.errors import (
    EventTimedOut,
    InvalidArgument,
    NotDurable,
    ResultTimedOut,
    RunCancelled,
    RunEnded,
    RunFailed,
)
from pgqrs.keeper import keeper_of
from pgqrs.outcomes import Outcome
from pgqrs.repositories import events, steps, workflows
from pgqrs.repositories.starting import Started
from pgqrs.repositories.workflows import Ended
from pgqrs.stores import Database
from pgqrs.stores.wakeups import RESULTS, SELDOM
from pgqrs.types import (
    ENDED,
    Duration,
    EventKind,
    Message,
    RunEvent,
    RunInfo,
    RunStatus,
    StepInfo,
    StepStatus,
    seconds,
    whole,
)
from pgqrs.workflows import cancelling, values
from pgqrs.workflows.children import signal_run, start_child
from pgqrs.workflows.context import current
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import execute, execute_async, is_async, registry
from pgqrs.workflows.flows import NOTHING
from pgqrs.workflows.guards import StepGuard, acquire_step
from pgqrs.workflows.holding import holding
from pgqrs.workflows.inline import run_inline, run_inline_async
from pgqrs.workflows.starting import start_many, start_once
from pgqrs.workflows.threads import journal_threads, step_threads

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Decode = Callable[[Any], Any]
"""What a result is to its caller."""
BATCH = 1000
SOONEST, LATEST = 0.01, 0.5
"""How long to wait before looking again for what another process does."""


class Run(Generic[T_co]):
    """A run of a workflow."""

    def __init__(self, database: Database, id: int, decode: Decode = lambda output: output) -> None:
        self._given = database
        self._found: Database | None = None
        self._decode = decode
        self.id = id

    @property
    def _database(self) -> Database:
        """The database that the run is in: looked for when it is first needed."""
        if self._found is None:
            self._found = self._given.of_run(self.id)
        return self._found

    # Asking

    def refresh(self) -> RunInfo:
        """All that its row says now."""
        return self._database.read(lambda c: workflows.get(c, self.id))

    def status(self) -> RunStatus:
        """Where it stands."""
        return self.refresh().status

    def steps(self) -> list[StepInfo]:
        """What it has done, in order. A step that was going on when the run ended is cancelled."""

        def look(connection: Connection) -> list[StepInfo]:
            found = steps.find(connection, self.id)
            if not any(step.status is StepStatus.RUNNING for step in found):
                return found
            if not workflows.get(connection, self.id).has_ended:
                return found
            return [_cut_off(step) for step in found]

        return self._database.read(look)

    def events(self, name: str | None = None) -> list[RunEvent]:
        """What it has let others know, in order."""
        return self._database.read(lambda c: events.find(c, self.id, name=name))

    def get_event(
        self, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        """What it has let others know last under this name; waits for it for so long.

        When there is nothing, this returns the `default`, or raises `EventTimedOut` if there is none.
        """
        found = self._wait(lambda: self._last_event(name), timeout if timeout is not None else 0.0)
        if found is not None:
            return found.payload
        if default is NOTHING:
            raise EventTimedOut(name)
        return default

    def result(self, timeout: Duration | None = None) -> T_co:
        """What it returned; waits until it has ended, at most so long.

        `RunFailed` if it failed, `RunCancelled` if it was cancelled, `ResultTimedOut` if it goes on.
        """
        ended = self._wait(self._ended, timeout)
        if ended is None:
            assert timeout is not None
            raise ResultTimedOut(f"run {self.id}", seconds("timeout", timeout))
        result: T_co = result_of(ended, self._decode)
        return result

    def _ended(self) -> RunInfo | None:
        run = self.refresh()
        return run if run.has_ended else None

    def _last_event(self, name: str) -> RunEvent | None:
        found = self.events(name)
        return found[-1] if found else None

    def _wait(self, look: Callable[[], T | None], timeout: Duration | None) -> T | None:
        """Look until there is something, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        rung = threading.Event()
        with self._database.wakeups.doorbell(RESULTS, rung.set):
            for pause, tell in pauses():
                rung.clear()
                if tell:
                    self._expect()
                found = look()
                left = None if deadline is None else deadline - time.monotonic()
                if found is not None or (left is not None and left <= 0):
                    return found
                rung.wait(pause if left is None else min(pause, left))
        return None

    def _expect(self) -> None:
        """Who ends the run elsewhere should say so."""
        queue = self.refresh().queue
        if queue is not None:
            self._database.expect_results(queue, seconds=4 * SELDOM)

    # Telling

    def signal(self, name: str, payload: Any = None) -> None:
        """Say something to it: one `wait_for_event` of this name gets the payload.

        In the body of a workflow on the same store it is done once, and in an async one it is awaited.
        """
        context = current()
        if context is not None:
            told: None = signal_run(context, self.id, name, payload, database=self._database)
            return told
        text = values.dump(payload, self._database.config)

        def work(connection: Connection) -> str | None:
            now = self._database.now()
            run = workflows.get(connection, self.id)
            if run.has_ended:
                raise RunEnded(self.id, run.status, "get a signal")
            events.add(connection, self.id, kind=EventKind.SIGNAL, name=name, payload=text, now=now)
            return workflows.nudge(connection, self.id, now=now)

        self._ring(self._database.write(work))

    def cancel(self) -> RunStatus:
        """Let it and its children end: at once if nobody runs it, else at its next step. Returns what
        it is then; one that has ended stays as it is.
        """
        cancelling.cancel(self._database, [self.id])
        self._database.wakeups.ring(RESULTS)
        return self.status()

    def pause(self) -> None:
        """Let it stop at its next step until it is resumed."""
        if not self._database.write(
            lambda c: workflows.pause(c, self.id, now=self._database.now())
        ):
            self._refuse("be paused", unless=(RunStatus.PAUSED,))

    def resume(self) -> None:
        """Let it go on after a pause; also one that was paused because its code could not go on."""
        resumed, queue = self._database.write(
            lambda c: workflows.resume(c, self.id, now=self._database.now())
        )
        if not resumed:
            self._refuse("be resumed", unless=workflows.WILLING)
        self._ring(queue)

    def retry(self) -> None:
        """Let a failed run go on from the call that failed it. What it has done stays done, and a
        failure that the workflow dealt with stays as it is. A deadline that has passed gives it once
        more the time that it had at first.
        """
        queue = self._database.write(
            lambda c: workflows.retry(c, self.id, now=self._database.now())
        )
        if queue is None:
            self._refuse("be retried", unless=())
        self._ring(queue)

    def fork(self, step: str | None = None) -> Run[T_co]:
        """A new run with the same input that has done what this one did before a step, and goes on
        from there; without a step it has done all of it.
        """
        config = self._database.config

        def work(connection: Connection) -> tuple[Started, str | None]:
            now = self._database.now()
            run = workflows.get(connection, self.id)
            if step is not None and steps.get(connection, self.id, step) is None:
                raise InvalidArgument("step", f"run {self.id} has no step {step!r}")
            input = values.dump(run.input, config)
            started = workflows.fork(connection, self.id, before=step, input=input, now=now)
            return started, run.queue

        started, queue = self._database.write(work)
        self._ring(queue)
        return Run(self._database, started.id, self._decode)

    # Driving it by hand

    def start(self) -> None:
        """It runs from now on, by the hand of who calls this."""
        allowed = (*workflows.WILLING, RunStatus.PAUSED)
        self._move("be started by hand", allowed, RunStatus.RUNNING)

    def acquire_step(self, name: str) -> StepGuard:
        """Begin an attempt at a step, or learn the value it had. `StepNotReady` while it waits for its
        next attempt, `StepFailed` if it failed for good.
        """
        return acquire_step(self._database, self.id, name)

    def complete(self, output: Any = None) -> None:
        """It is done."""
        text = values.dump(output, self._database.config)
        self._move("complete", (RunStatus.RUNNING,), RunStatus.COMPLETED, output=text)

    def fail(self, error: str | BaseException) -> None:
        """It failed."""
        allowed = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PAUSED)
        text = error_text(error, self._database.config)
        self._move("fail", allowed, RunStatus.FAILED, error=text)

    def _move(
        self,
        what: str,
        allowed: Sequence[RunStatus],
        status: RunStatus,
        *,
        output: str | None = None,
        error: str | None = None,
    ) -> None:
        ring = self._database.write(
            lambda c: workflows.move_by_hand(
                c,
                self.id,
                allowed=allowed,
                status=status,
                has_ended=status in ENDED,
                output=output,
                error=error,
                now=self._database.now(),
            )
        )
        if ring is None:
            run = self.refresh()
            if run.message_id is not None:
                raise InvalidArgument("run", f"run {self.id} is run by workers, not by hand")
            raise RunEnded(self.id, run.status, what)
        for queue in ring:
            self._ring(queue)
        self._database.wakeups.ring(RESULTS)

    def _refuse(self, what: str, *, unless: Sequence[RunStatus]) -> None:
        status = self.status()
        if status not in unless:
            raise RunEnded(self.id, status, what)

    def _ring(self, queue: str | None) -> None:
        if queue is not None:
            self._database.ring(queue)

    def __repr__(self) -> str:
        return f"<run {self.id}>"


class Workflows:
    """The runs of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def start(
        self,
        workflow: Workflow[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run[T]:
        """Start a run. `workflow.start(…)` reads better."""
        context = current()
        if context is not None:
            child: Any = start_child(context, workflow, args, kwargs or {}, store=self)
            return child  # type: ignore[no-any-return]
        arguments = workflow.start_arguments(args, kwargs or {}, self._database.config)
        return Run(
            self._database.lasting, self._start(arguments).id, workflow.signature.decode_result
        )

    def start_many(
        self,
        workflow: Workflow[..., T],
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
    ) -> list[Run[T]]:
        """Start a run for each of these calls. `workflow.start_many(…)` reads better."""
        wanted, context = calls_of(calls), current()
        if context is not None:
            children: Any = workflow.options(store=self)._start_children(context, wanted, keys)
            return children  # type: ignore[no-any-return]
        if not wanted:
            return []
        runs, arguments = workflow.start_many_arguments(wanted, keys, self._database.config)
        database = self._database.of_queue(arguments["queue"])
        started = start_many(database, runs, arguments)
        if started.any_new:
            database.ring(arguments["queue"], elsewhere=started.waited_for)
        decode = workflow.signature.decode_result
        return [Run(self._database.lasting, id, decode) for id in started.ids]

    def create(
        self,
        name: str,
        input: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        version: str | None = None,
    ) -> Run[Any]:
        """A run by the name of its workflow. Without a queue no worker runs it: drive it by hand, with
        `start`, `acquire_step` and `complete`.
        """
        refuse_in_body("create", "start it with `workflow.start(…)`, or create it in a step")
        text = values.dump(input, self._database.config)
        arguments = {"name": name, "queue": queue, "input": text, "key": key, "version": version}
        return Run(self._database.lasting, self._start(arguments).id)

    def _start(self, arguments: dict[str, Any]) -> Started:
        queue = arguments["queue"]
        # One that is driven by hand is in no queue: there is one place for all of its name.
        database = self._database.of_queue(arguments["name"] if queue is None else queue)
        started = start_once(database, arguments)
        if started.is_new and queue is not None:
            database.ring(queue, elsewhere=started.waited_for)
        return started

    def run_inline(
        self,
        workflow: Workflow[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T:
        """Start a run and run it here to its end. `workflow.run_inline(…)` reads better."""
        refuse_in_body("run_inline", "use `workflow.start(…).result()`, or do it in a step")
        database = self._database.of_queue(workflow.queue)
        call = (database, workflow, args, kwargs or {})
        hold = holding(database, keeper_of(database))
        if workflow.is_async:
            offload, host = journal_threads(database).run, step_threads.run
            ended = asyncio.run(run_inline_async(*call, hold=hold, offload=offload, host=host))
        else:
            ended = run_inline(*call, hold=hold)
        result: T = result_of(ended, workflow.signature.decode_result)
        return result

    def execute(self, message: Message, known: Iterable[Workflow[..., Any]]) -> Outcome:
        """Run the run of a message that you have dequeued, and renew its lease meanwhile. For loops of
        your own: a worker does it by itself.
        """
        workflows, database = registry(known), self._database.of_queue(message.queue)
        call = (database, workflows, message)
        with holding(database, keeper_of(database))(message, is_fresh=False) as watch:
            if not is_async(message, workflows):
                return execute(*call, watch=watch, in_script=True)
            offload, host = journal_threads(database).run, step_threads.run
            return asyncio.run(
                execute_async(*call, offload=offload, host=host, watch=watch, in_script=True)
            )

    def handle(self, run_id: int) -> Run[Any]:
        """A run by its id."""
        return Run(self._database, run_id)

    def get(self, run_id: int) -> RunInfo:
        """All that the row of a run says now."""
        return self.handle(run_id).refresh()

    def list_runs(
        self,
        *,
        name: str | None = None,
        status: RunStatus | str | None = None,
        key: str | None = None,
        parent_id: int | None = None,
        n: int = 100,
        before: int | None = None,
    ) -> list[RunInfo]:
        """Runs, the newest first; `before` is the last id of the page before. In a store of several
        shards those of one shard come before those of another.
        """
        limit = whole("n", n, low=1, high=100_000)
        wanted = None if status is None else _status(status)
        pages = [
            shard.read(
                lambda c: workflows.find(
                    c,
                    name=name,
                    status=wanted,
                    key=key,
                    parent_id=parent_id,
                    before=before,
                    limit=limit,
                )
            )
            for shard in self._database.shards
        ]
        newest = sorted(chain.from_iterable(pages), key=lambda run: run.id, reverse=True)
        return newest[:limit]

    def purge(self, *, older_than: Duration = 0.0, status: RunStatus | str | None = None) -> int:
        """Forget runs that ended longer ago than this, in bounded batches. Returns how many."""
        age = seconds("older_than", older_than)
        statuses = list(ENDED) if status is None else [_status(status)]
        if not set(statuses) <= ENDED:
            raise InvalidArgument("status", "only runs that have ended can be forgotten")

        def batch(connection: Connection, _: int) -> tuple[int, int | None]:
            done = workflows.purge(
                connection,
                statuses=statuses,
                older_than=age,
                limit=BATCH,
                now=self._database.now(),
            )
            return done, 0 if done == BATCH else None

        return sum(sum(shard.write_in_batches(batch)) for shard in self._database.shards)

    # By id, as the command line has it

    def signal(self, run_id: int, name: str, payload: Any = None) -> None:
        """Say something to a run: one `wait_for_event` of this name gets the payload."""
        self.handle(run_id).signal(name, payload)

    def cancel(self, run_id: int) -> RunStatus:
        """Let a run and its children end."""
        return self.handle(run_id).cancel()

    def pause(self, run_id: int) -> None:
        """Let a run stop at its next step until it is resumed."""
        self.handle(run_id).pause()

    def resume(self, run_id: int) -> None:
        """Let a run go on after a pause."""
        self.handle(run_id).resume()

    def resume_all(
        self,
        *,
        name: str | None = None,
        version: str | None = None,
        parked: bool | None = None,
        error: str | None = None,
    ) -> int:
        """Let all paused runs go on that match: of this workflow, started with this version, with this
        text in their error. Returns how many.

        `parked` runs are those that could not go on with the code that was there: their error says
        why. False leaves those alone.
        """

        def batch(connection: Connection, after: int) -> tuple[tuple[int, set[str]], int | None]:
            found = workflows.find_paused(
                connection,
                name=name,
                version=version,
                parked=parked,
                error=error,
                after=after,
                limit=BATCH,
            )
            now = self._database.now()
            resumed = [workflows.resume(connection, id, now=now) for id in found]
            queues = {queue for _, queue in resumed if queue is not None}
            return (sum(done for done, _ in resumed), queues), found[-1] if found else None

        resumed = [
            done for shard in self._database.shards for done in shard.write_in_batches(batch)
        ]
        for queue in set[str]().union(*(queues for _, queues in resumed)):
            self._database.ring(queue)
        return sum(count for count, _ in resumed)

    def retry(self, run_id: int) -> None:
        """Let a failed run go on from the step that failed."""
        self.handle(run_id).retry()

    def fork(self, run_id: int, step: str | None = None) -> Run[Any]:
        """A new run that has done what another did before a step."""
        return self.handle(run_id).fork(step)

    def steps(self, run_id: int) -> list[StepInfo]:
        """What a run has done, in order."""
        self.get(run_id)
        return self.handle(run_id).steps()

    def events(self, run_id: int, name: str | None = None) -> list[RunEvent]:
        """What a run has let others know, in order."""
        return self.handle(run_id).events(name)

    def get_event(
        self, run_id: int, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        """What a run has let others know last under this name."""
        return self.handle(run_id).get_event(name, timeout, default=default)


def refuse_in_body(what: str, instead: str) -> None:
    """Refuse what the body of a workflow would do again whenever its run is resumed."""
    if current() is not None:
        raise NotDurable(what, f"a workflow would do it again whenever it is resumed; {instead}")


def pauses() -> Iterator[tuple[float, bool]]:
    """Ever longer waits between two looks, and whether to say before the look that somebody waits.

    Not at the first one, after which most need not wait.
    """
    pause, told_at = SOONEST, float("-inf")
    yield 0.0, False
    while True:
        now = time.monotonic()
        tell = now - told_at > SELDOM
        told_at = now if tell else told_at
        yield pause, tell
        pause = min(pause * 1.5, LATEST)


def result_of(run: RunInfo | Ended, decode: Decode) -> Any:
    """What a run that has ended returned, or the error that says how it ended."""
    if run.status is RunStatus.FAILED:
        raise RunFailed(run.id, run.error)
    if run.status is RunStatus.CANCELLED:
        raise RunCancelled(run.id)
    return decode(run.output)


def _cut_off(step: StepInfo) -> StepInfo:
    """A step of a run that has ended: nobody does it any more."""
    if step.status is not StepStatus.RUNNING:
        return step
    return replace(step, status=StepStatus.CANCELLED)


def _status(status: RunStatus | str) -> RunStatus:
    try:
        return RunStatus(status)
    except ValueError:
        known = ", ".join(RunStatus)
        raise InvalidArgument("status", f"expected one of {known}, got {status!r}") from None
