"""What the ready pipelines may do in this process.

Runs come from a queue: whoever can write to it names the function that `drain` calls, and the directory
that `export`, `report` and `compact` write to. A process that says what it allows refuses all else; one
that says nothing trusts its queue.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pgqrs.errors import InvalidArgument
from pgqrs.spark.files import absolute, is_local

FUNCTIONS, ROOTS = "PGQRS_SPARK_FUNCTIONS", "PGQRS_SPARK_ROOTS"
"""Variables that say the same as `allow`, with commas in between."""


@dataclass
class _Allowed:
    """None where nothing was said."""

    functions: tuple[str, ...] | None = None
    roots: tuple[str, ...] | None = None


_allowed = _Allowed()


def allow(
    *,
    functions: Iterable[str] | None = None,
    roots: Iterable[str | os.PathLike[str]] | None = None,
) -> None:
    """Let pipelines of this process call these functions only (`module:name`, also as a pattern like
    `pricing:*`), and write below these directories or buckets only. What is None is not changed.

    The variables `PGQRS_SPARK_FUNCTIONS` and `PGQRS_SPARK_ROOTS` say the same to processes that do not
    call this.
    """
    if functions is not None:
        _allowed.functions = tuple(functions)
    if roots is not None:
        _allowed.roots = tuple(os.fspath(root) for root in roots)


def allowed_function(name: str) -> str:
    """The name of a function, if it may be called."""
    patterns = _said(_allowed.functions, FUNCTIONS)
    if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
        raise InvalidArgument("function", f"this worker does not allow {name!r}")
    return name


def allowed_root(path: str | os.PathLike[str]) -> str:
    """A path that means the same everywhere, if it may be written to."""
    found, roots = absolute(path), _said(_allowed.roots, ROOTS)
    if roots is not None and not any(_is_below(found, absolute(root)) for root in roots):
        raise InvalidArgument("path", f"this worker does not allow to write to {found}")
    return found


def _said(given: tuple[str, ...] | None, variable: str) -> tuple[str, ...] | None:
    if given is not None or variable not in os.environ:
        return given
    return tuple(word.strip() for word in os.environ[variable].split(",") if word.strip())


def _is_below(path: str, root: str) -> bool:
    if is_local(path) and is_local(root):  # links and .. lead elsewhere
        return Path(path).resolve().is_relative_to(Path(root).resolve())
    return ".." not in path.split("/") and f"{path}/".startswith(f"{root}/")
