"""Streams of messages: claimed batch by batch, or read along.

Spark asks for the latest offset, writes it down, asks for the rows up to there, works on them, and
writes down that they are done. What it asks for is answered by one process on the driver; rows are read
by tasks, each over a connection of its own.

*Claiming*: an offset is the number of a batch, claimed before Spark hears of it and there until it is
acknowledged (see `pgqrs.streams`). Spark asks what comes after a batch only when that batch is done.
*Reading along*: an offset is an id, up to which everything is there that ever will be (`pgqrs.tails`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructField, StructType
from sqlalchemy import Connection

from pgqrs.errors import InvalidArgument
from pgqrs.repositories import scans, streams, tails
from pgqrs.repositories.expressions import Holds
from pgqrs.repositories.scans import Bounds, Kind
from pgqrs.spark.options import Options, Where
from pgqrs.spark.places import place_of
from pgqrs.spark.reading import TYPES, ranges
from pgqrs.store import Store
from pgqrs.streams import LARGEST, Stream, batches
from pgqrs.tails import ALL, Tail

OPTIONS = ("mode", "queue", "stream", "columns", "maxRowsPerBatch", "numPartitions", "startingId")
MODES = ("claim", "tail")
COLUMNS = {
    "id": Kind.LONG,
    "queue": Kind.TEXT,
    "priority": Kind.INT,
    "enqueued_at": Kind.TIME,
    "expires_at": Kind.TIME,
    "producer_worker_id": Kind.LONG,
    "dedup_key": Kind.TEXT,
    "group_key": Kind.TEXT,
    "codec": Kind.TEXT,
    "headers": Kind.JSON,
    "payload": Kind.JSON,
}
"""What of a message never changes, so that a batch that is read again is the same."""
MAX_ROWS = {"claim": 10_000, "tail": 100_000}
FEW = 1000
"""Messages that are not worth a task of their own, unless one is asked for."""
AT_ONCE = 20_000
"""Messages of one task: their ids are part of its statement."""
PATIENCE = 30.0
"""Seconds to wait for those who are writing, when everything that is there now is wanted."""


@dataclass(frozen=True)
class Wanted:
    """What is to be streamed, as the options say."""

    where: Where
    mode: str
    queue: str
    stream: str | None
    columns: tuple[str, ...]
    max_rows: int
    partitions: int | None
    start: str
    cores: int

    @classmethod
    def of(cls, given: Mapping[str, str], cores: int | None = None) -> Wanted:
        """The options of a stream."""
        options = Options(given, OPTIONS)
        mode = options.required("mode")
        options.choice("mode", MODES, mode)
        columns = options.words("columns") or tuple(COLUMNS)
        for name in columns:
            _known(name, "columns")
        return cls(
            options.where(),
            mode,
            options.required("queue"),
            options.required("stream") if mode == "claim" else options.text("stream"),
            columns,
            options.whole("maxRowsPerBatch", low=1, high=LARGEST) or MAX_ROWS[mode],
            options.whole("numPartitions", low=1, high=100_000),
            options.text("startingId") or "earliest",
            cores or os.cpu_count() or 1,
        )

    @property
    def schema(self) -> StructType:
        """The columns in Spark's types."""
        return StructType([StructField(name, TYPES[COLUMNS[name]]) for name in self.columns])

    def only(self, schema: StructType) -> Wanted:
        """With the columns of this schema only."""
        for field in schema.fields:
            expected = TYPES[_known(field.name, "schema")]
            if field.dataType != expected:
                raise InvalidArgument("schema", f"{field.name} is {expected.simpleString()}")
        return replace(self, columns=tuple(schema.fieldNames()))


def _known(name: str, option: str) -> Kind:
    if name not in COLUMNS:
        raise InvalidArgument(option, f"a stream has no {name!r}; there are {', '.join(COLUMNS)}")
    return COLUMNS[name]


def is_stream(options: Mapping[str, str]) -> bool:
    """Whether these are the options of a stream: a table has no mode."""
    return any(name.lower() == "mode" for name in options)


def claimed_reader(
    options: Mapping[str, str], schema: StructType, cores: int | None = None
) -> ClaimedReader:
    """Reads what a stream has claimed, as a table."""
    wanted = Wanted.of(options, cores).only(schema)
    if wanted.mode != "claim":
        raise InvalidArgument("mode", f"{wanted.mode} is for readStream")
    return ClaimedReader(wanted)


def stream_reader(
    options: Mapping[str, str], schema: StructType, cores: int | None = None
) -> StreamReader:
    """Reads a stream."""
    wanted = Wanted.of(options, cores).only(schema)
    return ClaimReader(wanted) if wanted.mode == "claim" else TailReader(wanted)


class Part(InputPartition):
    """The statement that reads some rows of a batch. Without one there is nothing."""

    def __init__(self, where: Where, statement: str | None) -> None:
        super().__init__(None)
        self.where = where
        self.statement = statement

    def rows(self, wanted: Wanted) -> Iterator[Any]:
        """Its rows, wherever this runs."""
        if self.statement is None:
            return iter(())
        columns = {name: COLUMNS[name] for name in wanted.columns}
        # Of an object in a bucket, as it is now: nothing that belongs to the batch is gone since.
        return place_of(self.where).batches(self.statement, columns)


def _parts(store: Store, where: Where, statements: list[Any]) -> list[Part]:
    schema = store.config.schema
    dialect = store.read(lambda connection: connection.dialect)
    texts = [scans.text(statement, dialect, schema=schema) for statement in statements]
    return [Part(where, text) for text in texts]


