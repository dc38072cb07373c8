"""Moving house: everything from one database to another, of whatever kind.

In pages, each its own transaction, in the order of primary keys, with their ids. If it is
interrupted, however hard, it is called again and goes on where it was: what is in the target already
must be the same in the source, row by row, or the target holds something else and is refused. At
the end numbering goes on where it was, and both sides are read once more and compared.

Two databases are at work, and under asyncio each is reached in a way of its own. So moving is a
generator of *steps*, works for one side or the other, which sync and async code run as they can.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Table

from pgqrs.errors import CopyMismatch, CopyRefused, InvalidArgument
from pgqrs.repositories import moving
from pgqrs.repositories.moving import Fingerprint, Row
from pgqrs.stores import Database, Work

PAGE = 500


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far copying has come: rows that were copied or compared, of all there are."""

    doing: str
    table: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that is the same on both sides now."""

    table: str
    rows: int
    checksum: str


Progress = Callable[[CopyProgress], object]


class Opened(Protocol):
    """A store: `Store` for an `Admin`, `AsyncStore` for an `AsyncAdmin`."""

    _database: Database


class Step(NamedTuple):
    """A work for one of the two."""

    there: bool
    changes: bool
    work: Work[Any]

    def run(self, database: Database) -> Any:
        """Do it."""
        if self.changes:
            database.forget_store_id()
            return database.write(self.work, repeatable=True)
        return database.read(self.work)


Steps = Generator[Step, Any, list[CopiedTable]]


def run(steps: Steps, here: Database, there: Database) -> list[CopiedTable]:
    """All steps, one after the other."""
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            copied: list[CopiedTable] = end.value
            return copied
        answer = step.run(there if step.there else here)


def sync_database(store: Opened) -> Database:
    """The database of a store, if sync code can reach it."""
    if not isinstance(getattr(store, "_database", None), Database) or hasattr(store, "_bridge"):
        raise InvalidArgument("store", "expected a Store; AsyncAdmin copies to an AsyncStore")
    return store._database


class _Meter:
    """Tells whoever wants to know. Every row is looked at three times: moved, and twice compared."""

    def __init__(self, tell: Progress | None, total: int) -> None:
        self._tell = tell
        self._done, self._total = 0, total

    def add(self, doing: str, table: Table, rows: int) -> None:
        self._done += rows
        if self._tell is not None:
            self._tell(CopyProgress(doing, table.name, min(self._done, self._total), self._total))


def steps(progress: Progress | None) -> Steps:
    """Copy everything that is here to there."""
    tables, total = moving.tables(), 0
    for table in tables:
        total += yield _here(moving.count, table)
    meter = _Meter(progress, 3 * total)
    for table in tables:
        after = yield from _resume(table, meter)
        yield from _copy(table, after, meter)
    yield from _go_on_numbering()
    # Whoever holds a message of the one may end it in the other.
    yield _change(moving.take_over, (yield _here(moving.made_at)))
    copied: list[CopiedTable] = []
    for table in tables:
        copied += yield from _compare(table, meter)
    return copied


def _here(function: Callable[..., Any], *args: Any, **options: Any) -> Step:
    return Step(False, False, lambda connection: function(connection, *args, **options))


def _there(function: Callable[..., Any], *args: Any, **options: Any) -> Step:
    return Step(True, False, lambda connection: function(connection, *args, **options))


def _change(function: Callable[..., Any], *args: Any) -> Step:
    return Step(True, True, lambda connection: function(connection, *args))


def _resume(table: Table, meter: _Meter) -> Generator[Step, Any, Row | None]:
    """The key to go on after, when all that is there already is the same here."""
    after: Row | None = None
    while theirs := (yield _there(moving.page, table, after=after, limit=PAGE)):
        ours = yield _here(moving.same, table, theirs)
        if moving.digests(table, theirs) != moving.digests(table, ours):
            raise CopyRefused(table.name)
        after = moving.key_of(table, theirs[-1])
        meter.add("looking at", table, 0)
    if after is None:
        return None
    last: Row | None = yield _there(moving.last_key, table)
    if last is not None:
        meter.add("copying", table, (yield _there(moving.count, table)))
    return last


def _copy(table: Table, after: Row | None, meter: _Meter) -> Generator[Step, Any, None]:
    while rows := (yield _here(moving.page, table, after=after, limit=PAGE)):
        yield _change(moving.put, table, rows)
        after = moving.key_of(table, rows[-1])
        meter.add("copying", table, len(rows))


def _go_on_numbering() -> Generator[Step, Any, None]:
    for table in moving.counted_tables():
        ours = yield _here(moving.counter, table)
        theirs = yield _there(moving.counter, table)
        yield _change(moving.set_counter, table, max(ours, theirs))


def _compare(table: Table, meter: _Meter) -> Generator[Step, Any, list[CopiedTable]]:
    ours = yield from _fingerprint(table, _here, meter)
    theirs = yield from _fingerprint(table, _there, meter)
    if ours != theirs:
        raise CopyMismatch(table.name, ours.rows, theirs.rows)
    return [CopiedTable(table.name, ours.rows, f"{ours.checksum:032x}")]


def _fingerprint(
    table: Table, side: Callable[..., Step], meter: _Meter
) -> Generator[Step, Any, Fingerprint]:
    found, after = Fingerprint(0, 0), None
    while rows := (yield side(moving.page, table, after=after, limit=PAGE)):
        found = found.add(table, rows)
        after = moving.key_of(table, rows[-1])
        meter.add("comparing", table, len(rows))
    return found
