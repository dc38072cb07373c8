"""Opening a store on a history that this pgqrs does not know is refused, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import pgqrs
from pgqrs import schema
from pgqrs.config import parse_dsn

LAST = schema.revisions()[-1].id
FIRST = schema.revisions()[0].id


def open_sync(database: str, **settings: Any) -> None:
    pgqrs.Store(database, **settings).close()


def open_async(database: str, **settings: Any) -> None:
    async def opened() -> None:
        await (await pgqrs.connect(database, **settings)).close()

    asyncio.run(opened())


both = pytest.mark.parametrize("open_store", [open_sync, open_async])
Opener = Callable[..., None]


def change(database: str, sql: str) -> None:
    engine = create_engine(parse_dsn(database))
    with engine.begin() as connection:
        connection.execute(text(sql))
    engine.dispose()


def downgrade(database: str, to: str) -> None:
    engine = create_engine(parse_dsn(database))
    with engine.begin() as connection:
        schema.downgrade(connection, to=to)
    engine.dispose()


@pytest.fixture
def installed(database: str) -> str:
    with pgqrs.Store(database) as store:
        store.admin().install()
    return database


def test_there_are_at_least_two_revisions() -> None:
    assert len(schema.revisions()) >= 2


def test_every_applied_revision_is_recorded_with_its_checksum(installed: str) -> None:
    with pgqrs.Store(installed) as store:
        recorded = store.read(schema.applied)
    assert recorded == {revision.id: revision.checksum for revision in schema.revisions()}


@both
def test_an_empty_database_opens_and_says_what_to_run(database: str, open_store: Opener) -> None:
    open_store(database)
    with pgqrs.Store(database) as store:
        for use in (
            lambda: store.admin().list_queues(),
            lambda: store.admin().verify(),
            lambda: store.producer("q").enqueue(1),
            lambda: store.consumer("q").dequeue(),
        ):
            with pytest.raises(pgqrs.SchemaNotInstalled, match=r"admin\.install\(\)"):
                use()
        store.admin().install()
        assert store.admin().list_queues() == []


@both
@pytest.mark.parametrize(
    ("sql", "error", "revision"),
    [
        (
            f"UPDATE pgqrs_schema_history SET checksum = 'tampered' WHERE revision = '{FIRST}'",
            pgqrs.RevisionAltered,
            FIRST,
        ),
        (
            f"DELETE FROM pgqrs_schema_history WHERE revision = '{FIRST}'",
            pgqrs.RevisionMissing,
            FIRST,
        ),
        (
            "INSERT INTO pgqrs_schema_history "
            f"SELECT '{FIRST}a', checksum, applied_at FROM pgqrs_schema_history LIMIT 1",
            pgqrs.RevisionUnknown,
            FIRST + "a",
        ),
        (
            "INSERT INTO pgqrs_schema_history "
            "SELECT 'pgqrs_9999', checksum, applied_at FROM pgqrs_schema_history LIMIT 1",
            pgqrs.SchemaTooNew,
            "pgqrs_9999",
        ),
    ],
)
def test_a_history_that_does_not_fit_is_refused_by_name(
    installed: str,
    open_store: Opener,
    sql: str,
    error: type[pgqrs.RevisionError],
    revision: str,
) -> None:
    change(installed, sql)
    for settings in ({}, {"upgrade": True}):
        with pytest.raises(error) as caught:
            open_store(installed, **settings)
        assert caught.value.revision == revision
        assert revision in str(caught.value)


@both
def test_a_database_that_is_behind_is_upgraded_only_if_allowed(
    installed: str, open_store: Opener
) -> None:
    downgrade(installed, FIRST)
    with pytest.raises(pgqrs.UpgradeRequired) as caught:
        open_store(installed)
    assert (caught.value.current, caught.value.wanted) == (FIRST, LAST)
    open_store(installed, upgrade=True)
    open_store(installed)


@both
def test_an_empty_database_is_installed_if_allowed(database: str, open_store: Opener) -> None:
    open_store(database, upgrade=True)
    with pgqrs.Store(database) as store:
        store.admin().create_queue("ready at once")


def test_an_async_store_that_is_only_used_is_installed_if_allowed(database: str) -> None:
    async def main() -> None:
        store = pgqrs.AsyncStore(database, upgrade=True)
        await store.admin().create_queue("tasks")
        await store.close()

    asyncio.run(main())


def test_installing_refuses_a_tampered_history(installed: str) -> None:
    with pgqrs.Store(installed) as store:
        change(installed, "UPDATE pgqrs_schema_history SET checksum = 'tampered'")
        with pytest.raises(pgqrs.RevisionAltered):
            store.admin().install()
        with pytest.raises(pgqrs.RevisionAltered):
            store.admin().verify()


def test_checksums_do_not_depend_on_line_endings(tmp_path: Path) -> None:
    source = (schema.versions_path() / "0001_queues.py").read_text()
    unix, windows = tmp_path / "unix", tmp_path / "windows"
    for directory, newline in ((unix, "\n"), (windows, "\r\n")):
        directory.mkdir()
        (directory / "0001_queues.py").write_bytes(source.replace("\n", newline).encode())
    assert schema.read_revisions(unix) == schema.read_revisions(windows)


def test_a_changed_script_changes_its_checksum(tmp_path: Path) -> None:
    source = (schema.versions_path() / "0001_queues.py").read_text()
    (tmp_path / "0001_queues.py").write_text(source + "\n# edited\n")
    assert schema.read_revisions(tmp_path)[0].checksum != schema.revisions()[0].checksum
