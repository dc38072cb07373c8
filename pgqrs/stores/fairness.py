"""Fairness among the nodes that write to one object.

A node prepares its upload on the state that it has seen, and wins if nobody else was quicker. Among
equals chance decides, and all go on. But a node that needs longer than the pause between two uploads of
the others would never win. So a node that loses again and again *announces* itself: it writes a tiny
object beside the key, which says how long one of its turns takes (its *pace*). A node that uploads looks
at that object beside its uploads, now and then while it is alone and always while it is not, and
leaves the object to the other for two of its turns. Each announcement is honoured once by each node, so
one that a dead node left behind costs a single pause.

A node that has announced itself, and has not won since, honours no announcements of others: else all
would wait for all.

Everything here is decided from counts and from one clock; what talks to the bucket is `Announcements`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pgqrs.config import S3Settings
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.objects import RemoteObject

log = logging.getLogger("pgqrs.s3")

SUFFIX = ".starved"
"""What the name of the announcement is, after the key."""
LOSSES = 3
"""Races in a row that a node loses before it announces itself, if it is as quick as the others."""
OUTPACED = 2
"""Uploads of others during one turn that show that a node is not as quick."""
LOOK_EVERY = 8
"""Uploads after which a node that is alone looks for announcements."""
REMEMBER = 10.0
"""Seconds for which a node is not alone after it has met another one."""
TURNS = 2.0
"""How many turns of a node that announced itself the others wait for."""
LONGEST_PAUSE = 5.0
"""Seconds that a node pauses at most."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A node that loses again and again says so."""

    writer: str
    pace: float

    @classmethod
    def parse(cls, data: bytes) -> Announcement | None:
        try:
            said = json.loads(data)
            return cls(str(said["writer"]), min(LONGEST_PAUSE, max(0.0, float(said["pace"]))))
        except (ValueError, TypeError, KeyError):
            return None

    def dump(self) -> bytes:
        return json.dumps({"writer": self.writer, "pace": round(self.pace, 3)}).encode()


class Fairness:
    """What a node knows of the others, and what follows from it."""

    def __init__(self, writer: str, *, clock: Callable[[], float]) -> None:
        self._writer = writer
        self._clock = clock
        self._met_at = float("-inf")
        self._since_look = 0
        self._pause_until = float("-inf")
        self._waits = False
        self.wins = 0
        """Uploads in a row without meeting anybody."""
        self.losses = 0
        """Races lost in a row."""
        self.announced = 0
        self.pauses = 0
        self.pace = 0.0
        """Seconds that a turn takes, from the look to the answer."""

    @property
    def is_alone(self) -> bool:
        """True if nobody else was met for a while, and this node has uploaded since."""
        return self.wins >= 2 and self._clock() - self._met_at > REMEMBER

    def met(self) -> None:
        """Another node has uploaded."""
        self._met_at, self.wins = self._clock(), 0

    def won(self, took: float) -> None:
        self._took(took)
        self.wins += 1
        self.losses = 0
        self._waits = False

    def lost(self, took: float, *, behind: int) -> Announcement | None:
        """A race was lost; others have uploaded so many times since this turn began.

        Returns what this node should announce, if it should.
        """
        self._took(took)
        self.met()
        self.losses += 1
        if self.losses < LOSSES and behind < OUTPACED:
            return None
        self._waits = True
        self.announced += 1
        return Announcement(self._writer, self.pace)

    def should_look(self) -> bool:
        """True if it is time to look for announcements."""
        self._since_look += 1
        if self._since_look < LOOK_EVERY and self._clock() - self._met_at > REMEMBER:
            return False
        self._since_look = 0
        return True

    def heard(self, announcement: Announcement) -> None:
        if announcement.writer == self._writer:
            return
        self.met()
        if not self._waits:
            self.pauses += 1
            pause = min(LONGEST_PAUSE, TURNS * announcement.pace)
            self._pause_until = self._clock() + pause

    def pause(self) -> float:
        """Seconds for which to leave the object to others."""
        return max(0.0, self._pause_until - self._clock())

    def _took(self, seconds: float) -> None:
        self.pace = seconds if not self.pace else 0.5 * (self.pace + seconds)


class Announcements:
    """The object beside the key. Nothing here may fail or delay what it is for."""

    def __init__(self, settings: S3Settings) -> None:
        self._object = RemoteObject(settings, suffix=SUFFIX)
        self._seen: str | None = None
        self._look: Future[Announcement | None] | None = None
        self._made = False

    def announce(self, announcement: Announcement) -> None:
        if not self._made:
            log.warning(
                "%s: another node wins every race; asking the others to pause", self._object
            )
        self._made = True
        _threads.submit(_quietly, lambda: self._object.overwrite(announcement.dump()))

    def begin_look(self) -> None:
        """Look for an announcement, in the background."""
        if self._look is None:
            self._look = _threads.submit(_quietly, self._find)

    def take(self) -> Announcement | None:
        """A new announcement, if the look is over and has found one."""
        if self._look is None or not self._look.done():
            return None
        look, self._look = self._look, None
        return look.result()

    def close(self) -> None:
        if self._made:
            _quietly(self._object.delete)

    def _find(self) -> Announcement | None:
        found = self._object.get(unless=self._seen)
        if found is None or found.etag is None or found.etag == self._seen:
            return None
        self._seen = found.etag
        return Announcement.parse(found.data)


_threads = DaemonThreads("pgqrs-fairness")


def _quietly(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as exc:  # no permission, most of all
        log.debug("an announcement was not written or read: %s", exc)
    return None
