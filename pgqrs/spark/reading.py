"""Reading tables: planned once, then each range of ids by a task of its own.

Ranges have about the same number of rows, whatever gaps there are between ids: planning counts the rows
in a few hundred ranges of the same width, looks closer where there are many, and puts neighbours
together.

The bounds are fixed when the read is planned, so that what is added meanwhile is in none of the ranges.
Each task sees the rows of its range as they are when it runs; a table that is being worked on may lose
rows in between. The archive does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from sqlalchemy import Connection

from pgqrs.errors import InvalidArgument
from pgqrs.repositories import scans
from pgqrs.repositories.scans import Bounds, Condition, Kind, Piece, Scan
from pgqrs.spark.arrow import with_names
from pgqrs.spark.options import Options, Where
from pgqrs.spark.places import Place, place_of

OPTIONS = ("table", "queue", "since", "until", "columns", "numPartitions")
FEW = 10_000
"""Rows that are not worth a task of their own, unless one is asked for."""
PIECES = 64
"""Ranges in which rows are counted, for each task."""
CLOSER = 4
"""How often planning looks closer at where many rows are."""
TYPES: dict[Kind, DataType] = {
    Kind.LONG: LongType(),
    Kind.INT: IntegerType(),
    Kind.FLAG: BooleanType(),
    Kind.TIME: TimestampType(),
    Kind.SECONDS: DoubleType(),
    Kind.TEXT: StringType(),
    Kind.JSON: StringType(),
    Kind.QUEUE: StringType(),
}


@dataclass(frozen=True)
class Wanted:
    """What is to be read, as the options say."""

    where: Where
    scan: Scan
    partitions: int | None
    cores: int
    """How many tasks run at a time: so many partitions at most, if no number is given."""

    @classmethod
    def of(cls, given: Mapping[str, str], cores: int | None = None) -> Wanted:
        """The options of a read."""
        options = Options(given, OPTIONS)
        view = options.choice("table", scans.VIEWS, "messages")
        known = scans.kinds(view)
        columns = options.words("columns") or tuple(known)
        for name in columns:
            if name not in known:
                raise InvalidArgument(
                    "columns", f"{view} has no {name!r}; there are {_list(known)}"
                )
        scan = Scan(
            view,
            columns,
            queue=options.text("queue"),
            since=options.moment("since"),
            until=options.moment("until"),
        )
        partitions = options.whole("numPartitions", low=1, high=100_000)
        return cls(options.where(), scan, partitions, cores or os.cpu_count() or 1)

    @property
    def schema(self) -> StructType:
        """The columns in Spark's types."""
        kinds = scans.kinds(self.scan.view)
        return StructType([StructField(name, TYPES[kinds[name]]) for name in self.scan.columns])

    def only(self, schema: StructType) -> Wanted:
        """With the columns of this schema only, which somebody may have given by hand."""
        kinds = scans.kinds(self.scan.view)
        for field in schema.fields:
            if field.name not in kinds:
                raise InvalidArgument(
                    "schema", f"{self.scan.view} has no {field.name!r}; there are {_list(kinds)}"
                )
            if field.dataType != TYPES[kinds[field.name]]:
                expected = TYPES[kinds[field.name]].simpleString()
                raise InvalidArgument(
                    "schema", f"{field.name} is {expected}, not {field.dataType.simpleString()}"
                )
        return replace(self, scan=replace(self.scan, columns=tuple(schema.fieldNames())))


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


class Part(InputPartition):
    """A range of ids: where it is, the statement that reads it, and the names of the queues it may be
    of. Without a statement there is nothing.

    All that is known from planning is in here: Spark pickles the reader before it plans.
    """

    def __init__(self, place: Place, statement: str | None, queues: dict[int, str]) -> None:
        super().__init__(None)
        self.place = place
        self.statement = statement
        self.queues = queues


