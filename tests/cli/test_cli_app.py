"""Installing, verifying, and how the command line fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

import pgqrs
from pgqrs.cli.app import app
from pgqrs.cli.target import Target, name_of


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def assert_one_line_error(result: Result) -> str:
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def test_install_then_verify(empty_dsn: str) -> None:
    Path(empty_dsn.removeprefix("sqlite:///")).touch()
    assert "not installed" in assert_one_line_error(invoke("--dsn", empty_dsn, "verify"))
    for command in ("install", "install", "verify"):
        result = invoke("--dsn", empty_dsn, command)
        assert result.exit_code == 0
        assert "up to date" in result.stdout


def test_verify_reports_an_altered_history(dsn: str, store: pgqrs.Store) -> None:
    store.write(lambda c: c.execute(text("UPDATE pgqrs_schema_history SET checksum = 'x'")))
    line = assert_one_line_error(invoke("--dsn", dsn, "verify"))
    assert "differs from the one this pgqrs carries" in line


def test_database_from_the_environment(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQRS_DSN", dsn)
    result = invoke("queue", "list", "--json")
    assert [queue["queue_name"] for queue in json.loads(result.stdout)] == ["tasks"]


def test_schema_reaches_the_store(dsn: str) -> None:
    line = assert_one_line_error(invoke("--dsn", dsn, "--schema", "other", "queue", "list"))
    assert "SQLite has no schemas" in line


@pytest.mark.parametrize(
    "command",
    [
        ["--dsn", "{missing}", "verify"],
        ["--dsn", "{missing}", "stats"],
        ["--dsn", "{missing}", "enqueue", "tasks", "1"],
        ["copy", "{missing}", "{dsn}"],
    ],
    ids=lambda command: " ".join(word for word in command if "{" not in word and "-" not in word),
)
def test_a_mistyped_path_creates_no_file(command: list[str], dsn: str, tmp_path: Path) -> None:
    missing = tmp_path / "mistyped.db"
    words = [word.format(missing=f"sqlite:///{missing}", dsn=dsn) for word in command]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "pgqrs install" in done.output
    assert not missing.exists()


def test_an_error_of_a_task_does_nothing_to_the_terminal(dsn: str, store: pgqrs.Store) -> None:
    @pgqrs.task(queue="tasks", retry=pgqrs.Retry(max_attempts=1))
    def fail(name: str) -> None:
        raise ValueError(f"no such name: {name}")

    handle = fail.options(store=store).enqueue("\x1b]0;title\x07\x1b[2J")
    pgqrs.Worker(store, tasks=[fail]).run(until_empty=True, signals=False)
    done = CliRunner().invoke(app, ["--dsn", dsn, "task", "result", str(handle.id)])
    assert done.exit_code == 1
    assert "no such name" in done.output
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


def test_unknown_url_is_an_error() -> None:
    assert "mysql" in assert_one_line_error(invoke("--dsn", "mysql://host/db", "stats"))


def test_file_that_is_no_database_is_an_error(tmp_path: Any) -> None:
    path = tmp_path / "not.db"
    path.write_text("This is not a database. " * 100)
    line = assert_one_line_error(invoke("--dsn", f"sqlite:///{path}", "queue", "list"))
    assert "not a database" in line


def test_password_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQRS_RETRY_FOR", "0")
    url = "postgresql://someone:hunter2@127.0.0.1:1/db?password=hunter2&connect_timeout=1"
    for command in ("install", "verify", "stats"):
        result = invoke("--dsn", url, command)
        assert_one_line_error(result)
        assert "hunter2" not in result.output
    with Target(url).open() as store:
        assert "hunter2" not in name_of(store)
    assert "hunter2" not in repr(Target(url))


def test_unreachable_database_is_not_waited_for_as_a_service_would(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Target(dsn).open() as store:
        assert store.config.retry_for < pgqrs.Config().retry_for
    monkeypatch.setenv("PGQRS_RETRY_FOR", "77")
    with Target(dsn).open() as store:
        assert store.config.retry_for == 77


def commands(group: click.Group, *path: str) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        found.append(((*path, name), command))
        if isinstance(command, click.Group):
            found += commands(command, *path, name)
    return found


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(p, c, id=" ".join(p)) for p, c in commands(app)]
)
def test_everything_has_a_help_text(path: tuple[str, ...], command: click.Command) -> None:
    assert command.help
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help
    assert invoke(*path, "--help").exit_code == 0


def test_importing_the_package_loads_no_command_line() -> None:
    script = (
        "import pgqrs, pgqrs.cli, sys; "
        "assert not {'click', 'rich', 'pgqrs.cli.app'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pgqrs.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("pgqrs")
    assert pgqrs.__version__ in result.stdout
