"""Looking after a store: its tables, queues, workers and archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sqlalchemy import Connection

from pgqrs import moving
from pgqrs.errors import (
    ConstraintViolated,
    InvalidArgument,
    MessageNotFound,
    NotSupported,
    QueueNotFound,
    SeveralShards,
    WorkerNotFound,
)
from pgqrs.matching import ANYTHING, ArchiveFilter, archive_filter, reasons
from pgqrs.moving import CopiedTable, Opened, Progress
from pgqrs.queue_making import check_name
from pgqrs.repositories import archive, dequeue, messages, places, queues, stats, streams, workers
from pgqrs.repositories.reading import Unreadable, carefully
from pgqrs.s3_cost import S3Cost, S3Prices, measured
from pgqrs.stores import Database, Remote, Work
from pgqrs.types import (
    ArchivedMessage,
    ArchiveReason,
    Duration,
    Message,
    Queue,
    QueueStats,
    Rate,
    S3State,
    S3Stats,
    S3Version,
    StreamInfo,
    WorkerInfo,
    WorkerStatus,
    seconds,
    whole,
)

CANCELLED = "cancelled"
"""The error of a message that was cancelled."""
BATCH = 1000
"""Rows that one statement deletes, of the operations that may have many to delete. Each batch has a
transaction of its own, but in S3, where all of them share one upload.
"""


T = TypeVar("T")


class _Unchanged:
    """Tells a setting that was not given from one given as None."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final[Any] = _Unchanged()
_FAILED = archive_filter(
    reason=ArchiveReason.FAILED, since=None, until=None, error=None, payload=ANYTHING, headers=None
)


