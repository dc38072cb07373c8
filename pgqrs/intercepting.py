"""What takes tasks and runs before they reach a store: `pgqrs.testing.inline`.

For the whole process: a test that runs tasks in place wants none of them to be sent, whichever thread
or event loop sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pgqrs.codecs import Call


class Interceptor(Protocol):
    """Does something else with what would be sent. Methods that start with `a` are awaited."""

    def enqueue(self, task: Any, calls: Sequence[Call]) -> list[Any]:
        """Handles for these calls of a task."""

    async def aenqueue(self, task: Any, calls: Sequence[Call]) -> list[Any]:
        """Async handles for these calls of a task."""

    def start(self, workflow: Any, calls: Sequence[Call], keys: Sequence[str | None]) -> list[Any]:
        """Runs for these calls of a workflow; awaited, they are async runs."""

    def run_inline(self, workflow: Any, call: Call) -> Any:
        """The result of a run, or what to await for it."""


_in_use: list[Interceptor] = []


def interceptor() -> Interceptor | None:
    """The one that is in use, if there is one."""
    return _in_use[-1] if _in_use else None


class intercepting:  # noqa: N801 (to its callers it is a function)
    """Use an interceptor in this block."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def __enter__(self) -> None:
        _in_use.append(self._interceptor)

    def __exit__(self, *_: object) -> None:
        _in_use.remove(self._interceptor)
