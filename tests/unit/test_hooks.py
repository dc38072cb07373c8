"""What happens around handlers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import pgqrs
from pgqrs import tasks
from pgqrs.contrib.opentelemetry import Tracing, trace_tasks, traced
from pgqrs.contrib.prometheus import Metrics


@pgqrs.task(queue="tasks")
def work(n: int) -> int:
    return 1 // n


@pgqrs.task(queue="tasks")
async def work_async() -> str:
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


@pytest.fixture
def store() -> Iterator[pgqrs.Store]:
    with pgqrs.Store("sqlite::memory:") as store:
        store.admin().install()
        store.admin().create_queue("tasks", max_read_ct=1)
        with pgqrs.use(store):
            yield store


class Recorder(pgqrs.Hook):
    def __init__(self, name: str, said: list[Any]) -> None:
        self._name, self._said = name, said

    def before(self, delivery: Any, name: str) -> None:
        self._said.append((self._name, "before"))

    def after(self, delivery: Any, name: str, outcome: Any) -> None:
        self._said.append((self._name, type(outcome).__name__))
        raise RuntimeError("a hook may fail")

    def error(self, delivery: Any, name: str, error: BaseException) -> None:
        self._said.append((self._name, type(error).__name__))


def test_hooks_are_called_around_handlers(store: pgqrs.Store) -> None:
    said: list[Any] = []
    hooks = [Recorder("a", said), Recorder("b", said)]
    work.enqueue(0)
    pgqrs.Worker(store, queues=["tasks"], hooks=hooks).run(until_empty=True)
    around = ["before", "Failed", "ZeroDivisionError"]
    assert [word for name, word in said if name == "a"] == around
    assert [name for name, _ in said] == ["a", "b", "b", "b", "a", "a"]
    handle = work.enqueue(1)
    pgqrs.Worker(store, queues=["tasks"], hooks=hooks).run(until_empty=True)
    assert handle.result(60) == 1


def test_spans_are_in_the_trace_of_who_enqueued(
    store: pgqrs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_more_headers", [])
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")
    trace_tasks()
    with tracer.start_as_current_span("request") as request:
        failing, fine = work.enqueue(0), work_async.enqueue()
        headers = traced({"mine": 1})
    assert headers.keys() == {"mine", "traceparent"}
    pgqrs.Worker(store, queues=["tasks"], hooks=[Tracing(tracer)]).run(until_empty=True)
    wanted = format(request.get_span_context().trace_id, "032x")
    assert fine.result(60) == wanted
    ended = {span.name: span for span in spans.get_finished_spans()}
    assert {format(span.context.trace_id, "032x") for span in ended.values()} == {wanted}
    assert not ended[work.name].status.is_ok
    assert ended[work.name].attributes["messaging.message.id"] == str(failing.id)


def test_messages_are_counted_and_timed(store: pgqrs.Store) -> None:
    registry = CollectorRegistry()
    for n in (1, 1, 0):
        work.enqueue(n)
    pgqrs.Worker(store, queues=["tasks"], hooks=[Metrics(registry)]).run(until_empty=True)
    labels = {"queue": "tasks", "name": work.name}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, labels | more)

    assert value("pgqrs_handled_total", outcome="done") == 2
    assert value("pgqrs_handled_total", outcome="failed") == 1
    assert value("pgqrs_handling_seconds_count") == 3
    assert value("pgqrs_running") == 0
