"""The async twins: the same names and arguments as the sync facades, over one bridge."""

from pgqrs.aio.admin import AsyncAdmin
from pgqrs.aio.buffer import AsyncBuffer
from pgqrs.aio.consumer import AsyncConsumer
from pgqrs.aio.producer import AsyncProducer
from pgqrs.aio.s3 import S3Store
from pgqrs.aio.schedules import AsyncSchedules
from pgqrs.aio.store import AsyncStore, connect
from pgqrs.aio.transaction import AsyncTransaction
from pgqrs.aio.worker import AsyncWorker
from pgqrs.aio.workflows import AsyncRun, AsyncStepGuard, AsyncWorkflows

__all__ = [
    "AsyncAdmin",
    "AsyncBuffer",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncRun",
    "AsyncStepGuard",
    "AsyncSchedules",
    "AsyncStore",
    "AsyncTransaction",
    "AsyncWorker",
    "AsyncWorkflows",
    "S3Store",
    "connect",
]
