"""`@workflow` and `@step`: plain functions that last.

Called inside of a run, a step is durable; called anywhere else, it is the function it was. In an async
workflow every durable call is awaited, also that of a sync step, which then runs in a thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pgqrs.codecs import Signature
from pgqrs.config import Config
from pgqrs.current import store_for
from pgqrs.errors import InvalidArgument
from pgqrs.producer import HIGHEST_PRIORITY, LOWEST_PRIORITY
from pgqrs.retry import Retry
from pgqrs.types import Duration, aware, seconds, whole
from pgqrs.workflows import flows, values
from pgqrs.workflows.children import start_child
from pgqrs.workflows.context import Context, Flow, current
from pgqrs.workflows.decide import RetryOn
from pgqrs.workflows.flows import StepOptions
from pgqrs.workflows.history import Call

P = ParamSpec("P")
T = TypeVar("T")
QUEUE = "workflows"
"""Where runs are, unless a workflow names another queue."""


def valid_name(kind: str, name: str) -> str:
    """A name that can be told from others in a history."""
    if not name or not name.isprintable() or any(sign in name for sign in "/#"):
        raise InvalidArgument("name", f"a {kind}'s name is printable text without / or #: {name!r}")
    if name.startswith("pgqrs."):
        raise InvalidArgument("name", f"names that start with pgqrs. are its own: {name!r}")
    return name


class Step(Generic[P, T]):
    """A function whose result is kept in the run it is called in."""

    def __init__(self, function: Callable[P, T], *, name: str | None, options: StepOptions) -> None:
        functools.update_wrapper(self, function)
        self.name = valid_name("step", name or function.__name__)
        self._function = function
        self._options = options
        self.is_async = asyncio.iscoroutinefunction(function)
        if options.transactional and self.is_async:
            raise InvalidArgument(
                "transactional", "a step inside of a transaction is a plain function, not async"
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        context = current()
        if context is None:
            return self._function(*args, **kwargs)
        result: T = self.call_in(context, args, kwargs)
        return result

    def call_in(self, context: Context, args: Any, kwargs: Any) -> Any:
        """The durable call; in an async run what to await for it."""
        return context.perform(self.flow(context, args, kwargs))

    def flow(self, context: Context, args: Any, kwargs: Any) -> Flow[Any]:
        """The durable call, which has its identity from now on."""
        if self.is_async and not context.is_async:
            raise InvalidArgument(
                "step", f"{self.name} is async; a sync workflow has nothing to await it with"
            )
        call = context.take(self.name)
        return flows.run_step(context, call, self.options_for(context, call), args, kwargs)

    def options_for(self, context: Context, call: Call) -> StepOptions:
        """How this very call is done."""
        return self._options

    def __repr__(self) -> str:
        return f"<step {self.name}>"


@overload
def step(function: Callable[P, T], /) -> Step[P, T]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    retry_on: RetryOn | None = None,
    timeout: Duration | None = None,
    transactional: bool = False,
) -> Callable[[Callable[P, T]], Step[P, T]]: ...
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
    store: Any = None

    def __post_init__(self) -> None:
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


class Workflow(Generic[P, T]):
    """A function whose runs survive what runs them."""

    def __init__(self, function: Callable[P, T], *, name: str, options: StartOptions) -> None:
        functools.update_wrapper(self, function)
        self.name = valid_name("workflow", name)
        self.function = function
        self.signature = Signature(function)
        self.is_async = asyncio.iscoroutinefunction(function)
        self._options = options

    @property
    def queue(self) -> str:
        """Where its runs are."""
        return self._options.queue

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Just call the function: nothing is kept."""
        return self.function(*args, **kwargs)

    def options(self, **options: Any) -> Workflow[P, T]:
        """The same workflow, started differently: `queue`, `key`, `delay`, `eta`, `priority`, `timeout`
        or `deadline` of the whole run, `version`, `store`.
        """
        try:
            changed = replace(self._options, **options)
        except TypeError as exc:
            raise InvalidArgument("options", str(exc)) from None
        workflow = copy(self)  # as it is: looking at the function's hints takes longer than a step
        workflow._options = changed
        return workflow

    def start(self, *args: Any, key: str | None = None, store: Any = None, **kwargs: Any) -> Any:
        """Start a run with these arguments. Returns its handle; with an `AsyncStore`, or in an async
        workflow, what to await for it.

        A `key` names the run: starting again with it returns the run that is there. Inside of a run
        this starts a child.
        """
        given = {
            name: value for name, value in (("key", key), ("store", store)) if value is not None
        }
        workflow = self.options(**given) if given else self
        context = current()
        if context is not None:
            return start_child(context, workflow, args, kwargs)
        return store_for(workflow._options.store).workflows.start(workflow, args, kwargs)

    def run_inline(
        self, *args: Any, key: str | None = None, store: Any = None, **kwargs: Any
    ) -> Any:
        """Start a run and run it here, waits and all, to its end. Returns its result.

        Should this process die, any worker goes on with it.
        """
        given = {
            name: value for name, value in (("key", key), ("store", store)) if value is not None
        }
        workflow = self.options(**given) if given else self
        return store_for(workflow._options.store).workflows.run_inline(workflow, args, kwargs)

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
        }

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


@overload
def workflow(function: Callable[P, T], /) -> Workflow[P, T]: ...
@overload
def workflow(
    *,
    name: str | None = None,
    queue: str = QUEUE,
    version: str | None = None,
    timeout: Duration | None = None,
) -> Callable[[Callable[P, T]], Workflow[P, T]]: ...
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
        return Workflow(function, name=name or function.__name__, options=options)

    return decorate if function is None else decorate(function)