class Reader(DataSourceReader):
    """Reads what is wanted, and leaves filters to Spark."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """Ranges of ids, each with its statement."""
        place = place_of(self._wanted.where)
        statements, queues = place.look(self._plan)
        if not statements:
            return [Part(place, None, queues)]
        return [Part(place, statement, queues) for statement in statements]

    def _plan(self, connection: Connection) -> tuple[list[str], dict[int, str]]:
        schema = self._wanted.where.config().schema
        scan = scans.found(connection, self._wanted.scan)
        statements = [
            scans.text(scans.statement(scan, part), connection.dialect, schema=schema)
            for part in balanced(connection, scan, self._wanted.partitions, self._wanted.cores)
        ]
        if not statements:
            return [], {}
        return statements, scans.queue_names(connection) if "queue" in scan.columns else {}

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a range."""
        assert isinstance(partition, Part)
        if partition.statement is None:
            return
        kinds = scans.kinds(self._wanted.scan.view)
        columns = {name: kinds[name] for name in self._wanted.scan.columns}
        for batch in partition.place.batches(partition.statement, columns):
            yield with_names(batch, "queue", partition.queues) if "queue" in columns else batch


class FilteringReader(Reader):
    """Lets the database do the filtering."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 (Spark's name)
        """Take the filters that the database decides as Spark would; the others are Spark's."""
        taken: list[Condition] = []
        for given in filters:
            condition = _condition(given)
            if condition is None or not scans.can_compare(self._wanted.scan.view, condition):
                yield given
            else:
                taken.append(condition)
        scan = replace(self._wanted.scan, conditions=tuple(taken))
        self._wanted = replace(self._wanted, scan=scan)


SYMBOLS: dict[Any, str] = {
    datasource.EqualTo: "=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.In: "in",
    datasource.IsNull: "null",
}


def _condition(given: Any) -> Condition | None:
    if isinstance(given, datasource.Not):
        inner = _condition(given.child)
        return None if inner is None else replace(inner, negated=not inner.negated)
    if isinstance(given, datasource.IsNotNull):
        return Condition(_column(given), "null", negated=True)
    symbol, value = SYMBOLS.get(type(given)), getattr(given, "value", None)
    if symbol is None or (symbol != "null" and not _is_comparable(value)):
        return None
    return Condition(_column(given), symbol, value)


def _column(given: Any) -> str:
    return ".".join(given.attribute)


def _is_comparable(value: Any) -> bool:
    """Whether a value means the same to the database: a time without a zone would not."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_comparable, value))
    if hasattr(value, "utcoffset"):
        return value.utcoffset() is not None
    return isinstance(value, str | int)


def balanced(connection: Connection, scan: Scan, parts: int | None, cores: int) -> list[Bounds]:
    """Ranges of ids that hold all wanted rows, each about the same number: so many, or as many as are
    worth it.
    """
    ends = scans.ends(connection, scan)
    if ends is None:
        return []
    if scans.is_dense(connection, scan, ends):
        return ranges(ends, parts, cores)
    at_most = parts or cores
    found = scans.pieces(connection, scan, ends, number=PIECES * at_most)
    rows = sum(piece.rows for piece in found)
    wanted = min(at_most if parts else min(cores, -(-rows // FEW)), rows)
    for _ in range(CLOSER):
        heavy = [p for p in found if p.first < p.last and p.rows * wanted * 4 > rows]
        if wanted < 2 or not heavy:
            break
        for piece in heavy:
            at = found.index(piece)
            within = Bounds(piece.first, piece.last)
            found[at : at + 1] = scans.pieces(connection, scan, within, number=PIECES)
    return put_together(found, wanted)


def put_together(found: Sequence[Piece], parts: int) -> list[Bounds]:
    """Neighbouring pieces as ranges of about the same number of rows, without gaps between them."""
    rows, passed = sum(piece.rows for piece in found), 0
    starts: list[int] = []
    for piece in found:
        # By the middle of a piece: it belongs where most of it is.
        if (passed + piece.rows / 2) * parts >= rows * len(starts):
            starts.append(piece.first)
        passed += piece.rows
    ends = [start - 1 for start in starts[1:]] + [found[-1].last] if found else []
    return [Bounds(start, end) for start, end in zip(starts, ends, strict=True)]


def ranges(bounds: Bounds, parts: int | None, cores: int) -> list[Bounds]:
    """Ids from the first to the last in so many ranges of the same width, or in as many as are worth
    it.
    """
    span = bounds.last - bounds.first + 1
    if parts is None:
        parts = min(cores, -(-span // FEW))
    parts = min(parts, span)
    starts = [bounds.first + span * part // parts for part in range(parts + 1)]
    return [Bounds(start, end - 1) for start, end in pairwise(starts)]
