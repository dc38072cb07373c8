"""Tasks: a function that is called elsewhere, later, and as often as it takes.

`@task` wraps a function. Calling it runs it here and now, as always; `enqueue` puts the call into a
queue, as a message `{"task": name, "args": […], "kwargs": {…}}`, and a worker that knows a task of that
name runs it. The result is kept in the archive; the `Handle` that `enqueue` returns waits for it.

A task is known by its name, `module:function` unless it was given another. A worker runs the tasks that
it was given; one that was given only queues runs the tasks that were declared in its process. Nothing in
a message makes it import anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pgqrs.codecs import (
    PICKLE,
    Call,
    Calls,
    Signature,
    calls_of,
    known,
    naming,
    pickled,
    unpickled,
)
from pgqrs.current import StoreOfCall, outside, run_here, store_for, store_of_call, store_on
from pgqrs.errors import CodecRefused, InvalidArgument, InvalidPayload
from pgqrs.handlers import Delivery, Job, is_coroutine_function
from pgqrs.handles import AsyncHandle, Handle, Reach
from pgqrs.handling import handled, handling
from pgqrs.intercepting import interceptor
from pgqrs.outcomes import OUTCOMES, Done, Failed, Outcome
from pgqrs.processes import Processes
from pgqrs.producer import NewMessages, Producer
from pgqrs.queue_making import with_queue
from pgqrs.retry import OUTLASTING, Retry
from pgqrs.stores import Database
from pgqrs.types import ArchivedMessage, Duration, Message, UniqueFor, seconds
from pgqrs.unknown import Unknown
from pgqrs.workflows.decorators import Step, Workflow
from pgqrs.workflows.effects import refuse_transaction

P = ParamSpec("P")
R = TypeVar("R")
QUEUE = "default"
"""The queue of tasks that name none."""

_declared: dict[str, Task[Any, Any]] = {}


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
        self.retry = retry or OUTLASTING
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.codec = known(codec)
        self.is_async = is_coroutine_function(function)
        self.process = process
        if process and self.is_async:
            raise InvalidArgument("process", "a coroutine runs in the event loop")
        if process and is_typed_in(function):
            raise InvalidArgument(
                "process", "another process cannot have code that was typed in: use a file"
            )
        self._signature = Signature(function)
        self._options: dict[str, Any] = {}
        self._store: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run it here and now."""
        return self.function(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Have it run by a worker. Its queue is created if there is none of this name.

        In the body of a workflow on the same store it is enqueued once, however often the run is
        resumed.
        """
        call, intercepted = Call(args, kwargs), interceptor()
        if intercepted is not None:
            with outside():
                (handle,) = intercepted.enqueue(self, [call])
            return handle  # type: ignore[no-any-return]
        if run_here.get() is not None:
            return self._in_body(lambda database: self._new(database, call))[0]
        return self._enqueue(self._sync_database("aenqueue"), call)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncHandle[R]:
        """Have it run by a worker, from asyncio; on a store of either kind."""
        call, intercepted = Call(args, kwargs), interceptor()
        if intercepted is not None:
            with outside():
                (handle,) = await intercepted.aenqueue(self, [call])
            return handle  # type: ignore[no-any-return]
        if run_here.get() is not None:
            return (await self._in_async_body(lambda database: self._new(database, call)))[0]
        reach = self._reach()
        sent = await reach.write(lambda database: self._enqueue(database, call))
        return self._async_handle(reach, sent.id)

    def enqueue_many(
        self,
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
        groups: Iterable[str | None] | None = None,
    ) -> list[Handle[R]]:
        """Have it run by a worker once for each of these calls: all of them are sent, or none.

        A call is a tuple of arguments, or a mapping of named ones. `keys` and `groups` are one for each
        call; the other `options` are for all of them. Returns their handles.
        """
        wanted, intercepted = calls_of(calls), interceptor()
        if intercepted is not None:
            with outside():
                return intercepted.enqueue(self, wanted)
        if run_here.get() is not None:
            return self._in_body(lambda database: self._new_many(database, wanted, keys, groups))
        return self._enqueue_many(self._sync_database("aenqueue_many"), wanted, keys, groups)

    async def aenqueue_many(
        self,
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
        groups: Iterable[str | None] | None = None,
    ) -> list[AsyncHandle[R]]:
        """The same from asyncio; on a store of either kind."""
        wanted, intercepted = calls_of(calls), interceptor()
        if intercepted is not None:
            with outside():
                return await intercepted.aenqueue(self, wanted)
        if run_here.get() is not None:
            return await self._in_async_body(
                lambda database: self._new_many(database, wanted, keys, groups)
            )
        reach = self._reach()
        sent = await reach.write(
            lambda database: self._enqueue_many(database, wanted, keys, groups)
        )
        return [self._async_handle(reach, handle.id) for handle in sent]

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
        return self._handle(self._sync_database("ahandle", store=store), id)

    def ahandle(self, id: int, *, store: Any = None) -> AsyncHandle[R]:
        """The same for asyncio."""
        return self._async_handle(Reach(store or self._store or store_for(is_async=True)), id)

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

    def _sync_database(self, twin: str, *, store: Any = None) -> Database:
        store = store or self._store or store_for()
        if hasattr(store, "_bridge"):
            call = f"task.{twin}(…)" if twin == "ahandle" else f"await task.{twin}(…)"
            raise InvalidArgument("store", f"an AsyncStore is reached with `{call}`")
        database: Database = store._database
        return database

    def _reach(self) -> Reach:
        store = self._store or store_for(is_async=True)
        if not hasattr(store, "_database"):
            raise InvalidArgument("store", f"expected a store, got {store!r}")
        return Reach(store)

    def _enqueue(self, database: Database, call: Call) -> Handle[R]:
        database = database.of_queue(self.queue)
        producer = Producer(database, self.queue, codec=self.codec)
        payload, options = self.encode(call), _with_headers(self._options)
        id = with_queue(database, self.queue, lambda: producer.enqueue(payload, **options))
        return self._handle(database, id)

    def _enqueue_many(
        self,
        database: Database,
        calls: Sequence[Call],
        keys: Iterable[str | None] | None,
        groups: Iterable[str | None] | None,
    ) -> list[Handle[R]]:
        payloads, options = self._payloads(calls, keys, groups)
        database = database.of_queue(self.queue)
        producer = Producer(database, self.queue, codec=self.codec)
        ids = with_queue(database, self.queue, lambda: producer.enqueue_many(payloads, **options))
        return [self._handle(database, id) for id in ids]

    def _payloads(
        self,
        calls: Sequence[Call],
        keys: Iterable[str | None] | None,
        groups: Iterable[str | None] | None,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What `enqueue_many` is to send."""
        options = dict(_with_headers(self._options))
        if options.pop("key", None) is not None:
            raise InvalidArgument("key", "one key is for one message; give keys=[…]")
        group = options.pop("group", None)
        if group is not None and groups is None:
            groups = [group] * len(calls)
        payloads: list[dict[str, Any]] = []
        for call in calls:
            with naming(len(payloads)):
                payloads.append(self.encode(call))
        options |= {
            "keys": None if keys is None else list(keys),
            "groups": None if groups is None else list(groups),
        }
        return payloads, options

    # In the body of a workflow: see `workflows.effects`

    def _in_body(self, make: Callable[[Database], NewMessages]) -> list[Handle[R]]:
        run, given = run_here.get(), getattr(self._store, "_database", None)
        refuse_transaction(self._store, "enqueue")
        database = run.store(False)._database if given is None else given
        ids = run.enqueue(given, make(database))
        return [self._handle(database, id) for id in ids]

    async def _in_async_body(self, make: Callable[[Database], NewMessages]) -> list[AsyncHandle[R]]:
        run = run_here.get()
        refuse_transaction(self._store, "aenqueue")
        reach = Reach(self._store or run.store(True))
        given = None if self._store is None else reach.database
        ids = await run.enqueue_async(given, make(reach.database), call=reach.run)
        return [self._async_handle(reach, id) for id in ids]

    def _new(self, database: Database, call: Call) -> NewMessages:
        database = database.of_queue(self.queue)
        producer = Producer(database, self.queue, codec=self.codec)
        new = producer._one(self.encode(call), **_with_headers(self._options))
        return new._replace(creates_queue=True)

    def _new_many(
        self,
        database: Database,
        calls: Sequence[Call],
        keys: Iterable[str | None] | None,
        groups: Iterable[str | None] | None,
    ) -> NewMessages:
        payloads, options = self._payloads(calls, keys, groups)
        database = database.of_queue(self.queue)
        producer = Producer(database, self.queue, codec=self.codec)
        return producer._many(payloads, **options)._replace(creates_queue=True)

    def _handle(self, database: Database, id: int) -> Handle[R]:
        return Handle(database.lasting, self.queue, id, self.decode_result, task=self.name)

    def _async_handle(self, reach: Reach, id: int) -> AsyncHandle[R]:
        return AsyncHandle(reach, self.queue, id, self.decode_result, task=self.name)

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


_SCRIPT = ("__main__", "__mp_main__")
"""What the module of a script is called in its own process, and in processes that it spawns."""


def default_name(function: Any) -> str:
    """`module:function`, the same in every process. A script has the name by which a worker would import
    it: that of its file, or of its module after `python -m`.
    """
    module = getattr(function, "__module__", None) or "?"
    if module in _SCRIPT:
        module = _script_name(module) or "__main__"
    qualname = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{qualname}"


def is_typed_in(function: Any) -> bool:
    """True if no other process can have this function: it was typed in, or came by `python -c`."""
    module = getattr(function, "__module__", None)
    return module in _SCRIPT and _script_name(module) is None


def _script_name(module: str) -> str | None:
    script = sys.modules.get(module) or sys.modules["__main__"]
    spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
    if spec is not None and spec.name not in _SCRIPT:
        return str(spec.name)
    return Path(file).stem if file else None


def as_task(given: Task[Any, Any] | Callable[..., Any] | str) -> Task[Any, Any]:
    """A task as it is; of a plain function, or of its import path `module:function`, the task that
    `TaskQueue.enqueue` sends.
    """
    if isinstance(given, Task):
        return given
    function = _import(given) if isinstance(given, str) else given
    if isinstance(function, Workflow):
        raise InvalidArgument("tasks", f"{function!r} is no task; give it as workflows=[…]")
    if isinstance(function, Step):
        raise InvalidArgument("tasks", f"{function!r} is no task; a workflow calls it")
    return function if isinstance(function, Task) else Task(function, name=import_path(function))


def import_path(function: Any) -> str:
    """`module:function`, by which every process that can import the module finds this very function.

    Refuses what has no such path: a lambda, a function inside another, one of the script that runs.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    reason = None
    if not callable(function) or not module or not name:
        reason = "has no name by which a worker could find it"
    elif "<" in name:
        reason = "has no name by which a worker could find it: define it at the top of a module"
    elif module in _SCRIPT:
        reason = "is in the script that runs, which no worker can import: move it to a module"
    elif _attribute(sys.modules.get(module), name) is not function:
        reason = f"is not what {module}:{name} names, so a worker would run something else"
    if reason is not None:
        raise InvalidArgument("function", f"{function!r} {reason}")
    return f"{module}:{name}"


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = _attribute(import_module(module), name) if name else None
    except ImportError as exc:
        raise InvalidArgument("tasks", f"{path!r} cannot be imported: {exc}") from exc
    if found is None:
        raise InvalidArgument("tasks", f"{path!r} names no function; expected module:function")
    return found


def _attribute(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


# What a worker does with the message of a task


class TaskRoute:
    """Finds the jobs of tasks.

    A worker that was given tasks runs these and no others: each from its own queue, and from the queues
    that the worker was given by name (`open_queues`). One that was given none runs all that are
    declared, from the queues that it was given by name. So whoever may write to one queue cannot have a
    task of another executed. All other tasks are left to other workers.
    """

    def __init__(
        self,
        tasks: Iterable[Task[Any, Any]] = (),
        *,
        open_queues: Iterable[str] = (),
        codecs: Iterable[str] = (),
        processes: Processes | None = None,
    ) -> None:
        given = list(tasks)
        self.tasks = {task.name: task for task in given}
        self._queues = {(task.name, task.queue) for task in given}
        self._open = frozenset(open_queues)
        self._codecs = {None, *map(known, codecs)}
        self._processes = processes
        self._jobs: dict[str, Job] = {}
        self._stores: tuple[Database, StoreOfCall] | None = None
        """The database of the last message, and the stores on it."""
        self._unknown = Unknown()
        self._left_to_others = Job(name="unknown task", run=self._leave_to_others)

    def __call__(self, message: Message) -> Job | None:
        payload = message.payload
        if not isinstance(payload, dict) or not isinstance(payload.get("task"), str):
            return None
        name = payload["task"]
        wanted = self._find(name, message.queue)
        if wanted is None:
            return self._left_to_others
        if message.codec not in self._codecs:
            raise CodecRefused(message.codec)
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = self._job(wanted)
        return job

    def _find(self, name: str, queue: str) -> Task[Any, Any] | None:
        is_open = queue in self._open
        if not self.tasks:
            return _declared.get(name) if is_open else None
        return self.tasks.get(name) if is_open or (name, queue) in self._queues else None

    def _store_on(self, database: Database) -> StoreOfCall:
        if self._stores is None or self._stores[0] is not database:
            self._stores = database, store_on(database)
        return self._stores[1]

    def _leave_to_others(self, delivery: Delivery) -> Outcome:
        return self._unknown.outcome(delivery.message, "task", delivery.message.payload["task"])

    def _job(self, wanted: Task[Any, Any]) -> Job:
        def run(delivery: Delivery) -> Outcome:
            message, store = delivery.message, self._store_on(delivery.database)
            of_call = store_of_call.set(store)
            here = handled.set((message, wanted.name, _deadline(wanted, delivery)))
            try:
                call = wanted.decode(message)
                return as_kept(wanted, wanted.function(*call.args, **call.kwargs))
            finally:
                handled.reset(here)
                store_of_call.reset(of_call)

        async def run_async(delivery: Delivery) -> Outcome:
            message, store = delivery.message, self._store_on(delivery.database)
            of_call = store_of_call.set(store)
            here = handled.set((message, wanted.name, _deadline(wanted, delivery)))
            try:
                call = wanted.decode(message)
                return as_kept(wanted, await wanted.function(*call.args, **call.kwargs))
            finally:
                handled.reset(here)
                store_of_call.reset(of_call)

        def run_elsewhere(delivery: Delivery) -> Outcome:
            if self._processes is None:
                return run(delivery)
            module = wanted.function.__module__
            arguments = (module, wanted.name, delivery.message)
            return Done(
                self._processes.run(
                    run_in_process, *arguments, name=wanted.name, timeout=wanted.timeout
                )
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
    wanted = _declared.get(name)
    if wanted is None:
        raise InvalidArgument(
            "process",
            f"importing {module} declares no task {name!r}: declare it at the top of a module",
        )
    call = wanted.decode(message)
    with handling((message, name, _deadline(wanted))):
        outcome = as_kept(wanted, wanted.function(*call.args, **call.kwargs))
    if isinstance(outcome, Failed):
        assert isinstance(outcome.error, BaseException)
        raise outcome.error
    assert isinstance(outcome, Done)
    return outcome.result


def _deadline(wanted: Task[Any, Any], delivery: Delivery | None = None) -> datetime | None:
    """When a task that begins now takes too long."""
    if wanted.timeout is None:
        return None
    now = None if delivery is None else delivery.database.now()
    return (now or datetime.now(UTC)) + timedelta(seconds=wanted.timeout)


def as_kept(wanted: Task[Any, Any], value: Any) -> Outcome:
    """What a task returned as it is kept; a failure if it cannot be."""
    if isinstance(value, OUTCOMES):
        return value
    try:
        return Done(wanted.encode_result(value))
    except InvalidPayload as exc:
        return Failed(exc, dead=True)  # it would be the same the next time
