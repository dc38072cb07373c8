"""Where a process keeps its local copies of one object: a directory that no other process uses.

Below the cache directory each object has a directory, and in it there are numbered *slots*. A
process takes the first slot that is free and holds its lock for as long as it lives; the lock is
SQLite's, which works on every system and ends with the process. Whoever finds a slot whose owner
died with writes that were not uploaded takes that one first.

`base.json` says what the copy in a slot is based on. It is replaced atomically, and says that there
are local writes before the first of them is committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs

from pgqrs.config import S3Settings
from pgqrs.errors import InvalidConfig

MEMORY = ":memory:"
MOST_SLOTS = 1000


@dataclass(frozen=True, slots=True)
class Base:
    """What a local copy is based on."""

    known: bool = False
    """Whether anything was downloaded, or found missing, yet."""
    etag: str | None = None
    dirty: bool = False
    """Whether there may be local writes that were not uploaded."""
    upload: str | None = None
    """The nonce of the last upload that the object is known to contain: the copy contains it, too."""
    pending: tuple[str, ...] = ()
    """The nonces of uploads from this copy that were begun since, and may have been applied."""

    @classmethod
    def parse(cls, text: str) -> Base:
        """What a file says; one that says nothing of use may have been about local writes."""
        try:
            said = json.loads(text)
            known = {name: said[name] for name in said.keys() & set(cls.__slots__)}
            return cls(**known | {"pending": tuple(known.get("pending", ()))})
        except (ValueError, TypeError, AttributeError):
            return cls(dirty=True)


class Slot:
    """The place for the local copies of one store, on disk or in memory."""

    def __init__(self, home: Path, directory: Path | None, lock: sqlite3.Connection | None) -> None:
        self._home = home
        self._lock = lock
        self._changing = threading.Lock()
        self.directory = directory
        self.base = self._read() or Base()

    @classmethod
    def take(cls, settings: S3Settings) -> Slot:
        """A slot of one's own for this object."""
        home = _home(settings)
        if settings.cache == MEMORY:
            return cls(home, None, None)
        try:
            return _free_slot(home)
        except OSError as exc:
            raise InvalidConfig(f"cannot keep copies in {home}: {exc}; set s3_cache") from exc

    def path(self, name: str) -> str:
        """Where a database of this name is, for a URL."""
        return MEMORY if self.directory is None else str(self.directory / f"{name}.sqlite")

    def change(self, *, durably: bool = True, **changes: Any) -> None:
        """Remember something else about the base; `durably` also after a crash."""
        with self._changing:
            self.base = replace(self.base, **changes)
            if self.directory is not None and durably:
                self._write(json.dumps(asdict(self.base)))

    def forget(self) -> None:
        """What is here is nothing to start from."""
        self.base = Base()
        if self.directory is not None:
            self._file.unlink(missing_ok=True)

    def discard(self, *names: str) -> None:
        """Delete databases that are of no more use."""
        if self.directory is not None:
            for name in names:
                for path in self.directory.glob(f"{name}.sqlite*"):
                    path.unlink(missing_ok=True)

    def discard_incoming(self) -> None:
        """Delete what a process that died was downloading."""
        if self.directory is not None:
            for path in self.directory.glob("incoming-*"):
                path.unlink(missing_ok=True)

    def place_aside(self) -> Path:
        """Where to keep a database that cannot be uploaded, under a name of its own."""
        directory = self._home / "set-aside"
        _create_private(self._home)
        _create_private(directory)
        return directory / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}.sqlite"

    def move_aside(self, name: str) -> Path | None:
        """Keep the files of a database that cannot even be opened. None if there are none."""
        if self.directory is None:
            return None
        path = self.place_aside()
        kept = None
        for suffix in ("", "-wal", "-journal"):
            found = self.directory / f"{name}.sqlite{suffix}"
            if found.exists() and found.stat().st_size:
                kept = path
                found.replace(f"{path}{suffix}")
        return kept

    def release(self) -> None:
        """Let another process have it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    @property
    def _file(self) -> Path:
        assert self.directory is not None
        return self.directory / "base.json"

    def _read(self) -> Base | None:
        if self.directory is None:
            return None
        try:
            return Base.parse(self._file.read_text(errors="replace"))
        except FileNotFoundError:
            return None

    def _write(self, text: str) -> None:
        fresh = self._file.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)


def _home(settings: S3Settings) -> Path:
    """The directory for everything about one object."""
    if settings.cache in (None, MEMORY):
        caches = Path(platformdirs.user_cache_dir("pgqrs", appauthor=False)) / "s3"
    else:
        caches = Path(str(settings.cache)).expanduser().absolute()
    name = f"{settings.endpoint_url or ''} {settings.bucket} {settings.key}"
    return caches / f"{settings.bucket}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _free_slot(home: Path) -> Slot:
    """The first free slot with something left behind, or else the first free one."""
    chosen: Slot | None = None
    for directory in sorted(home.glob("[0-9]*")):
        slot = _taken(home, directory)
        if slot is None:
            continue
        if chosen is None or (slot.base.dirty and not chosen.base.dirty):
            chosen, slot = slot, chosen
        if slot is not None:
            slot.release()
    return chosen or _new_slot(home)


def _new_slot(home: Path) -> Slot:
    _create_private(home)
    for number in range(MOST_SLOTS):
        directory = home / f"{number:03}"
        _create_private(directory)
        if slot := _taken(home, directory):
            return slot
    raise OSError(f"{MOST_SLOTS} processes use this object already")


def _create_private(directory: Path) -> None:
    """Create a directory that its owner alone can enter, as the bucket protects what is in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # one that was created by an earlier version, or by another user
        directory.chmod(0o700)


def _taken(home: Path, directory: Path) -> Slot | None:
    lock = _locked(directory)
    return None if lock is None else Slot(home, directory, lock)


def _locked(directory: Path) -> sqlite3.Connection | None:
    """The lock of a slot, or None if somebody has it."""
    path = directory / "lock"
    try:
        return _lock(path)
    except sqlite3.DatabaseError as exc:
        code = exc.sqlite_errorcode & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return None
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            path.unlink(missing_ok=True)  # it holds nothing but the lock
            return _locked(directory)
        raise OSError(f"{path}: {exc}") from exc


def _lock(path: Path) -> sqlite3.Connection:
    lock = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except BaseException:
        lock.close()
        raise
    return lock
