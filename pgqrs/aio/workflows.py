"""The async twin of `pgqrs.workflows.runs`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from pgqrs.aio.bridge import Bridge, ThreadBridge
from pgqrs.errors import EventTimedOut, ResultTimedOut
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
from pgqrs.workflows.decorators import Workflow
from pgqrs.workflows.execution import execute, execute_async, is_async, registry
from pgqrs.workflows.flows import NOTHING
from pgqrs.workflows.guards import StepGuard
from pgqrs.workflows.inline import run_inline, run_inline_async
from pgqrs.workflows.runs import Run, Workflows, pauses, result_of

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


class AsyncRun:
    """A run of a workflow."""

    def __init__(self, bridge: Bridge, run: Run) -> None:
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

    async def result(self, timeout: Duration | None = None) -> Any:
        """What it returned; waits until it has ended, at most so long. Waiting needs no thread."""
        ended = await self._wait(self._sync._ended, timeout)
        if ended is None:
            assert timeout is not None
            raise ResultTimedOut(f"run {self.id}", seconds("timeout", timeout))
        return result_of(ended, self._sync._decode)

    async def _wait(self, look: Callable[[], T | None], timeout: Duration | None) -> T | None:
        loop, rung = asyncio.get_running_loop(), asyncio.Event()
        deadline = None if timeout is None else loop.time() + seconds("timeout", timeout)
        ring = partial(loop.call_soon_threadsafe, rung.set)
        with self._sync._database.wakeups.doorbell(RESULTS, ring):
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

    async def fork(self, step: str | None = None) -> AsyncRun:
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
        workflow: Workflow[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncRun:
        """Start a run. `workflow.start(…)` reads better."""
        run = await self._bridge.run(self._sync.start, workflow, args, kwargs)
        return AsyncRun(self._bridge, run)

    async def create(
        self,
        name: str,
        input: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        version: str | None = None,
    ) -> AsyncRun:
        """A run by the name of its workflow. Without a queue no worker runs it: drive it by hand."""
        run = await self._bridge.run(
            self._sync.create, name, input, key=key, queue=queue, version=version
        )
        return AsyncRun(self._bridge, run)

    async def run_inline(
        self,
        workflow: Workflow[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Start a run and run it here to its end. `workflow.run_inline(…)` reads better."""
        call = (self._database, workflow, args, kwargs or {})
        if workflow.is_async:
            ended = await run_inline_async(*call, offload=self._bridge.run)
        else:
            ended = await asyncio.to_thread(partial(run_inline, *call, reach=self._reach()))
        return result_of(ended, workflow.signature.decode_result)

    async def execute(self, message: Message, known: Iterable[Workflow[..., Any]]) -> Outcome:
        """Run the run of a message that you have dequeued: an async workflow in this event loop, a
        sync one in a thread.
        """
        workflows = registry(known)
        if is_async(message, workflows):
            return await execute_async(self._database, workflows, message, offload=self._bridge.run)
        return await asyncio.to_thread(
            execute, self._database, workflows, message, reach=self._reach()
        )

    def _reach(self) -> Callable[[Callable[[], Any]], Any]:
        """How a thread calls the database: by itself, or through the event loop."""
        if isinstance(self._bridge, ThreadBridge):
            return lambda call: call()
        loop = asyncio.get_running_loop()
        return lambda call: asyncio.run_coroutine_threadsafe(self._bridge.run(call), loop).result()

    def handle(self, run_id: int) -> AsyncRun:
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

    async def retry(self, run_id: int) -> None:
        """Let a failed run go on from the step that failed."""
        await self._bridge.run(self._sync.retry, run_id)

    async def fork(self, run_id: int, step: str | None = None) -> AsyncRun:
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


async def _first(event: Awaitable[object], seconds: float) -> None:
    """Until it happens, or for so long."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        pass
