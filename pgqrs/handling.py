"""Which message the task at hand is handling: `pgqrs.current_message()`."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from pgqrs.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentMessage:
    """The message of the task that runs here."""

    id: int
    queue: str
    task: str
    """The name of the task."""
    attempt: int
    """1 for the first attempt."""
    headers: Mapping[str, Any]
    key: str | None
    group: str | None
    enqueued_at: datetime
    deadline: datetime | None
    """When this attempt fails because of the task's `timeout`; None if it has none."""

    @classmethod
    def of(cls, message: Message, task: str, deadline: datetime | None) -> Self:
        """The message that is being handled by this task."""
        return cls(
            id=message.id,
            queue=message.queue,
            task=task,
            attempt=message.attempt,
            headers=dict(message.headers or {}),
            key=message.key,
            group=message.group,
            enqueued_at=message.enqueued_at,
            deadline=deadline,
        )


_Claim = tuple[Message, str, datetime | None]
handled: ContextVar[_Claim | CurrentMessage | None] = ContextVar("pgqrs_handled", default=None)
"""What is handled here, with the name of its task and its deadline."""


class handling:  # noqa: N801 (to its callers it is a function)
    """In this block, `current_message()` is this message."""

    __slots__ = ("_handled", "_token")

    def __init__(self, message: _Claim | CurrentMessage) -> None:
        self._handled = message
        self._token: Token[_Claim | CurrentMessage | None] | None = None

    def __enter__(self) -> None:
        self._token = handled.set(self._handled)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            handled.reset(self._token)


def current_message() -> CurrentMessage | None:
    """The message of the task that runs here: its id, attempt, headers and deadline. None outside of a
    task.
    """
    here = handled.get()
    # Made only where somebody asks: most tasks do not.
    return CurrentMessage.of(*here) if isinstance(here, tuple) else here
