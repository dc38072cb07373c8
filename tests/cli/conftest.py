"""The command line, run in this process against a SQLite file of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pgqrs
from pgqrs.cli.app import app

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGQRS_DSN", "PGQRS_SCHEMA", "PGQRS_RETRY_FOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def empty_dsn(tmp_path: Path) -> str:
    """A database without tables."""
    return f"sqlite:///{tmp_path / 'cli.db'}"


@pytest.fixture
def dsn(empty_dsn: str) -> str:
    """A database with tables and the queue `tasks`."""
    with pgqrs.Store(empty_dsn) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
    return empty_dsn


@pytest.fixture
def store(dsn: str) -> Iterator[pgqrs.Store]:
    """The same database through the library."""
    with pgqrs.Store(dsn) as opened:
        yield opened


@pytest.fixture
def run(dsn: str) -> Run:
    """Run a command; anything but a clean exit raises."""

    def run_command(*arguments: str, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, ["--dsn", dsn, *arguments], input, catch_exceptions=False)

    return run_command


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run a command that must succeed, and parse the JSON document that it prints."""

    def run_command(*arguments: str, input: str | bytes | None = None) -> Any:
        result = run(*arguments, "--json", input=input)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run_command
