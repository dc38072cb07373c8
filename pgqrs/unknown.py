"""Messages that are for code which this worker does not have: another worker may have it.

During a rolling deployment old workers claim tasks that only new ones know. They give such a message
back uncounted, after a delay that grows each time and keeps it out of the way of its neighbours. A
message that nobody knows for about a week is archived as failed, or earlier where its queue has
`max_releases` or the message a time to live.
"""

from __future__ import annotations

import logging

from pgqrs.errors import HandlerNotFound
from pgqrs.outcomes import Failed, GivenBack, Outcome
from pgqrs.types import Message

SHORTEST, LONGEST = 2.0, 600.0
"""Seconds after which a message is offered to workers again: at first, and in the end."""
MOST = 1000
"""How often a message is given back; it takes about a week."""
MOST_NAMES = 1000
"""Names remembered as logged. Names come from messages, and may be anything."""
logger = logging.getLogger("pgqrs.worker")


class Unknown:
    """Gives messages back that name something unknown, and logs each name once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def outcome(self, message: Message, what: str, name: str) -> Outcome:
        """What becomes of a message whose `what` (a task, a workflow) of this name is unknown."""
        error = HandlerNotFound(message.queue, f"no {what} {name!r} is known")
        if message.released_ct >= MOST:
            return Failed(error, dead=True)
        self.log(message, what, name)
        return GivenBack(delay=delay(message.released_ct))

    def log(self, message: Message, what: str, name: str) -> None:
        if (what, name) in self._logged or len(self._logged) >= MOST_NAMES:
            return
        self._logged.add((what, name))
        logger.warning(
            "%s %.200r of queue %s is not known to this worker; its messages are given back uncounted",
            *(what, name, message.queue),
        )


def delay(released_ct: int) -> float:
    """Seconds, from how often the message was given back before. Not random: messages with the same
    delay are given back in one statement.
    """
    return min(SHORTEST * 2.0 ** min(released_ct, 20), LONGEST)
