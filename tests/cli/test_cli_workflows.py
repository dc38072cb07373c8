"""`pgqrs workflow …`."""

from __future__ import annotations

from typing import Any

import pgqrs


@pgqrs.step
def double(n: int) -> int:
    return 2 * n


@pgqrs.step
def check(n: int) -> int:
    if n > 10:
        raise ValueError("too much")
    return n


@pgqrs.workflow
def ask(n: int, *, plus: int = 0) -> int:
    pgqrs.set_event("state", "asking")
    answer = pgqrs.wait_for_event("answer")
    return check(double(n) + plus + answer)


def work(store: pgqrs.Store) -> None:
    pgqrs.Worker(store, workflows=[ask]).run(until_empty=True, signals=False)


def test_the_life_of_a_run(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    assert "no such runs" in run("workflow", "list").stdout
    id = str(
        run_json("workflow", "start", "ask", "1", "--kwargs", '{"plus": 2}', "--key", "k")["id"]
    )
    assert run_json("workflow", "start", "ask", "1", "--key", "k")["id"] == int(id)
    work(store)
    assert run_json("workflow", "list", "--status", "suspended")[0]["key"] == "k"
    assert run("workflow", "signal", id, "answer", "3").exit_code == 0
    work(store)
    shown = run("workflow", "show", id).stdout
    for text in ("ask", "completed", '{"args": [1], "kwargs": {"plus": 2}}', "double", "asking"):
        assert text in shown
    found = run_json("workflow", "show", id)
    assert found["run"]["output"] == 7
    assert [step["step_id"] for step in found["steps"]] == [
        "pgqrs.set_event:state",
        "pgqrs.wait_for_event:answer",
        "double",
        "check",
    ]
    assert run("workflow", "list").stdout.count("completed") == 1


def test_control(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    id = str(run_json("workflow", "start", "ask", "10")["id"])
    assert run("workflow", "pause", id).exit_code == 0
    work(store)
    assert run_json("workflow", "show", id)["run"]["status"] == "paused"
    assert run("workflow", "resume", id).exit_code == 0
    run("workflow", "signal", id, "answer", "0")
    work(store)
    found = run("workflow", "list").stdout
    assert "failed" in found
    assert "too much" in found
    assert run("workflow", "retry", id).exit_code == 0
    work(store)
    fork = str(run_json("workflow", "fork", id, "--step", "check")["id"])
    assert run_json("workflow", "show", fork)["run"]["forked_from"] == int(id)
    assert run_json("workflow", "cancel", fork)["status"] == "cancelled"
    assert "cancelled" in run("workflow", "cancel", fork).stdout
    assert run("workflow", "retry", fork).exit_code == 1
    assert run_json("workflow", "purge", "--older-than", "0s")["purged"] == 2


def test_all_that_match_are_resumed(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    ids = [str(run_json("workflow", "start", "ask", "1")["id"]) for _ in range(3)]
    for id in ids:
        run("workflow", "pause", id)
    assert "0 run(s)" in run("workflow", "resume", "--all", "--parked").stdout
    assert "0 run(s)" in run("workflow", "resume", "--all", "--error", "mismatch").stdout
    assert "3 run(s)" in run("workflow", "resume", "--all", "--name", "ask").stdout
    assert run("workflow", "resume").exit_code != 0
    assert run("workflow", "resume", ids[0], "--all").exit_code != 0
    assert run("workflow", "resume", ids[0], "--name", "ask").exit_code != 0


def test_what_cannot_be_used_is_explained(run: Any) -> None:
    assert "not JSON" in run("workflow", "start", "ask", "text").output
    assert "JSON object" in run("workflow", "start", "ask", "--kwargs", "[1]").output
    assert "run 17 does not exist" in run("workflow", "show", "17").output
