"""URLs, settings and where they come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import platformdirs
import pytest

import pgqrs
from pgqrs.config import Config, parse_dsn


@pytest.mark.parametrize(
    ("dsn", "path"),
    [
        ("sqlite://./q.db", "./q.db"),
        ("sqlite://q.db", "q.db"),
        ("sqlite:q.db", "q.db"),
        ("sqlite:./q.db", "./q.db"),
        ("sqlite:/tmp/q.db", "/tmp/q.db"),
        ("sqlite:///q.db", "q.db"),
        ("sqlite:////tmp/q.db", "/tmp/q.db"),
        ("sqlite::memory:", ":memory:"),
        ("sqlite://:memory:", ":memory:"),
        ("sqlite:///:memory:", ":memory:"),
        ("sqlite://", ":memory:"),
    ],
)
def test_every_form_of_a_sqlite_url(dsn: str, path: str) -> None:
    url = parse_dsn(dsn)
    assert (url.drivername, url.database) == ("sqlite", path)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_form_of_a_postgres_url(scheme: str) -> None:
    url = parse_dsn(f"{scheme}://user:pass@host:5433/name?sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert (url.host, url.port, url.database, url.password) == ("host", 5433, "name", "pass")
    assert url.query == {"sslmode": "require"}


@pytest.mark.parametrize(
    "dsn",
    [
        "mysql://user:secret@host/db",
        "postgresql+asyncpg://user:secret@host/db",
        "sqlite+aiosqlite:///q.db",
        "redis://:secret@host",
        "secret.db",
        "",
        "postgresql://user:secret@host:port/db",
        "postgresql://user:top@secret@host/db",
        "sqlite:///q.db?mode=ro",
    ],
)
def test_anything_else_is_refused_without_repeating_the_password(dsn: str) -> None:
    with pytest.raises(pgqrs.InvalidConfig) as caught:
        pgqrs.Store(dsn)
    assert "secret@" not in str(caught.value)
    with pytest.raises(pgqrs.InvalidConfig):
        pgqrs.AsyncStore(dsn)


def test_the_refusal_names_what_is_accepted() -> None:
    with pytest.raises(pgqrs.InvalidConfig, match=r"sqlite::memory:.*postgresql://"):
        parse_dsn("mysql://host/db")


def test_something_else_than_a_url_is_refused() -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="expected a URL"):
        pgqrs.Store(42)  # type: ignore[arg-type]


def test_arguments_win_over_the_environment_over_defaults() -> None:
    environ = {
        "PGQRS_DSN": "sqlite:env.db",
        "PGQRS_LEASE": "12.5",
        "PGQRS_MAX_READ_CT": "9",
        "PGQRS_UPGRADE": "true",
        "PGQRS_SQLITE_JOURNAL_MODE": "delete",
        "PGQRS_PREPARE_THRESHOLD": "none",
    }
    config = Config.from_env(environ, max_read_ct=2)
    assert (config.dsn, config.lease, config.max_read_ct) == ("sqlite:env.db", 12.5, 2)
    assert (config.upgrade, config.sqlite_journal_mode) == (True, "DELETE")
    assert config.prepare_threshold is None
    assert config.sqlite_synchronous == "FULL"
    assert Config.from_env({}).lease == 30.0


@pytest.mark.parametrize(
    "environ",
    [
        {"PGQRS_LEASE": "soon"},
        {"PGQRS_MAX_READ_CT": "1.5"},
        {"PGQRS_UPGRADE": "perhaps"},
        {"PGQRS_SQLITE_SYNCHRONOUS": "sometimes"},
        {"PGQRS_POOL_SIZE": "0"},
        {"PGQRS_HEARTBEAT": "0"},
        {"PGQRS_HEARTBEAT": "-5"},
        {"PGQRS_HEARTBEAT": "nan"},
        {"PGQRS_HEARTBEAT": "inf"},
        {"PGQRS_RETRY_FOR": "-5"},
        {"PGQRS_RETRY_FOR": "nan"},
        {"PGQRS_LEASE": "inf"},
        {"PGQRS_SQLITE_BUSY_TIMEOUT": "-1"},
        {"PGQRS_PREPARE_THRESHOLD": "-1"},
        {"PGQRS_S3_MAX_STALENESS": "-1"},
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(pgqrs.InvalidConfig, match=name.removeprefix("PGQRS_").lower() + "|" + name):
        Config.from_env(environ)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="leese"):
        pgqrs.Store("sqlite::memory:", leese=5)


def test_the_password_is_not_shown() -> None:
    config = Config.from_dsn("postgresql://user:secret@host/db")
    assert "secret" not in repr(config)
    assert "secret" not in str(config.url)


@pytest.mark.parametrize("open_store", [pgqrs.Store, pgqrs.AsyncStore])
def test_a_store_does_not_show_its_password(open_store: Any) -> None:
    # Nobody listens there: opening is fine, since it may be a server that is not up yet.
    store = open_store("postgresql://user:secret@127.0.0.1:1/db?password=secret", retry_for=0)
    assert "secret" not in repr(store)
    assert "127.0.0.1:1/db" in repr(store)


def test_without_a_url_there_is_a_file_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGQRS_DSN", raising=False)
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda *_, **__: str(tmp_path / "data"))
    with pgqrs.Store() as store:
        store.admin().install()
    assert (tmp_path / "data" / "pgqrs.db").exists()


def test_without_an_argument_the_environment_names_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQRS_DSN", f"sqlite:{tmp_path / 'env.db'}")
    with pgqrs.Store() as store:
        store.admin().install()
    assert (tmp_path / "env.db").exists()


def test_a_config_opens_a_store() -> None:
    config = Config.from_dsn("sqlite::memory:", lease=5)
    with pgqrs.Store(config, max_read_ct=2) as store:
        store.admin().install()
        queue = store.admin().create_queue("q")
    assert (queue.lease, queue.max_read_ct) == (5.0, 2)


def test_a_relative_path_is_fixed_when_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with pgqrs.Store("sqlite://./q.db") as store:
        monkeypatch.chdir(tmp_path)
        store.admin().install()
    assert (tmp_path / "a" / "q.db").exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_the_default_file_and_its_directory_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("PGQRS_DSN", raising=False)
    before = os.umask(0o022)
    try:
        with pgqrs.Store(upgrade=True) as store:
            file = Path(str(store.engine.url.database))
            modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
            assert file.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert file.name in modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_file_that_exists_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "shared.db"
    file.touch()
    file.chmod(0o664)
    with pgqrs.Store(f"sqlite:///{file}", upgrade=True):
        pass
    assert file.stat().st_mode & 0o777 == 0o664


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="no directory"):
        pgqrs.Store(f"sqlite:///{tmp_path}/missing/q.db")


@pytest.mark.parametrize(
    "schema", ["", "a%b", "a.b", 'a"b', "a[b]", "new\nline", "x" * 64, "ä" * 32]
)
def test_a_schema_that_would_not_work_is_refused(schema: str) -> None:
    with pytest.raises(pgqrs.InvalidConfig, match="schema"):
        Config(schema=schema)


@pytest.mark.parametrize("schema", ["app", "My Schema", "a:b", "x" * 63, "ä" * 31])
def test_other_schemas_are_accepted(schema: str) -> None:
    assert Config(schema=schema).schema == schema
