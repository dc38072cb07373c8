"""Rows as Arrow batches in exactly the types that Spark expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgqrs.repositories.scans import Kind

TYPES = {
    Kind.LONG: pa.int64(),
    Kind.INT: pa.int32(),
    Kind.FLAG: pa.bool_(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.SECONDS: pa.float64(),
    Kind.TEXT: pa.string(),
    Kind.JSON: pa.string(),
    Kind.QUEUE: pa.int64(),
}


def arrow_schema(columns: dict[str, Kind]) -> Any:
    """The schema of batches with these columns."""
    return pa.schema([pa.field(name, TYPES[kind]) for name, kind in columns.items()])


def conform(batch: Any, wanted: Any) -> Any:
    """The same batch in the wanted schema."""
    if batch.schema.equals(wanted):
        return batch
    arrays = [
        column if column.type.equals(field.type) else pc.cast(column, field.type)
        for column, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def with_names(batch: Any, column: str, names: Mapping[int, str]) -> Any:
    """The same batch with names in a column of ids; where there is none, nothing."""
    place = batch.schema.get_field_index(column)
    found = pc.index_in(batch.column(place), pa.array(names.keys(), pa.int64()))
    return batch.set_column(place, column, pa.array(names.values(), pa.string()).take(found))


def from_rows(rows: Sequence[Sequence[Any]], wanted: Any) -> Any:
    """Rows of a driver as one batch; SQLite has times as text, and flags as numbers."""
    arrays = [
        _array(list(values), field.type)
        for values, field in zip(zip(*rows, strict=True), wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _array(values: list[Any], wanted: Any) -> Any:
    first = next((value for value in values if value is not None), None)
    if pa.types.is_timestamp(wanted) and isinstance(first, str):
        return pc.cast(pa.array(values, pa.string()), wanted)
    if pa.types.is_boolean(wanted) and type(first) is int:
        return pc.cast(pa.array(values, pa.int8()), wanted)
    return pa.array(values, wanted)
