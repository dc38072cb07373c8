"""Columns in which most rows have the same, read together.

PostgreSQL sends every value of a row, and ADBC looks at every one, which costs about the same whether
there is something in it or not. Of a message most columns may be empty, or zero, and most are. So these
travel as one value, a record in PostgreSQL's binary format, which is NULL where all of them are as usual
(see `scans.packed`): a message that nobody has touched has seven values to be looked at, not nineteen.
Records are taken apart column by column, not row by row.

A record is the number of its fields, and for each the number of its type, its length (-1 for NULL) and
its value: whole numbers with the highest byte first, and times in microseconds since 2000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgqrs.repositories.scans import UNUSUAL, USUAL
from pgqrs.spark.binary import EPOCH_US

NUMBERS = {
    pa.int64(): "i",
    pa.int32(): "i",
    pa.timestamp("us", tz="UTC"): "i",
    pa.float64(): "f",
    pa.bool_(): "b",
}
"""What is a number, and of which kind; how wide it is its length tells. All others are text."""


def unpacked(batch: Any, wanted: Any) -> Any:
    """A batch of what `scans.packed` selects, with the columns of the wanted schema."""
    if UNUSUAL not in batch.schema.names:
        return batch
    fields = [field for field in wanted if field.name in USUAL]
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    found = _unpack(columns.pop(UNUSUAL), [field.type for field in fields])
    for field, column in zip(fields, found, strict=True):
        usual = USUAL[field.name]
        columns[field.name] = column if usual is None else pc.fill_null(column, usual)
    return pa.RecordBatch.from_arrays([columns[name] for name in wanted.names], wanted.names)


def _unpack(records: Any, types: Sequence[Any]) -> list[Any]:
    """The fields of records; those of a record that is NULL are."""
    size = len(records)
    if records.null_count == size:
        return [pa.nulls(size, kind) for kind in types]
    if not records.null_count:
        return list(_fields(records, types))
    there = records.is_valid().to_numpy(zero_copy_only=False)
    places = pa.array(np.cumsum(there) - 1, mask=~there)
    return [field.take(places) for field in _fields(records.drop_null(), types)]


def _fields(records: Any, types: Sequence[Any]) -> Iterator[Any]:
    _, offsets, data = records.buffers()
    starts = np.frombuffer(offsets, np.int32)[records.offset : records.offset + len(records)]
    at = starts.astype(np.int64) + 4
    for kind in types:
        lengths = _everywhere(data, ">i4")[at + 4].astype(np.int64)
        begins, empty = at + 8, lengths < 0
        at = begins + np.maximum(lengths, 0)
        if empty.all():
            yield pa.nulls(len(records), kind)
        elif kind in NUMBERS:
            form = f">{NUMBERS[kind]}{lengths.max()}"
            yield _numbers(_everywhere(data, form)[np.where(empty, 0, begins)], empty, kind)
        else:
            yield _texts(data, begins, at, empty, kind)


def _everywhere(data: Any, form: str) -> Any:
    """What there would be at each byte, if a value of this form began there."""
    kind = np.dtype(form)
    return np.ndarray((data.size - kind.itemsize + 1,), kind, buffer=data, strides=(1,))


def _numbers(found: Any, empty: Any, kind: Any) -> Any:
    native = found.astype(found.dtype.newbyteorder("="))
    if pa.types.is_timestamp(kind):
        return pa.array(native + EPOCH_US, pa.int64(), mask=empty).cast(kind)
    return pa.array(native, kind, mask=empty)


def _texts(data: Any, begins: Any, ends: Any, empty: Any, kind: Any) -> Any:
    """Every second element of an array in which what lies between two texts is an element as well."""
    offsets: Any = np.empty(2 * len(begins) + 1, np.int32)
    offsets[0:-1:2], offsets[1::2], offsets[-1] = begins, ends, ends[-1]
    everything = pa.Array.from_buffers(kind, 2 * len(begins), [None, pa.py_buffer(offsets), data])
    return everything.take(pa.array(np.arange(0, 2 * len(begins), 2), mask=empty))
