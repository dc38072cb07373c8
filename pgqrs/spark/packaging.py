"""This package as one file, for servers and executors that do not have it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pgqrs
from pgqrs import schema

SOURCE = "pyspark_pgqrs"
"""The module by which Spark finds the data source."""


def package_zip(directory: Path) -> Path:
    """A zip in this directory with all that `import pgqrs` needs of pgqrs, its revisions among them.
    Its name tells its content: Spark refuses another file of the same name.
    """
    package = Path(pgqrs.__file__).parent
    if not package.is_dir():  # it is in a zip already
        return next(path for path in package.parents if path.is_file())
    found = dict(sorted(_files(package)))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in found.values()))
    target = directory / f"pgqrs-{content.hexdigest()[:16]}.zip"
    with ZipFile(target, "w", ZIP_DEFLATED) as archive:
        for name, path in found.items():
            archive.write(path, name)
    return target


def _files(package: Path) -> Iterator[tuple[str, Path]]:
    source = find_spec(SOURCE)
    assert source is not None
    assert source.origin is not None
    yield f"{SOURCE}.py", Path(source.origin)
    for inside, root in (("pgqrs", package), ("pgqrs/_alembic", schema.scripts_path())):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield f"{inside}/{path.relative_to(root)}", path
