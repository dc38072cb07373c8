"""The async twin of `pgqrs.schedules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pgqrs.aio.bridge import Bridge
from pgqrs.schedules import Schedules
from pgqrs.types import BackfillProgress, Duration, MissedTicks, Schedule


class AsyncSchedules:
    """The schedules of a store."""

    def __init__(self, bridge: Bridge, schedules: Schedules) -> None:
        self._bridge = bridge
        self._sync = schedules

    async def create(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        seconds: bool = False,
        task: Any = None,
        workflow: Any = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        payload: Any = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        missed: MissedTicks | str = MissedTicks.ONE,
        replace: bool = False,
    ) -> Schedule:
        """At every tick from now on, enqueue a task, start a workflow, or enqueue a payload."""
        return await self._bridge.run(
            self._sync.create,
            name,
            cron=cron,
            every=every,
            timezone=timezone,
            seconds=seconds,
            task=task,
            workflow=workflow,
            args=args,
            kwargs=kwargs,
            queue=queue,
            payload=payload,
            priority=priority,
            headers=headers,
            missed=missed,
            replace=replace,
        )

    async def get(self, name: str) -> Schedule:
        """A schedule, and when it ticks next."""
        return await self._bridge.run(self._sync.get, name)

    async def list_schedules(self) -> list[Schedule]:
        """All schedules, by name. One that cannot tick says why: its `error`."""
        return await self._bridge.run(self._sync.list_schedules)

    async def delete(self, name: str) -> None:
        """Forget a schedule. What it has enqueued stays."""
        await self._bridge.run(self._sync.delete, name)

    async def pause(self, name: str) -> Schedule:
        """No more ticks until resumed."""
        return await self._bridge.run(self._sync.pause, name)

    async def resume(self, name: str) -> Schedule:
        """Tick again. Those that came meanwhile are missed ones. A schedule that could not tick is tried
        again at once.
        """
        return await self._bridge.run(self._sync.resume, name)

    async def trigger(self, name: str) -> int:
        """Enqueue it once now, out of turn. Returns the id of the message, or of the run."""
        return await self._bridge.run(self._sync.trigger, name)

    async def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        progress: Callable[[BackfillProgress], object] | None = None,
    ) -> list[int]:
        """Enqueue all ticks from `start`, up to `end` and without it. Returns the ids.

        A piece at a time; `progress` is called after each, perhaps in another thread. If that is cut
        short, the same call goes on where it ended.
        """
        return await self._bridge.run(self._sync.backfill, name, start, end, progress=progress)

    async def tick(self) -> int:
        """Enqueue what is due. Workers do this. Returns how many messages."""
        return await self._bridge.run(self._sync.tick)

    async def next_in(self) -> float:
        """Seconds until it is worth looking again."""
        return await self._bridge.run(self._sync.next_in)