class Admin:
    """Everything that is not producing or consuming."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # The tables

    def install(self) -> None:
        """Create the tables, or upgrade them to what this version needs. Repeating it is fine."""
        self._database.install()

    def verify(self) -> None:
        """Raise the error that says how the tables differ from what this version needs.

        The recorded revisions are compared with those of this version, and every table, column,
        index, constraint and function with the models. Opening a store compares the revisions, and
        looks whether all tables, indexes and functions are there.
        """
        self._database.verify()

    def copy_to(self, store: Opened, *, progress: Progress | None = None) -> list[CopiedTable]:
        """Copy everything to another store, with all ids; interrupted, it goes on when called again.

        The other store is installed, and empty or partly copied to before. Nobody may use either of
        them meanwhile. At the end both are compared, row by row. `progress` is called with a
        `CopyProgress` now and then.
        """
        there = moving.sync_database(store)
        steps = moving.steps(progress, spread=moving.is_spread(there))
        return moving.run(steps, self._database, there)

    # Queues

    def create_queue(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        max_read_ct: int | None = None,
        retention: Duration | None = None,
        max_in_flight: int | None = None,
        max_in_flight_per_key: int | None = None,
        rate: Rate | None = None,
        max_lease: Duration | None = None,
        max_releases: int | None = None,
        if_not_exists: bool = False,
    ) -> Queue:
        """A new queue.

        `lease` is how long a claim lasts by default, `max_read_ct` how many attempts a message
        gets, `retention` how long `purge_archive` keeps finished messages (None: for ever).

        Limits: `max_in_flight` messages are held at a time, and of those with the same key
        `max_in_flight_per_key`; no more than `rate` are claimed in its period.
        Bounds: nobody holds a message for longer than `max_lease` without extending it, and one that
        is given back more often than `max_releases` goes to the archive as failed.
        """
        check_name(name)
        database = self._database.of_queue(name)
        defaults = database.config
        settings = _settings(
            lease=_shorter(defaults.lease, max_lease) if lease is None else lease,
            max_read_ct=defaults.max_read_ct if max_read_ct is None else max_read_ct,
            retention=retention,
            max_in_flight=max_in_flight,
            max_in_flight_per_key=max_in_flight_per_key,
            rate=rate,
            max_lease=max_lease,
            max_releases=max_releases,
        )

        def work(connection: Connection) -> Queue:
            now = database.now()
            return queues.create(connection, name, if_not_exists=if_not_exists, now=now, **settings)

        try:
            with database.savepoint():
                return database.write(work)
        except ConstraintViolated:  # somebody else created it meanwhile: now it is found
            return database.write(work)

    def get_queue(self, name: str) -> Queue:
        """A queue and its settings."""
        return self._database.of_queue(name).read(lambda c: queues.get(c, name))

    def list_queues(self) -> list[Queue]:
        """All queues, by name."""
        return self._everywhere(queues.find, by=lambda queue: queue.queue_name)

    def configure_queue(
        self,
        name: str,
        *,
        lease: Duration = UNCHANGED,
        max_read_ct: int = UNCHANGED,
        retention: Duration | None = UNCHANGED,
        max_in_flight: int | None = UNCHANGED,
        max_in_flight_per_key: int | None = UNCHANGED,
        rate: Rate | None = UNCHANGED,
        max_lease: Duration | None = UNCHANGED,
        max_releases: int | None = UNCHANGED,
    ) -> Queue:
        """Change settings of a queue; they count from the next operation on."""
        settings = _settings(
            lease=lease,
            max_read_ct=max_read_ct,
            retention=retention,
            max_in_flight=max_in_flight,
            max_in_flight_per_key=max_in_flight_per_key,
            rate=rate,
            max_lease=max_lease,
            max_releases=max_releases,
        )
        configured = self._configure(name, **settings)
        self._database.ring(name)  # there may be more room now
        return configured

    def pause_queue(self, name: str) -> Queue:
        """Hand out no more messages until resumed. Enqueueing goes on."""
        return self._configure(name, paused=True)

    def resume_queue(self, name: str) -> Queue:
        """Hand out messages again."""
        resumed = self._configure(name, paused=False)
        self._database.ring(name)
        return resumed

    def purge_queue(self, name: str) -> int:
        """Delete all messages that a queue holds now, also held ones. Returns how many.

        In bounded batches, each its own transaction. What is enqueued meanwhile stays.
        """
        database = self._database.of_queue(name)
        through = database.read(lambda c: queues.last_message(c, name))
        total, locked = 0, [0]
        while locked:
            purged, locked = self._purge_between(name, after=locked[0] - 1, through=through)
            total += purged
            if locked:  # by somebody who claims or ends it just now
                database.write(
                    lambda c, id=locked[0]: queues.wait_for(c, id),  # type: ignore[misc]
                    single=True,
                    repeatable=True,
                )
        return total

    def _purge_between(self, name: str, *, after: int, through: int) -> tuple[int, list[int]]:
        """Returns how many messages were deleted, and which were locked by others."""
        done = self._database.of_queue(name).write_in_batches(
            partial(self._purge_batch, name, through), after=after
        )
        locked = [id for batch in done for id in batch.locked]
        return sum(batch.deleted for batch in done), locked

    def _purge_batch(
        self, name: str, through: int, connection: Connection, after: int
    ) -> tuple[queues.Purged, int | None]:
        purged = queues.purge(
            connection, name, after=after, through=through, limit=BATCH, now=self._database.now()
        )
        return purged, purged.last

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        """Delete a queue and its archive; refused while messages remain or schedules use it
        (`QueueScheduled` names them), unless forced.

        By force, the runs of workflows whose messages it held end as failed, and its schedules say that
        they cannot tick until there is such a queue again.
        """
        self._database.of_queue(name).write(
            lambda c: queues.remove(c, name, force=force, now=self._database.now())
        )

    def expire(self, queue: str) -> int:
        """Archive what has expired, and what lapsed for good. Returns how many.

        Dequeueing does this in passing; this is for queues that nobody dequeues from.
        """
        self.get_queue(queue)
        total = 0
        while swept := self._database.of_queue(queue).write(
            lambda c: dequeue.sweep(c, queue, now=self._database.now()).ended
        ):
            total += swept
        return total

    # Messages

    def get_message(self, id: int) -> Message:
        """A message that is not finished yet."""
        return self._one(messages.get, id)

    def _one(self, get: Callable[..., T | None], id: int) -> T:
        """A message, or an archived one; bare if it cannot be read."""
        database = self._database.of_message(id)
        try:
            found = database.read(lambda c: get(c, id))
        except Unreadable:
            found = database.read(lambda c: get(c, id, bare=True))
        if found is None:
            raise MessageNotFound(id)
        return found

    def cancel(self, id: int) -> bool:
        """End a message, whoever holds it: to the archive as manual. Returns whether it was not
        finished.

        A worker that is at work on it learns that when it next renews the lease; what comes of it
        does not count.
        """
        database = self._database.of_message(id)
        queue = database.read(lambda c: messages.get(c, id, bare=True))
        if queue is None:
            self.get_archived(id)
            return False
        cancelled = database.write(
            lambda c: archive.cancel(c, id, error=CANCELLED, now=database.now()),
            repeatable=True,
        )
        database.ring(queue.queue)  # it may have kept others back
        database.ring_of_results(queue.queue)
        return cancelled

    def peek(self, queue: str, n: int = 10, *, after: int = 0) -> list[Message]:
        """Messages by id, without claiming them; `after` is the last id of the page before."""
        limit = whole("n", n, low=1, high=100_000)
        self.get_queue(queue)
        database = self._database.of_queue(queue)
        asked: dict[str, Any] = {"limit": limit, "after": after}
        return carefully(
            lambda bare: database.read(lambda c: messages.peek(c, queue, bare=bare, **asked)),
            lambda found: self.get_message(found.id),
        )

    # The archive

    def get_archived(self, id: int) -> ArchivedMessage:
        """How the message of this id ended."""
        return self._one(archive.get, id)

    def list_archive(
        self,
        queue: str,
        *,
        reason: ArchiveReason | str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        error: str | None = None,
        payload: Any = ANYTHING,
        headers: Mapping[str, Any] | None = None,
        n: int = 100,
        after: int = 0,
    ) -> list[ArchivedMessage]:
        """Finished messages in the order they ended; `after` is the last archive id of the page
        before. What the other arguments choose: see `replay_all`.
        """
        chosen = archive_filter(
            reason=reason, since=since, until=until, error=error, payload=payload, headers=headers
        )
        limit = whole("n", n, low=1, high=100_000)
        pages = self._find_archived(queue, chosen, replayed=True, size=limit, after=after)
        return list(islice((found for page in pages for found in page), limit))

    def dead_letters(self, queue: str, *, n: int = 100, after: int = 0) -> list[ArchivedMessage]:
        """Messages that failed for good and were not replayed."""
        limit = whole("n", n, low=1, high=100_000)
        pages = self._find_archived(queue, _FAILED, replayed=False, size=limit, after=after)
        return list(islice((found for page in pages for found in page), limit))

    def replay(self, ids: int | Iterable[int]) -> list[int]:
        """Enqueue archived messages anew, by the ids they had as messages. Returns the new ids.

        All of them or none, so all have to be on one shard of the store. The archive keeps them, with
        what they became.
        """
        wanted = [ids] if isinstance(ids, int) else list(ids)
        database = self._one_shard("replay", wanted)
        replayed = database.write(lambda c: archive.replay_messages(c, wanted, now=database.now()))
        for queue in replayed.queues:
            database.ring(queue)
        return replayed.ids

    def replay_all(
        self,
        queue: str,
        *,
        reason: ArchiveReason | str | None = "failed",
        since: datetime | None = None,
        until: datetime | None = None,
        error: str | None = None,
        payload: Any = ANYTHING,
        headers: Mapping[str, Any] | None = None,
    ) -> int:
        """Enqueue anew all archived messages that match and were not replayed yet. Returns how many.

        They ended for this reason (None: any), at or after `since`, before `until`, with an error
        that contains this text, with this payload, with these headers. Of an object, only the
        members that are given are compared. In bounded batches, each its own transaction.
        """
        chosen = archive_filter(
            reason=reason, since=since, until=until, error=error, payload=payload, headers=headers
        )
        return self._replay_all(queue, chosen)

    def replay_dead_letters(self, queue: str) -> int:
        """Enqueue all dead letters of a queue anew. Returns how many."""
        return self._replay_all(queue, _FAILED)

    def purge_archive(
        self,
        queue: str,
        *,
        older_than: Duration | None = None,
        reason: ArchiveReason | str | None = None,
    ) -> int:
        """Forget finished messages that ended longer ago than `older_than`, or the queue's
        retention.

        In bounded batches, each its own transaction. Returns how many. Without either age nothing
        is forgotten.
        """
        retention = self.get_queue(queue).retention
        kept = retention if older_than is None else older_than
        if kept is None:
            return 0
        age, ended = seconds("older_than", kept), reasons(reason)

        def batch(connection: Connection, _: int) -> tuple[int, int | None]:
            purged = archive.purge(
                connection,
                queue,
                reasons=ended,
                older_than=age,
                limit=BATCH,
                now=self._database.now(),
            )
            return purged.forgotten, 0 if purged.found == BATCH else None

        return sum(self._database.of_queue(queue).write_in_batches(batch))

    # Workers

    def list_workers(self) -> list[WorkerInfo]:
        """All workers, with when they were last heard of."""
        return self._everywhere(
            lambda c: workers.find(c, now=self._database.now()), by=lambda worker: worker.id
        )

    def suspend_worker(self, id: int) -> None:
        """Let a worker claim nothing until resumed."""
        self._tell(id, WorkerStatus.SUSPENDED)

    def resume_worker(self, id: int) -> None:
        """Let a worker claim again."""
        self._tell(id, WorkerStatus.READY)

    def stop_worker(self, id: int) -> None:
        """Tell a worker to leave: its next dequeue raises `WorkerStopped`."""
        self._tell(id, WorkerStatus.STOPPED)

    def release_worker(self, id: int) -> int:
        """Give back what a worker holds, as `release` does: the attempts do not count. Returns how many
        messages that were.

        For a worker that is lost, or hangs: whoever it is, it holds them no longer. One that still runs
        goes on claiming; tell it to stop first.
        """
        whole("id", id, low=1, high=2**63 - 1)

        def batch(connection: Connection, after: int) -> tuple[workers.Released, int | None]:
            released = workers.release(
                connection, id, after=after, limit=BATCH, now=self._database.now()
            )
            return released, released.last

        database = self._database.of_worker(id)
        released = database.write_in_batches(batch, repeatable=True)
        for queue in {queue for each in released for queue in each.queues}:
            database.ring(queue)
        return sum(each.messages for each in released)

    def purge_workers(self, *, silent_for: Duration = 300.0) -> int:
        """Delete the rows of workers not heard of for so long. Returns how many.

        What they held comes back when its leases lapse. One that was only slow registers anew.
        """
        age = seconds("silent_for", silent_for)
        return sum(
            shard.write(
                lambda c: workers.purge(c, silent_for=age, now=self._database.now()),
                repeatable=True,
            )
            for shard in self._database.shards
        )

    # Streams

    def list_streams(self) -> list[StreamInfo]:
        """Who claims batch by batch, by name, with what is claimed now."""
        return self._everywhere(streams.find, by=lambda stream: stream.name)

    def release_stream(self, name: str) -> int:
        """Give back all messages that a stream has claimed. Returns how many.

        For a stream that nobody will go on with: what it claims does not come back by itself. If
        somebody does work with it, that ends with `StreamTaken`.
        """
        database = self._database.where(lambda c: places.has_stream(c, name))
        queue, released = database.write(
            lambda c: streams.release(c, name, now=self._database.now()), repeatable=True
        )
        database.ring(queue)
        return released

    # Counting

    def stats(self) -> list[QueueStats]:
        """What every queue holds now, by name."""
        return self._everywhere(
            lambda c: stats.queue_stats(c, None, now=self._database.now()),
            by=lambda each: each.queue,
        )

    def queue_stats(self, queue: str) -> QueueStats:
        """What one queue holds now."""
        found = self._database.of_queue(queue).read(
            lambda c: stats.queue_stats(c, queue, now=self._database.now())
        )
        if not found:
            raise QueueNotFound(queue)
        return found[0]

    # The object in S3

    def pull_from_s3(self) -> bool:
        """Take over what others uploaded. Returns whether there was anything.

        In local mode nothing is taken over while there are local writes to upload.
        """
        return self._remote("pull_from_s3").pull()

    def batch_operations(self, operations: Iterable[Work[Any]]) -> int:
        """Keep operations for the next `flush_to_s3`. Returns how many wait for it now.

        An operation is a function over a connection, such as
        `lambda c: store.using(c).enqueue("tasks", 1)`. It may be run more than once.
        """
        return self._remote("batch_operations").submit(operations)

    def flush_to_s3(self) -> list[Any]:
        """Run the operations and upload, in one go. When that lost a race, start over from what is
        in the bucket now.

        Returns what each operation returned; for one that failed alone, its error. If this raises,
        the operations still wait.
        """
        return self._remote("flush_to_s3").flush()

    def s3_state(self) -> S3State:
        """How the local copy and the object differ just now. Changes neither."""
        return self._remote("s3_state").state()

    def s3_stats(self) -> S3Stats:
        """What was sent and fetched since the store was opened."""
        return self._remote("s3_stats").stats()

    def s3_cost(self, prices: S3Prices | None = None) -> S3Cost:
        """What a month costs that goes on as the time since the store was opened: requests and bytes of
        this store, not those of other processes.
        """
        return measured(self.s3_stats(), prices)

    def s3_versions(self, n: int = 100) -> list[S3Version]:
        """The states of the object that a versioned bucket keeps, the newest first."""
        return self._remote("s3_versions").versions(whole("n", n, low=1, high=100_000))

    def restore_s3(self, version: str) -> None:
        """Upload an older state of the object as the newest one. What is there now stays among the
        versions. `ConflictError` if somebody else uploads meanwhile.
        """
        self._remote("restore_s3").restore(version)

    def snapshot(self, path: str | Path) -> None:
        """Write the database, as reads see it, to a SQLite file of its own."""
        self._remote("snapshot").snapshot(Path(path))

    def close(self) -> None:
        """Nothing to let go of; here so that it reads like a consumer."""

    def _configure(self, name: str, **settings: Any) -> Queue:
        return self._database.of_queue(name).write(
            lambda c: queues.configure(c, name, **settings), repeatable=True
        )

    def _everywhere(self, look: Work[list[T]], *, by: Callable[[T], Any]) -> list[T]:
        """What is found in the database, in its order; over several shards, in the order of this."""
        pages = [shard.read(look) for shard in self._database.shards]
        return pages[0] if len(pages) == 1 else sorted(chain.from_iterable(pages), key=by)

    def _one_shard(self, operation: str, ids: list[int]) -> Database:
        """The database that all these messages are in."""
        found = {id: self._database.of_message(id) for id in ids}
        if len(set(found.values())) > 1:
            for id, database in found.items():
                if not database.read(lambda c, id=id: places.has_message(c, id)):  # type: ignore[misc]
                    raise MessageNotFound(id)
            raise SeveralShards(operation, "pass the messages of one queue at a time")
        return next(iter(found.values()), self._database.shards[0])

    def _remote(self, operation: str) -> Remote:
        if self._database.remote is None:
            raise NotSupported(operation, self._database.backend_name)
        return self._database.remote

    def _find_archived(
        self, queue: str, chosen: ArchiveFilter, *, replayed: bool, size: int, after: int
    ) -> Iterator[list[ArchivedMessage]]:
        """What is chosen, in pages; the database is asked for `size` at a time."""
        self.get_queue(queue)
        if chosen.looks_inside:
            size = BATCH
        while True:
            asked: dict[str, Any] = {"replayed": replayed, "limit": size, "after": after}
            page = carefully(
                lambda bare, asked=asked: self._database.of_queue(queue).read(  # type: ignore[misc]
                    partial(_find_page, queue, chosen, asked | {"bare": bare})
                ),
                lambda found: self.get_archived(found.original_message_id),
            )
            yield [found for found in page if chosen.matches(found)]
            if len(page) < size:
                return
            after = page[-1].id

    def _replay_all(self, queue: str, chosen: ArchiveFilter) -> int:
        database, total = self._database.of_queue(queue), 0
        pages = self._find_archived(queue, chosen, replayed=False, size=BATCH, after=0)
        batches = ([found.id for found in page] for page in pages)
        together = [list(batches)] if database.uploads_every_write else ([ids] for ids in batches)
        for some in together:
            if any(some):
                total += database.write(
                    lambda c, some=some: sum(  # type: ignore[misc]
                        archive.replay_once(c, ids, now=database.now()) for ids in some
                    )
                )
                database.ring(queue)
        return total

    def _tell(self, id: int, status: WorkerStatus) -> None:
        if not self._database.of_worker(id).write(
            lambda c: workers.set_status(c, id, status), single=True, repeatable=True
        ):
            raise WorkerNotFound(id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _find_page(
    queue: str, chosen: ArchiveFilter, asked: dict[str, Any], connection: Connection
) -> list[ArchivedMessage]:
    return archive.find(
        connection,
        queue,
        reasons=chosen.reasons,
        since=chosen.since,
        until=chosen.until,
        **asked,
    )


def _settings(**given: Any) -> dict[str, Any]:
    """Queue settings as they are stored; what is UNCHANGED is left out."""
    settings = {name: value for name, value in given.items() if value is not UNCHANGED}
    for name in ("lease", "retention", "max_lease"):
        if settings.get(name) is not None:
            settings[name] = seconds(name, settings[name])
    for name in ("lease", "max_lease"):
        if settings.get(name) == 0.0:
            raise InvalidArgument(name, "expected more than 0 seconds")
    if settings.get("max_lease") is not None and settings.get("lease", 0.0) > settings["max_lease"]:
        raise InvalidArgument(
            "lease",
            f"{settings['lease']:g} s is longer than max_lease, {settings['max_lease']:g} s",
        )
    for name in ("max_read_ct", "max_in_flight", "max_in_flight_per_key", "max_releases"):
        if settings.get(name) is not None or name == "max_read_ct" in settings:
            whole(name, settings[name], low=1, high=2**31 - 1)
    return settings | (_rate(settings.pop("rate")) if "rate" in settings else {})


def _shorter(lease: float, max_lease: Duration | None) -> float:
    return lease if max_lease is None else min(lease, seconds("max_lease", max_lease))


def _rate(rate: Rate | None) -> dict[str, Any]:
    if rate is not None and not isinstance(rate, Rate):
        raise InvalidArgument("rate", f"expected a Rate, such as Rate(100, per=60), got {rate!r}")
    return {
        "rate_limit": None if rate is None else rate.limit,
        "rate_period": None if rate is None else rate.period,
    }
