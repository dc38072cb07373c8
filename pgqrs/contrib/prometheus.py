"""Metrics: how many messages were handled, how they ended, how long they took and had waited.

`Worker(store, hooks=[Metrics()])`.
"""

from __future__ import annotations

import time

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from pgqrs.handlers import Delivery
from pgqrs.hooks import Hook
from pgqrs.outcomes import Outcome


class Metrics(Hook):
    """Counts and times every message, by queue and name."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ["queue", "name"]
        self.handled = Counter(
            "pgqrs_handled", "Messages handled", [*labels, "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "pgqrs_handling_seconds", "Time in the handler", labels, registry=registry
        )
        self.waited = Histogram(
            "pgqrs_waited_seconds", "Time from enqueue to claim", labels, registry=registry
        )
        self.running = Gauge("pgqrs_running", "Handlers at work", labels, registry=registry)

    def before(self, delivery: Delivery, name: str) -> None:
        message = delivery.message
        delivery.state[self] = time.perf_counter()
        self.running.labels(message.queue, name).inc()
        if message.dequeued_at is not None:
            waited = (message.dequeued_at - message.enqueued_at).total_seconds()
            self.waited.labels(message.queue, name).observe(max(0.0, waited))

    def after(self, delivery: Delivery, name: str, outcome: Outcome) -> None:
        queue = delivery.message.queue
        took = time.perf_counter() - delivery.state.pop(self)
        self.running.labels(queue, name).dec()
        self.seconds.labels(queue, name).observe(took)
        self.handled.labels(queue, name, type(outcome).__name__.lower()).inc()
