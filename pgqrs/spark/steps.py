"""Steps of workflows that are Spark jobs.

A step that returns a DataFrame writes it down as Parquet, below a directory of this very attempt, and
then records where that is: `Frame`. The record is fenced as that of every step, so what counts is what
the record names. A driver that lost its lease, or whose Java process works on after it died, writes
elsewhere and spoils nothing; what it leaves behind is swept (`sweep`). That a directory exists, or
looks complete, never means anything.

While Spark works a thread watches over the attempt. If the run is cancelled or overdue, if the step
takes longer than it may, or if somebody else holds the run, the jobs are cancelled.

When the Java process dies, nothing in this process can bring it back: the run is left as it is for
another worker, and the worker here stops with `SparkDied`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from pgqrs.errors import InvalidArgument, LeaseLost, PgqrsError, SparkDied, StepTimedOut
from pgqrs.repositories.steps import Recorded
from pgqrs.retry import Retry
from pgqrs.spark.files import absolute
from pgqrs.spark.frames import MARK, Frame, FrameSignature, is_frame, write_counted
from pgqrs.spark.jobs import Jobs, cause_of, death_of_java
from pgqrs.spark.session import activate, current_session
from pgqrs.store import Store
from pgqrs.types import Duration, seconds
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import Context
from pgqrs.workflows.decide import RetryOn
from pgqrs.workflows.decorators import Step
from pgqrs.workflows.flows import StepOptions
from pgqrs.workflows.history import Call
from pgqrs.workflows.interrupts import Broken, Interrupt, Lost, Pause

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

P = ParamSpec("P")
T = TypeVar("T")
LOOK_EVERY = 1.0
"""Seconds between two looks at whether the run was told to stop."""
Place = str | os.PathLike[str] | Callable[..., str | os.PathLike[str]]
Session = Callable[[], "SparkSession"]
Reach = Callable[[Callable[[], Any]], Any]
logger = logging.getLogger("pgqrs.spark")

_attempt: ContextVar[Attempt | None] = ContextVar("pgqrs_spark_attempt", default=None)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step."""

    context: Context = field(repr=False)
    step_id: str
    number: int
    reach: Reach = field(repr=False)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def run_id(self) -> int:
        return self.context.id

    @property
    def store(self) -> Store:
        """The store of the run."""
        return Store._of(self.context.journal.database)

    @property
    def tag(self) -> str:
        """What its jobs are called."""
        return f"pgqrs-{self.run_id}-{self.token}"

    @cached_property
    def directory(self) -> str:
        """Its directory, below whatever root. No other attempt at anything has the same."""
        run = self.reach(partial(self.context.journal.find_run, self.run_id))
        step = re.sub(r"[^A-Za-z0-9.-]+", "_", self.step_id)
        return f"{run_directory(run.id, run.created_at)}/step-{step}/{self.number}-{self.token}"

    def path(self, root: str | os.PathLike[str]) -> str:
        """Where this attempt may write to."""
        return f"{absolute(root)}/{self.directory}"

    def look(self) -> None:
        """Raise what ends the run, if anything does."""
        try:
            told: Recorded = self.reach(partial(self.context.journal.look, self.run_id))
        except LeaseLost as exc:
            raise Lost from exc
        self.context.check(told)


def run_directory(run_id: int, created_at: datetime) -> str:
    """The directory of a run. Ids alone are not enough: two stores may share a root."""
    return f"run-{run_id}-{created_at:%Y%m%dT%H%M%S%f}"


def current_attempt() -> Attempt:
    """The attempt that this code is part of: to write to places of its own, or to use its store."""
    attempt = _attempt.get()
    if attempt is None:
        raise InvalidArgument("current_attempt", "this is not part of a Spark step of a run")
    return attempt


