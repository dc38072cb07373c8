"""What a worker does with a message: jobs, where they come from, and what they are called with.

A *route* looks at a claimed message and returns the `Job` for it, or None if it knows of none. A job
is called with a `Delivery`, in a thread or as a coroutine, and returns an outcome (`pgqrs.outcomes`).
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pgqrs.consumer import Holder
from pgqrs.errors import InvalidArgument
from pgqrs.keeper import Lease, granted
from pgqrs.outcomes import Done, Failed, Outcome, as_outcome
from pgqrs.retry import OUTLASTING, Retry
from pgqrs.stores import Database
from pgqrs.types import Duration, Message, seconds, whole

MAX_BATCH = 10_000
logger = logging.getLogger("pgqrs.worker")


class Delivery(Lease):
    """One claimed message on its way through a worker.

    `holder` and `database` are for handlers that end the message themselves. Both block: a coroutine
    uses them through `asyncio.to_thread`.
    """

    __slots__ = (
        "_each_second",
        "_ended",
        "_when_lost",
        "claimed_at",
        "database",
        "holder",
        "state",
    )

    def __init__(
        self,
        message: Message,
        *,
        holder: Holder,
        database: Database,
        claimed_at: float,
        lease: float | None = None,
    ) -> None:
        """`lease` is how long the claim was given for, if that is known."""
        super().__init__(
            message, granted(message) if lease is None else lease, claimed_at=claimed_at
        )
        self.holder = holder
        self.database = database
        self.claimed_at = claimed_at
        self.state: dict[Any, Any] = {}
        self._ended = threading.Lock()
        self._each_second: Callable[[], object] | None = None
        self._when_lost: list[Callable[[], object]] = []

    def when_lost(self, call: Callable[[], object]) -> None:
        """Call this, from another thread, when the lease is lost; at once if it is."""
        self._when_lost.append(call)
        if self._is_lost:
            call()

    def each_second(self, call: Callable[[], object]) -> None:
        """Call this about once a second, from another thread, while the message is held."""
        self._each_second = call

    def second_passed(self) -> None:
        """The worker holds the message for another second."""
        if self._each_second is not None:
            self._each_second()

    def lose(self) -> None:
        """The lease is lost. Whoever wants to know is told in a thread of its own: what they do then
        must not keep the other leases from being renewed.
        """
        super().lose()
        logger.warning("lease lost on message %d, while it was handled", self.message.id)
        if self._when_lost:
            threading.Thread(target=self._tell, name="pgqrs-lost", daemon=True).start()

    def _tell(self) -> None:
        for call in list(self._when_lost):
            try:
                call()
            except BaseException:
                logger.exception("message %d: when_lost failed", self.message.id)

    def end(self) -> bool:
        """Whether this is the first to end it: the handler, its timeout, or the worker's leaving."""
        return self._ended.acquire(blocking=False)

    @property
    def is_ended(self) -> bool:
        return self._ended.locked()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """How to handle a message. With a `batch` above 1, `run` gets a list of deliveries, and returns
    a list of outcomes.
    """

    name: str
    run: Callable[[Any], Any]
    is_async: bool = False
    timeout: float | None = None
    retry: Retry = OUTLASTING
    batch: int = 1
    alone_from: int | None = None
    """From this attempt on, at least the third, the message is handled while the worker has no other
    (see `pgqrs.isolation`). For jobs whose attempts count crashes only.
    """


Route = Callable[[Message], Job | None]


@dataclass(frozen=True)
class Handler:
    """A function for the messages of a queue, with how it is to be called.

    It gets the message, and returns the result. With a `batch` above 1 it gets a list of up to so
    many messages, and returns nothing, or a list of as many results; an error fails all of them.
    """

    call: Callable[[Any], Any]
    _: KW_ONLY
    retry: Retry = OUTLASTING
    timeout: Duration | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise InvalidArgument("handlers", f"{self.call!r} cannot be called")
        whole("batch", self.batch, low=1, high=MAX_BATCH)

    def job(self) -> Job:
        """The job of every message of the queue."""
        many, is_async = self.batch > 1, is_coroutine_function(self.call)
        runs: dict[tuple[bool, bool], Callable[[Any], Any]] = {
            (False, False): self._run,
            (False, True): self._run_async,
            (True, False): self._run_many,
            (True, True): self._run_many_async,
        }
        return Job(
            name=getattr(self.call, "__qualname__", repr(self.call)),
            run=runs[many, is_async],
            is_async=is_async,
            timeout=None if self.timeout is None else seconds("timeout", self.timeout),
            retry=self.retry,
            batch=self.batch,
        )

    def _run(self, delivery: Delivery) -> Outcome:
        return as_outcome(self.call(delivery.message))

    async def _run_async(self, delivery: Delivery) -> Outcome:
        return as_outcome(await self.call(delivery.message))

    def _run_many(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        return _outcomes(self.call([delivery.message for delivery in deliveries]), len(deliveries))

    async def _run_many_async(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        returned: Awaitable[Any] = self.call([delivery.message for delivery in deliveries])
        return _outcomes(await returned, len(deliveries))


def is_coroutine_function(call: Any) -> bool:
    """Whether calling this returns something to await, also for objects with a `__call__`."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 (asked about the method, not whether it is there)
    )


def _outcomes(returned: Any, count: int) -> list[Outcome]:
    if returned is None:
        return [Done()] * count
    if not isinstance(returned, Sequence) or len(returned) != count:
        size = f" of {len(returned)}" if isinstance(returned, Sized) else ""
        kind = f"{type(returned).__name__}{size}"  # not the value: it may be secret
        error = f"a handler of {count} messages returned a {kind}, not None or one for each"
        return [Failed(error)] * count
    return [as_outcome(value) for value in returned]


@dataclass(slots=True, eq=False)
class Load:
    """What a slot takes at a time: a message, or a batch for one job."""

    job: Job
    deliveries: list[Delivery]
    given_at: float = 0.0
    """When it was handed to the slots."""
    started_at: float | None = None

    def start(self) -> Any:
        """Call the job. Returns what it returns, or what to await."""
        self.started_at = time.monotonic()
        return self.job.run(self.deliveries if self.job.batch > 1 else self.deliveries[0])

    def outcomes(self, returned: Any) -> list[Outcome]:
        """One for each delivery."""
        return list(returned) if self.job.batch > 1 else [returned]

    def failed(self, error: BaseException) -> list[Outcome]:
        """The same for each delivery."""
        return [Failed(error, retry=self.job.retry)] * len(self.deliveries)
