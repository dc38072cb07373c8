"""Durable queues and durable workflows in the database you already have."""

from pgqrs.admin import Admin
from pgqrs.aio import (
    AsyncAdmin,
    AsyncBuffer,
    AsyncConsumer,
    AsyncProducer,
    AsyncStore,
    AsyncTransaction,
    AsyncWorker,
    connect,
)
from pgqrs.buffer import Buffer
from pgqrs.clock import Clock, SystemClock
from pgqrs.config import Config
from pgqrs.consumer import Consumer
from pgqrs.errors import (
    CommitUncertain,
    ConflictError,
    HandlerNotFound,
    HandlerTimedOut,
    InvalidArgument,
    InvalidConfig,
    InvalidPayload,
    LeaseLost,
    MessageNotFound,
    NotExclusive,
    PayloadTooLarge,
    PgqrsError,
    QueueExists,
    QueueNotEmpty,
    QueueNotFound,
    RevisionAltered,
    RevisionError,
    RevisionMissing,
    RevisionUnknown,
    SchemaError,
    SchemaNotInstalled,
    SchemaTooNew,
    StoreClosed,
    StoreUnavailable,
    UpgradeRequired,
    WorkerNotFound,
    WorkerStopped,
)
from pgqrs.handlers import Handler
from pgqrs.outcomes import Done, Failed, GivenBack, Settled
from pgqrs.producer import Producer
from pgqrs.retry import Retry, RetryAfter
from pgqrs.store import Store
from pgqrs.transaction import Transaction
from pgqrs.types import (
    ArchivedMessage,
    ArchiveReason,
    ConcurrencyModel,
    Message,
    Queue,
    QueueStats,
    WorkerInfo,
    WorkerStatus,
)
from pgqrs.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "Admin",
    "ArchiveReason",
    "ArchivedMessage",
    "AsyncAdmin",
    "AsyncBuffer",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncStore",
    "AsyncTransaction",
    "AsyncWorker",
    "Buffer",
    "Clock",
    "CommitUncertain",
    "ConcurrencyModel",
    "Config",
    "ConflictError",
    "Consumer",
    "Done",
    "Failed",
    "GivenBack",
    "Handler",
    "HandlerNotFound",
    "HandlerTimedOut",
    "InvalidArgument",
    "InvalidConfig",
    "InvalidPayload",
    "LeaseLost",
    "Message",
    "MessageNotFound",
    "NotExclusive",
    "PayloadTooLarge",
    "PgqrsError",
    "Producer",
    "Queue",
    "QueueExists",
    "QueueNotEmpty",
    "QueueNotFound",
    "QueueStats",
    "Retry",
    "RetryAfter",
    "RevisionAltered",
    "RevisionError",
    "RevisionMissing",
    "RevisionUnknown",
    "SchemaError",
    "SchemaNotInstalled",
    "SchemaTooNew",
    "Settled",
    "Store",
    "StoreClosed",
    "StoreUnavailable",
    "SystemClock",
    "Transaction",
    "UpgradeRequired",
    "Worker",
    "WorkerInfo",
    "WorkerNotFound",
    "WorkerStatus",
    "WorkerStopped",
    "__version__",
    "connect",
]