def _claimed(store: Store, wanted: Wanted, *, after: int, through: int) -> list[Part]:
    """The messages of these batches of a stream, in parts of about the same size."""
    assert wanted.stream is not None
    found = batches(store._database, wanted.stream, after=after, through=through)
    statements = [
        streams.select_records(part, wanted.columns)
        for batch in found
        for part in _split(batch.holds, wanted.partitions, wanted.cores)
    ]
    return _parts(store, wanted.where, statements)


class ClaimedReader(DataSourceReader):
    """Reads what a stream has claimed, and claims nothing."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """Some messages each."""
        with Store(self._wanted.where.config()) as store:
            found = _claimed(store, self._wanted, after=0, through=streams.ANY)
        return [*found] or [Part(self._wanted.where, None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part."""
        assert isinstance(partition, Part)
        return partition.rows(self._wanted)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What both have in common."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._opened: Store | None = None

    @property
    def _store(self) -> Store:
        # Only when it is used: a reader is pickled before that, and nothing of a store is.
        if self._opened is None:
            self._opened = Store(self._wanted.where.config())
        return self._opened

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """How many rows a batch has, unless the trigger wants all."""
        return ReadMaxRows(self._wanted.max_rows)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part."""
        assert isinstance(partition, Part)
        return partition.rows(self._wanted)

    def stop(self) -> None:
        """Let go of the connections."""
        if self._opened is not None:
            self._opened.close()


def _rows(limit: ReadLimit, *, most: int) -> int:
    rows: int = limit.max_rows if isinstance(limit, ReadMaxRows) else most
    return rows


class ClaimReader(StreamReader):
    """Claims messages, and acknowledges them when Spark asks what comes after them."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self._taken: Stream | None = None
        self._room, self._through = LARGEST, streams.ANY
        """How many may still be claimed, and up to which id, if only those there are now are wanted."""

    @property
    def _stream(self) -> Stream:
        if self._taken is None:
            self._taken = Stream(self._store._database, self._name, self._wanted.queue)
        return self._taken

    @property
    def _name(self) -> str:
        assert self._wanted.stream is not None
        return self._wanted.stream

    def _offset(self, batch: int) -> dict[str, Any]:
        return {"stream": self._name, "batch": batch}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Before the first batch. Spark asks more than once."""
        return self._offset(0)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Claim no more than there is now. Of a group the next one can be claimed when the batch with
        the one before it is done: so until nothing is left up to the last id, and not by number alone.
        """
        found = self._store.admin().queue_stats(self._wanted.queue)
        self._room = found.ready + found.blocked
        self._through = self._store.read(tails.greatest_id)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Everything up to `start` is done; the next batch is claimed now, if it was not before."""
        if start["stream"] != self._name:
            raise InvalidArgument("stream", f"this checkpoint is of the stream {start['stream']!r}")
        room = min(_rows(limit, most=LARGEST), self._room)
        batch = self._stream.next_batch(start["batch"], limit=room, through=self._through)
        if batch is None:
            return start
        if self._through != streams.ANY and batch.is_new:
            self._room -= len(batch.holds.tokens)
        return self._offset(batch.number)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The messages of the batches after `start`."""
        return [*_claimed(self._store, self._wanted, after=start["batch"], through=end["batch"])]

    def stop(self) -> None:
        """Leave the workers. What is claimed stays so, until somebody goes on or releases it."""
        if self._taken is not None:
            self._taken.close()
        super().stop()


def _split(holds: Holds, parts: int | None, cores: int) -> list[Holds]:
    ids = sorted(holds.tokens)
    if parts is None:
        parts = min(cores, -(-len(ids) // FEW))
    size = min(-(-len(ids) // parts), AT_ONCE)
    pieces = [ids[first : first + size] for first in range(0, len(ids), size)]
    return [holds._replace(tokens={id: holds.tokens[id] for id in piece}) for piece in pieces]


class TailReader(StreamReader):
    """Reads along, and changes nothing."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self._followed: Tail | None = None
        self._start: int | None = None
        self._end: int | None = None

    @property
    def _tail(self) -> Tail:
        if self._followed is None:
            self._followed = Tail(self._store._database, self._wanted.queue)
        return self._followed

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where to begin. Spark asks more than once, and is told the same."""
        if self._start is None:
            self._start = self._first()
        return {"id": self._start}

    def _first(self) -> int:
        if self._wanted.start == "earliest":
            return 0
        if self._wanted.start == "latest":
            return self._tail.settled_mark(patience=PATIENCE)
        if not self._wanted.start.isdecimal():
            raise InvalidArgument(
                "startingId", f"expected earliest, latest or an id, got {self._wanted.start!r}"
            )
        return max(0, int(self._wanted.start) - 1)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read no further than there is now."""
        self._end = self._tail.settled_mark(patience=PATIENCE)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """As far as is certain, and as many rows as are allowed."""
        through = self._tail.mark() if self._end is None else self._end
        return {
            "id": self._tail.last_of_next(
                start["id"], through=through, limit=_rows(limit, most=ALL)
            )
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Ranges of ids."""
        if start["id"] >= end["id"]:
            return []
        bounds = Bounds(start["id"] + 1, end["id"])
        statements = self._store.read(lambda c: self._statements(c, bounds))
        return [*_parts(self._store, self._wanted.where, statements)]

    def _statements(self, connection: Connection, bounds: Bounds) -> list[Any]:
        return [
            tails.select_records(
                connection,
                self._wanted.queue,
                after=part.first - 1,
                through=part.last,
                columns=self._wanted.columns,
            )
            for part in ranges(bounds, self._wanted.partitions, self._wanted.cores)
        ]
