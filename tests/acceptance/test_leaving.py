"""A process that was told to leave is gone when its grace is over, whatever hangs in it.

What hangs here does so for an hour; the limit for the process is far above its grace, since the machine
may be busy, and far below the hour.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pgqrs
from pgqrs.testing.postgres import local_postgres
from tests.acceptance.hanging import ASYNC_WORKER, HANDLERS, WORKFLOWS

GONE_WITHIN = 60
"""Seconds: the grace is half of one."""


@contextmanager
def hanging(how: str, url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.acceptance.hanging", how, url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "hangs\n"
            yield process
        finally:
            process.kill()


def leaves(process: subprocess.Popen[str]) -> str:
    """Tell it to leave. Returns what it has logged."""
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=GONE_WITHIN)
    return logged


@pytest.mark.parametrize("how", [*HANDLERS, *WORKFLOWS])
def test_a_worker_leaves_whatever_hangs(tmp_path: Path, how: str) -> None:
    database = f"sqlite:///{tmp_path}/store.db"
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        store.producer("tasks").enqueue(1)
        with hanging(how, database) as process:
            logged = leaves(process)
        assert process.returncode == 0, logged
        assert "told to stop by SIGTERM" in logged
        assert store.admin().list_workers() == []
        stats = store.admin().stats()
        assert sum(queue.leased for queue in stats) == 0, "its messages are given back"


def test_a_process_leaves_though_its_own_event_loop_is_blocked(database: str) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        store.producer("tasks").enqueue(1)
        with hanging(ASYNC_WORKER, database) as process:
            logged = leaves(process)
        assert process.returncode == 128 + signal.SIGTERM, logged
        assert "blocks the event loop" in logged
        assert store.admin().list_workers() == []
        assert store.admin().queue_stats("tasks").leased == 0


def test_a_worker_leaves_while_the_database_is_away() -> None:
    with local_postgres() as server:
        with pgqrs.Store(server.dsn, upgrade=True) as store:
            store.admin().create_queue("tasks")
            store.producer("tasks").enqueue_many(range(10))
        with hanging("database", server.dsn) as process:
            server.stop(immediately=True)
            leaves(process)
        assert process.returncode == 0
