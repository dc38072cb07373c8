"""Generators that ask for what they need, and who answers them.

What is written as such a generator is written once, and runs in a thread or in an event loop: only
the answering differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

Ask = TypeVar("Ask")
T = TypeVar("T")


def drive(flow: Generator[Ask, Any, T], answer: Callable[[Ask], Any]) -> T:
    """Answer all that is asked for, until there is a result."""
    try:
        ask = next(flow)
        while True:
            try:
                given = answer(ask)
            except BaseException as exc:
                ask = flow.throw(exc)
            else:
                ask = flow.send(given)
    except StopIteration as stop:
        value: T = stop.value
        return value


async def drive_async(flow: Generator[Ask, Any, T], answer: Callable[[Ask], Awaitable[Any]]) -> T:
    """The same, awaiting the answers."""
    try:
        ask = next(flow)
        while True:
            try:
                given = await answer(ask)
            except BaseException as exc:
                ask = flow.throw(exc)
            else:
                ask = flow.send(given)
    except StopIteration as stop:
        value: T = stop.value
        return value
