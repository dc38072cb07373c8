"""Traces: a span for each message that is handled, in the trace of whoever enqueued it.

`Worker(store, hooks=[Tracing()])` on the consuming side. On the producing side `traced(headers)` adds
the current trace to the headers of a message; `trace_tasks()` does so for every task from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from pgqrs.handlers import Delivery
from pgqrs.hooks import Hook
from pgqrs.outcomes import Failed, Outcome
from pgqrs.tasks import add_headers


class Tracing(Hook):
    """A span around each message."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("pgqrs")

    def before(self, delivery: Delivery, name: str) -> None:
        message = delivery.message
        parent = propagate.extract(dict(message.headers or {}))
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": "pgqrs",
                "messaging.destination.name": message.queue,
                "messaging.message.id": str(message.id),
                "pgqrs.attempt": message.attempt,
            },
        )
        token = context.attach(trace.set_span_in_context(span, parent))
        delivery.state[self] = span, token

    def after(self, delivery: Delivery, name: str, outcome: Outcome) -> None:
        span, token = delivery.state.pop(self)
        context.detach(token)
        span.set_attribute("pgqrs.outcome", type(outcome).__name__)
        if isinstance(outcome, Failed):
            span.set_status(Status(StatusCode.ERROR, str(outcome.error)))
            if isinstance(outcome.error, BaseException):
                span.record_exception(outcome.error)
        span.end()


def traced(headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """These headers, and the current trace."""
    carrier: dict[str, Any] = dict(headers or {})
    propagate.inject(carrier)
    return carrier


def trace_tasks() -> None:
    """Every task that is enqueued carries the current trace from now on."""
    add_headers(traced)
