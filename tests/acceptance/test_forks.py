"""A store that was opened before a fork: the children work, and the parent does not notice them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import pgqrs
from pgqrs.testing.postgres import free_port
from tests.acceptance import forking

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
ROOT = Path(__file__).parents[2]
Url = Callable[[str], str]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Url:
    def made(backend: str) -> str:
        if backend == "sqlite":
            return f"sqlite:///{tmp_path / 'app.db'}"
        if backend == "postgres":
            return str(request.getfixturevalue("postgres_database"))
        server = request.getfixturevalue("s3_server")
        key, mode = uuid.uuid4().hex, backend.removeprefix("s3-")
        return f"s3://bucket/{key}?endpoint_url={server}&cache={tmp_path}&mode={mode}"

    return made


def run_forking(kind: str, url: str) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", forking.__name__, kind, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, object] = json.loads(process.stdout)
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("backend", ["sqlite", "postgres", "s3-durable"])
def test_children_of_a_fork_have_connections_of_their_own(
    url: Url, backend: str, kind: str
) -> None:
    found = run_forking(kind, url(backend))
    assert found["completed"] == 2 * forking.CHILDREN
    assert found["ready"] == 1 + 2 * forking.CHILDREN * forking.EACH - 2 * forking.CHILDREN
    everybody = [found["mine"], *found["found"]]  # type: ignore[misc]
    assert all(child["called"] == 1 for child in found["found"])  # type: ignore[attr-defined]
    if backend == "postgres":
        assert len({one["session"] for one in everybody}) == len(everybody)
    assert len({one["worker"] for one in everybody}) == len(everybody)


def test_a_database_in_memory_stays_with_its_process(tmp_path: Path) -> None:
    code = """
import os, pgqrs
store = pgqrs.Store("sqlite::memory:", upgrade=True)
store.admin().create_queue("q")
child = os.fork()
if child == 0:
    try:
        store.producer("q").enqueue(1)
    except pgqrs.InvalidConfig as error:
        os._exit(17 if "memory" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
store.producer("q").enqueue(1)
assert store.admin().queue_stats("q").ready == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_sqlite_store_in_the_middle_of_a_read_is_refused_in_the_child(tmp_path: Path) -> None:
    code = """
import os, pgqrs, sys, threading
store = pgqrs.Store(sys.argv[1], upgrade=True)
store.admin().create_queue("q")
reading, enough = threading.Event(), threading.Event()
def read(connection):
    connection.exec_driver_sql("SELECT count(*) FROM pgqrs_queues").scalar()
    reading.set()
    enough.wait(100)
thread = threading.Thread(target=store.read, args=(read,))
thread.start()
reading.wait()
child = os.fork()
if child == 0:
    try:
        store.producer("q").enqueue(1)
    except pgqrs.InvalidConfig as error:
        os._exit(17 if "forked" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
enough.set()
thread.join()
store.producer("q").enqueue(1)
"""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, url]
    subprocess.run(command, check=True, timeout=120)


def test_what_a_child_writes_survives_the_end_of_its_parent(tmp_path: Path) -> None:
    """SQLite deletes the log of a file with the last connection that it knows of."""
    code = """
import os, pgqrs, sys
store = pgqrs.Store(sys.argv[1], upgrade=True)
store.admin().create_queue("q")
store.producer("q").enqueue("parent")
come, go = os.pipe()
if os.fork() == 0:
    producer = store.producer("q")
    producer.enqueue("child")
    os.write(go, b"!")
    os.close(go)
    os.read(int(sys.argv[2]), 1)  # until the parent is gone
    for n in range(100):
        producer.enqueue(n)
    os._exit(0)
os.read(come, 1)
store.close()
"""
    path = tmp_path / "app.db"
    waits, gone = os.pipe()
    command = [sys.executable, "-c", code, f"sqlite:///{path}", str(waits)]
    with subprocess.Popen(command, pass_fds=[waits], stdout=subprocess.PIPE) as parent:
        assert parent.wait(120) == 0
        os.write(gone, b"!")
        assert parent.stdout is not None
        assert parent.stdout.read() == b""  # the child has it open until its end
    os.close(waits)
    os.close(gone)
    with pgqrs.Store(f"sqlite:///{path}") as store:
        assert store.admin().queue_stats("q").ready == 102


@contextmanager
def gunicorn(dsn: str, directory: Path) -> Iterator[int]:
    port = free_port()
    log = directory / "gunicorn.log"
    command = [
        *(sys.executable, "-m", "gunicorn", "--preload", "--workers", "3"),
        *("--bind", f"127.0.0.1:{port}", "tests.acceptance.preloaded:application"),
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PGQRS_DSN": dsn}, stdout=output, stderr=output
        ) as process,
    ):
        try:
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()


def ask(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()
    finally:
        connection.close()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 100
    while True:
        try:
            ask(port, "/first")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("backend", ["sqlite", "postgres", "s3-durable", "s3-local"])
def test_gunicorn_may_preload_an_application(url: Url, backend: str, tmp_path: Path) -> None:
    dsn, asked = url(backend), 1
    with gunicorn(dsn, tmp_path) as port:
        wait_for(port)
        workers: set[str] = set()
        with ThreadPoolExecutor(4) as threads:
            while len(workers) < 2:
                paths = [f"/{asked + n}" for n in range(20)]
                workers.update(threads.map(lambda path: ask(port, path), paths))
                asked += len(paths)
                assert asked < 1000
    if backend == "s3-local":
        return  # who uploads first wins, and the others keep their writes aside: see its guide
    with pgqrs.Store(dsn) as store:
        assert store.admin().queue_stats("q").ready == 1 + 2 * asked
