"""What a worker logs of messages: one line for each that failed, and if asked for, each that finished.

A line names the task or handler, the queue, the message, the attempt and how long it took, also as
`extra` fields of the record, for structured logs: `task`, `queue`, `message_id`, `attempt`, `duration`
(seconds, or None) and `outcome`. Payloads, arguments, results and headers are never logged. An error is
logged with its traceback; if the application redacts errors, as the redacted text instead.
"""

from __future__ import annotations

import logging
from typing import Any

from pgqrs.config import Config
from pgqrs.error_texts import as_logged
from pgqrs.outcomes import Done, Failed, Outcome, Settled
from pgqrs.types import Message

logger = logging.getLogger("pgqrs.worker")
FAILED_FOR_GOOD, TRIED_AGAIN = "failed", "retried"


def finished(message: Message, outcome: Outcome, *, name: str, took: float | None) -> None:
    """Log a message that is over; one that is given back, or a run that waits, is not."""
    ended = _ended_as(outcome)
    if ended is None:
        return
    facts = _facts(message, name, took, ended)
    logger.info("%s %s: %s", name, ended, _where(message, took), extra=facts)


def failed(
    message: Message, outcome: Failed, *, name: str, took: float | None, again: bool, config: Config
) -> None:
    """Log a failure: a warning if the message is delivered again, an error if not."""
    text, traceback = as_logged(outcome.error, config)
    logger.log(
        logging.WARNING if again else logging.ERROR,
        "%s failed: %s, %s%s",
        *(name, _where(message, took)),
        "and will be tried again" if again else "for good",
        text,
        exc_info=traceback,
        extra=_facts(message, name, took, TRIED_AGAIN if again else FAILED_FOR_GOOD),
    )


def _ended_as(outcome: Outcome) -> str | None:
    if isinstance(outcome, Done):
        return "completed"
    ending = outcome.ending if isinstance(outcome, Settled) else None
    return None if ending is None else str(ending.status)


def _where(message: Message, took: float | None) -> str:
    where = f"message {message.id} of {message.queue}, attempt {message.attempt}"
    return where if took is None else f"{where}, {took:.3f} s"


def _facts(message: Message, name: str, took: float | None, outcome: str) -> dict[str, Any]:
    return {
        "task": name,
        "queue": message.queue,
        "message_id": message.id,
        "attempt": message.attempt,
        "duration": took,
        "outcome": outcome,
    }
