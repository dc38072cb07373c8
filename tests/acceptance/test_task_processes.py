"""Tasks with `process=True`: what a process does harms the task that it runs, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgqrs
from pgqrs import task

pytestmark = pytest.mark.processes


@task(queue="tasks", process=True)
def where(n: int) -> tuple[int, int]:
    time.sleep(0.02)
    return n, os.getpid()


@task(queue="tasks", process=True, retry=pgqrs.Retry.fixed(0, max_attempts=2))
def die() -> None:
    os._exit(1)


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tasks.db'}"


@pytest.fixture
def store(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[pgqrs.Store]:
    monkeypatch.setenv("PGQRS_TEST_STORE", database)  # for processes that it starts
    with pgqrs.Store(database) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        store.admin().create_queue("pids")
        yield store


def test_a_process_that_dies_fails_its_task_and_no_other(store: pgqrs.Store) -> None:
    dying = die.options(store=store).enqueue()
    healthy = [where.options(store=store).enqueue(n) for n in range(20)]
    pgqrs.Worker(store, tasks=[die, where], concurrency=8).run(until_empty=True)
    with pytest.raises(pgqrs.TaskFailed, match="ended with status 1"):
        dying.result(100)
    assert [handle.result(100)[0] for handle in healthy] == list(range(20))
    attempts = {store.admin().get_archived(handle.id).read_ct for handle in healthy}
    assert attempts == {1}


class Demanding(Exception):
    """Cannot be read again by pickle: it takes two arguments, and says it has one."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


@task(queue="tasks", process=True, retry=pgqrs.Retry(max_attempts=1))
def raise_what_pickle_cannot_read() -> None:
    raise Demanding(1, 2)


@task(queue="tasks", process=True, retry=pgqrs.Retry(max_attempts=1))
def leave() -> None:
    sys.exit(3)


@task(queue="tasks", process=True, retry=pgqrs.Retry(max_attempts=1))
def raise_an_end_of_file() -> None:
    raise EOFError("of the task's own")


@task(queue="tasks", process=True, timeout=1.0, retry=pgqrs.Retry(max_attempts=1))
def hang() -> None:
    time.sleep(1000)


FAILURES = {
    raise_what_pickle_cannot_read: "Demanding: 1 2",
    leave: "SystemExit",
    raise_an_end_of_file: "EOFError: of the task's own",
    hang: "took longer than 1 s",
}


def test_what_a_task_does_in_its_process_is_its_own_failure(store: pgqrs.Store) -> None:
    failing = {failed: failed.options(store=store).enqueue() for failed in FAILURES}
    after = where.options(store=store).enqueue(1)
    pgqrs.Worker(store, queues=["tasks"], concurrency=1).run(until_empty=True)
    for failed, told in FAILURES.items():
        with pytest.raises(pgqrs.TaskFailed, match=told):
            failing[failed].result(100)
    assert after.result(100)[0] == 1


def test_a_process_that_died_while_idle_harms_no_task(store: pgqrs.Store) -> None:
    first = where.options(store=store).enqueue(1)
    with pgqrs.Worker(store, tasks=[where], concurrency=1):
        os.kill(first.result(100)[1], signal.SIGKILL)
        second = where.options(store=store).enqueue(2)
        assert second.result(100)[0] == 2
    assert store.admin().get_archived(second.id).read_ct == 1


def test_processes_that_hang_do_not_outlive_their_worker(store: pgqrs.Store) -> None:
    with pgqrs.Worker(store, tasks=[tell_and_hang], grace=0) as worker:
        tell_and_hang.options(store=store).enqueue()
        with store.consumer("pids") as consumer:
            (message,) = consumer.dequeue(1, wait=100)
        assert worker.worker_id is not None
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            os.kill(message.payload, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the process goes on")


@task(queue="tasks", process=True)
def tell_and_hang() -> None:
    with pgqrs.Store(os.environ["PGQRS_TEST_STORE"]) as store:
        store.producer("pids").enqueue(os.getpid())
    time.sleep(1000)


SCRIPT = """
import os, sys
import pgqrs

@pgqrs.task(queue="tasks", process=True, retry=pgqrs.Retry(max_attempts=1))
def square(n: int) -> tuple[int, int]:
    return n * n, os.getpid()

if __name__ == "__main__":
    assert square.name == "{name}:square", square.name
    with pgqrs.Store(sys.argv[1]) as store, pgqrs.Worker(store, tasks=[square]):
        result, process = square.options(store=store).enqueue(4).result(timeout=100)
    assert result == 16 and process != os.getpid()
    print("done")
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_task_has_one_name_in_a_script_and_its_processes(
    database: str, store: pgqrs.Store, tmp_path: Path, module: bool
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    path = tmp_path / "package" / "app.py"
    name = "package.app" if module else "app"
    path.write_text(SCRIPT.replace("{name}", name))
    command = ["-m", "package.app"] if module else [str(path)]
    ended = subprocess.run(
        [sys.executable, *command, database],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr


def test_a_process_cannot_have_what_was_typed_in() -> None:
    code = "import pgqrs\npgqrs.task(process=True)(lambda: 1)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "InvalidArgument: process: another process cannot have" in ended.stderr
