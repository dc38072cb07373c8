"""The async twin of `pgqrs.admin`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pgqrs import moving
from pgqrs.admin import UNCHANGED, Admin
from pgqrs.aio.bridge import Bridge, Facade
from pgqrs.errors import InvalidArgument
from pgqrs.matching import ANYTHING
from pgqrs.moving import CopiedTable, Opened, Progress
from pgqrs.s3_cost import S3Cost, S3Prices
from pgqrs.stores import Work
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
)


class AsyncAdmin(Facade):
    """Everything that is not producing or consuming."""

    def __init__(self, bridge: Bridge, admin: Admin) -> None:
        super().__init__(bridge)
        self._sync = admin

    # The tables

    async def install(self) -> None:
        """Create the tables, or upgrade them to what this version needs. Repeating it is fine."""
        await self._bridge.run(self._sync.install)

    async def verify(self) -> None:
        """Raise the error that says how the tables differ from what this version needs.

        The recorded revisions are compared with those of this version, and every table, column,
        index and constraint with the models.
        """
        await self._bridge.run(self._sync.verify)

    async def copy_to(
        self, store: Opened, *, progress: Progress | None = None
    ) -> list[CopiedTable]:
        """Copy everything to another store, with all ids; interrupted, it goes on when called again.

        The other store is installed, and empty or partly copied to before. Nobody may use either of
        them meanwhile. At the end both are compared, row by row. `progress` is called with a
        `CopyProgress` now and then.
        """
        there = getattr(store, "_bridge", None)
        if not isinstance(there, Bridge):
            raise InvalidArgument("store", "expected an AsyncStore; Admin copies to a Store")
        steps = moving.steps(progress, spread=moving.is_spread(store._database))
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                copied: list[CopiedTable] = end.value
                return copied
            if step.there:
                answer = await there.run(step.run, store._database)
            else:
                answer = await self._bridge.run(step.run, self._sync._database)

    # Queues

    async def create_queue(
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
        return await self._bridge.run(
            self._sync.create_queue,
            name,
            lease=lease,
            max_read_ct=max_read_ct,
            retention=retention,
            max_in_flight=max_in_flight,
            max_in_flight_per_key=max_in_flight_per_key,
            rate=rate,
            max_lease=max_lease,
            max_releases=max_releases,
            if_not_exists=if_not_exists,
        )

    async def get_queue(self, name: str) -> Queue:
        """A queue and its settings."""
        return await self._bridge.run(self._sync.get_queue, name)

    async def list_queues(self) -> list[Queue]:
        """All queues, by name."""
        return await self._bridge.run(self._sync.list_queues)

    async def configure_queue(
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
        return await self._bridge.run(
            self._sync.configure_queue,
            name,
            lease=lease,
            max_read_ct=max_read_ct,
            retention=retention,
            max_in_flight=max_in_flight,
            max_in_flight_per_key=max_in_flight_per_key,
            rate=rate,
            max_lease=max_lease,
            max_releases=max_releases,
        )

    async def pause_queue(self, name: str) -> Queue:
        """Hand out no more messages until resumed. Enqueueing goes on."""
        return await self._bridge.run(self._sync.pause_queue, name)

    async def resume_queue(self, name: str) -> Queue:
        """Hand out messages again."""
        return await self._bridge.run(self._sync.resume_queue, name)

    async def purge_queue(self, name: str) -> int:
        """Delete all messages of a queue, also held ones. Returns how many."""
        return await self._bridge.run(self._sync.purge_queue, name)

    async def delete_queue(self, name: str, *, force: bool = False) -> None:
        """Delete a queue and its archive; refused while messages remain or schedules use it, unless
        forced.
        """
        await self._bridge.run(self._sync.delete_queue, name, force=force)

    async def expire(self, queue: str) -> int:
        """Archive what has expired, and what lapsed for good. Returns how many."""
        return await self._bridge.run(self._sync.expire, queue)

    # Messages

    async def get_message(self, id: int) -> Message:
        """A message that is not finished yet."""
        return await self._bridge.run(self._sync.get_message, id)

    async def cancel(self, id: int) -> bool:
        """End a message, whoever holds it: to the archive as manual. Returns whether it was not
        finished.
        """
        return await self._bridge.run(self._sync.cancel, id)

    async def peek(self, queue: str, n: int = 10, *, after: int = 0) -> list[Message]:
        """Messages by id, without claiming them; `after` is the last id of the page before."""
        return await self._bridge.run(self._sync.peek, queue, n, after=after)

    # The archive

    async def get_archived(self, id: int) -> ArchivedMessage:
        """How the message of this id ended."""
        return await self._bridge.run(self._sync.get_archived, id)

    async def list_archive(
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
        return await self._bridge.run(
            self._sync.list_archive,
            queue,
            reason=reason,
            since=since,
            until=until,
            error=error,
            payload=payload,
            headers=headers,
            n=n,
            after=after,
        )

    async def dead_letters(
        self, queue: str, *, n: int = 100, after: int = 0
    ) -> list[ArchivedMessage]:
        """Messages that failed for good and were not replayed."""
        return await self._bridge.run(self._sync.dead_letters, queue, n=n, after=after)

    async def replay(self, ids: int | Iterable[int]) -> list[int]:
        """Enqueue archived messages anew, by the ids they had as messages. Returns the new ids.

        All of them or none. The archive keeps them, with what they became.
        """
        return await self._bridge.run(self._sync.replay, ids)

    async def replay_all(
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
        return await self._bridge.run(
            self._sync.replay_all,
            queue,
            reason=reason,
            since=since,
            until=until,
            error=error,
            payload=payload,
            headers=headers,
        )

    async def replay_dead_letters(self, queue: str) -> int:
        """Enqueue all dead letters of a queue anew. Returns how many."""
        return await self._bridge.run(self._sync.replay_dead_letters, queue)

    async def purge_archive(
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
        return await self._bridge.run(
            self._sync.purge_archive, queue, older_than=older_than, reason=reason
        )

    # Workers

    async def list_workers(self) -> list[WorkerInfo]:
        """All workers, with when they were last heard of."""
        return await self._bridge.run(self._sync.list_workers)

    async def suspend_worker(self, id: int) -> None:
        """Let a worker claim nothing until resumed."""
        await self._bridge.run(self._sync.suspend_worker, id)

    async def resume_worker(self, id: int) -> None:
        """Let a worker claim again."""
        await self._bridge.run(self._sync.resume_worker, id)

    async def stop_worker(self, id: int) -> None:
        """Tell a worker to leave: its next dequeue raises `WorkerStopped`."""
        await self._bridge.run(self._sync.stop_worker, id)

    async def release_worker(self, id: int) -> int:
        """Give back what a worker holds, as `release` does: the attempts do not count. Returns how many
        messages that were.

        For a worker that is lost, or hangs: whoever it is, it holds them no longer. One that still runs
        goes on claiming; tell it to stop first.
        """
        return await self._bridge.run(self._sync.release_worker, id)

    async def purge_workers(self, *, silent_for: Duration = 300.0) -> int:
        """Delete the rows of workers not heard of for so long. Returns how many.

        What they held comes back when its leases lapse. One that was only slow registers anew.
        """
        return await self._bridge.run(self._sync.purge_workers, silent_for=silent_for)

    # Streams

    async def list_streams(self) -> list[StreamInfo]:
        """Who claims batch by batch, by name, with what is claimed now."""
        return await self._bridge.run(self._sync.list_streams)

    async def release_stream(self, name: str) -> int:
        """Give back all messages that a stream has claimed. Returns how many.

        For a stream that nobody will go on with: what it claims does not come back by itself. If
        somebody does work with it, that ends with `StreamTaken`.
        """
        return await self._bridge.run(self._sync.release_stream, name)

    # Counting

    async def stats(self) -> list[QueueStats]:
        """What every queue holds now, by name."""
        return await self._bridge.run(self._sync.stats)

    async def queue_stats(self, queue: str) -> QueueStats:
        """What one queue holds now."""
        return await self._bridge.run(self._sync.queue_stats, queue)

    # The object in S3

    async def pull_from_s3(self) -> bool:
        """Take over what others uploaded. Returns whether there was anything."""
        return await self._bridge.run(self._sync.pull_from_s3)

    async def batch_operations(self, operations: Iterable[Work[Any]]) -> int:
        """Keep operations for the next `flush_to_s3`. Returns how many wait for it now."""
        return await self._bridge.run(self._sync.batch_operations, operations)

    async def flush_to_s3(self) -> list[Any]:
        """Run the operations and upload, in one go. When that lost a race, start over from what is
        in the bucket now.
        """
        return await self._bridge.run(self._sync.flush_to_s3)

    async def s3_state(self) -> S3State:
        """How the local copy and the object differ just now. Changes neither."""
        return await self._bridge.run(self._sync.s3_state)

    async def s3_stats(self) -> S3Stats:
        """What was sent and fetched since the store was opened."""
        return await self._bridge.run(self._sync.s3_stats)

    async def s3_cost(self, prices: S3Prices | None = None) -> S3Cost:
        """What a month costs that goes on as the time since the store was opened."""
        return await self._bridge.run(self._sync.s3_cost, prices)

    async def s3_versions(self, n: int = 100) -> list[S3Version]:
        """The states of the object that a versioned bucket keeps, the newest first."""
        return await self._bridge.run(self._sync.s3_versions, n)

    async def restore_s3(self, version: str) -> None:
        """Upload an older state of the object as the newest one."""
        await self._bridge.run(self._sync.restore_s3, version)

    async def snapshot(self, path: str | Path) -> None:
        """Write the database, as reads see it, to a SQLite file of its own."""
        await self._bridge.run(self._sync.snapshot, path)
