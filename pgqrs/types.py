"""The values that come out of pgqrs: frozen, with the column names of the tables they were read
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, TypeVar, cast

from pgqrs.errors import InvalidArgument

Duration = float | timedelta
UniqueFor = Literal["queued", "unfinished"] | Duration | None
"""How long a message keeps others with its key out: while it is queued, until it is finished, or until
so long after that. None: not at all.
"""
T = TypeVar("T")


def quick_maker(frozen: type[T]) -> Callable[..., T]:
    """Makes objects of a frozen dataclass from values in order, six times as fast as it does.

    What is slow is getting around its own guard for each field. So a twin without a guard is made,
    which then becomes one of the frozen class: both have the same slots.
    """
    twin: Any = make_dataclass(
        frozen.__name__,
        [
            (known.name, Any, field(default=known.default))
            for known in fields(frozen)  # type: ignore[arg-type]
        ],
        slots=True,
    )

    def make(*values: Any) -> T:
        made = twin(*values)
        made.__class__ = frozen
        return cast(T, made)

    return make


MAX_JSON_DEPTH = 500
"""Stored JSON that is nested deeper counts as damaged: nothing here writes it, few parsers read it."""


class ConcurrencyModel(StrEnum):
    """How many processes a store is made for."""

    SINGLE_PROCESS = "single_process"
    MULTI_PROCESS = "multi_process"


class ArchiveReason(StrEnum):
    """Why a message is in the archive. The failed ones are the queue's dead letters."""

    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    MANUAL = "manual"


class WriteMode(StrEnum):
    """How messages that are written in bulk become visible: all at once, or part by part."""

    STAGED = "staged"
    PART_KEY = "part-key"


class WorkerStatus(StrEnum):
    """What a worker was told to be: a suspended one claims nothing, a stopped one should leave."""

    READY = "ready"
    SUSPENDED = "suspended"
    STOPPED = "stopped"


class KeyScope(StrEnum):
    """How long a message keeps others with its key out."""

    QUEUED = "queued"
    UNFINISHED = "unfinished"


class MessageId(int):
    """The id of an enqueued message.

    If `created` is false, nothing was enqueued: it is the message that has the same unique key.
    """

    __slots__ = ()  # as light as a plain number: a batch returns many

    @property
    def created(self) -> bool:
        """Whether the message is new."""
        return True

    @staticmethod
    def existing(id: int) -> MessageId:
        """The id of a message that was there before."""
        return _ExistingId(id)


class _ExistingId(MessageId):
    __slots__ = ()

    @property
    def created(self) -> bool:
        return False


class RunStatus(StrEnum):
    """Where a run of a workflow stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class StepStatus(StrEnum):
    """Where a step of a run stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The workflow itself cut it short: by a timeout, or because another branch failed."""


class EventKind(StrEnum):
    """Which way something was said: to a run, or by it."""

    SIGNAL = "signal"
    EVENT = "event"


class TaskStatus(StrEnum):
    """Where a task stands."""

    QUEUED = "queued"
    DELAYED = "delayed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class MissedTicks(StrEnum):
    """What a schedule does about ticks that came while no worker ran."""

    SKIP = "skip"
    ONE = "one"
    ALL = "all"


class S3State(StrEnum):
    """How the local copy of a store in S3 and the object in the bucket differ."""

    IN_SYNC = "in_sync"
    LOCAL_CHANGED = "local_changed"
    REMOTE_CHANGED = "remote_changed"
    BOTH_CHANGED = "both_changed"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a queue. Who dequeued it holds it until `vt`."""

    queue: str
    id: int
    payload: Any
    headers: Mapping[str, Any] | None
    codec: str | None
    priority: int
    vt: datetime
    enqueued_at: datetime
    expires_at: datetime | None
    read_ct: int
    released_ct: int
    dequeued_at: datetime | None
    producer_worker_id: int | None
    consumer_worker_id: int | None
    key: str | None
    group: str | None
    store_id: str | None = field(default=None, repr=False, compare=False)
    """Which store it was dequeued from; `NOT_CLAIMED` if somebody only looked at it."""

    @property
    def attempt(self) -> int:
        """How many times it was really tried: claims given back by `release` do not count."""
        return self.read_ct - self.released_ct


NOT_CLAIMED = ""
"""The `store_id` of a message that was looked at: it does not prove that anybody holds it."""
make_message = quick_maker(Message)


def mark_claimed(messages: Iterable[Message], store_id: str) -> None:
    """Let messages say which store they were dequeued from. Only for messages that are new."""
    for message in messages:
        object.__setattr__(message, "store_id", store_id)


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A message that is finished, and how it ended."""

    queue: str
    id: int
    original_message_id: int
    archive_reason: ArchiveReason
    payload: Any
    headers: Mapping[str, Any] | None
    codec: str | None
    priority: int
    enqueued_at: datetime
    dequeued_at: datetime | None
    archived_at: datetime
    read_ct: int
    released_ct: int
    producer_worker_id: int | None
    consumer_worker_id: int | None
    key: str | None
    group: str | None
    result: Any
    error: str | None
    replayed_as: int | None


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `limit` messages in any period of `per` seconds."""

    limit: int
    per: Duration = 1.0

    def __post_init__(self) -> None:
        whole("rate", self.limit, low=1, high=2**31 - 1)
        if not self.period:
            raise InvalidArgument("per", "expected more than 0 seconds")

    @property
    def period(self) -> float:
        """`per` in seconds."""
        return seconds("per", self.per)


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its settings."""

    id: int
    queue_name: str
    created_at: datetime
    lease: float
    max_read_ct: int
    retention: float | None
    paused: bool
    max_in_flight: int | None
    max_in_flight_per_key: int | None
    max_lease: float | None
    max_releases: int | None
    rate: Rate | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is enqueued again and again, and when next."""

    name: str
    queue: str
    cron: str | None
    every: float | None
    timezone: str
    missed: MissedTicks
    paused: bool
    starts_at: datetime
    next_at: datetime
    last_at: datetime | None
    created_at: datetime
    priority: int
    codec: str | None
    headers: Mapping[str, Any] | None
    payload: Any
    """Of each message; the arguments of each run if it starts a workflow."""
    workflow: str | None
    """The name of the workflow that it starts."""
    options: Mapping[str, Any] | None
    """`version` and `timeout` of the runs."""
    error: str | None
    """Why it cannot tick, if it cannot."""
    failing_since: datetime | None
    retry_at: datetime | None
    """When a schedule that cannot tick is tried again."""


