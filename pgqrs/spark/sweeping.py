"""Removing what attempts at Spark steps left behind.

An attempt that died, was cancelled or lost its lease leaves a directory that no record names. It is
removed once its run has ended, or when nothing in it has changed for long. What a record names is
never removed, whichever run it is of: a fork shares what the run it came from has written.

The order matters: first the directories are listed, then the runs are looked at, then the records. An
attempt that is recorded meanwhile is found, and one that begins meanwhile was not listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from pgqrs.errors import RunNotFound
from pgqrs.repositories import steps
from pgqrs.spark.files import absolute, open_files
from pgqrs.spark.frames import MARK
from pgqrs.spark.steps import run_directory
from pgqrs.store import Store
from pgqrs.types import Duration, RunInfo, seconds

GRACE = timedelta(days=1)
PAGE = 1000
_ATTEMPT = re.compile(r"(run-(\d+)-\d{8}T\d{12})/step-[^/]+/\d+-[0-9a-f]{16}(?=/|\Z)")


@dataclass(frozen=True)
class Swept:
    """What became of the directories of attempts."""

    removed: tuple[str, ...]
    """Left behind, and gone now."""
    recorded: int
    """Named by a record."""
    recent: int
    """Of runs that go on, and too young to tell."""
    unknown: int
    """Of runs that this store does not have, or not any more."""


@dataclass(slots=True)
class _Found:
    """The directory of an attempt."""

    run: str
    run_id: int
    changed_at: datetime


def sweep(store: Store, root: str | os.PathLike[str], *, grace: Duration = GRACE) -> Swept:
    """Remove what attempts at steps of this store left behind below the directory `root`.

    That of runs that have ended goes at once, that of others if it has not changed for `grace`.
    Directories of runs that the store does not know are left alone.
    """
    files, inner = open_files(absolute(root))
    oldest = datetime.now(UTC) - timedelta(seconds=seconds("grace", grace))
    found = _list(files, inner)
    runs = {run: _find(store, run, id) for run, id in {(f.run, f.run_id) for f in found.values()}}
    recorded = set(_recorded(store))
    removed, counts = [], {"recorded": 0, "recent": 0, "unknown": 0}
    for path, attempt in sorted(found.items()):
        run = runs[attempt.run]
        if path in recorded:
            counts["recorded"] += 1
        elif run is None:
            counts["unknown"] += 1
        elif not run.has_ended and attempt.changed_at > oldest:
            counts["recent"] += 1
        else:
            files.delete_dir(f"{inner}/{path}")
            removed.append(path)
    return Swept(tuple(removed), **counts)


def _list(files: Any, inner: str) -> dict[str, _Found]:
    """The directories of attempts by their path below the root, with the time of their last change."""
    from pyarrow.fs import FileSelector

    found: dict[str, _Found] = {}
    for info in files.get_file_info(FileSelector(inner, recursive=True, allow_not_found=True)):
        match = _ATTEMPT.match(info.path[len(inner) :].lstrip("/"))
        if match is None:
            continue
        changed_at = info.mtime or datetime.min.replace(tzinfo=UTC)  # a bucket has no directories
        attempt = found.setdefault(match[0], _Found(match[1], int(match[2]), changed_at))
        attempt.changed_at = max(attempt.changed_at, changed_at)
    return found


def _find(store: Store, directory: str, run_id: int) -> RunInfo | None:
    try:
        run = store.workflows.get(run_id)
    except RunNotFound:
        return None
    return run if run_directory(run.id, run.created_at) == directory else None


def _recorded(store: Store) -> Iterator[str]:
    """The directories that records of steps name, wherever in their values."""
    after = 0
    while True:

        def work(connection: Connection, after: int = after) -> list[tuple[int, Any]]:
            return steps.mentioning(connection, MARK, after=after, limit=PAGE)

        page = store.read(work)
        for _, output in page:
            yield from _paths(output)
        if len(page) < PAGE:
            return
        after = page[-1][0]


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (match[0] for match in _ATTEMPT.finditer(value))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item)
