"""Compacting: many small exports become one, with a file for each queue and day.

Which exports is recorded first. They are written again, counted, and recorded; then one manifest
appears that stands for all of theirs. Who reads the directory sees either them or it, and never both.
Their files stay, for those who are still reading them, unless they are to be deleted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pgqrs.errors import ConflictError
from pgqrs.spark.allowing import allowed_root
from pgqrs.spark.export import manifests, publish, together, write_by_day
from pgqrs.spark.files import absolute, open_files
from pgqrs.spark.frames import Frame
from pgqrs.spark.pipelines import QUEUE
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import current_attempt, spark_step
from pgqrs.workflows.decorators import step, workflow


@step(name="choose")
def choose(out: str) -> dict[str, str]:
    """The exports there are: their directories by the names of their manifests."""
    return {name: frame.path for name, frame in manifests(out).items() if frame.rows}


@spark_step(name="write")
def write_again(out: str, chosen: list[str]) -> Any:
    """All of them in one."""
    spark, found = current_session("pgqrs compact"), manifests(out)
    if not found.keys() >= set(chosen):
        raise ConflictError(f"somebody else has put together exports in {out}; compact them again")
    frames = [found[name].df(spark) for name in chosen]
    return write_by_day(together(frames), current_attempt().path(allowed_root(out)))


@spark_step(name="delete files")
def delete_files(out: str, frame: Frame, paths: list[str]) -> int:
    """Delete what this export stands for, if it does: somebody else may have been quicker. Returns how
    many directories.
    """
    if frame.path not in {counts.path for counts in manifests(out).values()}:
        return 0
    for path in paths:
        files, inner = open_files(allowed_root(path))
        with suppress(FileNotFoundError):  # this was begun before
            files.delete_dir(inner)
    return len(paths)


@workflow(name="spark-compact", queue=QUEUE)
def compact(out: str, delete: bool = False) -> dict[str, Any]:
    """Make one export of all that are in the directory `out`; then, if so wanted, delete their files."""
    out = absolute(out)
    chosen = choose(out)
    if len(chosen) < 2:
        return {"exports": len(chosen), "rows": 0, "path": None}
    frame: Frame = write_again(out, list(chosen))
    publish(out, frame, list(chosen))
    if delete:
        delete_files(out, frame, list(chosen.values()))
    return {"exports": len(chosen), "rows": frame.rows, "path": frame.path}
