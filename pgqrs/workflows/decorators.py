"""`@workflow` and `@step`: plain functions that last.

Called inside of a run, a step is durable; called anywhere else, it is the function it was. In an async
workflow every durable call is awaited, also that of a sync step, which then runs in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from pgqrs.codecs import Call, Calls, Signature, calls_of, naming
from pgqrs.config import Config
from pgqrs.current import in_event_loop, store_for
from pgqrs.errors import InvalidArgument
from pgqrs.intercepting import interceptor
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY
from pgqrs.repositories.starting_many import NewRun
from pgqrs.retry import Retry
from pgqrs.types import Duration, ParentClose, aware, seconds, whole
from pgqrs.workflows import flows, values
from pgqrs.workflows.children import start_child
from pgqrs.workflows.context import Context, Flow, current
from pgqrs.workflows.decide import RetryOn
from pgqrs.workflows.flows import NOTHING, StepOptions
from pgqrs.workflows.history import Call as StepCall

if TYPE_CHECKING:
    from pgqrs.aio.workflows import AsyncRun
    from pgqrs.workflows.runs import Run

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
QUEUE = "workflows"
"""Where runs are, unless a workflow names another queue."""


def valid_name(kind: str, name: str) -> str:
    """A name that can be told from others in a history."""
    if not name or not name.isprintable() or any(sign in name for sign in "/#"):
        raise InvalidArgument("name", f"a {kind}'s name is printable text without / or #: {name!r}")
    if name.startswith("pgqrs."):
        raise InvalidArgument("name", f"names that start with pgqrs. are its own: {name!r}")
    return name


class Step(Generic[P, T_co]):
    """A function whose result is kept in the run it is called in."""

    def __init__(
        self, function: Callable[P, T_co], *, name: str | None, options: StepOptions
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = valid_name("step", name or function.__name__)
        self._function = function
        self._options = options
        self.is_async = asyncio.iscoroutinefunction(function)
        self._is_plain = not (self.is_async or options.transactional or options.timeout)
        if options.transactional and self.is_async:
            raise InvalidArgument(
                "transactional", "a step inside of a transaction is a plain function, not async"
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        context = current()
        if context is None:
            return self._function(*args, **kwargs)
        result: T_co = self.call_in(context, args, kwargs)
        return result

    @overload
    def acall(
        self: Step[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...
    @overload
    def acall(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T_co]: ...
    def acall(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """The call as something to await, for async workflows. `await step(…)` does the same; this
        is for type checkers, to which a call of a sync step is its result.
        """
        context = current()
        if context is None:
            return _awaited(self._function(*args, **kwargs))
        if not context.is_async:
            raise InvalidArgument("acall", "a sync workflow has nothing to await it with")
        called: Awaitable[Any] = self.call_in(context, args, kwargs)
        return called

    def call_in(self, context: Context, args: Any, kwargs: Any) -> Any:
        """The durable call; in an async run what to await for it."""
        if context.is_async or not self._is_plain:
            return context.perform(*self.flow(context, args, kwargs))
        call = context.take(self.name, (args, kwargs))
        if call.record is not None or context.limits:
            options_for = functools.partial(self.options_for, context)
            flow = flows.run_step(context, call, options_for, args, kwargs)
            return context.perform(flow, call)
        options = self.options_for(context, call)
        return context.directly(flows.run_directly, call, options, args, kwargs)

    def flow(self, context: Context, args: Any, kwargs: Any) -> tuple[Flow[Any], StepCall]:
        """The durable call, which has its identity from now on."""
        if self.is_async and not context.is_async:
            raise InvalidArgument(
                "step", f"{self.name} is async; a sync workflow has nothing to await it with"
            )
        call = context.take(self.name, (args, kwargs))
        options_for = functools.partial(self.options_for, context)
        return flows.run_step(context, call, options_for, args, kwargs), call

    def options_for(self, context: Context, call: StepCall) -> StepOptions:
        """How this very attempt at a call is done."""
        return self._options

    def __repr__(self) -> str:
        return f"<step {self.name}>"


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


@overload
def step(function: Callable[P, T], /) -> Step[P, T]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    transactional: Literal[False] = False,
) -> Callable[[Callable[P, T]], Step[P, T]]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    transactional: Literal[True],
) -> Callable[[Callable[Concatenate[Connection, P], T]], Step[P, T]]: ...
def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    transactional: bool = False,
) -> Any:
    """Make a function a step of workflows.

    It is not tried again when it fails, unless `retry` says so, and `retry_on` (types of errors, or a
    function that tells) agrees. `timeout` is for each attempt. A `transactional` step gets the
    connection of the transaction that records its result as its first argument.
    """

    def decorate(function: Callable[..., Any]) -> Step[..., Any]:
        options = StepOptions(
            function=function,
            signature=Signature(function),
            retry=retry,
            retry_on=retry_on,
            timeout=None if timeout is None else seconds("timeout", timeout),
            transactional=transactional,
        )
        return Step(function, name=name, options=options)

    return decorate if function is None else decorate(function)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How a run is started."""

    queue: str = QUEUE
    key: str | None = None
    version: str | None = None
    delay: Duration | None = None
    eta: datetime | None = None
    priority: int = 0
    timeout: Duration | None = None
    deadline: datetime | None = None
    parent_close: ParentClose | None = None
    store: Any = None

    def __post_init__(self) -> None:
        if self.parent_close not in (None, "cancel", "leave"):
            raise InvalidArgument(
                "parent_close", f'expected "cancel" or "leave", got {self.parent_close!r}'
            )
        if self.delay is not None and self.eta is not None:
            raise InvalidArgument("eta", "give a delay or an eta, not both")
        if self.timeout is not None and self.deadline is not None:
            raise InvalidArgument("deadline", "give a timeout or a deadline, not both")
        for name in ("delay", "timeout"):
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))
        for name in ("eta", "deadline"):
            if getattr(self, name) is not None:
                aware(name, getattr(self, name))


