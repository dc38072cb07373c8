"""Ends messages as their outcomes say, many at a time.

Handlers report from their threads; the worker's loop flushes. What the database could not take is
kept, and flushed again: every ending is safe to repeat, since it is fenced by the claim. One that
the database refuses for itself does not hinder the others, and neither does one whose row another
transaction has locked: it is tried again from time to time.
"""

from __future__ import annotations

import logging
import time
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
AGAIN = 0.5
"""Seconds between two attempts at an outcome whose row another transaction has locked."""
NEVER = float("inf")
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
        forget: Callable[..., None],
        *,
        log_messages: bool = False,
    ) -> None:
        self._log_messages = log_messages
        self._holder = holder
        self._forget = forget
        self._waiting: deque[Ending] = deque()
        self._locked: list[Ending] = []
        """Those whose rows others have locked, and when to try them again."""
        self._again_at = NEVER

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

    @property
    def again_in(self) -> float:
        """Seconds until something is to be tried again that was locked."""
        return max(0.0, self._again_at - time.monotonic())

    @property
    def is_done(self) -> bool:
        """True if nothing waits to be stored."""
        return not self._waiting and not self._locked

    def flush(self, *, everything: bool = False) -> int:
        """Store what waits, or everything, also what was locked just now. Returns how many; what raises
        is kept.
        """
        if self._locked and (everything or not self.again_in):
            self._waiting.extend(self._locked)
            self._locked, self._again_at = [], NEVER
        ending = [self._waiting.popleft() for _ in range(len(self._waiting))]
        pieces = deque(_pieces(ending))
        try:
            while pieces:
                locked = self._end(pieces[0])
                piece = pieces.popleft()
                self._forget(*[e.delivery for e in piece if e.delivery.message.id not in locked])
                self._keep_locked([e for e in piece if e.delivery.message.id in locked])
        except BaseException:
            self._waiting.extendleft(reversed([left for piece in pieces for left in piece]))
            raise
        return len(ending)

    def _keep_locked(self, locked: list[Ending]) -> None:
        if locked:
            self._locked += locked
            self._again_at = min(self._again_at, time.monotonic() + AGAIN)

    def _end(self, piece: list[Ending]) -> set[int]:
        """All of one kind. Returns the ids of those whose rows others have locked."""
        piece = [ending for ending in piece if not (ending[0].is_lost and self._is_lost(ending))]
        if not piece:
            return set()
        lost: Collection[int] = ()
        locked: set[int] = set()
        try:
            locked = self._act(piece)
        except LeaseLost as exc:
            lost = exc.ids
            for id in exc.ids:
                logger.warning("lease lost on message %d: what came of it does not count", id)
        except (StoreUnavailable, CommitUncertain, StoreClosed):
            raise
        except Exception as exc:
            if len(piece) > 1:
                return {id for ending in piece for id in self._end([ending])}
            self._give_up(piece[0], exc)
            return set()
        if self._log_messages:
            for delivery, outcome, _, name, took in piece:
                if delivery.message.id not in lost and delivery.message.id not in locked:
                    message_log.finished(delivery.message, outcome, name=name, took=took)
        return locked

    def _act(self, piece: list[Ending]) -> set[int]:
        """Returns the ids of those whose rows others have locked."""
        outcome, messages = piece[0].outcome, [ending.delivery.message for ending in piece]
        if isinstance(outcome, Done):
            texts = {e.delivery.message.id: e.text for e in piece if e.text is not None}
            if messages[0].group is None:
                return self._holder._ack_unlocked(messages, texts)
            self._holder._ack(messages, texts, tells=True)
        elif isinstance(outcome, GivenBack):
            self._holder.release_many(messages, delay=outcome.delay, eta=outcome.eta)
        elif isinstance(outcome, Failed):
            self._fail(piece[0], outcome)
        return set()

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
    if isinstance(outcome, GivenBack):
        return outcome
    return type(outcome), ending.delivery.message.group is None
