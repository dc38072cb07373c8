"""Pipelines in a process that is killed, at a moment that is told on the command line."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pgqrs
from pgqrs.repositories import archive, writes
from pgqrs.spark import export, replay, session
from tests.spark.conftest import SETTINGS

KEPT: dict[str, Any] = {}


def die(*_: Any, **__: Any) -> Any:
    """The driver and its Java at once."""
    os.killpg(0, signal.SIGKILL)


def after_first(*args: Any, **kwargs: Any) -> Any:
    """Once it has been done and committed, the next time is the end."""
    if KEPT.setdefault("calls", []):
        die()
    KEPT["calls"].append(1)
    return KEPT["forget"](*args, **kwargs)


def prepare(moment: str) -> None:
    if moment == "written":  # but not recorded
        export.count_rows = die
    elif moment == "deleting":  # some are gone, some are not
        KEPT["forget"] = archive.forget
        archive.forget = after_first
        export.AT_ONCE = 10
    elif moment == "enqueued":  # but not recorded
        writes.message_count = die


def main(url: str, key: str, moment: str, what: str, arguments: str) -> None:
    session("killed", **SETTINGS)
    prepare(moment)
    pipeline: Any = {"export": export.export, "replay": replay.replay}[what]
    with pgqrs.Store(url) as store:
        pipeline.run_inline(**json.loads(arguments), key=key, store=store)


if __name__ == "__main__":
    main(*sys.argv[1:])
