"""A write in bulk: begun by one, stored part by part by many, ended by one. See `repositories.writes`.

A `Bulk` says which write; it is pickled and sent to whoever stores parts, each of which opens the store
for itself. Where rows can be streamed they are, while they are being made.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, Table
from sqlalchemy.exc import IntegrityError

from pgqrs.errors import InvalidArgument, WriteMismatch
from pgqrs.models import messages, staged
from pgqrs.repositories import writes
from pgqrs.repositories.writes import NAMELESS, UNSTAGED, Batch, Part, Settings, Write
from pgqrs.spark import binary
from pgqrs.spark.options import Where
from pgqrs.spark.rows import TIME, Limits, checked
from pgqrs.spark.workers import settle
from pgqrs.stores import Database, open_database
from pgqrs.types import WriteMode

ORDINARY = Settings()
FOLDED, FOLDED_BYTES = 1000, 4 * 1024 * 1024
"""Messages that are staged as one row, and about how many bytes."""


PORTION, UPLOADED = 4 * 1024 * 1024, 256 * 1024 * 1024
"""Bytes that are put into one transaction where nothing can be streamed; the second where each is an
upload.
"""


class _TooLate(Exception):
    """The write was finished meanwhile: what this attempt stored is not to be committed."""


class _TakenPart(Exception):
    """Another attempt has stored this part."""


@dataclass(frozen=True)
class Bulk:
    """A write, as everybody who takes part in it knows it."""

    where: Where
    queue: str
    write_id: str
    mode: WriteMode = WriteMode.STAGED
    parts: int | None = None
    settings: Settings = ORDINARY
    batch: Batch | None = None
    """Which batch of a stream this is, if it is one."""
    write: Write | None = None
    """Known once it was begun."""

    def begin(self) -> Bulk:
        """Begin, or go on with what was begun under this id."""
        with _opened(self.where) as database:

            def work(connection: Connection) -> Write:
                now = database.now()
                writes.sweep(connection, now=now)
                return writes.begin(
                    connection,
                    self.write_id,
                    self.queue,
                    mode=self.mode,
                    parts=self.parts,
                    now=now,
                    batch=self.batch,
                )

            return replace(self, write=database.write(work, repeatable=True))

    @property
    def is_finished(self) -> bool:
        """Whether there was nothing left to do when it was begun."""
        return self.begun.finished_at is not None

    @property
    def begun(self) -> Write:
        """The write."""
        if self.write is None:
            raise WriteMismatch(self.write_id, "was not begun")
        return self.write

    def store(self, part: int, batches: Iterable[Any]) -> Part:
        """Store a part: Arrow batches with the columns of messages."""
        if self.is_finished:
            return Part(part, UNSTAGED, 0)
        if self.parts is not None and part >= self.parts:
            raise WriteMismatch(self.write_id, f"has {self.parts} parts, and this is {part + 1}")
        with _opened(self.where) as database:
            config = database.config
            limits = Limits(config.max_payload_bytes, config.max_payload_depth)
            # JSON is parsed by databases that have a type for it, which are those that can copy.
            ready = (checked(b, limits, parsed_later=database.supports_copy) for b in batches)
            kind = STORING[self.mode, database.supports_copy]
            stored: Part = kind(self, database).store(part, ready)
            return stored

    def publish(self, parts: Sequence[Part]) -> int:
        """End it: what these attempts have stored is in the queue. Returns how many messages."""
        if self.is_finished:
            return self.begun.message_ct or 0
        with _opened(self.where) as database:
            ordered = sorted(parts)

            def work(connection: Connection) -> writes.Published:
                now = database.now()
                if self.mode is WriteMode.PART_KEY:
                    total = writes.finish_parts(
                        connection, self.write_id, parts=len(ordered), now=now
                    )
                    return writes.Published(total, False)
                return writes.publish(
                    connection,
                    self.write_id,
                    self.queue,
                    [part.attempt for part in ordered],
                    settings=self.settings,
                    now=now,
                    batch=self.batch,
                )

            published = database.write(work, repeatable=True)
            database.ring(self.queue, elsewhere=published.waited_for)
            return published.message_ct

    def discard(self, parts: Sequence[Part]) -> None:
        """Forget what these attempts have staged."""
        attempts = [part.attempt for part in parts]
        with _opened(self.where) as database:
            database.write(
                lambda connection: writes.discard(connection, self.write_id, attempts),
                repeatable=True,
            )


def new_write_id() -> str:
    """An id for a write that nobody will want to repeat."""
    return f"{NAMELESS}{secrets.token_hex(16)}"


@contextmanager
def _opened(where: Where) -> Iterator[Database]:
    database = open_database(where.config())
    try:
        database.open()
        yield database
    finally:
        database.close()
    settle()


class _Storing:
    """Stores a part in one transaction."""

    def __init__(self, bulk: Bulk, database: Database) -> None:
        self.bulk = bulk
        self.database = database

    @property
    def now(self) -> datetime | None:
        """The time, asked for inside of a work."""
        return self.database.now()

    def record(self, connection: Connection, part: Part) -> None:
        """The last thing in the transaction."""
        try:
            if not writes.record(connection, self.bulk.write_id, part, now=self.now):
                raise _TooLate
        except IntegrityError as exc:
            raise _TakenPart from exc


class _StreamStaged(_Storing):
    """Staged, by streaming."""

    def store(self, number: int, batches: Iterator[Any]) -> Part:
        attempt = new_attempt()

        def work(connection: Connection) -> Part:
            counted = _Counted(_pieces(batches))
            _stream(
                connection,
                staged,
                counted,
                lambda batch, start: _numbered(batch, attempt, start),
                binary.folded,
            )
            part = Part(number, attempt, counted.rows)
            self.record(connection, part)
            return part

        try:
            return self.database.write_once(work)
        except _TooLate:
            return Part(number, UNSTAGED, 0)


class _Putting(_Storing):
    """Stages a part where nothing can be streamed: some batches in a transaction of their own, and the
    last ones in the one that ends the part.
    """

    def put_all(self, number: int, batches: Iterator[Any], attempt: int) -> tuple[int, list[Any]]:
        """Stage all batches but the last ones. Returns how many rows, and these last ones."""
        stored, last = 0, list[Any]()
        for some in _portions(batches, self.portion):
            if last:
                # Not to be repeated: rows that are stored twice would be published twice.
                self.database.write(partial(self.put_some, number, attempt, last, stored))
                stored += _size(last)
            last = some
        return stored, last

    @property
    def portion(self) -> int:
        """Bytes of a transaction. Of a store in a bucket each is an upload."""
        return PORTION if self.database.remote is None else UPLOADED

    def put_some(
        self, number: int, attempt: int, some: list[Any], start: int, connection: Connection
    ) -> None:
        if start == 0:  # whoever sweeps must know whose rows these are
            self.record(connection, Part(number, attempt, 0))
        self.put(connection, attempt, some, start)

    def put(self, connection: Connection, attempt: int, some: list[Any], start: int) -> None:
        for batch in some:
            writes.put(connection, _rows(batch, attempt, start))
            start += batch.num_rows


class _PutStaged(_Putting):
    """Staged, where nothing can be streamed."""

    def store(self, number: int, batches: Iterator[Any]) -> Part:
        attempt = new_attempt()

        def work(connection: Connection) -> Part:
            there = writes.find_part(connection, self.bulk.write_id, number, attempt=attempt)
            if there != part:
                self.put(connection, attempt, last, stored)
                if stored:
                    writes.drop_part(connection, self.bulk.write_id, part)
                self.record(connection, part)
            return part

        try:
            stored, last = self.put_all(number, batches, attempt)
            part = Part(number, attempt, stored + _size(last))
            return self.database.write(work, repeatable=True)
        except _TooLate:
            return Part(number, UNSTAGED, 0)


class _ByKey(_Storing):
    """A part that goes to the queue at once, unless it is there already: then it must be the same."""

    def store(self, number: int, batches: Iterator[Any]) -> Part:
        there = self.find(number)
        if there is None:
            try:
                return self.add(number, batches)
            except _TooLate:
                return Part(number, UNSTAGED, 0)
        return self.compare(there, digest_of(batches))

    def find(self, number: int) -> Part | None:
        return self.database.read(
            lambda connection: writes.find_part(connection, self.bulk.write_id, number)
        )

    def compare(self, there: Part, digest: str) -> Part:
        if there.digest != digest:
            raise WriteMismatch(
                self.bulk.write_id,
                f"has other messages in part {there.part}: a write that is repeated must have the "
                "same messages in the same parts and order; or write in the mode staged",
            )
        return there

    def add(self, number: int, batches: Iterator[Any]) -> Part:
        raise NotImplementedError


class _StreamByKey(_ByKey):
    """The same, by streaming into the queue."""

    def add(self, number: int, batches: Iterator[Any]) -> Part:
        digest = _Digest()

        def work(connection: Connection) -> tuple[Part, bool]:
            waited_for = writes.is_waited_for(
                connection, self.bulk.begun, self.bulk.queue, now=self.now
            )
            now = writes.time_of(connection, self.now)
            counted = _Counted(digest.over(batches))
            _stream(
                connection,
                messages,
                counted,
                lambda batch, _: self._complete(batch, now),
                binary.rows,
            )
            part = Part(number, UNSTAGED, counted.rows, digest.value)
            self.record(connection, part)
            return part, waited_for

        try:
            part, waited_for = self.database.write_once(work)
        except _TakenPart:
            # Of a twin that was quicker. It has committed, or its row would not be in the way.
            there = self.find(number)
            if there is None:
                raise
            return self.compare(there, digest.value)
        self.database.ring(self.bulk.queue, elsewhere=waited_for)
        return part

    def _complete(self, batch: Any, now: datetime) -> dict[str, Any]:
        """A batch with all columns of messages that have no default."""
        if "group_key" in batch.schema.names:
            raise InvalidArgument("group", "messages with groups are written in the mode staged")
        bound = writes.times(self.bulk.settings, now=now)
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        eta, priority = columns.pop("eta", None), columns.pop("priority", None)
        expires = columns.pop("expires_at", None)
        at_once = pa.scalar(bound["at_once"])
        same = {
            "queue_id": pa.scalar(self.bulk.begun.queue_id),
            "enqueued_at": pa.scalar(now, TIME),
            "read_ct": pa.scalar(0),
            "released_ct": pa.scalar(0),
        }
        return {
            **same,
            "ready": at_once if eta is None else pc.and_(at_once, pc.is_null(eta)),
            "vt": _or_else(eta, pa.scalar(bound["vt_at"], TIME)),
            "priority": _or_else(priority, pa.scalar(bound["priority"], pa.int32())),
            "expires_at": _or_else(expires, pa.scalar(bound["expires_at"], TIME)),
            **columns,
        }


class _PutByKey(_ByKey, _Putting):
    """The same, where nothing can be streamed."""

    def add(self, number: int, batches: Iterator[Any]) -> Part:
        digest, attempt = _Digest(), new_attempt()
        stored, last = self.put_all(number, digest.over(batches), attempt)
        part = Part(number, UNSTAGED, stored + _size(last), digest.value)

        def work(connection: Connection) -> bool | None:
            there = writes.find_part(connection, self.bulk.write_id, number)
            if there is not None:
                self.compare(there, digest.value)
                writes.discard(connection, self.bulk.write_id, [attempt])
                return False
            self.put(connection, attempt, last, stored)
            added = writes.add_part(
                connection,
                self.bulk.begun,
                self.bulk.queue,
                part,
                staged_as=attempt,
                settings=self.bulk.settings,
                now=self.now,
            )
            return None if added is None else added.waited_for

        waited_for = self.database.write(work, repeatable=True)
        if waited_for is None:
            raise _TooLate
        self.database.ring(self.bulk.queue, elsewhere=waited_for)
        return part


STORING: dict[tuple[WriteMode, bool], Any] = {
    (WriteMode.STAGED, True): _StreamStaged,
    (WriteMode.STAGED, False): _PutStaged,
    (WriteMode.PART_KEY, True): _StreamByKey,
    (WriteMode.PART_KEY, False): _PutByKey,
}
"""By the mode, and by whether the database can be streamed to."""


def new_attempt() -> int:
    """A number that no other attempt has, at whatever."""
    return secrets.randbits(62) + 1


class _Counted:
    """Batches, counted as they pass."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.rows = 0
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield batch
            self.rows += batch.num_rows


