"""What workers log of messages: facts, and no secrets."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pgqrs import Failed, Retry, task, workflow
from pgqrs.testing.conformance.harness import QUEUE, Harness, enqueue, worker

SECRET = "hunter2"


@task(queue=QUEUE, name="app:greet")
def greet(name: str) -> str:
    return f"dear {name}"


@task(queue=QUEUE, name="app:fail", retry=Retry(max_attempts=1))
async def fail(message: str) -> None:
    raise LookupError(f"no {message}")


@task(queue=QUEUE, name="app:later")
def later(message: str) -> Any:
    return Failed("later", retry=Retry.fixed(60))


@workflow(queue=QUEUE)
def shout(word: str) -> str:
    return word.upper()


def lines(caplog: pytest.LogCaptureFixture) -> dict[Any, logging.LogRecord]:
    """What was logged of messages, by what handled them."""
    found = [record for record in caplog.records if hasattr(record, "message_id")]
    return {record.task: record for record in found}  # type: ignore[attr-defined]


def facts(record: Any) -> tuple[Any, ...]:
    assert record.duration >= 0
    return record.levelname, record.queue, record.message_id, record.attempt, record.outcome


def test_failures_are_logged_and_what_is_finished_if_asked_for(
    store: Any, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgqrs.worker")
    ids = [enqueue(one, store, SECRET).id for one in (greet, fail, later)]
    run = store.workflows.start(shout, [SECRET])
    run_message = store.workflows.get(run.id).message_id
    options: dict[str, Any] = {"queues": [QUEUE], "workflows": [shout]}
    worker(store, **options, log_messages=True).run(until_empty=True)
    found = lines(caplog)
    assert {name: facts(record) for name, record in found.items()} == {
        "app:greet": ("INFO", QUEUE, ids[0], 1, "completed"),
        "app:fail": ("ERROR", QUEUE, ids[1], 1, "failed"),
        "app:later": ("WARNING", QUEUE, ids[2], 1, "retried"),
        "shout": ("INFO", QUEUE, run_message, 1, "completed"),
    }
    text = found["app:greet"].getMessage()
    assert f"app:greet completed: message {ids[0]} of {QUEUE}, attempt 1, 0." in text
    others = [record for record in caplog.records if record is not found["app:fail"]]
    assert SECRET not in "".join(record.getMessage() for record in others)


def test_redacted_errors_are_logged_redacted(
    harness: Harness, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = harness.open(clock=harness.clock, redact_errors=lambda text: text.replace(SECRET, "*"))
    enqueue(fail, store, SECRET)
    enqueue(greet, store, SECRET)
    worker(store, queues=[QUEUE]).run(until_empty=True)
    assert list(lines(caplog)) == ["app:fail"]
    assert "LookupError: no *" in caplog.text
    assert SECRET not in caplog.text
