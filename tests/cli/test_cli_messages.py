"""`pgqrs enqueue` and `pgqrs dequeue`."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import pgqrs


def test_enqueue_and_dequeue(run: Any, run_json: Any) -> None:
    enqueued = run_json("enqueue", "tasks", '{"job": "hello"}', "17", '"text"', "null")
    assert enqueued["queue"] == "tasks"
    assert enqueued["enqueued"] == 4
    messages = run_json("dequeue", "tasks", "-n", "10")
    assert [message["id"] for message in messages] == enqueued["ids"]
    assert [message["payload"] for message in messages] == [{"job": "hello"}, 17, "text", None]
    assert all(message["read_ct"] == 1 for message in messages)
    assert run_json("stats", "tasks")["archived"]["completed"] == 4
    assert run_json("dequeue", "tasks") == []
    assert "nothing ready" in run("dequeue", "tasks").stdout


def test_plain_output_names_ids_and_payloads(run: Any) -> None:
    assert (
        run("enqueue", "tasks", "1").stdout == "Enqueued 1 message(s) into queue 'tasks': id 1.\n"
    )
    assert "ids 2 to 3" in run("enqueue", "tasks", '{"a": 1}', "2").stdout
    assert '{"a": 1}' in run("dequeue", "tasks", "-n", "3").stdout


def test_dequeue_takes_one_by_default(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1", "2")
    assert [message["payload"] for message in run_json("dequeue", "tasks")] == [1]
    assert [message["payload"] for message in run_json("dequeue", "tasks")] == [2]


def test_no_ack_leaves_messages_leased(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    run("enqueue", "tasks", "1")
    (message,) = run_json("dequeue", "tasks", "--no-ack", "--lease", "1h")
    held = store.admin().get_message(message["id"])
    assert held.vt == datetime.fromisoformat(message["vt"])
    assert held.dequeued_at is not None
    assert (held.vt - held.dequeued_at).total_seconds() == 3600
    assert run_json("dequeue", "tasks") == []


def test_lapsed_lease_comes_back(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1")
    (first,) = run_json("dequeue", "tasks", "--no-ack", "--lease", "0")
    (again,) = run_json("dequeue", "tasks")
    assert (again["id"], again["read_ct"]) == (first["id"], 2)


def test_priority_delay_and_eta(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    run("enqueue", "tasks", '"low"')
    run("enqueue", "tasks", '"high"', "--priority", "5")
    delayed = run_json("enqueue", "tasks", '"delayed"', "--delay", "2h")["ids"][0]
    planned = run_json("enqueue", "tasks", '"eta"', "--eta", "2999-01-01T01:00:00+01:00")["ids"][0]
    assert [m["payload"] for m in run_json("dequeue", "tasks", "-n", "9")] == ["high", "low"]
    message = store.admin().get_message(delayed)
    assert (message.vt - message.enqueued_at).total_seconds() == 7200
    assert store.admin().get_message(planned).vt == datetime(2999, 1, 1, tzinfo=UTC)


def test_times_that_cannot_be_meant(run: Any) -> None:
    naive = run("enqueue", "tasks", "1", "--eta", "2999-01-01T00:00:00")
    assert naive.exit_code == 2
    assert "has no time zone" in naive.stderr
    assert run("enqueue", "tasks", "1", "--eta", "tomorrow").exit_code == 2
    assert run("enqueue", "tasks", "1", "--delay", "-5").exit_code == 2
    both = run("enqueue", "tasks", "1", "--eta", "2999-01-01T00:00:00Z", "--delay", "1")
    assert both.exit_code == 1


def test_payload_that_is_not_json(run: Any, run_json: Any) -> None:
    result = run("enqueue", "tasks", "1", "{broken")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: PAYLOAD 2 is not JSON: ")
    assert run_json("queue", "peek", "tasks") == []


def test_payload_that_cannot_be_stored(run: Any, run_json: Any) -> None:
    result = run("enqueue", "tasks", "1", '{"a": NaN}')
    assert result.exit_code == 1
    assert result.stderr == "Error: PAYLOAD 2: payload.a: nan is not JSON\n"
    assert run_json("queue", "peek", "tasks") == []


def test_missing_queue(run: Any) -> None:
    for command in (["enqueue", "nope", "1"], ["enqueue", "nope", "-"], ["dequeue", "nope"]):
        result = run(*command, input="1\n")
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: queue 'nope' does not exist")


def test_json_lines_from_standard_input(run_json: Any) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(2500))
    enqueued = run_json("enqueue", "tasks", "-", input=lines)
    assert enqueued["enqueued"] == 2500
    messages = run_json("dequeue", "tasks", "-n", "5000")
    assert [message["payload"]["n"] for message in messages] == list(range(2500))
    assert [message["id"] for message in messages] == enqueued["ids"]


def test_standard_input_is_utf_8_with_blank_lines_and_no_final_newline(run_json: Any) -> None:
    run_json("enqueue", "tasks", "-", input='\ufeff"é"\r\n\n  \n"中"'.encode())
    assert [m["payload"] for m in run_json("dequeue", "tasks", "-n", "9")] == ["é", "中"]


def test_empty_standard_input(run_json: Any) -> None:
    assert run_json("enqueue", "tasks", "-", input="") == {
        "queue": "tasks",
        "enqueued": 0,
        "ids": [],
    }


@pytest.mark.parametrize("broken", [b"{broken", b'"\xff"', b"NaN", b"[" * 100_000])
def test_error_in_standard_input_names_the_line_and_how_far_it_came(
    run: Any, run_json: Any, broken: bytes
) -> None:
    lines = [b"%d" % n for n in range(1, 2500)]
    lines[2199] = broken
    result = run("enqueue", "tasks", "-", input=b"\n".join(lines))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: line 2200")
    assert result.stderr.endswith("; everything up to line 2000 was enqueued\n")
    assert run_json("stats", "tasks")["ready"] == 2000


def test_error_in_the_first_batch_enqueues_nothing(run: Any, run_json: Any) -> None:
    result = run("enqueue", "tasks", "-", input="1\n{broken\n")
    assert result.stderr.startswith("Error: line 2 is not JSON: ")
    assert result.stderr.endswith("; nothing was enqueued\n")
    assert run_json("queue", "peek", "tasks") == []


def test_standard_input_and_arguments_do_not_mix(run: Any) -> None:
    assert run("enqueue", "tasks", "-", "1", input="2\n").exit_code == 2
    assert run("enqueue", "tasks").exit_code == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_could_not_be_printed_is_not_acked(
    run: Any, dsn: str, store: pgqrs.Store, options: list[str]
) -> None:
    run("enqueue", "tasks", "1")
    command = [sys.executable, "-m", "pgqrs.cli", "--dsn", dsn, "dequeue", "tasks", *options]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode != 0
    assert "Error: " in result.stderr
    (message,) = store.admin().peek("tasks")
    assert message.read_ct == 1
    assert store.admin().list_archive("tasks") == []


def test_through_real_pipes(dsn: str) -> None:
    command = [sys.executable, "-m", "pgqrs.cli", "--dsn", dsn]
    text = '{"word": "naïve"}\n'.encode()
    enqueued = subprocess.run(
        [*command, "enqueue", "tasks", "-"], input=text, capture_output=True, check=True
    )
    assert enqueued.stderr == b""  # no progress bar in a log
    printed = subprocess.run(
        [*command, "dequeue", "tasks", "--json"], capture_output=True, check=True
    )
    assert [message["payload"] for message in json.loads(printed.stdout)] == [{"word": "naïve"}]
