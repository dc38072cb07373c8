"""PgBouncer in transaction mode before a PostgreSQL server: clients share its sessions, one transaction
at a time.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import URL, make_url

SETTINGS = """
[databases]
* = host={host} port={port} user={user} {password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
max_client_conn = 500
"""


def find() -> str | None:
    """The program that `PGQRS_TEST_PGBOUNCER` names, or one of the system.

    Debian installs it where only root looks.
    """
    if named := os.environ.get("PGQRS_TEST_PGBOUNCER"):
        return named
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def in_front_of(server: str, directory: Path) -> Iterator[str]:
    """The URL by which the databases of this server are reached through a pooler."""
    url, listen = make_url(server), _free_port()
    program = find()
    assert program is not None
    path = directory / "pgbouncer.ini"
    path.write_text(_settings(url, listen))
    directory.chmod(0o755)
    path.chmod(0o644)
    # It refuses to be root, as PostgreSQL does.
    identity = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}
    with (directory / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [program, str(path)],
            cwd="/",
            stdout=log,
            stderr=log,
            start_new_session=True,
            **identity,
        )
    pooled = url.set(host="127.0.0.1", port=listen, password=None)
    try:
        _wait_until_it_answers(pooled, process, directory / "pgbouncer.log")
        yield pooled.render_as_string(hide_password=False)
    finally:
        process.terminate()
        process.wait()


def _settings(url: URL, listen: int) -> str:
    return SETTINGS.format(
        host=url.host,
        port=url.port or 5432,
        user=url.username,
        password=f"password={url.password}" if url.password else "",
        listen=listen,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(url: URL, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 100
    while True:
        try:
            psycopg.connect(url.render_as_string(hide_password=False), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
