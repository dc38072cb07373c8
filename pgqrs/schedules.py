"""Schedules: messages and tasks that are enqueued, and workflows that are started, again and again.

They live in the database. Workers look at them: whoever finds one due enqueues its tick, and nobody else
does (see `repositories.schedules`). When they tick is decided in `ticks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import Any

from sqlalchemy import Connection

from pgqrs import ticks
from pgqrs.admin import Admin
from pgqrs.codecs import Call
from pgqrs.error_texts import error_message, said
from pgqrs.errors import (
    CommitUncertain,
    ConflictError,
    InvalidArgument,
    InvalidPayload,
    QueueNotFound,
    ScheduleNotFound,
    SeveralShards,
    StoreClosed,
    StoreUnavailable,
)
from pgqrs.payloads import Batch, encode, encode_headers
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY, MAX_HEADER_BYTES
from pgqrs.repositories import messages, places, queues, schedules, starting
from pgqrs.repositories.reading import carefully
from pgqrs.repositories.schedules import Backfill
from pgqrs.sqltypes import Undecodable
from pgqrs.stores import Database
from pgqrs.types import BackfillProgress, Duration, MissedTicks, Schedule, aware, whole
from pgqrs.types import seconds as in_seconds

SELDOM = 5.0
"""Seconds after which workers look for new schedules."""
NAME_HEADER, TICK_HEADER = "pgqrs-schedule", "pgqrs-tick"
RUNS = "workflows"
"""The queue of a workflow that is given by its name, unless another is given."""
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
        """At every tick from now on, enqueue a task with these arguments, start a workflow (given itself
        or by its name), or enqueue a payload.

        `cron` is an expression of five fields in the `timezone`, of six with `seconds`; `every` an
        interval. `missed` is what to do about ticks that came while no worker ran: `skip` them, run
        `one` for all, or `all`. With `replace` a schedule of this name is changed where it differs: it
        keeps its next tick unless its timing changes, and stays paused if it is.
        """
        interval = None if every is None else in_seconds("every", every)
        ticks.check(cron=cron, every=interval, timezone=timezone, seconds=seconds)
        target = _target(task, workflow, Call(tuple(args), dict(kwargs or {})), self._database)
        if target is None:
            target = {"payload": _text(payload, self._database), "queue": None}
        elif payload is not None:
            raise InvalidArgument("payload", "a task or a workflow gets args and kwargs instead")
        own_queue, target["queue_name"] = target.pop("queue"), queue
        if queue is None:
            target["queue_name"] = own_queue
        if target["queue_name"] is None:
            raise InvalidArgument("queue", "give a task, a workflow, or a queue and a payload")
        values: dict[str, Any] = {
            "name": _valid_name(name),
            "cron": cron,
            "every": interval,
            "timezone": timezone,
            "missed": _policy(missed),
            "priority": whole("priority", priority, low=LOWEST_PRIORITY, high=HIGHEST_PRIORITY),
            "codec": None,
            "headers": encode_headers(headers, max_bytes=MAX_HEADER_BYTES),
            "workflow": None,
            "options": None,
        } | target

        def first(when: datetime, start: datetime) -> datetime:
            return ticks.first_after(
                when, cron=cron, every=interval, timezone=timezone, start=start
            )

        database = self._database.of_queue(values["queue_name"])
        self._refuse_elsewhere(name, database)

        def work(connection: Connection) -> Schedule:
            now = database.now()
            queues.get(connection, values["queue_name"])
            return schedules.create(connection, values, replace=replace, first=first, now=now)

        try:
            return database.write(work)
        except QueueNotFound:
            if queue is not None or own_queue is None:
                raise
        Admin(database).create_queue(own_queue, if_not_exists=True)
        return database.write(work)

    def _refuse_elsewhere(self, name: str, database: Database) -> None:
        """A name is that of one schedule, on whatever shard."""
        for shard in self._database.shards:
            if shard is not database and shard.read(lambda c: places.has_schedule(c, name)):
                raise SeveralShards(
                    "create",
                    f"schedule {name!r} is on the shard of another queue; delete it first, or take "
                    "another name",
                )

    def _of(self, name: str) -> Database:
        """The database that a schedule is in."""
        return self._database.where(lambda c: places.has_schedule(c, name))

    def get(self, name: str) -> Schedule:
        """A schedule, and when it ticks next."""
        return self._of(name).read(lambda c: schedules.get(c, name))

    def list_schedules(self) -> list[Schedule]:
        """All schedules, by name. One that cannot tick says why: its `error`."""
        pages = [
            carefully(
                lambda bare, shard=shard: shard.read(  # type: ignore[misc]
                    schedules.find_bare if bare else schedules.find
                ),
                lambda found: self.get(found.name),
            )
            for shard in self._database.shards
        ]
        by_name = sorted(chain.from_iterable(pages), key=lambda schedule: schedule.name)
        return pages[0] if len(pages) == 1 else by_name

    def delete(self, name: str) -> None:
        """Forget a schedule. What it has enqueued stays."""
        self._of(name).write(lambda c: schedules.remove(c, name))

    def pause(self, name: str) -> Schedule:
        """No more ticks until resumed."""
        return self._of(name).write(lambda c: schedules.change(c, name, paused=True))

    def resume(self, name: str) -> Schedule:
        """Tick again. Those that came meanwhile are missed ones. A schedule that could not tick is tried
        again at once.
        """
        return self._of(name).write(lambda c: schedules.resume(c, name))

    def trigger(self, name: str) -> int:
        """Enqueue it once now, out of turn. Returns the id of the message, or of the run."""

        def work(connection: Connection) -> tuple[str, list[int]]:
            now = self._database.now()
            schedule = schedules.get(connection, name)
            return schedule.queue, _enqueue(connection, schedule, [None], self._database, now)

        queue, (id,) = self._of(name).write(work)
        self._database.ring(queue)
        return id

    def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        progress: Callable[[BackfillProgress], object] | None = None,
    ) -> list[int]:
        """Enqueue all ticks from `start`, up to `end` and without it. Returns the ids.

        A piece at a time, each in a transaction of its own; `progress` is called after each. If that is
        cut short, the same call goes on where it ended: each tick is enqueued once.
        """
        range = Backfill(aware("start", start), aware("end", end), aware("start", start))
        ids: list[int] = []
        left: Backfill | None = range
        while left is not None:
            schedule = self.get(name)
            # One more than is enqueued: it tells where the next piece begins.
            found = list(islice(ticks.between(schedule, left.left, left.end), ticks.AT_ONCE + 1))
            piece = found[: ticks.AT_ONCE]
            following = range._replace(left=found[-1]) if len(found) > len(piece) else None
            done, position = self._backfill(schedule, piece, left, following)
            if done is None:  # another call has gone on with it, or one before was cut short
                left = position
                continue
            ids += done
            left = following
            if progress is not None and piece:
                progress(BackfillProgress(len(ids), piece[-1], range.start, range.end))
        return ids

    def _backfill(
        self,
        schedule: Schedule,
        piece: list[datetime],
        left: Backfill,
        following: Backfill | None,
    ) -> tuple[list[int] | None, Backfill | None]:
        """Enqueue a piece, unless the backfill stands elsewhere. Returns the ids and where it stands."""

        def work(connection: Connection) -> tuple[list[int] | None, Backfill | None]:
            noted = schedules.lock_backfills(connection, schedule.name)
            same = [one for one in noted if one[:2] == left[:2]]
            if same and same[0] != left:
                return None, same[0]
            if not same and left.is_begun:
                return None, None  # another call has come to its end
            ids = _enqueue(connection, schedule, piece, self._database, self._database.now())
            others = [one for one in noted if one not in same]
            going_on = [] if following is None else [following]
            schedules.note_backfills(connection, schedule.name, others + going_on)
            return ids, following

        done = self._database.of_queue(schedule.queue).write(work)
        if done[0]:
            self._database.ring(schedule.queue)
        return done

    def tick(self) -> int:
        """Enqueue what is due. Workers do this. Returns how many messages."""
        return sum(Schedules(shard)._tick() for shard in self._database.shards)

    def _tick(self) -> int:
        total = 0
        for name in self._database.read(lambda c: schedules.due(c, now=self._database.now())):
            try:
                total += self._tick_one(name)
            except (StoreUnavailable, CommitUncertain, StoreClosed):
                raise
            except ConflictError:  # in S3 another process wrote meanwhile: the next look finds it
                continue
            except Exception as exc:  # one that cannot tick does not hinder the others
                self._note_failure(name, exc)
        return total

    def next_in(self) -> float:
        """Seconds until it is worth looking again."""
        found = [
            shard.read(lambda c: schedules.next_in(c, now=self._database.now()))
            for shard in self._database.shards
        ]
        return min([SELDOM, *(max(0.0, due) for due in found if due is not None)])

    def _tick_one(self, name: str) -> int:
        try:
            schedule, asked = self._database.read(
                lambda c: schedules.get_at(c, name, now=self._database.now())
            )
        except ScheduleNotFound:
            return 0  # it was deleted meanwhile
        decided = ticks.decide(schedule, asked)  # not inside of the transaction: it may take long

        def work(connection: Connection) -> int:
            found = schedules.lock(connection, name)
            if found is None or _timing(found) != _timing(schedule):
                return 0  # another worker was quicker, or it was changed
            now = self._database.now()
            ids = _enqueue(connection, found, decided.due, self._database, now)
            last = (decided.due or [asked])[-1]
            schedules.move_on(connection, name, next_at=decided.next_at, last_at=last)
            return len(ids)

        count = self._database.write(work)
        if count:
            self._database.ring(schedule.queue)
        return count

    def _note_failure(self, name: str, error: Exception) -> None:
        text = error_message(f"{type(error).__name__}: {said(error)}", self._database.config)
        if self._database.write(lambda c: schedules.fail(c, name, text, now=self._database.now())):
            logger.error(
                "schedule %s cannot tick, and is tried again after growing pauses: %s", name, text
            )


def _timing(schedule: Schedule) -> tuple[Any, ...]:
    """What decides when a schedule ticks."""
    return (
        schedule.next_at,
        schedule.starts_at,
        schedule.cron,
        schedule.every,
        schedule.timezone,
        schedule.missed,
        schedule.paused,
    )


def _target(task: Any, workflow: Any, call: Call, database: Database) -> dict[str, Any] | None:
    """What a task or a workflow is in a schedule; None if there is neither."""
    if task is not None and workflow is not None:
        raise InvalidArgument("workflow", "give a task or a workflow, not both")
    if task is not None:
        payload = _text(task.payload(*call.args, **call.kwargs), database)
        return {"payload": payload, "queue": task.queue, "codec": task.codec}
    if workflow is None:
        if call.args or call.kwargs:
            raise InvalidArgument("args", "only a task or a workflow has arguments")
        return None
    if isinstance(workflow, str):
        input = {"args": list(call.args), "kwargs": dict(call.kwargs)}
        return {"payload": _text(input, database), "queue": RUNS, "workflow": workflow}
    started = workflow.start_arguments(call.args, call.kwargs, database.config)
    for name in ("key", "eta", "deadline", "delay"):
        if started[name]:
            raise InvalidArgument(
                "workflow", f"a schedule cannot start it with the option {name!r}"
            )
    options = {name: started[name] for name in ("version", "timeout") if started[name] is not None}
    return {
        "payload": started["input"],
        "queue": started["queue"],
        "workflow": started["name"],
        "options": _text(options, database) if options else None,
        **({"priority": started["priority"]} if started["priority"] else {}),
    }


def _enqueue(
    connection: Connection,
    schedule: Schedule,
    due: Iterable[datetime | None],
    database: Database,
    now: datetime | None,
) -> list[int]:
    """Enqueue these ticks. Returns the ids of the messages, or of the runs."""
    text = _text(schedule.payload, database)
    ids: list[int] = []
    for tick in due:
        given = dict(schedule.headers or {}) | {NAME_HEADER: schedule.name}
        if tick is not None:
            given[TICK_HEADER] = tick.isoformat()
        headers = encode_headers(given, max_bytes=2 * MAX_HEADER_BYTES)
        if schedule.workflow is not None:
            started = starting.start(
                connection,
                name=schedule.workflow,
                queue=schedule.queue,
                input=text,
                priority=schedule.priority,
                headers=headers,
                now=now,
                **(schedule.options or {}),
            )
            ids.append(started.id)
            continue
        ids += messages.enqueue(
            connection,
            schedule.queue,
            Batch(1, None, [text]),
            headers=headers,
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
    if type(payload) is Undecodable:
        raise InvalidPayload("payload", "the stored text is not JSON")
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
