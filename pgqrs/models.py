"""The wanted schema. `alembic/versions` leads there; a test proves that both agree on both
databases.

Why the indexes on messages are what they are: a message is *ready*, or it waits for `vt` (delayed,
or leased), or it is *blocked* by others. Partial indexes keep the sets apart, so that claiming the
first of a million ready messages never steps over leased, delayed or blocked ones, and noticing that
some `vt` lapsed never looks at ready ones.

Messages name their queue without a foreign key. PostgreSQL would check it row by row; enqueueing
locks the queue's row once per statement instead, which keeps a queue from being deleted under it
just as well.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgqrs.sqltypes import (
    BigId,
    EnumText,
    Flag,
    Json,
    JsonText,
    Seconds,
    Small,
    UTCDateTime,
    Whole,
    many,
)
from pgqrs.types import (
    ArchiveReason,
    EventKind,
    KeyScope,
    MissedTicks,
    RunStatus,
    StepStatus,
    WorkerStatus,
    WriteMode,
)

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


def one_of(column: str, words: type[StrEnum]) -> CheckConstraint:
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


TABLE: dict[str, Any] = {"sqlite_autoincrement": True, "sqlite_strict": True}


class Queue(Base):
    __tablename__ = "pgqrs_queues"
    __table_args__ = (UniqueConstraint("queue_name"), TABLE)

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    queue_name: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    lease: Mapped[float] = mapped_column(Seconds)
    max_read_ct: Mapped[int] = mapped_column(Whole)
    retention: Mapped[float | None] = mapped_column(Seconds)
    paused: Mapped[bool] = mapped_column(Flag)
    max_in_flight: Mapped[int | None] = mapped_column(Whole)
    max_in_flight_per_key: Mapped[int | None] = mapped_column(Whole)
    rate_limit: Mapped[int | None] = mapped_column(Whole)
    rate_period: Mapped[float | None] = mapped_column(Seconds)
    max_lease: Mapped[float | None] = mapped_column(Seconds)
    max_releases: Mapped[int | None] = mapped_column(Whole)


class Waiting(Base):
    """Until when somebody waits for messages of a queue, and for what becomes of them.

    Apart from the queue's row, so that nobody who changes a queue delays those who use it.
    """

    __tablename__ = "pgqrs_waiting"
    __table_args__ = ({"sqlite_strict": True},)

    queue_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    waiting_until: Mapped[datetime | None] = mapped_column(UTCDateTime)
    results_wanted_until: Mapped[datetime | None] = mapped_column(UTCDateTime)


class Worker(Base):
    __tablename__ = "pgqrs_workers"
    __table_args__ = (
        one_of("status", WorkerStatus),
        Index("ix_pgqrs_workers_queue_id", "queue_id"),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    queue_id: Mapped[int | None] = mapped_column(
        BigId, ForeignKey("pgqrs_queues.id", ondelete="CASCADE")
    )
    hostname: Mapped[str] = mapped_column(Text)
    port: Mapped[int] = mapped_column(Whole)
    pid: Mapped[int | None] = mapped_column(Whole)
    status: Mapped[WorkerStatus] = mapped_column(EnumText(WorkerStatus))
    last_heartbeat: Mapped[datetime] = mapped_column(UTCDateTime)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)


class Message(Base):
    __tablename__ = "pgqrs_messages"
    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    queue_id: Mapped[int] = mapped_column(BigId)
    priority: Mapped[int] = mapped_column(Small)
    ready: Mapped[bool] = mapped_column(Flag)
    vt: Mapped[datetime] = mapped_column(UTCDateTime)
    read_ct: Mapped[int] = mapped_column(Whole)
    released_ct: Mapped[int] = mapped_column(Whole)
    enqueued_at: Mapped[datetime] = mapped_column(UTCDateTime)
    dequeued_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    producer_worker_id: Mapped[int | None] = mapped_column(BigId)
    consumer_worker_id: Mapped[int | None] = mapped_column(BigId)
    dedup_key: Mapped[str | None] = mapped_column(Text)
    group_key: Mapped[str | None] = mapped_column(Text)
    codec: Mapped[str | None] = mapped_column(Text)
    payload_ref: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[Any | None] = mapped_column(Json)
    payload: Mapped[Any] = mapped_column(Json)
    blocked: Mapped[int] = mapped_column(Small, server_default="0")
    """What keeps it from being claimed: 0 nothing, 1 an earlier message of its group, 2 the limit of
    its key.
    """

    __table_args__ = (
        Index(
            "ix_pgqrs_messages_ready",
            queue_id,
            priority.desc(),
            id,
            postgresql_where=text("ready"),
            sqlite_where=text("ready = 1"),
        ),
        Index(
            "ix_pgqrs_messages_waiting",
            queue_id,
            vt,
            postgresql_where=text("NOT ready AND blocked = 0"),
            sqlite_where=text("ready = 0 AND blocked = 0"),
        ),
        Index(
            "ix_pgqrs_messages_group",
            queue_id,
            group_key,
            id,
            postgresql_where=text("group_key IS NOT NULL"),
            sqlite_where=text("group_key IS NOT NULL"),
        ),
        Index(
            "ix_pgqrs_messages_parked",
            queue_id,
            dedup_key,
            priority.desc(),
            id,
            postgresql_where=text("blocked = 2"),
            sqlite_where=text("blocked = 2"),
        ),
        Index(
            "ix_pgqrs_messages_expiring",
            queue_id,
            expires_at,
            postgresql_where=text("expires_at IS NOT NULL"),
            sqlite_where=text("expires_at IS NOT NULL"),
        ),
        TABLE,
    )


class Group(Base):
    """A group that has messages. Its row is what those who change the group lock."""

    __tablename__ = "pgqrs_groups"
    __table_args__ = ({"sqlite_strict": True},)

    queue_id: Mapped[int] = mapped_column(BigId, primary_key=True)
    group_key: Mapped[str] = mapped_column(Text, primary_key=True)


class Key(Base):
    """A unique key, and the message that has it or had it last."""

    __tablename__ = "pgqrs_keys"
    __table_args__ = (
        one_of("scope", KeyScope),
        Index("ix_pgqrs_keys_look", "queue_id", "look_at"),
        {"sqlite_strict": True},
    )

    queue_id: Mapped[int] = mapped_column(BigId, primary_key=True)
    dedup_key: Mapped[str] = mapped_column(Text, primary_key=True)
    message_id: Mapped[int] = mapped_column(BigId)
    scope: Mapped[KeyScope] = mapped_column(EnumText(KeyScope))
    window_after: Mapped[float] = mapped_column(Seconds)
    look_at: Mapped[datetime] = mapped_column(UTCDateTime)


class Limit(Base):
    """What claims of a queue with limits lock, so that they take turns. It goes with the limits."""

    __tablename__ = "pgqrs_limits"
    __table_args__ = ({"sqlite_strict": True},)

    queue_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    max_in_flight: Mapped[int | None] = mapped_column(Whole)
    max_in_flight_per_key: Mapped[int | None] = mapped_column(Whole)
    """The limits that slots and parked messages were last kept for; the queue may have others now."""
    rate_taken: Mapped[Any | None] = mapped_column(Json)


class Slot(Base):
    """A message in flight in a queue with limits. It counts as long as that claim lasts.

    Or a message that was parked and let in, and waits to be claimed: it counts for nothing, but if it
    leaves otherwise, its key is looked at again.
    """

    __tablename__ = "pgqrs_slots"
    __table_args__ = (
        Index("ix_pgqrs_slots_queue", "queue_id", "dedup_key"),
        {"sqlite_strict": True},
    )

    message_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    queue_id: Mapped[int] = mapped_column(BigId)
    dedup_key: Mapped[str | None] = mapped_column(Text)
    read_ct: Mapped[int] = mapped_column(Whole)
    let_in: Mapped[bool] = mapped_column(Flag)


class Archive(Base):
    __tablename__ = "pgqrs_archive"
    __table_args__ = (
        UniqueConstraint("original_message_id"),
        one_of("archive_reason", ArchiveReason),
        Index("ix_pgqrs_archive_ended", "queue_id", "archive_reason", "archived_at"),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    original_message_id: Mapped[int] = mapped_column(BigId)
    queue_id: Mapped[int] = mapped_column(BigId)
    archive_reason: Mapped[ArchiveReason] = mapped_column(EnumText(ArchiveReason))
    priority: Mapped[int] = mapped_column(Small)
    read_ct: Mapped[int] = mapped_column(Whole)
    released_ct: Mapped[int] = mapped_column(Whole)
    enqueued_at: Mapped[datetime] = mapped_column(UTCDateTime)
    dequeued_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    archived_at: Mapped[datetime] = mapped_column(UTCDateTime)
    producer_worker_id: Mapped[int | None] = mapped_column(BigId)
    consumer_worker_id: Mapped[int | None] = mapped_column(BigId)
    replayed_as: Mapped[int | None] = mapped_column(BigId)
    dedup_key: Mapped[str | None] = mapped_column(Text)
    group_key: Mapped[str | None] = mapped_column(Text)
    codec: Mapped[str | None] = mapped_column(Text)
    payload_ref: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[Any | None] = mapped_column(Json)
    payload: Mapped[Any] = mapped_column(Json)
    result: Mapped[Any | None] = mapped_column(Json)
    error: Mapped[str | None] = mapped_column(Text)


class Schedule(Base):
    """What is to be enqueued again and again, and when next."""

    __tablename__ = "pgqrs_schedules"
    __table_args__ = (
        UniqueConstraint("name"),
        one_of("missed", MissedTicks),
        Index("ix_pgqrs_schedules_due", "paused", "next_at"),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    queue_name: Mapped[str] = mapped_column(Text)
    cron: Mapped[str | None] = mapped_column(Text)
    every: Mapped[float | None] = mapped_column(Seconds)
    timezone: Mapped[str] = mapped_column(Text)
    missed: Mapped[MissedTicks] = mapped_column(EnumText(MissedTicks))
    paused: Mapped[bool] = mapped_column(Flag)
    starts_at: Mapped[datetime] = mapped_column(UTCDateTime)
    next_at: Mapped[datetime] = mapped_column(UTCDateTime)
    last_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    priority: Mapped[int] = mapped_column(Small)
    codec: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[Any | None] = mapped_column(Json)
    payload: Mapped[Any] = mapped_column(Json)
    workflow: Mapped[str | None] = mapped_column(Text)
    options: Mapped[Any | None] = mapped_column(Json)
    error: Mapped[str | None] = mapped_column(Text)
    failing_since: Mapped[datetime | None] = mapped_column(UTCDateTime)
    retry_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    backfill: Mapped[str | None] = mapped_column(Text)


class Workflow(Base):
    """A row is one run."""

    __tablename__ = "pgqrs_workflows"
    __table_args__ = (
        UniqueConstraint("name", "key"),
        one_of("status", RunStatus),
        Index(
            "ix_pgqrs_workflows_parent_id",
            "parent_id",
            postgresql_where=text("parent_id IS NOT NULL"),
            sqlite_where=text("parent_id IS NOT NULL"),
        ),
        Index("ix_pgqrs_workflows_status", "status", "id"),
        Index("ix_pgqrs_workflows_message_id", "message_id", unique=True),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    key: Mapped[str | None] = mapped_column(Text)
    parent_id: Mapped[int | None] = mapped_column(
        BigId, ForeignKey("pgqrs_workflows.id", ondelete="CASCADE")
    )
    version: Mapped[str | None] = mapped_column(Text)
    status: Mapped[RunStatus] = mapped_column(EnumText(RunStatus))
    input: Mapped[Any] = mapped_column(JsonText)
    output: Mapped[Any | None] = mapped_column(Json)
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    updated_at: Mapped[datetime] = mapped_column(UTCDateTime)
    wake_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    deadline_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    queue_id: Mapped[int | None] = mapped_column(BigId)
    message_id: Mapped[int | None] = mapped_column(BigId)
    """The message whose holder runs it; None for a run that is driven by hand."""
    nudge_ct: Mapped[int] = mapped_column(Whole, server_default=text("0"))
    """How often somebody had news for it: a signal, a child that ended."""
    failed_step: Mapped[str | None] = mapped_column(Text)
    forked_from: Mapped[int | None] = mapped_column(BigId)
    waiter_ct: Mapped[int] = mapped_column(Whole, server_default=text("0"))
    """Above 0 if its end concerns other runs: some wait for it, or children end with it."""
    parent_close: Mapped[str | None] = mapped_column(Text)
    """What becomes of it when its parent ends: see `pgqrs.types.ParentClose`."""
    time_limit: Mapped[float | None] = mapped_column(Seconds)
    """Seconds that its deadline gave it, once it was retried."""
    failed_by: Mapped[Any | None] = mapped_column(Json)
    """The calls whose failure ended it, which a retry makes again."""
    progress_ct: Mapped[int] = mapped_column(Whole, server_default=text("0"))
    """How many steps it had finished when its crashes were last forgiven."""


class WorkflowStep(Base):
    __tablename__ = "pgqrs_workflow_steps"
    __table_args__ = (
        UniqueConstraint("workflow_id", "step_id"),
        one_of("status", StepStatus),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    workflow_id: Mapped[int] = mapped_column(BigId)
    """Not a foreign key, whose check costs a tenth of a step: steps are recorded by who holds the
    run, and deleted with it.
    """
    step_id: Mapped[str] = mapped_column(Text)
    status: Mapped[StepStatus] = mapped_column(EnumText(StepStatus))
    output: Mapped[Any | None] = mapped_column(JsonText)
    error: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    completed_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    wake_at: Mapped[datetime | None] = mapped_column(UTCDateTime)
    position: Mapped[int] = mapped_column(Whole, server_default=text("0"))
    """Which call of the workflow it was, counted in each branch."""
    attempts: Mapped[int] = mapped_column(Whole, server_default=text("0"))
    seq: Mapped[int | None] = mapped_column(BigId)
    """In which order the run got to know how its calls ended; None for steps from before this was
    recorded, and while there is no end.
    """
    digest: Mapped[int | None] = mapped_column(BigId)
    """Of the arguments of the call, if they can be told from others."""


class WorkflowEvent(Base):
    """What was said to a run (a signal), or by it (an event)."""

    __tablename__ = "pgqrs_workflow_events"
    __table_args__ = (
        one_of("kind", EventKind),
        Index("ix_pgqrs_workflow_events_run", "workflow_id", "kind", "name", "id"),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    workflow_id: Mapped[int] = mapped_column(
        BigId, ForeignKey("pgqrs_workflows.id", ondelete="CASCADE")
    )
    kind: Mapped[EventKind] = mapped_column(EnumText(EventKind))
    name: Mapped[str] = mapped_column(Text)
    payload: Mapped[Any | None] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    consumed_by: Mapped[str | None] = mapped_column(Text)
    """The step that waited for this signal and got it."""


class WorkflowWait(Base):
    """A run that wants to be woken when another one ends."""

    __tablename__ = "pgqrs_workflow_waits"
    __table_args__ = (
        Index("ix_pgqrs_workflow_waits_waiter_id", "waiter_id"),
        {"sqlite_strict": True},
    )

    awaited_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    waiter_id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)


class Stream(Base):
    """Who claims messages of a queue batch by batch, and remembers elsewhere how far it has come."""

    __tablename__ = "pgqrs_streams"
    __table_args__ = (
        UniqueConstraint("name"),
        Index("ix_pgqrs_streams_queue_id", "queue_id"),
        TABLE,
    )

    id: Mapped[int] = mapped_column(BigId, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    queue_id: Mapped[int] = mapped_column(BigId)
    epoch: Mapped[int] = mapped_column(BigId)
    """Goes up when somebody takes the stream over: whoever had it before may not go on."""
    worker_id: Mapped[int] = mapped_column(BigId)
    """The row among the workers of who has it. It goes when somebody takes the stream over."""
    last_batch: Mapped[int] = mapped_column(BigId)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)


class StreamBatch(Base):
    """A batch that a stream has claimed and not acknowledged."""

    __tablename__ = "pgqrs_stream_batches"
    __table_args__ = ({"sqlite_strict": True},)

    stream_id: Mapped[int] = mapped_column(
        BigId, ForeignKey("pgqrs_streams.id", ondelete="CASCADE"), primary_key=True
    )
    batch: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=False)
    worker_id: Mapped[int] = mapped_column(BigId)
    size: Mapped[int] = mapped_column(Whole)
    held: Mapped[Any] = mapped_column(Json)
    """The ids of its messages, each with the token of its claim."""
    claimed_at: Mapped[datetime] = mapped_column(UTCDateTime)


class Upload(Base):
    """In a store that is one object in a bucket: its last uploads.

    `writer` is a nonce, which only this upload has, and `number` its position among all uploads.
    """

    __tablename__ = "pgqrs_uploads"
    __table_args__ = ({"sqlite_strict": True},)

    writer: Mapped[str] = mapped_column(Text, primary_key=True)
    number: Mapped[int] = mapped_column(BigId)
    uploaded_at: Mapped[datetime] = mapped_column(UTCDateTime)


class Write(Base):
    """Messages that are written in bulk by many at once, exactly once. Done when it is finished."""

    __tablename__ = "pgqrs_writes"
    __table_args__ = (one_of("mode", WriteMode), {"sqlite_strict": True})

    write_id: Mapped[str] = mapped_column(Text, primary_key=True)
    queue_id: Mapped[int] = mapped_column(BigId)
    mode: Mapped[WriteMode] = mapped_column(EnumText(WriteMode))
    parts: Mapped[int | None] = mapped_column(Whole)
    message_ct: Mapped[int | None] = mapped_column(BigId)
    created_at: Mapped[datetime] = mapped_column(UTCDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UTCDateTime)


class WritePart(Base):
    """What one attempt at one part of a write has stored."""

    __tablename__ = "pgqrs_write_parts"
    __table_args__ = ({"sqlite_strict": True},)

    write_id: Mapped[str] = mapped_column(Text, primary_key=True)
    part: Mapped[int] = mapped_column(Whole, primary_key=True)
    attempt: Mapped[int] = mapped_column(BigId, primary_key=True)
    """Names the rows of this attempt among the staged ones; 0 for messages that were never staged."""
    message_ct: Mapped[int] = mapped_column(BigId)
    digest: Mapped[str] = mapped_column(Text)
    stored_at: Mapped[datetime] = mapped_column(UTCDateTime)


# Nobody looks for these one by one: no key, and no index to slow down writing. Where there are arrays a
# row is many messages, from that position on: it costs little to write, to put in order, and to delete.
staged = Table(
    "pgqrs_staged",
    Base.metadata,
    Column("attempt", BigId, nullable=False),
    Column("position", Whole, nullable=False),
    Column("priority", many(Small)),
    Column("eta", many(UTCDateTime())),
    Column("expires_at", many(UTCDateTime())),
    Column("dedup_key", many(Text())),
    Column("group_key", many(Text())),
    Column("codec", many(Text())),
    Column("headers", many(Json())),
    Column("payload", many(Json()), nullable=False),
    sqlite_strict=True,
)


class SchemaHistory(Base):
    """Which revisions were applied here, and from which text."""

    __tablename__ = "pgqrs_schema_history"
    __table_args__ = ({"sqlite_strict": True},)

    revision: Mapped[str] = mapped_column(Text, primary_key=True)
    checksum: Mapped[str] = mapped_column(Text)
    applied_at: Mapped[datetime] = mapped_column(UTCDateTime)


queues = Base.metadata.tables["pgqrs_queues"]
workers = Base.metadata.tables["pgqrs_workers"]
messages = Base.metadata.tables["pgqrs_messages"]
archive = Base.metadata.tables["pgqrs_archive"]
groups = Base.metadata.tables["pgqrs_groups"]
keys = Base.metadata.tables["pgqrs_keys"]
waiting = Base.metadata.tables["pgqrs_waiting"]
limits = Base.metadata.tables["pgqrs_limits"]
slots = Base.metadata.tables["pgqrs_slots"]
schedules = Base.metadata.tables["pgqrs_schedules"]
workflows = Base.metadata.tables["pgqrs_workflows"]
workflow_steps = Base.metadata.tables["pgqrs_workflow_steps"]
workflow_events = Base.metadata.tables["pgqrs_workflow_events"]
workflow_waits = Base.metadata.tables["pgqrs_workflow_waits"]
streams = Base.metadata.tables["pgqrs_streams"]
stream_batches = Base.metadata.tables["pgqrs_stream_batches"]
uploads = Base.metadata.tables["pgqrs_uploads"]
writes = Base.metadata.tables["pgqrs_writes"]
write_parts = Base.metadata.tables["pgqrs_write_parts"]
schema_history = Base.metadata.tables["pgqrs_schema_history"]

FUNCTIONS = {
    "pgqrs_claim_within_limits": "e9f52feb09e2f7e75feb0a0cd3f0636cff55ea52aa7fde9f8fb70b2e2ab23b26",
}
"""What PostgreSQL does for us: names of functions, and the digests of their texts (see
`schema_differences`). A test tells the digest after a revision has replaced one.
"""
