"""Messages that may have killed their workers are handled one at a time.

A worker that dies takes all its messages along, and each of them has one attempt less. Which of them
killed it nobody knows. So from the third attempt on such a message is a *suspect*: a worker gives it
back uncounted, handles what it has, and then claims messages one by one until it has met as many
suspects as it gave back. A suspect that kills the worker now kills it alone; the others come through.

A worker with a handler that does not end cannot wait for ever: after `PATIENCE` seconds it takes
suspects beside others for a while, and claims beside a suspect that has gone well for so long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pgqrs.types import Message

PATIENCE = 30.0


class Isolation:
    """Says how many messages a worker may claim, and which of them it gives back."""

    def __init__(
        self,
        is_suspect: Callable[[Message], bool],
        give_back: Callable[[list[Message]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_suspect = is_suspect
        self._give_back = give_back
        self._clock = clock
        self._since: float | None = None
        self._suspects = 0
        self._crowded_until = float("-inf")

    def room(self, wanted: int, aboard: int) -> int:
        """How many of the messages that are wanted may be claimed beside so many."""
        if self._since is None:
            return wanted
        if aboard == 0 and self._suspects <= 0:
            self._since = None
            return wanted
        now = self._clock()
        if now - self._since > PATIENCE:
            self._since, self._crowded_until = None, now + PATIENCE
            return wanted
        return 0 if aboard else min(1, wanted)

    def sift(self, claimed: Sequence[Message], aboard: int) -> list[Message]:
        """Those of the claimed messages to be handled now; suspects among the others are given back."""
        suspects = [message for message in claimed if self._is_suspect(message)]
        if not suspects:
            if not claimed and not aboard:
                self._since = None  # others have taken them
            return list(claimed)
        now = self._clock()
        if now < self._crowded_until:
            return list(claimed)
        if len(claimed) == 1 and aboard == 0:
            self._since, self._suspects = now, max(0, self._suspects - 1)
            return suspects
        self._give_back(suspects)
        self._since, self._suspects = now, len(suspects)
        return [message for message in claimed if message not in suspects]
