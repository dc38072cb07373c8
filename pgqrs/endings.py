"""Ends messages as their outcomes say, many at a time.

Handlers report from their threads; the worker's loop flushes. What the database could not take is
kept, and flushed again: every ending is safe to repeat, since it is fenced by the claim. One that
the database refuses for itself does not hinder the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from pgqrs import message_log
from pgqrs.consumer import Holder
from pgqrs.errors import (
    CommitUncertain,
    InvalidPayload,
    LeaseLost,
    StoreClosed,
    StoreUnavailable,
)
from pgqrs.handlers import Delivery
from pgqrs.outcomes import Done, Failed, GivenBack, Outcome, Settled
from pgqrs.payloads import encode

MOST_AT_ONCE = 1000
MOST_TEXT = 8 * 1024 * 1024
logger = logging.getLogger("pgqrs.worker")


class Ending(NamedTuple):
    """A delivery and its outcome; the result as text; what handled it, and for how many seconds."""

    delivery: Delivery
    outcome: Outcome
    text: str | None
    name: str = "handler"
    took: float | None = None


class Endings:
    """The outcomes that wait to be stored."""

    def __init__(
        self,
        holder: Holder,
        forget: Callable[[Delivery], None],
        *,
        log_messages: bool = False,
    ) -> None:
        self._log_messages = log_messages
        self._holder = holder
        self._forget = forget
        self._waiting: deque[Ending] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        delivery: Delivery,
        outcome: Outcome,
        *,
        name: str = "handler",
        took: float | None = None,
    ) -> None:
        """From any thread. Only the first outcome of a delivery counts."""
        if not delivery.end():
            return
        text = None
        if isinstance(outcome, Done) and outcome.result is not None:
            limits = delivery.database.config
            try:
                text = encode(
                    outcome.result,
                    max_bytes=limits.max_payload_bytes,
                    max_depth=limits.max_payload_depth,
                    name="result",
                )
            except InvalidPayload as exc:
                outcome = Failed(exc, dead=True)  # it would be the same the next time
        self._waiting.append(Ending(delivery, outcome, text, name, took))

    def flush(self) -> int:
        """Store what waits. Returns how many; what raises is kept."""
        ending = [self._waiting.popleft() for _ in range(len(self._waiting))]
        pieces = deque(_pieces(ending))
        try:
            while pieces:
                self._end(pieces[0])
                for done in pieces.popleft():
                    self._forget(done.delivery)
        except BaseException:
            self._waiting.extendleft(reversed([left for piece in pieces for left in piece]))
            raise
        return len(ending)

    def _end(self, piece: list[Ending]) -> None:
        """All of one kind."""
        piece = [ending for ending in piece if not self._is_lost(ending)]
        if not piece:
            return
        lost: Collection[int] = ()
        try:
            self._act(piece)
        except LeaseLost as exc:
            lost = exc.ids
            for id in exc.ids:
                logger.warning("lease lost on message %d: what came of it does not count", id)
        except (StoreUnavailable, CommitUncertain, StoreClosed):
            raise
        except Exception as exc:
            if len(piece) > 1:
                for ending in piece:
                    self._end([ending])
            else:
                self._give_up(piece[0], exc)
            return
        if self._log_messages:
            for delivery, outcome, _, name, took in piece:
                if delivery.message.id not in lost:
                    message_log.finished(delivery.message, outcome, name=name, took=took)

    def _act(self, piece: list[Ending]) -> None:
        outcome, messages = piece[0].outcome, [ending.delivery.message for ending in piece]
        if isinstance(outcome, Done):
            texts = {e.delivery.message.id: e.text for e in piece if e.text is not None}
            self._holder._ack(messages, texts, tells=True)
        elif isinstance(outcome, GivenBack):
            self._holder.release_many(messages, delay=outcome.delay, eta=outcome.eta)
        elif isinstance(outcome, Failed):
            self._fail(piece[0], outcome)

    def _fail(self, ending: Ending, outcome: Failed) -> None:
        message = ending.delivery.message
        again = self._holder.fail(message, outcome.error, retry=outcome.retry, dead=outcome.dead)
        if not again:
            self._holder._tell_of_results([message])
        config = ending.delivery.database.config
        message_log.failed(
            message, outcome, name=ending.name, took=ending.took, again=again, config=config
        )

    def _give_up(self, ending: Ending, error: Exception) -> None:
        """The database refuses this outcome. It is kept as a failure, or comes back by itself."""
        message = ending.delivery.message
        # Not with its traceback: the statement's error may quote the result.
        logger.error("the outcome of message %d cannot be stored: %s", message.id, error)
        try:
            self._holder.fail(message, error, dead=True)
            self._holder._tell_of_results([message])
        except Exception:
            logger.exception("message %d could not be failed either; its lease lapses", message.id)

    def _is_lost(self, ending: Ending) -> bool:
        lost = ending.delivery.is_lost and not isinstance(ending.outcome, Settled)
        if lost:
            id = ending.delivery.message.id
            logger.warning("lease lost on message %d: what came of it does not count", id)
        return lost


def _pieces(endings: Iterable[Ending]) -> Iterator[list[Ending]]:
    """Alike ones together, in pieces that fit one statement."""
    alike: dict[object, list[Ending]] = {}
    for ending in endings:
        alike.setdefault(_kind(ending), []).append(ending)
    for some in alike.values():
        piece: dict[int, Ending] = {}
        room = MOST_TEXT
        for ending in some:
            id, size = ending.delivery.message.id, len(ending.text or "")
            # A message that was claimed twice by this worker ends twice, one of them in vain.
            if piece and (id in piece or size > room or len(piece) == MOST_AT_ONCE):
                yield list(piece.values())
                piece, room = {}, MOST_TEXT
            piece[id] = ending
            room -= size
        yield list(piece.values())


def _kind(ending: Ending) -> object:
    outcome = ending.outcome
    if isinstance(outcome, Failed):  # each has an error of its own
        return id(ending)
    return outcome if isinstance(outcome, GivenBack) else type(outcome)