@dataclass(frozen=True, slots=True)
class BackfillProgress:
    """How far a backfill has come."""

    enqueued: int
    """Messages, or runs, of this call."""
    tick: datetime
    """The last tick that was enqueued."""
    start: datetime
    end: datetime

    @property
    def done(self) -> float:
        """Which part of the time was gone through: from 0 to 1."""
        return (self.tick - self.start) / (self.end - self.start)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The row of a worker: who it is, and when it was last heard of."""

    id: int
    queue: str | None
    hostname: str
    port: int
    pid: int | None
    status: WorkerStatus
    last_heartbeat: datetime
    created_at: datetime
    silent_for: float

    def is_alive(self, *, within: Duration = 90.0) -> bool:
        """Whether it was heard of within this many seconds."""
        return self.silent_for <= seconds("within", within)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """What a queue holds at one moment."""

    queue: str
    paused: bool
    ready: int
    delayed: int
    leased: int
    blocked: int
    oldest_age: float | None
    archived: Mapping[ArchiveReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream: who claims messages of a queue batch by batch, and what it has claimed now."""

    name: str
    queue: str
    last_batch: int
    batches: int
    messages: int
    claimed_since: datetime | None
    created_at: datetime


ParentClose = Literal["cancel", "leave"]
"""What becomes of a child when its parent ends. `"cancel"`: it is cancelled then, however the parent
ends. `"leave"`: it goes on, also if the parent is cancelled. Without either it is cancelled with a
parent that is cancelled, and goes on otherwise.
"""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run of a workflow, as its row says."""

    id: int
    name: str
    key: str | None
    status: RunStatus
    input: Any
    output: Any
    error: str | None
    failed_step: str | None
    version: str | None
    queue: str | None
    message_id: int | None
    parent_id: int | None
    forked_from: int | None
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    ended_at: datetime | None
    wake_at: datetime | None
    deadline_at: datetime | None

    @property
    def has_ended(self) -> bool:
        """Whether it is completed, failed or cancelled."""
        return self.status in ENDED


ENDED = frozenset((RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED))
"""What a run stays, whatever comes later."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step of a run, as its row says."""

    run_id: int
    step_id: str
    position: int
    status: StepStatus
    attempts: int
    output: Any
    error: str | None
    started_at: datetime | None
    completed_at: datetime | None
    wake_at: datetime | None
    seq: int | None = None
    """In which order the run got to know how its calls ended."""
    digest: int | None = None
    """Of the arguments of the call."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that a run let others know."""

    id: int
    run_id: int
    name: str
    payload: Any
    created_at: datetime


@dataclass(frozen=True, slots=True)
class S3Stats:
    """What a store in S3 sent and fetched since it was opened, and how full its database is."""

    puts: int
    gets: int
    not_modified: int
    uploaded_bytes: int
    downloaded_bytes: int
    last_upload_bytes: int
    uploads: int
    conflicts: int
    vacuums: int
    pages: int
    dead_pages: int
    set_aside: tuple[str, ...]
    losses_in_a_row: int = 0
    """Races that this node has lost since its last upload: it starves if this grows."""
    announcements: int = 0
    """How often this node has asked the others to pause."""
    pauses: int = 0
    """How often this node has paused for another one."""
    seconds: float = 0.0
    """Since the store was opened."""


@dataclass(frozen=True, slots=True)
class S3Version:
    """A state of the object that the bucket keeps. Without a size the object was deleted then."""

    id: str
    etag: str | None
    size: int | None
    modified_at: datetime
    is_latest: bool


def seconds(name: str, value: Duration) -> float:
    """A duration argument as seconds, or an error that names the argument."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(name, f"expected seconds or a timedelta, got {value!r}")
    if not 0 <= value <= MAX_SECONDS:
        raise InvalidArgument(name, f"expected between 0 and {MAX_SECONDS} seconds, got {value!r}")
    return float(value)


MAX_SECONDS = 100 * 366 * 86400
"""A century: far beyond every use, and safe to add to a time on every backend."""


def aware(name: str, value: datetime) -> datetime:
    """A time argument in UTC, or an error that names the argument."""
    if not isinstance(value, datetime):
        raise InvalidArgument(name, f"expected a datetime, got {value!r}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidArgument(name, f"{value!r} has no time zone; use datetime.now(timezone.utc)")
    return value.astimezone(UTC)


def whole(name: str, value: int, *, low: int, high: int) -> int:
    """An integer argument within bounds, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(name, f"expected an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidArgument(name, f"expected between {low} and {high}, got {value}")
    return value
