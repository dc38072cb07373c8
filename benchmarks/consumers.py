"""Consumers in processes of their own, which drain a queue at a signal.

They are started once and connect before anything is measured. A drain is timed by the parent, from
the moment it lets all go until the last one finds nothing left.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import Any, Self

from benchmarks.driver import Backend, Side
from benchmarks.sides import open_driver
from benchmarks.sites import Site

_PATIENCE = 600.0
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
processes: Any = multiprocessing.get_context(_METHOD)
processes.set_forkserver_preload(["benchmarks.sides"])
"""Where processes are made: not by forking this one, which has threads."""


class Consumers:
    """So many processes of one side, each claiming and acking batches of one size."""

    def __init__(self, site: Site, side: Side, *, consumers: int, batch: int) -> None:
        self._site = site
        self._start: Barrier = processes.Barrier(consumers + 1)
        self._end: Barrier = processes.Barrier(consumers + 1)
        self._workers = [
            processes.Process(
                target=_consume,
                args=(side, site.backend, site.dsn, batch, self._start, self._end),
                daemon=True,
            )
            for _ in range(consumers)
        ]
        for worker in self._workers:
            worker.start()
        self.drain(20 * batch * consumers)  # to warm up

    def drain(self, amount: int) -> float:
        """Fill the queue, let it be drained, and return how many seconds that took."""
        self._site.empty()
        self._site.fill(ready=amount)
        self._site.settle()
        self._start.wait(_PATIENCE)
        began = time.perf_counter()
        self._end.wait(_PATIENCE)
        took = time.perf_counter() - began
        if (done := self._site.count_archived()) != amount:
            raise RuntimeError(f"{amount} messages went in, {done} came out")
        return took

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._start.abort()
        for worker in self._workers:
            worker.join(timeout=10)


def _consume(
    side: Side, backend: Backend, dsn: str, batch: int, start: Barrier, end: Barrier
) -> None:
    driver = open_driver(side, backend, dsn)
    try:
        while _reached(start):
            while claimed := driver.claim(batch):
                driver.ack(claimed)
            _reached(end)
    except BaseException:
        end.abort()
        raise
    finally:
        driver.close()


def _reached(barrier: Barrier) -> bool:
    try:
        barrier.wait(_PATIENCE)
    except threading.BrokenBarrierError:
        return False
    return True