_UNCHECKED = {"key", "store"}
"""Options that any value is good for. They are given with a call, where checking all options once more
would take as long as a small statement (benchmarks.workflows, `run_inline`).
"""
_declared: WeakValueDictionary[str, Workflow[..., Any]] = WeakValueDictionary()


def declared() -> list[Workflow[..., Any]]:
    """All workflows of this process; of those with one name the last. Workers run those that they are
    given; this is for tests.
    """
    return list(_declared.values())


class Workflow(Generic[P, T_co]):
    """A function whose runs survive what runs them. It takes `P`, and its runs return `T_co`."""

    def __init__(self, function: Callable[P, Any], *, name: str, options: StartOptions) -> None:
        functools.update_wrapper(self, function)
        self.name = valid_name("workflow", name)
        _declared[self.name] = self
        self.function = function
        self.signature = Signature(function)
        self.is_async = asyncio.iscoroutinefunction(function)
        self._options = options
        self._names = tuple(inspect.signature(function).parameters)

    @property
    def queue(self) -> str:
        """Where its runs are."""
        return self._options.queue

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Just call the function: nothing is kept."""
        result: T_co = self.function(*args, **kwargs)
        return result

    def options(self, **options: Any) -> Self:
        """The same workflow, started differently: `queue`, `key`, `delay`, `eta`, `priority`, `timeout`
        or `deadline` of the whole run, `version`, `store`, `parent_close`.

        `parent_close` says what becomes of a child when its parent ends. `"cancel"`: it is cancelled,
        however the parent ends. `"leave"`: it goes on, also if the parent is cancelled. Without either
        it is cancelled with a parent that is cancelled, and goes on otherwise.
        """
        if options.keys() <= _UNCHECKED:
            changed = object.__new__(StartOptions)
            changed.__dict__.update(self._options.__dict__, **options)
        else:
            changed = self._checked_options(options)
        # As it is: looking at the function's hints takes longer than a step.
        workflow = object.__new__(type(self))
        workflow.__dict__.update(self.__dict__)
        workflow._options = changed
        return workflow

    def _checked_options(self, options: dict[str, Any]) -> StartOptions:
        try:
            return replace(self._options, **options)
        except TypeError as exc:
            raise InvalidArgument("options", str(exc)) from None

    # A signature has no place for options beside the arguments of a function: with one of them the
    # arguments are not checked. `options(…)` takes them all, and then they are.

    @overload
    def start(self, *args: P.args, **kwargs: P.kwargs) -> Started[T_co]: ...
    @overload
    def start(
        self, *args: Any, key: str | None, store: Any = ..., **kwargs: Any
    ) -> Started[T_co]: ...
    @overload
    def start(self, *args: Any, store: Any, **kwargs: Any) -> Started[T_co]: ...
    def start(self, *args: Any, key: Any = NOTHING, store: Any = NOTHING, **kwargs: Any) -> Any:
        """Start a run with these arguments. Returns its handle; with an `AsyncStore`, or in an async
        workflow, what to await for it.

        A `key` names the run: starting again with it returns the run that is there. Inside of a run
        this starts a child. A parameter of the workflow's own that is called `key` or `store` gets what
        is given here, unless it is given by position; the run's are given by `options` then.
        """
        workflow, kwargs = self._given(args, kwargs, key=key, store=store)
        context, intercepted, store = current(), interceptor(), workflow._options.store
        if context is not None:
            return start_child(context, workflow, args, kwargs, store=store)
        if intercepted is not None:
            call = Call(args, kwargs)
            return intercepted.start(workflow, [call], [workflow._options.key])[0]
        found = store_for(store, is_async=in_event_loop())
        return found.workflows.start(workflow, args, kwargs)

    def start_many(
        self,
        calls: Calls,
        *,
        keys: Iterable[str | None] | None = None,
        store: Any = None,
    ) -> Any:
        """Start a run for each of these calls, all of them or none. Returns their handles; with an
        `AsyncStore`, or in an async workflow, what to await for them.

        A call is a tuple of arguments, or a mapping of named ones. `keys` are one for each call. Inside
        of a run this starts children, one after the other.
        """
        workflow = self if store is None else self.options(store=store)
        context, intercepted = current(), interceptor()
        if context is not None:
            return workflow._start_children(context, calls_of(calls), keys)
        if intercepted is not None:
            wanted = calls_of(calls)
            return intercepted.start(workflow, wanted, _one_for_each(wanted, keys))
        found = store_for(workflow._options.store, is_async=in_event_loop())
        return found.workflows.start_many(workflow, calls, keys=keys)

    def _start_children(
        self, context: Context, calls: Sequence[Call], keys: Iterable[str | None] | None
    ) -> Any:
        started = [
            start_child(
                context, self.options(key=key), call.args, call.kwargs, store=self._options.store
            )
            for call, key in zip(calls, _one_for_each(calls, keys), strict=True)
        ]
        return _all_of(started) if context.is_async else started

    @overload
    def run_inline(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def run_inline(self, *args: Any, key: str | None, store: Any = ..., **kwargs: Any) -> T_co: ...
    @overload
    def run_inline(self, *args: Any, store: Any, **kwargs: Any) -> T_co: ...
    def run_inline(
        self, *args: Any, key: Any = NOTHING, store: Any = NOTHING, **kwargs: Any
    ) -> Any:
        """Start a run and run it here, waits and all, to its end. Returns its result; with an
        `AsyncStore`, what to await for it.

        Should this process die, any worker goes on with it.
        """
        workflow, kwargs = self._given(args, kwargs, key=key, store=store)
        intercepted = interceptor()
        if intercepted is not None:
            return intercepted.run_inline(workflow, Call(args, kwargs))
        found = store_for(workflow._options.store, is_async=in_event_loop())
        return found.workflows.run_inline(workflow, args, kwargs)

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> tuple[Self, dict[str, Any]]:
        """This workflow with those options that were given, and the arguments of its function by name.
        A parameter that has its value by position is not meant.
        """
        given = {name: value for name, value in options.items() if value is not NOTHING}
        own = {name: given.pop(name) for name in self._names[len(args) :] if name in given}
        given = {name: value for name, value in given.items() if value is not None}
        return (self.options(**given) if given else self), (kwargs | own if own else kwargs)

    def start_arguments(self, args: Any, kwargs: Any, config: Config) -> dict[str, Any]:
        """What a new run is to be in the database."""
        options = self._options
        return {
            "name": self.name,
            "queue": options.queue,
            "input": values.dump_arguments(self.signature, args, kwargs, config),
            "key": options.key,
            "version": options.version,
            "delay": 0.0 if options.delay is None else seconds("delay", options.delay),
            "eta": options.eta,
            "priority": whole(
                "priority", options.priority, low=LOWEST_PRIORITY, high=HIGHEST_PRIORITY
            ),
            "timeout": None if options.timeout is None else seconds("timeout", options.timeout),
            "deadline": options.deadline,
            "parent_close": options.parent_close,
        }

    def start_many_arguments(
        self, calls: Sequence[Call], keys: Iterable[str | None] | None, config: Config
    ) -> tuple[list[NewRun], dict[str, Any]]:
        """What new runs are to be in the database: each by itself, and what they have in common."""
        if self._options.key is not None:
            raise InvalidArgument("key", "one key is for one run; give keys=[…]")
        runs: list[NewRun] = []
        for call, key in zip(calls, _one_for_each(calls, keys), strict=True):
            with naming(len(runs)):
                common = self.start_arguments(call.args, call.kwargs, config)
                runs.append(NewRun(common.pop("input"), key))
        del common["key"], common["parent_close"]
        return runs, common

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


def _one_for_each(calls: Sequence[Call], keys: Iterable[str | None] | None) -> Sequence[str | None]:
    given = [None] * len(calls) if keys is None else list(keys)
    if len(given) != len(calls):
        raise InvalidArgument("keys", f"{len(given)} for {len(calls)} calls")
    return given


async def _all_of(started: Sequence[Any]) -> list[Any]:
    return [await one for one in started]


class AsyncWorkflow(Workflow[P, T_co]):
    """A coroutine function whose runs survive what runs them."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:  # type: ignore[override]
        """Just call the function: nothing is kept."""
        result: Coroutine[Any, Any, T_co] = self.function(*args, **kwargs)
        return result

    if TYPE_CHECKING:

        @overload
        def run_inline(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
        @overload
        def run_inline(
            self, *args: Any, key: str | None, store: Any = ..., **kwargs: Any
        ) -> Any: ...
        @overload
        def run_inline(self, *args: Any, store: Any, **kwargs: Any) -> Any: ...
        def run_inline(self, *args: Any, **kwargs: Any) -> Any:
            """With a `Store` its result, with an `AsyncStore` what to await for it: no type is both."""


if TYPE_CHECKING:

    class Started(Run[T_co]):
        """What `start` returns, to type checkers: a handle; or, awaited, an async one."""

        def __await__(self) -> Generator[Any, Any, AsyncRun[T_co]]: ...


class _Declare(Protocol):
    """`@workflow(…)`: what is still to be given a function."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncWorkflow[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> Workflow[P, T]: ...


@overload
def workflow(function: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncWorkflow[P, T]: ...
@overload
def workflow(function: Callable[P, T], /) -> Workflow[P, T]: ...
@overload
def workflow(
    *,
    name: str | None = None,
    queue: str = QUEUE,
    version: str | None = None,
    timeout: Duration | None = None,
) -> _Declare: ...
def workflow(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = QUEUE,
    version: str | None = None,
    timeout: Duration | None = None,
) -> Any:
    """Make a function a workflow. Its name is that of the function, unless given: it is how runs find
    their code again.

    `version` is recorded with each run, for people to read. `timeout` is for a whole run.
    """

    def decorate(function: Callable[..., Any]) -> Workflow[..., Any]:
        options = StartOptions(queue=queue, version=version, timeout=timeout)
        kind = AsyncWorkflow if asyncio.iscoroutinefunction(function) else Workflow
        return kind(function, name=name or function.__name__, options=options)

    return decorate if function is None else decorate(function)
