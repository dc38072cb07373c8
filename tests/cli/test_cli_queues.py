"""`pgqrs queue …` and `pgqrs stats`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

import pgqrs


def test_create_show_and_list(run: Any, run_json: Any) -> None:
    created = run_json("queue", "create", "mail", "--lease", "5m", "--retention", "7d")
    assert created["queue_name"] == "mail"
    assert created["lease"] == 300
    assert created["retention"] == 7 * 86400
    assert created["paused"] is False
    assert datetime.fromisoformat(created["created_at"]).utcoffset() is not None
    assert run_json("queue", "show", "mail") == created
    assert [queue["queue_name"] for queue in run_json("queue", "list")] == ["mail", "tasks"]
    table = run("queue", "list").stdout
    assert "mail" in table
    assert "tasks" in table


def test_create_twice(run: Any, run_json: Any) -> None:
    result = run("queue", "create", "tasks")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: queue 'tasks' exists already")
    before = run_json("queue", "show", "tasks")
    assert run_json("queue", "create", "tasks", "--if-not-exists", "--lease", "1") == before


def test_configure(run: Any, run_json: Any) -> None:
    changed = run_json("queue", "configure", "tasks", "--max-read-ct", "2", "--retention", "60")
    assert (changed["max_read_ct"], changed["retention"]) == (2, 60)
    changed = run_json("queue", "configure", "tasks", "--no-retention")
    assert (changed["max_read_ct"], changed["retention"]) == (2, None)
    assert run("queue", "configure", "tasks").exit_code == 2
    assert run("queue", "configure", "tasks", "--lease", "soon").exit_code == 2
    assert run("queue", "configure", "tasks", "--lease", "0").exit_code == 1


def test_pause_and_resume(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1")
    assert run_json("queue", "pause", "tasks")["paused"] is True
    assert run_json("dequeue", "tasks") == []
    assert run_json("stats", "tasks")["paused"] is True
    assert run_json("queue", "resume", "tasks")["paused"] is False
    assert [message["payload"] for message in run_json("dequeue", "tasks")] == [1]


@pytest.mark.parametrize(
    "command", [["show"], ["pause"], ["peek"], ["purge", "--yes"], ["dead"], ["archive"]]
)
def test_missing_queue(run: Any, command: list[str]) -> None:
    result = run("queue", *command, "nope")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: queue 'nope' does not exist")


def test_purge_asks_first(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1", "2", "3")
    refused = run("queue", "purge", "tasks", input="n\n")
    assert refused.exit_code == 1
    assert "3 message(s)" in refused.stderr
    assert run("queue", "purge", "tasks", input="").exit_code == 1
    assert len(run_json("queue", "peek", "tasks")) == 3
    assert run_json("queue", "purge", "tasks", input="y\n") == {"queue": "tasks", "purged": 3}
    assert run_json("queue", "purge", "tasks", "--yes") == {"queue": "tasks", "purged": 0}


def test_delete_is_refused_while_messages_remain(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1")
    result = run("queue", "delete", "tasks")
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert run("queue", "delete", "tasks", "--force", input="n\n").exit_code == 1
    assert run_json("queue", "list") != []
    assert run("queue", "delete", "tasks", "--force", "--yes").exit_code == 0
    assert run_json("queue", "list") == []


def test_delete_an_empty_queue_needs_no_confirmation(run: Any, run_json: Any) -> None:
    assert run("queue", "delete", "tasks").exit_code == 0
    assert run_json("queue", "list") == []
    assert "no queues" in run("queue", "list").stdout


def test_peek_pages_and_claims_nothing(run: Any, run_json: Any) -> None:
    run("enqueue", "tasks", "1", "2", "3")
    first = run_json("queue", "peek", "tasks", "-n", "2")
    rest = run_json("queue", "peek", "tasks", "--after", str(first[-1]["id"]))
    assert [message["payload"] for message in first + rest] == [1, 2, 3]
    assert run_json("stats", "tasks")["ready"] == 3


def test_tables_show_text_as_it_is(run: Any) -> None:
    run("enqueue", "tasks", '"[bold]x[/bold] :smile: \\u001b[31m \\u009b é"')
    table = run("queue", "peek", "tasks").stdout
    assert "[bold]x[/bold] :smile: \\u001b[31m \\x9b é" in table
    assert "\x1b" not in table
    assert "\x9b" not in table


def test_long_payload_is_not_cut_off(run: Any) -> None:
    run("enqueue", "tasks", f'"{"x" * 5000}"')
    assert run("queue", "peek", "tasks").stdout.count("x") == 5000


def dead_letters(store: pgqrs.Store, payloads: list[Any]) -> list[int]:
    with store.producer("tasks") as producer, store.consumer("tasks") as consumer:
        ids = producer.enqueue_many(payloads)
        consumer.fail_many(consumer.dequeue(len(ids)), ValueError("boom\x1b[31m"), dead=True)
    return ids


def test_dead_letters_and_archive(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    ids = dead_letters(store, ["a", "b"])
    run("enqueue", "tasks", '"c"')
    run("dequeue", "tasks")

    dead = run_json("queue", "dead", "tasks")
    assert [message["original_message_id"] for message in dead] == ids
    assert dead[0]["archive_reason"] == "failed"
    assert "ValueError: boom" in dead[0]["error"]
    assert "boom\\x1b[31m" in run("queue", "dead", "tasks").stdout

    archived = run_json("queue", "archive", "tasks")
    assert [message["archive_reason"] for message in archived] == ["failed", "failed", "completed"]
    completed = run_json("queue", "archive", "tasks", "--reason", "completed")
    assert [message["payload"] for message in completed] == ["c"]
    paged = run_json("queue", "archive", "tasks", "-n", "1", "--after", str(archived[0]["id"]))
    assert paged == [archived[1]]
    assert run("queue", "archive", "tasks", "--reason", "nonsense").exit_code == 2


def test_replay_all_dead_letters(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    dead_letters(store, ["a", "b"])
    assert run_json("queue", "replay", "tasks") == {"queue": "tasks", "replayed": 2}
    assert run_json("queue", "dead", "tasks") == []
    assert [m["payload"] for m in run_json("dequeue", "tasks", "-n", "9")] == ["a", "b"]
    assert "no dead letters" in run("queue", "dead", "tasks").stdout


def test_replay_one_message(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    first, second = dead_letters(store, ["a", "b"])
    replayed = run_json("queue", "replay", "tasks", "--id", str(second))
    (message,) = run_json("dequeue", "tasks", "-n", "9")
    assert message["payload"] == "b"
    assert replayed == {"queue": "tasks", "replayed": 1, "ids": [message["id"]]}
    assert [m["original_message_id"] for m in run_json("queue", "dead", "tasks")] == [first]


def test_replay_what_matches(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    dead_letters(store, [{"customer": 1}, {"customer": 2}, {"customer": 2, "vip": True}])
    chosen = ["--payload", '{"customer": 2}', "--error", "boom"]
    listed = run_json("queue", "archive", "tasks", *chosen)
    assert [found["payload"]["customer"] for found in listed] == [2, 2]
    assert run_json("queue", "replay", "tasks", *chosen)["replayed"] == 2
    assert run_json("queue", "replay", "tasks", "--until", "2020-01-01T00:00:00Z")["replayed"] == 0
    assert run_json("queue", "replay", "tasks", "--header", "tenant=x")["replayed"] == 0
    assert run_json("queue", "replay", "tasks", "--reason", "completed")["replayed"] == 0
    assert run_json("queue", "replay", "tasks", "--reason", "any")["replayed"] == 1
    for bad in (
        ["--payload", "{"],
        ["--since", "yesterday"],
        ["--header", "tenant"],
        ["--id", "1", "--error", "boom"],
    ):
        assert run("queue", "replay", "tasks", *bad).exit_code == 2


def test_replay_refuses_a_message_of_another_queue(run: Any, store: pgqrs.Store) -> None:
    (id,) = dead_letters(store, ["a"])
    run("queue", "create", "other")
    result = run("queue", "replay", "other", "--id", str(id))
    assert result.exit_code == 1
    assert result.stderr == f"Error: message {id} does not exist\n"
    assert run("queue", "replay", "tasks", "--id", "999").exit_code == 1


def test_purge_archive(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    dead_letters(store, ["a", "b"])
    assert run("queue", "purge-archive", "tasks", "--yes").exit_code == 2  # keeps for ever
    old = ["queue", "purge-archive", "tasks", "--older-than"]
    assert run_json(*old, "1h", "--yes") == {"queue": "tasks", "purged": 0}
    assert run(*old, "0", input="n\n").exit_code == 1
    assert run_json(*old, "0", "--reason", "completed", "--yes")["purged"] == 0
    assert run_json(*old, "0", input="y\n")["purged"] == 2
    assert run_json("queue", "archive", "tasks") == []


def test_stats(run: Any, run_json: Any, store: pgqrs.Store) -> None:
    dead_letters(store, ["a"])
    run("enqueue", "tasks", "1", "2")
    run("enqueue", "tasks", "3", "--delay", "1h")
    run("dequeue", "tasks", "--no-ack")
    run("queue", "create", "other")

    one = run_json("stats", "tasks")
    assert (one["ready"], one["delayed"], one["leased"]) == (1, 1, 1)
    assert one["archived"] == {"completed": 0, "failed": 1, "expired": 0, "manual": 0}
    assert one["oldest_age"] >= 0
    every = run_json("stats")
    assert [stats["queue"] for stats in every] == ["other", "tasks"]
    assert every[0]["oldest_age"] is None
    assert run("stats", "nope").exit_code == 1
    heading = run("stats").stdout.split()
    for column in ("ready", "delayed", "leased", "oldest", "paused", "completed", "failed"):
        assert column in heading


def test_bounds(run: Any, run_json: Any) -> None:
    made = run_json("queue", "create", "bounded", "--max-lease", "20", "--max-releases", "3")
    assert (made["lease"], made["max_lease"], made["max_releases"]) == (20.0, 20.0, 3)
    assert "20 s of lease, 3 releases" in run("queue", "show", "bounded").stdout
    assert run("queue", "configure", "bounded", "--lease", "21").exit_code == 1
    changed = run_json("queue", "configure", "bounded", "--max-lease", "1m", "--lease", "1m")
    assert (changed["lease"], changed["max_lease"]) == (60.0, 60.0)
    changed = run_json("queue", "configure", "bounded", "--no-limits")
    assert (changed["max_lease"], changed["max_releases"]) == (None, None)
