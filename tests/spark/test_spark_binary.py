"""Rows of binary COPY, as PostgreSQL reads them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pgqrs import Store
from pgqrs.models import messages, staged
from pgqrs.repositories import writes
from pgqrs.spark import binary
from pgqrs.spark.bulk import Bulk
from pgqrs.spark.options import Where
from pgqrs.types import WriteMode

TIME = pa.timestamp("us", tz="UTC")
BEFORE, LATER = datetime(1969, 7, 20, 20, 17, tzinfo=UTC), datetime(2262, 1, 2, 3, 4, 5, 6, UTC)
COLUMNS = {
    "queue_id": pa.scalar(2**62),
    "read_ct": pa.array([0, 1, 2], pa.int64()),
    "released_ct": pa.scalar(0),
    "ready": pa.array([True, False, True]),
    "priority": pa.array([-5, 0, 7], pa.int32()),
    "vt": pa.array([BEFORE, LATER, LATER], TIME),
    "dequeued_at": pa.array([BEFORE, None, LATER], TIME),
    "enqueued_at": pa.scalar(LATER, TIME),
    "expires_at": pa.scalar(None, TIME),
    "group_key": pa.array(["", "grün", None]),
    "headers": pa.array([None, '{"a": "b"}', None]),
    "payload": pa.array(['{"text": "a \\"quote\\", 🚀"}', "null", "[]"]),
}
EXPECTED = [
    (2**62, 0, 0, True, -5, BEFORE, BEFORE, LATER, None, "", None, {"text": 'a "quote", 🚀'}),
    (2**62, 1, 0, False, 0, LATER, None, LATER, None, "grün", {"a": "b"}, None),
    (2**62, 2, 0, True, 7, LATER, LATER, LATER, None, None, None, []),
]
MANY = {"attempt": pa.scalar(2**62), "position": pa.scalar(3, pa.int32())} | {
    name: COLUMNS[name] for name in ("priority", "expires_at", "group_key", "headers", "payload")
}


def copied(dsn: str, table: Any, columns: dict[str, Any], pieces: Any) -> list[Any]:
    with Store(dsn, upgrade=True) as store:
        store.write(lambda c: writes.copy(c, table, list(columns), pieces(columns, table)))
    with psycopg.connect(dsn) as connection:
        query = f"SELECT {', '.join(columns)} FROM {table.name} ORDER BY priority"
        return connection.execute(query.encode()).fetchall()


def test_every_type_and_null_arrives_as_it_is(pg_url: str) -> None:
    assert copied(pg_url, messages, COLUMNS, binary.rows) == EXPECTED


def test_large_columns_go_in_pieces(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "PIECE", 1)
    assert len(list(binary.rows(COLUMNS, messages))) == 3
    assert copied(pg_url, messages, COLUMNS, binary.rows) == EXPECTED


def sliced(columns: dict[str, Any]) -> dict[str, Any]:
    return {
        name: column.slice(1) if isinstance(column, pa.Array) else column
        for name, column in columns.items()
    }


def test_slices_are_not_taken_for_the_whole(pg_url: str) -> None:
    assert copied(pg_url, messages, sliced(COLUMNS), binary.rows) == EXPECTED[1:]


def test_many_in_one_row(pg_url: str) -> None:
    names = ["", "grün", None]
    texts = [{"text": 'a "quote", 🚀'}, None, []]
    (found,) = copied(pg_url, staged, MANY, binary.folded)
    assert found == (2**62, 3, [-5, 0, 7], None, names, [None, {"a": "b"}, None], texts)
    _, found = copied(pg_url, staged, sliced(MANY), binary.folded)
    assert found == (2**62, 3, [0, 7], None, names[1:], [{"a": "b"}, None], texts[1:])


@pytest.mark.parametrize("mode", WriteMode)
def test_text_is_right_in_a_database_of_another_encoding(pg_url: str, mode: WriteMode) -> None:
    latin = pg_url.rsplit("/", 1)[0] + "/latin"
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS latin")
        connection.execute(
            "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 "
            "LC_COLLATE 'C' LC_CTYPE 'C' LOCALE_PROVIDER libc"
        )
    with Store(latin, upgrade=True) as store:
        store.admin().create_queue("jobs")
        parts = 1 if mode is WriteMode.PART_KEY else None
        bulk = Bulk(Where(latin, "NONE"), "jobs", "one", mode, parts).begin()
        rows = pa.record_batch({"payload": ['{"text": "grün"}']})
        assert bulk.publish([bulk.store(0, [rows])]) == 1
        (message,) = store.admin().peek("jobs")
        assert message.payload == {"text": "grün"}
