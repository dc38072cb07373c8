"""Where rows are read from: planned on the driver over SQLAlchemy, read on executors as Arrow.

A place is pickled and sent to executors, so it holds no connection, and of secrets only what its
`Where` does.

- PostgreSQL is read by ADBC, which turns its binary COPY into Arrow; by psycopg where there is no wheel.
- A SQLite file is read by the module of the standard library. ADBC's driver guesses the type of a column
  from its first rows, and fails when a text follows a thousand NULLs.
- A store in S3 is an object that others replace at any time. Planning pins what it sees: it is
  downloaded once to a host, under its ETag. A host that has no copy yet asks for that very version, and
  gets it if the bucket keeps versions or nobody has replaced it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import NullPool, create_engine

from pgqrs import schema
from pgqrs.config import Config, S3Settings
from pgqrs.errors import ConflictError, InvalidArgument
from pgqrs.repositories import scans
from pgqrs.repositories.scans import Kind
from pgqrs.spark.arrow import arrow_schema, conform, from_rows
from pgqrs.spark.options import Where
from pgqrs.spark.packed import unpacked
from pgqrs.spark.workers import settle
from pgqrs.store import Store
from pgqrs.stores import Work

T = TypeVar("T")
ROWS = 10_000
"""Rows of a batch, where we make it."""
BATCH_SIZE, BYTES = "adbc.postgresql.batch_size_hint_bytes", str(4 * 1024 * 1024)
"""Of a batch, where ADBC makes it: not so many that Spark waits long for the first."""
KEPT = 24 * 3600.0
"""Seconds for which a downloaded object is kept."""


@dataclass(frozen=True)
class Place(ABC):
    """Where rows are read from."""

    where: Where

    def look(self, work: Work[T]) -> T:
        """Run a work that reads, to plan what is to be read."""
        with Store(self.where.config()) as store:
            found = store.read(work)
        settle()
        return found

    def batches(self, text: str, columns: dict[str, Kind]) -> Iterator[Any]:
        """What a statement returns, as Arrow batches with these columns."""
        yield from self.read(text, arrow_schema(columns))
        settle()

    @abstractmethod
    def read(self, text: str, wanted: Any) -> Iterator[Any]:
        """What a statement returns, as Arrow batches of the wanted schema."""


class PostgresPlace(Place):
    """A PostgreSQL server."""

    def read(self, text: str, wanted: Any) -> Iterator[Any]:
        url = self.where.config().url.set(drivername="postgresql")
        address = url.render_as_string(hide_password=False)
        if find_spec("adbc_driver_postgresql") is None:
            return self._by_psycopg(address, text, wanted)
        return self._by_adbc(address, text, wanted)

    def _by_adbc(self, address: str, text: str, wanted: Any) -> Iterator[Any]:
        import pyarrow as pa
        from adbc_driver_manager import AdbcConnection, AdbcStatement

        with AdbcConnection(_adbc(address)) as connection, AdbcStatement(connection) as statement:
            statement.set_options(**{BATCH_SIZE: BYTES})
            statement.set_sql_query(scans.packed(text, wanted.names))
            found, _ = statement.execute_query()
            for batch in pa.RecordBatchReader.from_stream(found):
                yield conform(unpacked(batch, wanted), wanted)

    def _by_psycopg(self, address: str, text: str, wanted: Any) -> Iterator[Any]:
        import psycopg

        with psycopg.connect(address) as connection, connection.cursor("scan") as cursor:
            cursor.execute(text.encode())
            while rows := cursor.fetchmany(ROWS):
                yield from_rows(rows, wanted)


@lru_cache(maxsize=4)
def _adbc(address: str) -> Any:
    """A server, as ADBC knows it: it asks for all types there are, once. Holds no connection."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(address)


@dataclass(frozen=True)
class SqlitePlace(Place):
    """A file that all executors see under the same path."""

    path: str

    def read(self, text: str, wanted: Any) -> Iterator[Any]:
        with closing(self.connect()) as connection:
            cursor = connection.execute(text)
            while rows := cursor.fetchmany(ROWS):
                yield from_rows(rows, wanted)

    def connect(self) -> sqlite3.Connection:
        """A connection that only reads, and waits for who writes."""
        waiting = self.where.config().sqlite_busy_timeout
        return sqlite3.connect(f"{Path(self.path).as_uri()}?mode=ro", uri=True, timeout=waiting)


@dataclass(frozen=True)
class S3Place(SqlitePlace):
    """An object as it was when it was planned to be read."""

    etag: str = ""
    version: str | None = None

    def look(self, work: Work[T]) -> T:
        engine = create_engine("sqlite://", creator=self.connect, poolclass=NullPool)
        with engine.connect() as connection:
            schema.check(connection)
            found = work(connection)
        settle()
        return found

    def connect(self) -> sqlite3.Connection:
        # It never changes, whatever its header says of a log beside it.
        path = self._downloaded()
        return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)

    def _downloaded(self) -> Path:
        settings = S3Settings.of(self.where.config())
        path = _cached(settings, self.etag)
        if not path.exists():
            _store(path, _pinned(settings, self.etag, self.version))
        return path


def place_of(where: Where) -> Place:
    """The place that a URL names, as it is now."""
    config = where.config()
    place: Place = PLACES[config.url.get_backend_name()](where, config)
    return place


def _sqlite(where: Where, config: Config) -> Place:
    path = config.url.database
    if path in (None, "", ":memory:"):
        raise InvalidArgument("url", "a database in memory is seen by one process only")
    # Executors may have been started elsewhere.
    path = str(Path(str(path)).resolve())
    return SqlitePlace(replace(where, url=f"sqlite:///{path}") if where.url else where, path)


def _s3(where: Where, config: Config) -> Place:
    from pgqrs.stores.objects import RemoteObject

    settings = S3Settings.of(config)
    found = RemoteObject(settings).get(unless=None)
    if found is None or found.etag is None:
        raise InvalidArgument("url", f"there is no s3://{settings.bucket}/{settings.key}")
    path = _cached(settings, found.etag)
    _sweep(path.parent)
    _store(path, found.data)
    return S3Place(where, str(path), found.etag, found.version)


PLACES: dict[str, Any] = {
    "postgresql": lambda where, _config: PostgresPlace(where),
    "sqlite": _sqlite,
    "s3": _s3,
}
"""By the name URLs start with."""


def _pinned(settings: S3Settings, etag: str, version: str | None) -> bytes:
    from pgqrs.stores.objects import Lost, RemoteObject

    try:
        return RemoteObject(settings).get_pinned(etag=etag, version=version).data
    except Lost as exc:
        raise ConflictError(
            f"s3://{settings.bucket}/{settings.key} was replaced while it was being read; read it "
            "again, or let the bucket keep versions"
        ) from exc


def _cached(settings: S3Settings, etag: str) -> Path:
    """The file for this state of an object. Everybody has a directory of their own."""
    name = hashlib.sha256(f"{settings.bucket}/{settings.key}/{etag}".encode()).hexdigest()
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"pgqrs-spark-{user}" / f"{name[:32]}.sqlite"


def _store(path: Path, data: bytes) -> None:
    """Complete or not at all; another process may be doing the same."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(data)
    Path(draft.name).replace(path)


def _sweep(directory: Path) -> None:
    for path in directory.glob("*") if directory.is_dir() else ():
        if time.time() - path.stat().st_mtime > KEPT:
            path.unlink(missing_ok=True)
