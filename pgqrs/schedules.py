"""Schedules: messages and tasks that are enqueued again and again, by cron or by interval.

They live in the database. Workers look at them: whoever finds one due enqueues its tick, and nobody else
does (see `repositories.schedules`). When they tick is decided in `ticks`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from pgqrs import ticks
from pgqrs.errors import InvalidArgument, PgqrsError
from pgqrs.payloads import Batch, encode, encode_headers
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY, MAX_HEADER_BYTES
from pgqrs.repositories import messages, queues, schedules
from pgqrs.stores import Database
from pgqrs.types import Duration, MissedTicks, Schedule, aware, seconds, whole

SELDOM = 5.0
"""Seconds after which workers look for new schedules."""
NAME_HEADER, TICK_HEADER = "pgqrs-schedule", "pgqrs-tick"
logger = logging.getLogger("pgqrs.schedules")


class Schedules:
    """The schedules of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
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
        """Enqueue a task with these arguments, or a payload, at every tick from now on.

        `cron` is an expression of five fields in the `timezone`; `every` an interval. `missed` is what
        to do about ticks that came while no worker ran: `skip` them, run `one` for all, or `all`.
        """
        interval = None if every is None else seconds("every", every)
        ticks.check(cron=cron, every=interval, timezone=timezone)
        if task is not None:
            payload, queue = task.payload(*args, **dict(kwargs or {})), queue or task.queue
        if queue is None:
            raise InvalidArgument("queue", "give a task, or a queue and a payload")
        values: dict[str, Any] = {
            "name": _valid_name(name),
            "queue_name": queue,
            "cron": cron,
            "every": interval,
            "timezone": timezone,
            "missed": _policy(missed),
            "priority": whole("priority", priority, low=LOWEST_PRIORITY, high=HIGHEST_PRIORITY),
            "codec": getattr(task, "codec", None),
            "headers": encode_headers(headers, max_bytes=MAX_HEADER_BYTES),
            "payload": _text(payload, self._database),
        }

        def first(now: datetime) -> datetime:
            timing = {"cron": cron, "every": interval, "timezone": timezone, "start": now}
            return next(ticks.after(now, **timing))  # type: ignore[arg-type]

        now = self._database.now()

        def work(connection: Connection) -> Schedule:
            queues.get(connection, values["queue_name"])
            return schedules.create(connection, values, replace=replace, first=first, now=now)

        return self._database.write(work)

    def get(self, name: str) -> Schedule:
        """A schedule, and when it ticks next."""
        return self._database.read(lambda c: schedules.get(c, name))

    def list_schedules(self) -> list[Schedule]:
        """All schedules, by name."""
        return self._database.read(schedules.find)

    def delete(self, name: str) -> None:
        """Forget a schedule. What it has enqueued stays."""
        self._database.write(lambda c: schedules.remove(c, name))

    def pause(self, name: str) -> Schedule:
        """No more ticks until resumed."""
        return self._database.write(lambda c: schedules.change(c, name, paused=True))

    def resume(self, name: str) -> Schedule:
        """Tick again. Those that came meanwhile are missed ones."""
        return self._database.write(lambda c: schedules.change(c, name, paused=False))

    def trigger(self, name: str) -> int:
        """Enqueue it once now, out of turn. Returns the id of the message."""
        now = self._database.now()

        def work(connection: Connection) -> tuple[str, list[int]]:
            schedule = schedules.get(connection, name)
            return schedule.queue, _enqueue(connection, schedule, [None], self._database, now)

        queue, (id,) = self._database.write(work)
        self._database.ring(queue)
        return id

    def backfill(self, name: str, start: datetime, end: datetime) -> list[int]:
        """Enqueue all ticks from `start`, up to `end` and without it. Returns the ids."""
        schedule = self.get(name)
        wanted = ticks.between(schedule, aware("start", start), aware("end", end))
        now = self._database.now()
        ids = self._database.write(lambda c: _enqueue(c, schedule, wanted, self._database, now))
        self._database.ring(schedule.queue)
        return ids

    def tick(self) -> int:
        """Enqueue what is due. Workers do this. Returns how many messages."""
        now, total = self._database.now(), 0
        for name in self._database.read(lambda c: schedules.due(c, now=now)):
            try:
                total += self._tick_one(name)
            except PgqrsError as exc:  # one that cannot tick does not hinder the others
                logger.error("schedule %s could not tick: %s", name, exc)
        return total

    def next_in(self) -> float:
        """Seconds until it is worth looking again."""
        now = self._database.now()
        found = self._database.read(lambda c: schedules.next_in(c, now=now))
        return SELDOM if found is None else min(SELDOM, max(0.0, found))

    def _tick_one(self, name: str) -> int:
        now = self._database.now()

        def work(connection: Connection) -> tuple[str, int]:
            found = schedules.lock(connection, name, now=now)
            if found is None:
                return "", 0
            schedule, asked = found
            decided = ticks.decide(schedule, asked)
            if schedule.paused or decided.next_at == schedule.next_at:
                return "", 0  # somebody else was quicker
            ids = _enqueue(connection, schedule, decided.due, self._database, now)
            schedules.change(
                connection, name, next_at=decided.next_at, last_at=(decided.due or [asked])[-1]
            )
            return schedule.queue, len(ids)

        queue, count = self._database.write(work)
        if count:
            self._database.ring(queue)
        return count


def _enqueue(
    connection: Connection,
    schedule: Schedule,
    due: Iterable[datetime | None],
    database: Database,
    now: datetime | None,
) -> list[int]:
    text = _text(schedule.payload, database)
    ids: list[int] = []
    for tick in due:
        headers = dict(schedule.headers or {}) | {NAME_HEADER: schedule.name}
        if tick is not None:
            headers[TICK_HEADER] = tick.isoformat()
        ids += messages.enqueue(
            connection,
            schedule.queue,
            Batch(1, None, [text]),
            headers=encode_headers(headers, max_bytes=2 * MAX_HEADER_BYTES),
            codec=schedule.codec,
            priority=schedule.priority,
            delay=0.0,
            eta=None,
            ttl=None,
            expires_at=None,
            producer=None,
            now=now,
        ).ids
    return ids


def _text(payload: Any, database: Database) -> str:
    limits = database.config
    return encode(payload, max_bytes=limits.max_payload_bytes, max_depth=limits.max_payload_depth)


def _valid_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise InvalidArgument("name", f"a schedule's name is printable text, not {name!r}")
    return name


def _policy(missed: MissedTicks | str) -> MissedTicks:
    try:
        return MissedTicks(missed)
    except ValueError:
        known = ", ".join(MissedTicks)
        raise InvalidArgument("missed", f"expected one of {known}, got {missed!r}") from None
