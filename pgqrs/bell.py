"""A bell to wait for. Unlike an `Event` it may be rung from a signal handler: its `put` is
reentrant, and takes no lock that the interrupted thread could hold.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Bell:
    """Rings once, however often it is rung before somebody hears it."""

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        if self._rung.empty():
            self._rung.put(None)

    def wait(self, seconds: float) -> bool:
        """Until it rings, or for so long. Whether it rang."""
        try:
            self._rung.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        return True