class Watch:
    """Cancels the jobs of an attempt that is not to go on."""

    def __init__(self, attempt: Attempt, timeout: float | None) -> None:
        self._attempt = attempt
        self._timeout = timeout
        self._began = time.monotonic()
        self._done = threading.Event()
        self.reason: Interrupt | StepTimedOut | None = None
        self.jobs: Jobs | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch, from a thread of its own."""
        thread = threading.Thread(target=self._run, name=f"watch {self._attempt.tag}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def check(self) -> None:
        """Raise why it is not to go on."""
        if self.reason is not None:
            raise self.reason

    def _run(self) -> None:
        while not self._done.wait(self._pause()):
            self.reason = self.reason or self._look()
            if self.reason is not None and self.jobs is not None:
                logger.warning("cancelling %s: %r", self._attempt.tag, self.reason)
                self.jobs.cancel()

    def _pause(self) -> float:
        if self._timeout is None or self.reason is not None:
            return LOOK_EVERY
        return min(LOOK_EVERY, max(0.01, self._began + self._timeout - time.monotonic()))

    def _look(self) -> Interrupt | StepTimedOut | None:
        if self._timeout is not None and time.monotonic() - self._began >= self._timeout:
            return StepTimedOut(self._attempt.step_id, self._timeout)
        try:
            self._attempt.look()
        except Pause:  # takes effect when the step is done
            return None
        except Interrupt as exc:
            return exc
        except Exception as exc:
            logger.warning("run %d cannot be looked at: %s", self._attempt.run_id, exc)
        return None


class SparkStep(Step[P, T]):
    """A step that is done by Spark."""

    def __init__(
        self,
        function: Callable[P, T],
        *,
        name: str | None,
        options: StepOptions,
        materialize: Place | None,
        session: Session | None,
    ) -> None:
        super().__init__(function, name=name, options=options)
        if self.is_async:
            raise InvalidArgument(
                "spark_step",
                f"{self.name} is async, but Spark blocks; an async workflow runs it in a thread",
            )
        self._materialize = materialize
        self._session = session or partial(current_session, self.name)

    def options_for(self, context: Context, call: Call) -> StepOptions:
        number = 1 if call.record is None else call.record.attempts + 1
        attempt = Attempt(context, call.step_id, number, _reach(context))
        return replace(self._options, function=partial(self._run, attempt))

    def _run(self, attempt: Attempt, /, *args: Any, **kwargs: Any) -> Any:
        """The attempt, in the thread of the step."""
        watch = Watch(attempt, self._options.timeout)
        token = _attempt.set(attempt)
        try:
            with watch.on():
                return self._call(attempt, watch, args, kwargs)
        except Exception as exc:
            watch.check()
            how = death_of_java(exc)
            if how is not None:
                raise Broken(SparkDied(how)) from exc
            cause = cause_of(exc)
            if cause is not None:
                exc.add_note(cause)  # the last line is what the error of a run is shown by
            raise
        finally:
            _attempt.reset(token)

    def _call(self, attempt: Attempt, watch: Watch, args: Any, kwargs: Any) -> Any:
        spark = self._session()
        activate(spark)
        watch.jobs = Jobs(spark, attempt.tag)
        with watch.jobs.tagged():
            value = self._function(*args, **kwargs)
            watch.check()
            if not _is_dataframe(value):
                return value
            frame = write(value, attempt.path(self._root(args, kwargs)))
            watch.check()
            return frame

    def _root(self, args: Any, kwargs: Any) -> str | os.PathLike[str]:
        if self._materialize is None:
            raise InvalidArgument(
                "materialize", f"step {self.name} returns a DataFrame; say where it is to be kept"
            )
        place = self._materialize
        return place(*args, **kwargs) if callable(place) else place


def write(df: DataFrame, path: str) -> Frame:
    """Write a DataFrame to a path that nobody else uses."""
    frame = write_counted(df, lambda counted: counted.write.parquet(path), path)
    written = df.sparkSession.read.schema(df.schema).parquet(path)
    return replace(frame, schema_json=written.schema.jsonValue())


def written_by(attempt: Attempt) -> list[Frame]:
    """The frames that steps of the run have on record."""
    steps = attempt.store.workflows.steps(attempt.run_id)
    return [Frame(**step.output[MARK]) for step in steps if is_frame(step.output)]


def _is_dataframe(value: Any) -> bool:
    from pyspark.sql import DataFrame

    return isinstance(value, DataFrame)


def _reach(context: Context) -> Reach:
    """How threads of a step call the database."""
    if not isinstance(context, AsyncContext):
        return context.reach
    loop, offload = asyncio.get_running_loop(), context.offload

    async def call_there(call: Callable[[], Any]) -> Any:
        return await offload(call)

    def reach(call: Callable[[], Any]) -> Any:
        if loop.is_closed():
            raise PgqrsError("the event loop of the run is closed")
        return asyncio.run_coroutine_threadsafe(call_there(call), loop).result()

    return reach


@overload
def spark_step(function: Callable[P, T], /) -> SparkStep[P, T]: ...
@overload
def spark_step(
    *,
    materialize: Place | None = None,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    session: Session | None = None,
) -> Callable[[Callable[P, T]], SparkStep[P, T]]: ...
def spark_step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    materialize: Place | None = None,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    session: Session | None = None,
) -> Any:
    """Make a function a step of workflows that is done by Spark.

    A DataFrame that it returns is written below `materialize` (a directory, a bucket, or a function
    that is given the step's arguments and tells), and the workflow gets a `Frame`. Anything else is a
    result as that of every step. `session` makes the Spark session; without it, the one that is
    active is used, or a new one. The rest is as with `step`.
    """

    def decorate(function: Callable[..., Any]) -> SparkStep[..., Any]:
        options = StepOptions(
            function=function,
            signature=FrameSignature(function),
            retry=retry,
            retry_on=retry_on,
            timeout=None if timeout is None else seconds("timeout", timeout),
        )
        return SparkStep(
            function, name=name, options=options, materialize=materialize, session=session
        )

    return decorate if function is None else decorate(function)
