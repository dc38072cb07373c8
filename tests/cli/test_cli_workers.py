"""`pgqrs worker …`."""

from __future__ import annotations

from typing import Any

import pytest

import pgqrs


def test_list(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    assert run_json("worker", "list") == []
    assert "no workers" in run("worker", "list").stdout
    with store.consumer("tasks", hostname="here") as consumer:
        (worker,) = run_json("worker", "list")
        assert worker["id"] == consumer.worker_id
        assert (worker["queue"], worker["hostname"]) == ("tasks", "here")
        assert worker["status"] == "ready"
        assert "here" in run("worker", "list").stdout


def test_suspend_resume_and_stop(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    run("enqueue", "tasks", "1")
    with store.consumer("tasks") as consumer:
        id = str(consumer.worker_id)
        assert run("worker", "suspend", id).exit_code == 0
        assert run_json("worker", "list")[0]["status"] == "suspended"
        assert consumer.dequeue() == []
        assert run("worker", "resume", id).exit_code == 0
        assert len(consumer.dequeue()) == 1
        assert run("worker", "stop", id).exit_code == 0
        with pytest.raises(pgqrs.WorkerStopped):
            consumer.dequeue()


def test_purge(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    store.consumer("tasks").open()
    assert run_json("worker", "purge") == {"purged": 0}
    assert run_json("worker", "purge", "--silent-for", "0") == {"purged": 1}
    assert run_json("worker", "list") == []


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "release"])
def test_unknown_worker(run: Any, command: str) -> None:
    result = run("worker", command, "999")
    assert result.exit_code == 1
    assert result.stderr == "Error: worker 999 does not exist\n"


def test_release(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    run("enqueue", "tasks", "1")
    with store.consumer("tasks", lease=3600) as lost, store.consumer("tasks") as other:
        lost.dequeue()
        released = run_json("worker", "release", str(lost.worker_id))
        assert released == {"worker": lost.worker_id, "released": 1}
        assert len(other.dequeue()) == 1
        said = run("worker", "release", str(lost.worker_id)).stdout
        assert said == f"Gave back 0 message(s) of worker {lost.worker_id}.\n"
