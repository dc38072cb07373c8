"""Tasks: a function that is called elsewhere, later, and as often as it takes.

`@task` wraps a function. Calling it runs it here and now, as always; `enqueue` puts the call into a
queue, as a message `{"task": name, "args": […], "kwargs": {…}}`, and a worker that knows a task of that
name runs it. The result is kept in the archive; the `Handle` that `enqueue` returns waits for it.

A task is known by its name, `module:function` unless it was given another. A worker runs tasks that were
declared in its process, so it has to import the modules that declare them; nothing in a message makes it
import anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from datetime import datetime
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pgqrs.codecs import PICKLE, Call, Signature, known, pickled, unpickled
from pgqrs.current import store_for
from pgqrs.errors import CodecRefused, HandlerNotFound, InvalidArgument, InvalidPayload
from pgqrs.handlers import Delivery, Job, is_coroutine_function
from pgqrs.handles import AsyncHandle, Handle, Reach
from pgqrs.outcomes import Done, Failed, Outcome
from pgqrs.producer import Producer
from pgqrs.retry import Retry
from pgqrs.store import Store
from pgqrs.stores import Database
from pgqrs.types import ArchivedMessage, Duration, Message, UniqueFor, seconds

P = ParamSpec("P")
R = TypeVar("R")
QUEUE = "default"
"""The queue of tasks that name none."""

_declared: dict[str, Task[Any, Any]] = {}
_store_of_call: ContextVar[Store | None] = ContextVar("pgqrs_store_of_call", default=None)
"""The store of the worker that runs the task at hand: what it enqueues goes there."""
_intercept: ContextVar[Callable[[Task[Any, Any], Call], Any] | None] = ContextVar(
    "pgqrs_intercept", default=None
)
"""Runs tasks instead of enqueueing them: for tests."""


class Task(Generic[P, R]):
    """A function that can be enqueued."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        queue: str = QUEUE,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        codec: str | None = None,
        process: bool = False,
    ) -> None:
        if not callable(function):
            raise InvalidArgument("task", f"{function!r} cannot be called")
        self.function = function
        self.name = name or default_name(function)
        self.queue = queue
        self.retry = retry or Retry()
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.codec = known(codec)
        self.is_async = is_coroutine_function(function)
        self.process = process
        if process and self.is_async:
            raise InvalidArgument("process", "a coroutine runs in the event loop")
        self._signature = Signature(function)
        self._options: dict[str, Any] = {}
        self._store: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run it here and now."""
        return self.function(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Have it run by a worker."""
        call = Call(args, kwargs)
        intercept = _intercept.get()
        if intercept is not None:
            handle: Handle[R] = intercept(self, call)
            return handle
        store = self._store_now()
        if hasattr(store, "_bridge"):
            raise InvalidArgument("store", "an AsyncStore is reached with `await task.aenqueue(…)`")
        return self._enqueue(store._database, call)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncHandle[R]:
        """Have it run by a worker, from asyncio; on a store of either kind."""
        store = self._store_now()
        if not hasattr(store, "_database"):
            raise InvalidArgument("store", f"expected a store, got {store!r}")
        reach = Reach(store)
        handle = await reach.run(self._enqueue, reach.database, Call(args, kwargs))
        return AsyncHandle(reach, handle.queue, handle.id, self.decode_result)

    def options(
        self,
        *,
        store: Any = None,
        queue: str | None = None,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int | None = None,
        key: str | None = None,
        unique: UniqueFor | None = None,
        group: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> Task[P, R]:
        """The same task, enqueued like this. The store may be a `store.using(…)` as well."""
        given = {
            "delay": delay,
            "eta": eta,
            "ttl": ttl,
            "expires_at": expires_at,
            "priority": priority,
            "key": key,
            "unique": unique,
            "group": group,
            "headers": headers,
        }
        other: Task[P, R] = Task.__new__(Task)
        other.__dict__.update(self.__dict__)
        other.queue = queue or self.queue
        other._store = store or self._store
        other._options = self._options | {
            name: value for name, value in given.items() if value is not None
        }
        return other

    def handle(self, id: int, *, store: Any = None) -> Handle[R]:
        """The handle of a task that was enqueued before, perhaps by another process."""
        database = (store or self._store_now())._database
        return Handle(database, self.queue, id, self.decode_result)

    def ahandle(self, id: int, *, store: Any = None) -> AsyncHandle[R]:
        """The same for asyncio."""
        reach = Reach(store or self._store_now())
        return AsyncHandle(reach, self.queue, id, self.decode_result)

    def payload(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The message that `enqueue` would send."""
        return self.encode(Call(args, kwargs))

    # From a call to a payload and back

    def encode(self, call: Call) -> dict[str, Any]:
        if self.codec == PICKLE:
            return {"task": self.name, "pickle": pickled(tuple(call))}
        return {"task": self.name, **self._signature.encode(call)}

    def decode(self, message: Message) -> Call:
        """The arguments in a message. One that is encoded otherwise than this task says is refused."""
        if message.codec != self.codec:
            raise CodecRefused(message.codec)
        if self.codec == PICKLE:
            return Call(*unpickled(message.payload["pickle"]))
        return self._signature.decode(message.payload)

    def encode_result(self, value: Any) -> Any:
        if self.codec == PICKLE:
            return pickled(value)
        return self._signature.encode_result(value)

    def decode_result(self, ended: ArchivedMessage) -> R:
        result: Any = ended.result
        if self.codec == PICKLE and ended.codec == PICKLE:
            result = None if result is None else unpickled(result)
        elif self.codec is None:
            result = self._signature.decode_result(result)
        return result  # type: ignore[no-any-return]

    # Inside

    def _store_now(self) -> Any:
        return self._store or _store_of_call.get() or store_for()

    def _enqueue(self, database: Database, call: Call) -> Handle[R]:
        producer = Producer(database, self.queue, codec=self.codec)
        id = producer.enqueue(self.encode(call), **_with_headers(self._options))
        # Inside a transaction the handle outlives the connection.
        lasting = getattr(database, "_database", database)
        return Handle(lasting, self.queue, id, self.decode_result)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


_more_headers: list[Callable[[Mapping[str, Any] | None], Mapping[str, Any]]] = []


def add_headers(more: Callable[[Mapping[str, Any] | None], Mapping[str, Any]]) -> None:
    """Let this function add to the headers of every task that is enqueued."""
    if more not in _more_headers:
        _more_headers.append(more)


def _with_headers(options: dict[str, Any]) -> dict[str, Any]:
    headers = options.get("headers")
    for more in _more_headers:
        headers = more(headers)
    return options if not headers else options | {"headers": headers}


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def task(
    *,
    name: str | None = None,
    queue: str = QUEUE,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    codec: str | None = None,
    process: bool = False,
) -> Decorator: ...
def task(function: Any = None, /, **options: Any) -> Any:
    """Make a task of a function: `@task`, or `@task(queue=…, retry=…, timeout=…)`.

    `codec="cloudpickle"` sends any arguments, to workers that accept it. `process` runs the function in
    another process, for work that needs a core of its own.
    """
    if function is None:
        return Decorator(options)
    return declare(Task(function, **options))


class Decorator:
    """`@task(…)`: what is still to be given a function."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Any, /) -> Any:
        return declare(Task(function, **self._options))


def declare(declared: Task[P, R]) -> Task[P, R]:
    """From now on workers of this process know it by its name."""
    _declared[declared.name] = declared
    return declared


def default_name(function: Any) -> str:
    """`module:function`. A script is known by its file, as a worker would import it."""
    module = getattr(function, "__module__", None) or "?"
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else module
    qualname = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{qualname}"


# What a worker does with the message of a task


class TaskRoute:
    """Finds the jobs of tasks: of these, and of all that are declared."""

    def __init__(
        self,
        tasks: Iterable[Task[Any, Any]] = (),
        *,
        codecs: Iterable[str] = (),
        processes: Callable[[], Executor] | None = None,
    ) -> None:
        self.tasks = {task.name: task for task in tasks}
        self._codecs = {None, *map(known, codecs)}
        self._processes = processes
        self._jobs: dict[str, Job] = {}

    def __call__(self, message: Message) -> Job | None:
        payload = message.payload
        if not isinstance(payload, dict) or not isinstance(payload.get("task"), str):
            return None
        if message.codec not in self._codecs:
            raise CodecRefused(message.codec)
        name = payload["task"]
        wanted = self.tasks.get(name) or _declared.get(name)
        if wanted is None:
            raise HandlerNotFound(message.queue, f"no task {name!r} is declared")
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = self._job(wanted)
        return job

    def _job(self, wanted: Task[Any, Any]) -> Job:
        def run(delivery: Delivery) -> Outcome:
            token = _store_of_call.set(Store._of(delivery.database))
            try:
                call = wanted.decode(delivery.message)
                return _outcome(wanted, wanted.function(*call.args, **call.kwargs))
            finally:
                _store_of_call.reset(token)

        async def run_async(delivery: Delivery) -> Outcome:
            token = _store_of_call.set(Store._of(delivery.database))
            try:
                call = wanted.decode(delivery.message)
                return _outcome(wanted, await wanted.function(*call.args, **call.kwargs))
            finally:
                _store_of_call.reset(token)

        def run_elsewhere(delivery: Delivery) -> Outcome:
            if self._processes is None:
                return run(delivery)
            module = wanted.function.__module__
            return Done(
                self._processes()
                .submit(run_in_process, module, wanted.name, delivery.message)
                .result()
            )

        return Job(
            name=wanted.name,
            run=run_async if wanted.is_async else run_elsewhere if wanted.process else run,
            is_async=wanted.is_async,
            timeout=wanted.timeout,
            retry=wanted.retry,
        )


def run_in_process(module: str, name: str, message: Message) -> Any:
    """In the other process: find the task, run it, and return its result as JSON."""
    __import__(module)
    wanted = _declared[name]
    call = wanted.decode(message)
    outcome = _outcome(wanted, wanted.function(*call.args, **call.kwargs))
    if isinstance(outcome, Failed):
        assert isinstance(outcome.error, BaseException)
        raise outcome.error
    assert isinstance(outcome, Done)
    return outcome.result


def _outcome(wanted: Task[Any, Any], value: Any) -> Outcome:
    if isinstance(value, Outcome):
        return value
    try:
        return Done(wanted.encode_result(value))
    except InvalidPayload as exc:
        return Failed(exc, dead=True)  # it would be the same the next time