class _Digest:
    """What tells rows from others, worked out as they pass. In how many batches they come does not
    matter: of each column the values, their lengths, and where there are none, are hashed one
    after the other.
    """

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, str], Any] = {}

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = zip(batch.schema.names, batch.columns, strict=True)
            for name, column in columns if batch.num_rows else ():
                self._update(name, "there", column.is_valid().cast(pa.int8()))
                if pa.types.is_string(column.type):
                    full = pc.fill_null(column.cast(pa.binary()), b"")
                    self._update(name, "length", pc.binary_length(full))
                    self._hash(name, "text").update(binary.data(full))
                else:
                    self._update(name, "number", pc.fill_null(column.cast(pa.int64()), 0))
            yield batch

    def _update(self, name: str, what: str, numbers: Any) -> None:
        self._hash(name, what).update(np.ascontiguousarray(numbers.to_numpy(zero_copy_only=False)))

    def _hash(self, name: str, what: str) -> Any:
        return self._hashes.setdefault((name, what), hashlib.blake2b(digest_size=16))

    @property
    def value(self) -> str:
        whole = hashlib.blake2b(digest_size=16)
        for key, found in sorted(self._hashes.items()):
            whole.update(f"{key}{found.hexdigest()}".encode())
        return whole.hexdigest()


