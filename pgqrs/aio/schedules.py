"""The async twin of `pgqrs.schedules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pgqrs.aio.bridge import Bridge
from pgqrs.schedules import Schedules
from pgqrs.types import Duration, MissedTicks, Schedule


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
        task: Any = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        payload: Any = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        missed: MissedTicks | str = MissedTicks.ONE,
        replace: bool = False,
    ) -> Schedule:
        """Enqueue a task with these arguments, or a payload, at every tick from now on."""
        return await self._bridge.run(
            self._sync.create,
            name,
            cron=cron,
            every=every,
            timezone=timezone,
            task=task,
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
        """All schedules, by name."""
        return await self._bridge.run(self._sync.list_schedules)

    async def delete(self, name: str) -> None:
        """Forget a schedule. What it has enqueued stays."""
        await self._bridge.run(self._sync.delete, name)

    async def pause(self, name: str) -> Schedule:
        """No more ticks until resumed."""
        return await self._bridge.run(self._sync.pause, name)

    async def resume(self, name: str) -> Schedule:
        """Tick again. Those that came meanwhile are missed ones."""
        return await self._bridge.run(self._sync.resume, name)

    async def trigger(self, name: str) -> int:
        """Enqueue it once now, out of turn. Returns the id of the message."""
        return await self._bridge.run(self._sync.trigger, name)

    async def backfill(self, name: str, start: datetime, end: datetime) -> list[int]:
        """Enqueue all ticks from `start`, up to `end` and without it. Returns the ids."""
        return await self._bridge.run(self._sync.backfill, name, start, end)

    async def tick(self) -> int:
        """Enqueue what is due. Workers do this. Returns how many messages."""
        return await self._bridge.run(self._sync.tick)

    async def next_in(self) -> float:
        """Seconds until it is worth looking again."""
        return await self._bridge.run(self._sync.next_in)
