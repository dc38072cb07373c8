"""Pipelines in a process that is killed, at moments that are told on the command line.

Each run is a thread that bears the name of its moment. Who is there waits for the others, and with the
last one the process ends: one Spark is enough for many moments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from threading import Barrier, Thread, current_thread
from typing import Any

import deltalake
from deltalake.exceptions import CommitFailedError

import pgqrs
from pgqrs.repositories import archive, writes
from pgqrs.spark import claims, compact, export, frames, replay, session
from tests.spark.claiming import collecting
from tests.spark.conftest import SETTINGS

PIPELINES: dict[str, Any] = {
    "collecting": collecting,
    "compact": compact.compact,
    "export": export.export,
    "replay": replay.replay,
}
write_deltalake = deltalake.write_deltalake


def die() -> None:
    """The driver and its Java at once."""
    os.killpg(0, signal.SIGKILL)


def until(
    end: Barrier,
    moment: str,
    owner: Any,
    name: str,
    *,
    calls: int = 0,
    last: Callable[..., Any] | None = None,
) -> None:
    """In the run of this moment, a function is called so often. The next time something else is called
    in its place, if anything, and that is the end.
    """
    real, made = getattr(owner, name), count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_thread().name != moment or next(made) < calls:
            return real(*args, **kwargs)
        if last is not None:
            last(*args, **kwargs)
        end.wait()

    setattr(owner, name, call)


def write_only(seen: deltalake.DeltaTable, *args: Any, **kwargs: Any) -> None:
    """All that an append does but the commit, whose place is taken."""
    log = Path(seen.table_uri.removeprefix("file://"), "_delta_log")
    place = log / f"{seen.version() + 1:020}.json"
    place.mkdir()
    try:
        write_deltalake(seen, *args, **kwargs)
    except CommitFailedError:
        place.rmdir()


def delete_a_file(path: str) -> None:
    """Begin to delete a directory."""
    next(Path(path).rglob("*.parquet")).unlink()


def prepare(end: Barrier) -> None:
    stop = partial(until, end)
    # What a step has done, but not recorded.
    stop("written", frames, "count_rows")
    stop("published", export, "write_text", last=export.write_text)
    stop("appended", export, "append_once", last=export.append_once)
    stop("enqueued", writes, "message_count")
    stop("claimed", claims.Stream, "close", last=claims.Stream.close)
    stop("acknowledged", claims, "end", last=claims.end)
    # What it has done in part. The first transaction is committed when the second begins.
    stop("deleting", archive, "forget", calls=1)
    stop("deleting files", compact, "open_files", calls=1, last=delete_a_file)
    stop("appending", deltalake, "write_deltalake", last=write_only)
    export.AT_ONCE = 10


def run(end: Barrier, url: str, key: str, moment: str, what: str, arguments: Any) -> None:
    current_thread().name = moment
    try:
        with pgqrs.Store(url) as store:
            PIPELINES[what].run_inline(**arguments, key=key, store=store)
    finally:
        end.abort()  # its moment did not come: the others wait in vain


def main(url: str, runs: str) -> None:
    session("killed", **SETTINGS)
    these = json.loads(runs)
    end = Barrier(len(these), action=die)
    prepare(end)
    for each in these:
        Thread(target=run, args=(end, url, *each)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
