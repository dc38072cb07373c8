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

from sqlalchemy import Connection, Table

from pgqrs.errors import CopyMismatch, CopyRefused, InvalidArgument, SeveralShards
from pgqrs.repositories import moving, places
from pgqrs.repositories.moving import Fingerprint, Row
from pgqrs.repositories.places import Kin
from pgqrs.stores import Database

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
    """A function over a connection, for one of the two."""

    there: bool
    changes: bool
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, database: Database) -> Any:
        """Do it; in a store of several shards, on each of them as the function needs it."""
        if self.changes:
            database.forget_store_id()
        if is_spread(database):
            return _OVER_SHARDS[self.function](self, database)
        return self.on(database)

    def on(self, database: Database) -> Any:
        """Do it on one database."""
        if self.changes:
            return database.write(self._work, repeatable=True)
        return database.read(self._work)

    def each(self, database: Database) -> list[Any]:
        """Do it on each shard of a store."""
        return [self.on(shard) for shard in database.shards]

    def _work(self, connection: Connection) -> Any:
        return self.function(connection, *self.arguments, **self.options)


def is_spread(database: Database) -> bool:
    """True for the database of a store of several shards."""
    return database.shards[0] is not database


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


def steps(progress: Progress | None, *, spread: bool) -> Steps:
    """Copy everything that is here to there; `spread` over its shards, if it has several."""
    tables, total = moving.tables(), 0
    if spread:
        highest = 0
        for table in moving.counted_tables():
            highest = max(highest, (yield _here(moving.counter, table)))
        yield _change(make_room, highest)
    for table in tables:
        total += yield _here(moving.count, table)
    meter = _Meter(progress, 3 * total)
    for table in tables:
        after = yield from _resume(table, meter)
        yield from _copy(table, after, meter, spread=spread)
    yield from _go_on_numbering()
    # Whoever holds a message of the one may end it in the other.
    yield _change(moving.take_over, (yield _here(moving.made_at)))
    copied: list[CopiedTable] = []
    for table in tables:
        copied += yield from _compare(table, meter)
    return copied


def _here(function: Callable[..., Any], *args: Any, **options: Any) -> Step:
    return Step(False, False, function, args, options)


def _there(function: Callable[..., Any], *args: Any, **options: Any) -> Step:
    return Step(True, False, function, args, options)


def _change(function: Callable[..., Any], *args: Any) -> Step:
    return Step(True, True, function, args, {})


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


def _copy(
    table: Table, after: Row | None, meter: _Meter, *, spread: bool
) -> Generator[Step, Any, None]:
    while rows := (yield _here(moving.page, table, after=after, limit=PAGE)):
        if spread:
            yield _change(put_spread, table, rows, (yield _here(places.queues_of, table, rows)))
        else:
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


# Over the shards of a store: see `pgqrs.stores.placement`


def make_room(connection: Connection, highest: int) -> None:
    """Give only ids above this one, which the rows that come have. Only in shards."""
    raise AssertionError("a store of one database numbers its rows as the other one did")


def put_spread(connection: Connection, table: Table, rows: list[Row], queues: list[Kin]) -> None:
    """Add rows, each on the shard of its queue."""
    raise AssertionError("a store of one database has no shards")


def _make_room(step: Step, database: Database) -> None:
    for shard in database.shards:
        shard.move_above(*step.arguments)


def _put_spread(step: Step, database: Database) -> None:
    table, rows, queues = step.arguments
    of_shard: dict[Database, list[Row]] = {}
    for row, kin in zip(rows, queues, strict=True):
        found = {database.of_queue(queue): queue for queue in kin}
        if len(found) > 1:
            raise SeveralShards(
                "copy_to",
                f"runs of the queues {' and '.join(map(repr, found.values()))} belong to each other; "
                "place these queues together, with shard_by=group, or purge the runs",
            )
        shard = next(iter(found), database.shards[0])
        of_shard.setdefault(shard, []).append(row)
    for shard, own in of_shard.items():
        Step(True, True, moving.put, (table, own), {}).on(shard)


def _first_page(step: Step, database: Database) -> list[Row]:
    (table,), limit = step.arguments, step.options["limit"]
    rows = [row for page in step.each(database) for row in page]
    return sorted(rows, key=lambda row: moving.key_of(table, row))[:limit]


def _all_rows(step: Step, database: Database) -> list[Row]:
    return [row for rows in step.each(database) for row in rows]


def _known_queues(step: Step, database: Database) -> list[Kin]:
    """What all shards together know."""
    found = zip(*step.each(database), strict=True)
    return [tuple(queue for kin in kins for queue in kin) for kins in found]


_OVER_SHARDS: dict[Callable[..., Any], Callable[[Step, Database], Any]] = {
    moving.count: lambda step, database: sum(step.each(database)),
    moving.page: _first_page,
    moving.same: _all_rows,
    moving.last_key: lambda _step, _database: None,  # does not say how far each of them is filled
    moving.counter: lambda step, database: max(step.each(database)),
    moving.set_counter: lambda _step, _database: None,  # each goes on in a range of its own
    moving.made_at: lambda step, database: step.on(database.shards[0]),
    moving.take_over: lambda step, database: step.each(database),
    places.queues_of: _known_queues,
    make_room: _make_room,
    put_spread: _put_spread,
}
"""What becomes of a function where there are several shards."""
