"""How the arguments and the result of a task become a payload, and back.

`json` is the default: by the type hints of the function, see `conversion`. `cloudpickle` takes anything,
and runs whatever the database says: it is used only where the task *and* the worker say so. The name of
the codec is recorded with each message.
"""

from __future__ import annotations

import base64
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import Parameter
from typing import Any, NamedTuple

from pgqrs.conversion import Converter, converter
from pgqrs.errors import InvalidArgument, InvalidConfig, InvalidPayload

PICKLE = "cloudpickle"
CODECS = (None, PICKLE)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Call(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Calls = Iterable[tuple[Any, ...] | Mapping[str, Any]]
"""Arguments of many calls: for each a tuple of them, or a mapping of named ones."""


def calls_of(calls: Calls) -> list[Call]:
    """The calls one by one. What is neither a tuple nor a mapping is refused: a text or a list could be
    meant as one argument, or as many.
    """
    if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
        raise InvalidArgument("calls", f"expected a list of calls, got {type(calls).__name__}")
    return [_call_of(index, given) for index, given in enumerate(calls)]


def _call_of(index: int, given: Any) -> Call:
    if isinstance(given, Call):
        return given
    if isinstance(given, tuple):
        return Call(tuple(given), {})
    if isinstance(given, Mapping):
        return Call((), dict(given))
    raise InvalidArgument(
        f"calls[{index}]",
        f"expected a tuple of arguments, or a mapping of named ones, got {type(given).__name__}",
    )


@contextmanager
def naming(index: int) -> Iterator[None]:
    """Errors name which of many calls they are about."""
    try:
        yield
    except InvalidPayload as exc:
        raise type(exc)(f"calls[{index}].{exc.path}", exc.problem) from exc
    except InvalidArgument as exc:
        raise InvalidArgument(f"calls[{index}]", str(exc)) from exc


class Signature:
    """What a function's signature and hints say of its arguments and its result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        self._hints: dict[str, Any] | None = None
        self._keeps_scalars: bool | None = None
        self._converters: dict[str, Converter] = {}
        kinds = {name: found.kind for name, found in self._signature.parameters.items()}
        self._positional = [name for name, kind in kinds.items() if kind in _POSITIONAL]
        needed = [name for name, found in self._signature.parameters.items() if _is_needed(found)]
        self._needs_names = not set(needed) <= set(self._positional)
        self._fewest = len(needed)
        self._rest, self._others = (
            next((name for name, kind in kinds.items() if kind is wanted), None)
            for wanted in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        )

    @property
    def hints(self) -> dict[str, Any]:
        # Not when the task is declared: names may be defined later.
        if self._hints is None:
            try:
                self._hints = typing.get_type_hints(self._function, include_extras=True)
            except Exception:  # a name that only type checkers know: as if there were no hints
                self._hints = {}
        return self._hints

    def encode(self, call: Call) -> dict[str, Any]:
        """The call as JSON. Arguments are bound as Python would, so wrong ones fail here."""
        self.bind(call)
        names = self._positional_names(len(call.args))
        return {
            "args": [
                _to_json(self._converter(name), value, name)
                for name, value in zip(names, call.args, strict=True)
            ],
            "kwargs": {
                name: _to_json(self._converter(name), value, name)
                for name, value in call.kwargs.items()
            },
        }

    def decode(self, payload: dict[str, Any]) -> Call:
        """The call again."""
        args, kwargs = payload.get("args", ()), payload.get("kwargs")
        names, find = self._positional_names(len(args)), self._converter
        return Call(
            tuple([find(name).from_json(value) for name, value in zip(names, args, strict=True)]),
            {name: find(name).from_json(value) for name, value in kwargs.items()} if kwargs else {},
        )

    def encode_result(self, value: Any) -> Any:
        return _to_json(self._converter("return"), value, "result")

    def decode_result(self, found: Any) -> Any:
        return self._converter("return").from_json(found)

    @property
    def keeps_scalars(self) -> bool:
        """Whether strings, whole numbers, truth values and None are results that come back as they
        are. A subclass that decodes them otherwise says so.
        """
        if self._keeps_scalars is None:
            self._keeps_scalars = converter(self.hints.get("return", Any)).identity
        return self._keeps_scalars

    def bind(self, call: Call) -> None:
        """`InvalidArgument` unless the function takes these arguments."""
        fits = self._fewest <= len(call.args) <= len(self._positional)
        if fits and not call.kwargs and not self._needs_names:
            return  # asking `inspect` takes as long as a small statement
        try:
            self._signature.bind(*call.args, **call.kwargs)
        except TypeError as exc:
            raise InvalidArgument("arguments", str(exc)) from None

    def _positional_names(self, count: int) -> list[str]:
        """The names of the first so many positional arguments; those of `*args` share one."""
        names = self._positional[:count]
        return names if self._rest is None else names + [self._rest] * (count - len(names))

    def _converter(self, name: str) -> Converter:
        found = self._converters.get(name)
        if found is None:
            found = converter(self.hints.get(name, Any) if name == "return" else self._hint(name))
            if name == "return" or name in self._signature.parameters:
                self._converters[name] = found  # other names come from messages: any number of them
        return found

    def _hint(self, name: str) -> Any:
        hints = self.hints
        return hints[name] if name in hints else hints.get(self._others or name, Any)


def _is_needed(parameter: Parameter) -> bool:
    """True if a call has to give it a value."""
    open_ended = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and parameter.kind not in open_ended


def _to_json(by: Converter, value: Any, name: str) -> Any:
    try:
        return by.to_json(value)
    except (TypeError, ValueError) as exc:
        raise InvalidPayload(name, str(exc)) from exc


def known(codec: str | None) -> str | None:
    """The name of a codec as it is recorded; None is JSON."""
    if codec == "json":
        return None
    if codec not in CODECS:
        raise InvalidArgument("codec", f"expected 'json' or {PICKLE!r}, got {codec!r}")
    return codec


def pickled(value: Any) -> str:
    """Anything, as text."""
    return base64.b64encode(_cloudpickle().dumps(value)).decode()


def unpickled(text: str) -> Any:
    return _cloudpickle().loads(base64.b64decode(text))


def _cloudpickle() -> Any:
    try:
        return import_module(PICKLE)
    except ImportError as exc:
        raise InvalidConfig("cloudpickle is not installed; pip install pgqrs[cloudpickle]") from exc
