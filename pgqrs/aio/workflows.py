"""The async twin of `pgqrs.workflows.runs`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pgqrs.aio.bridge import Bridge
from pgqrs.aio.thread_access import LoopDatabase, in_loop, keeper_for
from pgqrs.codecs import Calls, calls_of
from pgqrs.current import StoreOfCall, store_on
from pgqrs.errors import EventTimedOut, NotDurable, ResultTimedOut
from pgqrs.outcomes import Outcome
from pgqrs.stores import Database
from pgqrs.stores.wakeups import RESULTS
from pgqrs.types import (
    Duration,
    Message,
    RunEvent,
    RunInfo,
    RunStatus,
    StepInfo,
    seconds,
)
from pgqrs.workflows.children import signal_run, start_child
from pgqrs.workflows.context import Context, current
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import execute, execute_async, is_async, registry
from pgqrs.workflows.flows import NOTHING
from pgqrs.workflows.guards import StepGuard
from pgqrs.workflows.holding import holding
from pgqrs.workflows.inline import run_inline, run_inline_async
from pgqrs.workflows.runs import Run, Workflows, pauses, refuse_in_body, result_of
from pgqrs.workflows.threads import Offload, step_threads

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class AsyncStepGuard:
    """An attempt at a step; or, if `skipped`, the `value` that it had.

    As a context manager it fails the step if the block raises.
    """

    def __init__(self, bridge: Bridge, guard: StepGuard) -> None:
        self._bridge = bridge
        self._sync = guard
        self.name = guard.name
        self.attempt = guard.attempt
        self.value = guard.value

    @property
    def skipped(self) -> bool:
        """Whether there is nothing left to do."""
        return self._sync.skipped

    async def success(self, value: Any = None) -> None:
        """It is done; `value` is kept."""
        await self._bridge.run(self._sync.success, value)

    async def fail(self, error: str | BaseException) -> None:
        """It failed for good."""
        await self._bridge.run(self._sync.fail, error)

    async def fail_transient(
        self, code: str, message: str = "", retry_after: Duration | None = None
    ) -> None:
        """It failed for a passing reason: it may be acquired again, after so long."""
        await self._bridge.run(self._sync.fail_transient, code, message, retry_after)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not self.skipped:
            await self.fail(error)


class AsyncRun(Generic[T_co]):
    """A run of a workflow."""

    def __init__(self, bridge: Bridge, run: Run[T_co]) -> None:
        self._bridge = bridge
        self._sync = run
        self.id = run.id

    async def refresh(self) -> RunInfo:
        """All that its row says now."""
        return await self._bridge.run(self._sync.refresh)

    async def status(self) -> RunStatus:
        """Where it stands."""
        return await self._bridge.run(self._sync.status)

    async def steps(self) -> list[StepInfo]:
        """What it has done, in order."""
        return await self._bridge.run(self._sync.steps)

    async def events(self, name: str | None = None) -> list[RunEvent]:
        """What it has let others know, in order."""
        return await self._bridge.run(self._sync.events, name)

    async def get_event(
        self, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        """What it has let others know last under this name; waits for it for so long."""
        patience = 0.0 if timeout is None else timeout
        found = await self._wait(partial(self._sync._last_event, name), patience)
        if found is not None:
            return found.payload
        if default is NOTHING:
            raise EventTimedOut(name)
        return default

    async def result(self, timeout: Duration | None = None) -> T_co:
        """What it returned; waits until it has ended, at most so long. Waiting needs no thread."""
        ended = await self._wait(self._sync._ended, timeout)
        if ended is None:
            assert timeout is not None
            raise ResultTimedOut(f"run {self.id}", seconds("timeout", timeout))
        result: T_co = result_of(ended, self._sync._decode)
        return result

    async def _wait(self, look: Callable[[], T | None], timeout: Duration | None) -> T | None:
        loop, rung = asyncio.get_running_loop(), asyncio.Event()
        deadline = None if timeout is None else loop.time() + seconds("timeout", timeout)
        ring = partial(loop.call_soon_threadsafe, rung.set)
        database = await self._bridge.run(lambda: self._sync._database)
        with database.wakeups.doorbell(RESULTS, ring):
            for pause, tell in pauses():
                rung.clear()
                if tell:
                    await self._bridge.run(self._sync._expect)
                found = await self._bridge.run(look)
                left = None if deadline is None else deadline - loop.time()
                if found is not None or (left is not None and left <= 0):
                    return found
                await _first(rung.wait(), pause if left is None else min(pause, left))
        return None

    async def signal(self, name: str, payload: Any = None) -> None:
        """Say something to it: one `wait_for_event` of this name gets the payload."""
        context = current()
        if context is not None:
            _refuse_in_sync_body(context, "signal")
            database = await self._bridge.run(lambda: self._sync._database)
            await signal_run(
                context, self.id, name, payload, database=database, bridge=self._bridge
            )
            return
        await self._bridge.run(self._sync.signal, name, payload)

    async def cancel(self) -> RunStatus:
        """Let it and its children end. Returns what it is then."""
        return await self._bridge.run(self._sync.cancel)

    async def pause(self) -> None:
        """Let it stop at its next step until it is resumed."""
        await self._bridge.run(self._sync.pause)

    async def resume(self) -> None:
        """Let it go on after a pause."""
        await self._bridge.run(self._sync.resume)

    async def retry(self) -> None:
        """Let a failed run go on from the step that failed. What it has done stays done."""
        await self._bridge.run(self._sync.retry)

    async def fork(self, step: str | None = None) -> AsyncRun[T_co]:
        """A new run with the same input that has done what this one did before a step."""
        return AsyncRun(self._bridge, await self._bridge.run(self._sync.fork, step))

    async def start(self) -> None:
        """It runs from now on, by the hand of who calls this."""
        await self._bridge.run(self._sync.start)

    async def acquire_step(self, name: str) -> AsyncStepGuard:
        """Begin an attempt at a step, or learn the value it had."""
        return AsyncStepGuard(self._bridge, await self._bridge.run(self._sync.acquire_step, name))

    async def complete(self, output: Any = None) -> None:
        """It is done."""
        await self._bridge.run(self._sync.complete, output)

    async def fail(self, error: str | BaseException) -> None:
        """It failed."""
        await self._bridge.run(self._sync.fail, error)

    def __repr__(self) -> str:
        return f"<run {self.id}>"


class AsyncWorkflows:
    """The runs of a store."""

    def __init__(self, bridge: Bridge, database: Database) -> None:
        self._bridge = bridge
        self._database = database
        self._sync = Workflows(database)

    async def start(
        self,
        workflow: Workflow[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncRun[T]:
        """Start a run. `workflow.start(…)` reads better."""
        context = current()
        if context is not None:
            _refuse_in_sync_body(context, "start")
            child: Any = await start_child(context, workflow, args, kwargs or {}, store=self)
            return child  # type: ignore[no-any-return]
        run = await self._bridge.run(self._sync.start, workflow, args, kwargs)
        return AsyncRun(self._bridge, run)

    async def start_many(
        self,
        workflow: Workflow[..., T],
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
    ) -> list[AsyncRun[T]]:
        """Start a run for each of these calls. `workflow.start_many(…)` reads better."""
        context = current()
        if context is not None:
            _refuse_in_sync_body(context, "start_many")
            named = workflow.options(store=self)
            children: Any = await named._start_children(context, calls_of(calls), keys)
            return children  # type: ignore[no-any-return]
        runs = await self._bridge.run(self._sync.start_many, workflow, calls, keys=keys)
        return [AsyncRun(self._bridge, run) for run in runs]

    async def create(
        self,
        name: str,
        input: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        version: str | None = None,
    ) -> AsyncRun[Any]:
        """A run by the name of its workflow. Without a queue no worker runs it: drive it by hand."""
        refuse_in_body("create", "start it with `workflow.start(…)`, or create it in a step")
        run = await self._bridge.run(
            self._sync.create, name, input, key=key, queue=queue, version=version
        )
        return AsyncRun(self._bridge, run)

    async def run_inline(
        self,
        workflow: Workflow[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T:
        """Start a run and run it here to its end. `workflow.run_inline(…)` reads better."""
        refuse_in_body("run_inline", "use `workflow.start(…)`, or do it in a step")
        database = self._database.of_queue(workflow.queue)
        call = (database, workflow, args, kwargs or {})
        hold = holding(database, keeper_for(database, self._bridge))
        if workflow.is_async:
            ended = await run_inline_async(
                *call,
                hold=hold,
                offload=self._bridge.run,
                host=self._host(),
                reach=self._reach(),
                store=self._stores(),
            )
        else:
            run = partial(run_inline, *call, hold=hold, reach=self._reach(), store=self._stores())
            ended = await step_threads.run(run)
        result: T = result_of(ended, workflow.signature.decode_result)
        return result

    async def execute(self, message: Message, known: Iterable[Workflow[..., Any]]) -> Outcome:
        """Run the run of a message that you have dequeued, and renew its lease meanwhile: an async
        workflow in this event loop, a sync one in a thread.
        """
        workflows, reach = registry(known), self._reach()
        database = self._database.of_queue(message.queue)
        call = (database, workflows, message)
        hold = holding(database, keeper_for(database, self._bridge))
        with hold(message, reach, is_fresh=False) as watch:
            if is_async(message, workflows):
                return await execute_async(
                    *call,
                    offload=self._bridge.run,
                    host=self._host(),
                    watch=watch,
                    in_script=True,
                    store=self._stores(),
                )
            run = partial(
                execute, *call, reach=reach, watch=watch, in_script=True, store=self._stores()
            )
            return await step_threads.run(run)

    def _host(self) -> Offload | None:
        """Calls the database for user code, which may hang, if threads can reach it."""
        return step_threads.run if self._bridge.has_threads else None

    def _reach(self) -> Callable[[Callable[[], Any]], Any]:
        """How a thread calls the database: by itself, or through the event loop."""
        if self._bridge.has_threads:
            return lambda call: call()
        loop = asyncio.get_running_loop()
        return lambda call: in_loop(loop, self._bridge, call)

    def _stores(self) -> StoreOfCall:
        """The store for steps: as async code, or a thread, can use it."""
        if self._bridge.has_threads:
            return store_on(self._database)
        for_threads = LoopDatabase(self._database, self._bridge)
        for_threads.loop = asyncio.get_running_loop()

        def find(is_async: bool) -> Any:
            # By name: a store has workflows.
            if is_async:
                face = import_module("pgqrs.aio.store").AsyncStore
                return face._of(self._database, self._bridge)
            return import_module("pgqrs.store").Store._of(for_threads)

        return find

    def handle(self, run_id: int) -> AsyncRun[Any]:
        """A run by its id."""
        return AsyncRun(self._bridge, self._sync.handle(run_id))

    async def get(self, run_id: int) -> RunInfo:
        """All that the row of a run says now."""
        return await self._bridge.run(self._sync.get, run_id)

    async def list_runs(
        self,
        *,
        name: str | None = None,
        status: RunStatus | str | None = None,
        key: str | None = None,
        parent_id: int | None = None,
        n: int = 100,
        before: int | None = None,
    ) -> list[RunInfo]:
        """Runs, the newest first; `before` is the last id of the page before."""
        return await self._bridge.run(
            self._sync.list_runs,
            name=name,
            status=status,
            key=key,
            parent_id=parent_id,
            n=n,
            before=before,
        )

    async def purge(
        self, *, older_than: Duration = 0.0, status: RunStatus | str | None = None
    ) -> int:
        """Forget runs that ended longer ago than this, in bounded batches. Returns how many."""
        return await self._bridge.run(self._sync.purge, older_than=older_than, status=status)

    async def signal(self, run_id: int, name: str, payload: Any = None) -> None:
        """Say something to a run: one `wait_for_event` of this name gets the payload."""
        await self._bridge.run(self._sync.signal, run_id, name, payload)

    async def cancel(self, run_id: int) -> RunStatus:
        """Let a run and its children end."""
        return await self._bridge.run(self._sync.cancel, run_id)

    async def pause(self, run_id: int) -> None:
        """Let a run stop at its next step until it is resumed."""
        await self._bridge.run(self._sync.pause, run_id)

    async def resume(self, run_id: int) -> None:
        """Let a run go on after a pause."""
        await self._bridge.run(self._sync.resume, run_id)

    async def resume_all(
        self,
        *,
        name: str | None = None,
        version: str | None = None,
        parked: bool | None = None,
        error: str | None = None,
    ) -> int:
        """Let all paused runs go on that match. Returns how many."""
        return await self._bridge.run(
            self._sync.resume_all, name=name, version=version, parked=parked, error=error
        )

    async def retry(self, run_id: int) -> None:
        """Let a failed run go on from the step that failed."""
        await self._bridge.run(self._sync.retry, run_id)

    async def fork(self, run_id: int, step: str | None = None) -> AsyncRun[Any]:
        """A new run that has done what another did before a step."""
        return await self.handle(run_id).fork(step)

    async def steps(self, run_id: int) -> list[StepInfo]:
        """What a run has done, in order."""
        return await self._bridge.run(self._sync.steps, run_id)

    async def events(self, run_id: int, name: str | None = None) -> list[RunEvent]:
        """What a run has let others know, in order."""
        return await self._bridge.run(self._sync.events, run_id, name)

    async def get_event(
        self, run_id: int, name: str, timeout: Duration | None = None, *, default: Any = NOTHING
    ) -> Any:
        """What a run has let others know last under this name."""
        return await self.handle(run_id).get_event(name, timeout, default=default)


def _refuse_in_sync_body(context: Context, what: str) -> None:
    if not context.is_async:
        raise NotDurable(what, "a sync workflow has nothing to await it with; do it in a step")


async def _first(event: Awaitable[object], seconds: float) -> None:
    """Until it happens, or for so long."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        pass
