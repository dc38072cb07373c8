"""What tests drain queues with, and a driver that they kill: `python -m tests.spark.draining URL`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pgqrs
from pgqrs.spark import session
from pgqrs.spark.drain import drain
from tests.spark.conftest import SETTINGS


def double(message: pgqrs.Message) -> Any:
    """Most succeed; some fail for good, some take long, and one kills its process, once."""
    n, directory = message.payload["n"], message.payload.get("directory")
    if n % 100 == 99:
        return pgqrs.Failed("every hundredth", dead=True)
    if directory is not None:
        fatal, slow = Path(directory) / "fatal", Path(directory) / "slow"
        if n == 1500 and fatal.exists():
            fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        while n == 2500 and slow.exists():
            (Path(directory) / "working").touch()
            time.sleep(0.05)
    return {"twice": 2 * n}


if __name__ == "__main__":
    session("draining", **SETTINGS)
    with pgqrs.Store(sys.argv[1]) as store:
        pgqrs.Worker(store, workflows=[drain], concurrency=1).run()
