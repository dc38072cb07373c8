"""Error texts: bounded, and redacted wherever they are stored."""

from __future__ import annotations

from typing import Any

import pytest

from pgqrs import StepFailed, step, workflow
from pgqrs.error_texts import MAX_BYTES
from pgqrs.testing.conformance.harness import QUEUE, RUNS, Harness

SECRET = "hunter2"


def redact(text: str) -> str:
    return text.replace(SECRET, "***")


@pytest.fixture
def discreet(harness: Harness, admin: Any) -> Any:
    """A store that redacts."""
    admin.create_queue(RUNS, lease=30, max_read_ct=3)
    return harness.open(clock=harness.clock, redact_errors=redact)


@step
def blab() -> None:
    raise ValueError("ä" * 100_000 + SECRET)


@workflow
def careless() -> None:
    with pytest.raises(StepFailed) as caught:
        blab()
    assert SECRET not in str(caught.value)
    raise ValueError("ä" * 100_000 + SECRET)


def is_fine(text: str) -> bool:
    return len(text.encode()) <= MAX_BYTES and "***" in text and SECRET not in text


def test_the_error_of_a_message_is_bounded_and_redacted(discreet: Any) -> None:
    id = discreet.producer(QUEUE).enqueue(1)
    with discreet.consumer(QUEUE) as consumer:
        (message,) = consumer.dequeue()
        consumer.fail(message, ValueError("ä" * 1_000_000 + SECRET), dead=True)
    kept = discreet.admin().get_archived(id).error
    assert is_fine(kept)
    assert kept.startswith("ValueError: ää")
    assert "bytes left out" in kept


def test_the_errors_of_a_run_and_its_steps_are_bounded_and_redacted(
    discreet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = discreet.workflows.start(careless)
    with discreet.consumer(RUNS) as consumer:
        (message,) = consumer.dequeue()
        discreet.workflows.execute(message, [careless])
    (done,) = discreet.workflows.steps(run.id)
    assert is_fine(done.error)
    assert is_fine(discreet.workflows.get(run.id).error)
    assert SECRET not in str(done.output)
    assert "careless failed" in caplog.text
    assert SECRET not in caplog.text


def test_errors_by_hand_are_bounded_and_redacted(discreet: Any) -> None:
    run = discreet.workflows.create("by hand")
    run.start()
    run.acquire_step("x").fail_transient("code", "ä" * 100_000 + SECRET)
    assert is_fine(run.steps()[0].error)
    run.acquire_step("x").fail("ä" * 100_000 + SECRET)
    assert is_fine(run.steps()[0].error)
    run.fail("ä" * 100_000 + SECRET)
    assert is_fine(run.refresh().error)
