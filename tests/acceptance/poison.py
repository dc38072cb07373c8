"""A run that kills its worker, beside runs that record nothing for a while.

`python -m tests.acceptance.poison URL` is such a worker.
"""

from __future__ import annotations

import os
import sys
import time

import pgqrs


@pgqrs.step
def long_part(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pgqrs.workflow
def innocent(seconds: float) -> float:
    return long_part(seconds)


@pgqrs.workflow
def poison(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(77)


if __name__ == "__main__":
    with pgqrs.Store(sys.argv[1]) as store:
        pgqrs.Worker(store, workflows=[innocent, poison], concurrency=8).run()
