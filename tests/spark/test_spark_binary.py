"""Rows of binary COPY, as PostgreSQL reads them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pgqrs import Store
from pgqrs.models import staged
from pgqrs.repositories import writes
from pgqrs.spark import binary
from pgqrs.spark.bulk import Bulk
from pgqrs.spark.options import Where
from pgqrs.types import WriteMode

TIME = pa.timestamp("us", tz="UTC")
BEFORE, LATER = datetime(1969, 7, 20, 20, 17, tzinfo=UTC), datetime(2262, 1, 2, 3, 4, 5, 6, UTC)
COLUMNS = {
    "attempt": pa.scalar(2**62),
    "position": pa.array([0, 1, 2], pa.int32()),
    "priority": pa.array([-5, None, 7], pa.int32()),
    "eta": pa.array([BEFORE, None, LATER], TIME),
    "expires_at": pa.scalar(None, TIME),
    "group_key": pa.array(["", "grün", None]),
    "headers": pa.array([None, '{"a": "b"}', None]),
    "payload": pa.array(['{"text": "a \\"quote\\", 🚀"}', "null", "[]"]),
}
EXPECTED = [
    (2**62, 0, -5, BEFORE, None, "", None, {"text": 'a "quote", 🚀'}),
    (2**62, 1, None, None, None, "grün", {"a": "b"}, None),
    (2**62, 2, 7, LATER, None, None, None, []),
]


def written(dsn: str, columns: dict[str, Any]) -> list[Any]:
    with Store(dsn, upgrade=True) as store:
        store.write(lambda c: writes.copy(c, staged, list(columns), binary.rows(columns, staged)))
    with psycopg.connect(dsn) as connection:
        query = f"SELECT {', '.join(columns)} FROM pgqrs_staged ORDER BY position"
        return connection.execute(query.encode()).fetchall()


def test_every_type_and_null_arrives_as_it_is(pg_url: str) -> None:
    assert written(pg_url, COLUMNS) == EXPECTED


def test_large_columns_go_in_pieces(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "PIECE", 1)
    assert len(list(binary.rows(COLUMNS, staged))) == 3
    assert written(pg_url, COLUMNS) == EXPECTED


def test_slices_are_not_taken_for_the_whole(pg_url: str) -> None:
    part = {
        name: column.slice(1) if isinstance(column, pa.Array) else column
        for name, column in COLUMNS.items()
    }
    assert written(pg_url, part) == EXPECTED[1:]


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
