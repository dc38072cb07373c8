"""Files of a driver, wherever they are: a directory of this machine, or a bucket."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pgqrs.errors import InvalidArgument

HADOOP_NAMES = {"s3a": "s3", "s3n": "s3"}
"""What Spark calls what all others call something else."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that means the same in another directory; without a slash at its end."""
    text = os.fspath(path)
    return text.rstrip("/") if _SCHEME.match(text) else str(Path(text).absolute())


def is_local(path: str) -> bool:
    """True if this is a path of this machine, and no URL."""
    return _SCHEME.match(path) is None


def open_files(path: str) -> tuple[Any, str]:
    """The file system of a path, and what the path is called there."""
    from pyarrow.fs import FileSystem

    found = _SCHEME.match(path)
    if found and found[1] in HADOOP_NAMES:
        path = HADOOP_NAMES[found[1]] + path[found.end(1) :]
    try:
        files, inner = FileSystem.from_uri(path if found else str(Path(path).absolute()))
    except (ValueError, OSError, NotImplementedError) as exc:
        raise InvalidArgument("path", f"{path} is nothing that can be listed here: {exc}") from exc
    return files, inner


def count_rows(path: str) -> int | None:
    """The rows of a directory of Parquet, by the footers of its files; None if they are out of reach
    from here.
    """
    import pyarrow as pa
    import pyarrow.dataset as parquet

    try:
        files, inner = open_files(path)
        rows: int = parquet.dataset(inner, filesystem=files, format="parquet").count_rows()
    except (InvalidArgument, OSError, pa.ArrowException):
        return None
    return rows
