"""Functions that are named by text, `module:name`: imported where they are called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pgqrs.errors import InvalidArgument


def imported(path: str, argument: str) -> Callable[..., Any]:
    """The function of this name. `argument` says what named it."""
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidArgument(argument, f"{path!r} cannot be imported: {exc}") from exc
    if not callable(found):
        raise InvalidArgument(argument, f"{path!r} cannot be called")
    called: Callable[..., Any] = found
    return called
