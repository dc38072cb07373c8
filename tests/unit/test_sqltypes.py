"""Values as they are written into statements."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from sqlalchemy import literal, select
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from pgqrs.sqltypes import UTCDateTime


def test_a_time_is_rendered_as_sqlite_stores_it() -> None:
    noon = datetime(2026, 11, 16, 12, tzinfo=UTC).astimezone(timezone(timedelta(hours=2)))
    rendered = select(literal(noon, UTCDateTime())).compile(
        dialect=SQLiteDialect(), compile_kwargs={"literal_binds": True}
    )
    assert "'2026-11-16T12:00:00.000000Z'" in str(rendered)
