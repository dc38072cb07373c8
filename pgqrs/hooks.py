"""What else happens around handlers: measuring, tracing, logging.

A worker calls its hooks before and after each message, in the thread or task that handles it: `before`
in their order, `after` in the opposite one. What a hook raises is logged, and changes nothing.
Ready-made ones: `pgqrs.contrib.opentelemetry`, `pgqrs.contrib.prometheus`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pgqrs.handlers import Delivery, Load
from pgqrs.outcomes import Failed, Outcome

logger = logging.getLogger("pgqrs.worker")


class Hook:
    """Override what you need."""

    def before(self, delivery: Delivery, name: str) -> None:
        """A message is about to be handled, by a handler or a task of this name."""

    def after(self, delivery: Delivery, name: str, outcome: Outcome) -> None:
        """It was handled; this came of it."""

    def error(self, delivery: Delivery, name: str, error: BaseException) -> None:
        """It failed with this error; `after` is called as well, first."""


class Hooks:
    """The hooks of a worker, around its handlers."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = tuple(hooks)

    def before(self, load: Load) -> None:
        for hook in self._hooks:
            for delivery in load.deliveries:
                _guarded(hook.before, delivery, load.job.name)

    def after(self, load: Load, outcomes: Sequence[Outcome]) -> None:
        for hook in reversed(self._hooks):
            for delivery, outcome in zip(load.deliveries, outcomes, strict=True):
                _guarded(hook.after, delivery, load.job.name, outcome)
                if isinstance(outcome, Failed) and isinstance(outcome.error, BaseException):
                    _guarded(hook.error, delivery, load.job.name, outcome.error)


def _guarded(call: Callable[..., object], *args: Any) -> None:
    try:
        call(*args)
    except BaseException:  # also an exit: the slot goes on
        logger.exception("a hook failed")