def digest_of(batches: Iterable[Any]) -> str:
    """What tells these batches from others."""
    digest = _Digest()
    for _ in digest.over(batches):
        pass
    return digest.value


def _or_else(given: Any, default: Any) -> Any:
    return default if given is None else pc.coalesce(given, default)


def _pieces(batches: Iterable[Any]) -> Iterator[Any]:
    """The same in batches that are not too large for one row."""
    for batch in batches:
        heavy = -(-batch.nbytes // FOLDED_BYTES)
        size = max(1, min(FOLDED, batch.num_rows // max(heavy, 1)))
        for start in range(0, batch.num_rows, size):
            yield batch.slice(start, size)


def _numbered(batch: Any, attempt: int, start: int) -> dict[str, Any]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    return {"attempt": pa.scalar(attempt), "position": pa.scalar(start, pa.int32()), **columns}


def _stream(
    connection: Connection, table: Table, batches: _Counted, complete: Any, encode: Any
) -> None:
    """Batches to a table, each with the columns that `complete` gives it, as `encode` has them."""
    iterator = iter(batches)
    batch = next(iterator, None)
    if batch is None:
        return

    def pieces() -> Iterator[memoryview]:
        nonlocal batch
        while batch is not None:
            yield from encode(complete(batch, batches.rows), table)
            batch = next(iterator, None)

    writes.copy(connection, table, list(complete(batch.slice(0, 0), 0)), pieces())


def _rows(batch: Any, attempt: int, start: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    for position, row in enumerate(rows, start):
        row["attempt"], row["position"] = attempt, position
    return rows


def _size(batches: Iterable[Any]) -> int:
    return sum(batch.num_rows for batch in batches)


def _portions(batches: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Batches, as many at a time as have about so many bytes."""
    some: list[Any] = []
    for batch in batches:
        some.append(batch)
        if sum(each.nbytes for each in some) >= most:
            yield some
            some = []
    if some:
        yield some
