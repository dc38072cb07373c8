"""The task that brings local writes to the bucket: a thread, or whoever steps by hand.

It waits to be woken, and wakes by itself every `interval` seconds. With an infinite interval there
is no thread: nothing happens but by `step`, which is how tests walk through every situation.

The thread starts with the first `wake`, and knows nothing of the store it works for, so that the
store can be garbage collected; that, or `stop`, ends it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

log = logging.getLogger("pgqrs.s3")


class SyncTask:
    """Calls `step` when woken, and `finish` when it ends after `stop(finish=True)`."""

    def __init__(
        self, step: Callable[[], object], *, interval: float, finish: Callable[[], object]
    ) -> None:
        self.step = step
        self._interval = interval
        self._finish = finish
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._must_finish = False
        self.stopping = threading.Event()

    @property
    def by_hand(self) -> bool:
        """Whether somebody else steps."""
        return math.isinf(self._interval)

    def wake(self) -> None:
        """There is something to do."""
        self._awake.set()
        self.start()

    def stop(self, *, finish: bool = False) -> None:
        """End soon. With `finish` the thread finishes by itself what it was for, and nobody waits."""
        with self._lock:
            self._must_finish = finish
            self.stopping.set()
            self._awake.set()

    def join(self) -> None:
        """Wait for the end of the thread, unless this is it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def runs(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def start(self) -> None:
        """See that there is a thread, unless somebody steps by hand."""
        if self._thread is not None or self.by_hand:
            return
        with self._lock:
            if self._thread is None and not self.stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="pgqrs-sync", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._awake.wait(min(self._interval, threading.TIMEOUT_MAX))
            self._awake.clear()
            if not self.stopping.is_set():
                self._guarded(self.step)
        if self._must_finish:
            self._guarded(self._finish)

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as exc:  # it will be tried again, and who waits was told
            log.warning("%s", exc)
