"""Local mode, turn by turn; and what becomes of writes whose process is gone."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import pgqrs
from pgqrs.stores import local
from tests.s3.conftest import QUEUE, Call, Object, replica_of, step, until
from tests.s3.proxy import Held, answered, applied_but_unanswered, never_applied

ROOT = Path(__file__).parents[2]


def ready(store: pgqrs.Store) -> list[Any]:
    return [message.payload for message in store.admin().peek(QUEUE)]


def kept_aside(store: pgqrs.Store) -> list[str]:
    """The payloads in the file that the store kept aside."""
    (path,) = store.admin().s3_stats().set_aside
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT payload FROM pgqrs_messages ORDER BY id").fetchall()
    return [payload for (payload,) in rows]


# One turn


def test_a_write_returns_at_once_and_is_uploaded_later(object: Object) -> None:
    store = object.open("local")
    with store.consumer(QUEUE) as consumer:
        assert store.producer(QUEUE).enqueue("a") == 1
        assert [message.payload for message in consumer.dequeue()] == ["a"]
    assert object.proxy.puts() == 0
    assert object.payloads() == []
    step(store)
    assert object.payloads() == ['"a"']


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_local_copies_are_for_their_owner_alone(object: Object, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    object.open("local", s3_cache=str(cache))
    assert list(cache.rglob("*.sqlite"))
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o700]


def test_what_changed_nothing_is_not_uploaded(object: Object) -> None:
    store = object.open("local")
    consumer = store.consumer(QUEUE).open()
    step(store)
    puts = object.proxy.puts()
    assert consumer.dequeue() == []
    step(store)
    assert object.proxy.puts() == puts == 1


def test_what_is_written_during_an_upload_is_in_the_next(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("first")
    held = Held()
    object.proxy.script("PUT", held)
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    store.producer(QUEUE).enqueue("second")
    held.release()
    turn.outcome()
    assert object.payloads() == ['"first"']
    assert store.admin().s3_state() == "local_changed"
    step(store)
    assert object.payloads() == ['"first"', '"second"']
    assert store.admin().s3_state() == "in_sync"


def test_an_idle_store_takes_over_what_others_uploaded(object: Object) -> None:
    store = object.open("local", s3_max_staleness=0.0)
    assert ready(store) == []
    object.other().producer(QUEUE).enqueue("theirs")
    assert ready(store) == []
    step(store)
    assert ready(store) == ["theirs"]


def test_the_thread_uploads_by_itself(object: Object) -> None:
    store = object.open("local", by_hand=False, s3_sync_interval=0.02)
    store.producer(QUEUE).enqueue("a")
    until(lambda: object.payloads() == ['"a"'])


def test_many_writes_do_not_wait_for_their_time(
    object: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MANY_WRITES", 10)
    store = object.open("local", by_hand=False, s3_sync_interval=3600.0)
    for n in range(10):
        store.producer(QUEUE).enqueue(n)
    until(lambda: len(object.payloads()) == 10)


def test_an_error_that_passes_is_tried_again_next_time(object: Object) -> None:
    store = object.open("local", retry_for=0.1)
    store.producer(QUEUE).enqueue("a")
    object.proxy.usually["PUT"] = answered(503, "SlowDown")
    with pytest.raises((pgqrs.StoreUnavailable, pgqrs.CommitUncertain)):
        step(store)
    store.producer(QUEUE).enqueue("b")
    object.proxy.usually.clear()
    step(store)
    assert object.payloads() == ['"a"', '"b"']


def test_an_application_writes_in_a_transaction_of_its_own(object: Object) -> None:
    store = object.open("local")
    with store.engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
        store.using(connection).enqueue(QUEUE, "with the order")
    assert ready(store) == ["with the order"]
    step(store)
    assert object.payloads() == ['"with the order"']


# Lost races


def test_writes_that_cannot_be_uploaded_are_kept_aside_and_reported_once(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("mine")
    object.other().producer(QUEUE).enqueue("theirs")
    step(store)
    assert ready(store) == ["theirs"]
    assert kept_aside(store) == ['"mine"']
    with pytest.raises(pgqrs.ConflictError, match="set-aside"):
        store.producer(QUEUE).enqueue("next")
    store.producer(QUEUE).enqueue("next")
    step(store)
    assert object.payloads() == ['"theirs"', '"next"']


def test_an_object_that_was_deleted_leaves_its_last_copy(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("mine")
    step(store)
    object.delete()
    with pytest.raises(pgqrs.SchemaNotInstalled):
        store.admin().pull_from_s3()
    assert kept_aside(store) == ['"mine"']


def test_who_flushes_is_told_at_once(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("mine")
    object.other().producer(QUEUE).enqueue("theirs")
    with pytest.raises(pgqrs.ConflictError, match="set-aside"):
        store.admin().flush_to_s3()
    store.producer(QUEUE).enqueue("next")
    assert store.admin().flush_to_s3() == []
    assert object.payloads() == ['"theirs"', '"next"']


def test_an_upload_that_was_applied_but_not_answered_is_recognised(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("once")
    object.proxy.script("PUT", applied_but_unanswered)
    step(store)
    assert store.admin().s3_state() == "in_sync"
    assert object.payloads() == ['"once"']


def test_it_is_recognised_also_when_somebody_built_on_it(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("once")
    held = Held()
    object.proxy.script("PUT", applied_but_unanswered, held)
    turn = Call(lambda: step(store))
    held.arrived.wait(100)
    object.other().producer(QUEUE).enqueue("on top")
    held.release()
    turn.outcome()
    assert ready(store) == ["once", "on top"]
    assert store.admin().s3_stats().set_aside == ()
    store.producer(QUEUE).enqueue("and on")
    step(store)
    assert len(object.payloads()) == 3


# The end, and what is left behind


def test_closing_uploads(object: Object) -> None:
    store = object.open("local")
    store.producer(QUEUE).enqueue("a")
    store.close()
    assert object.payloads() == ['"a"']


def test_closing_without_a_bucket_leaves_the_writes_for_the_next(object: Object) -> None:
    settings = object.settings(name="cache") | {"retry_for": 0.1}
    store = pgqrs.Store(object.url("local"), **settings)
    store.producer(QUEUE).enqueue("a")
    object.proxy.usually["PUT"] = answered(503, "SlowDown")
    store.close()
    object.proxy.usually.clear()
    with pgqrs.Store(object.url("local"), **settings) as store:
        assert object.payloads() == ['"a"']
        assert ready(store) == ["a"]


def test_in_memory_the_writes_are_kept_aside_instead(
    object: Object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = object.open("local", s3_cache=":memory:", retry_for=0.1)
    store.producer(QUEUE).enqueue("a")
    object.proxy.usually["PUT"] = answered(503, "SlowDown")
    with pytest.raises((pgqrs.StoreUnavailable, pgqrs.CommitUncertain)):
        store.close()
    assert len(list(tmp_path.rglob("set-aside/*.sqlite"))) == 1


def test_a_store_that_nobody_uses_is_uploaded_and_gone(object: Object) -> None:
    settings = object.settings(by_hand=False, name="cache") | {"s3_sync_interval": 3600.0}
    store = pgqrs.Store(object.url("local"), **settings)
    store.producer(QUEUE).enqueue("a")
    thread = replica_of(store).task._thread
    del store
    gc.collect()
    thread.join(100)
    assert object.payloads() == ['"a"']


CHILD = """
import sys, pgqrs
url, endpoint, cache, payload, ending = sys.argv[1:]
store = pgqrs.Store(url, s3_endpoint_url=endpoint, s3_cache=cache, s3_sync_interval=3600)
print(store.producer("tasks").enqueue(payload), flush=True)
if ending != "exit":
    sys.stdin.read()
"""


def child(object: Object, cache: Path, payload: str, *, ending: str) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD),
            *(object.url("local"), object.proxy.url, str(cache), payload, ending),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdout
    assert process.stdout.readline().strip().isdigit()
    if ending == "wait":
        process.send_signal(signal.SIGKILL)
    elif ending == "terminate":
        process.send_signal(signal.SIGTERM)
        process.wait(100)
    process.communicate()
    ended = {"wait": -signal.SIGKILL, "terminate": 128 + signal.SIGTERM, "exit": 0}
    assert process.returncode == ended[ending]


def test_the_end_of_the_interpreter_uploads(object: Object, tmp_path: Path) -> None:
    child(object, tmp_path / "cache", "last words", ending="exit")
    assert object.payloads() == ['"last words"']


@pytest.mark.parametrize("mode", ["local", "durable"])
def test_what_a_killed_process_left_behind_is_uploaded_by_the_next(
    object: Object, tmp_path: Path, mode: str
) -> None:
    child(object, tmp_path / "cache", "left behind", ending="wait")
    assert object.payloads() == []
    store = object.open(mode, s3_cache=str(tmp_path / "cache"))
    assert object.payloads() == ['"left behind"']
    assert ready(store) == ["left behind"]


@pytest.mark.parametrize("mode", ["local", "durable"])
def test_what_was_left_behind_too_long_is_kept_aside(
    object: Object, tmp_path: Path, mode: str
) -> None:
    child(object, tmp_path / "cache", "left behind", ending="wait")
    object.other().producer(QUEUE).enqueue("meanwhile")
    store = object.open(mode, s3_cache=str(tmp_path / "cache"))
    assert ready(store) == ["meanwhile"]
    assert kept_aside(store) == ['"left behind"']
    assert object.payloads() == ['"meanwhile"']


def test_left_behind_after_an_upload_that_was_not_answered(object: Object) -> None:
    settings = object.settings(name="cache") | {"retry_for": 0.1}
    store = pgqrs.Store(object.url("local"), **settings)
    store.producer(QUEUE).enqueue("uploaded")
    object.proxy.script("PUT", applied_but_unanswered)
    object.proxy.usually["PUT"] = never_applied
    with pytest.raises(pgqrs.CommitUncertain):
        step(store)
    store.producer(QUEUE).enqueue("and more")
    store.close()  # in vain
    object.proxy.script("PUT")
    object.proxy.usually.clear()
    with pgqrs.Store(object.url("local"), **settings) as store:
        assert object.payloads() == ['"uploaded"', '"and more"']
        assert store.admin().s3_stats().set_aside == ()


def test_without_a_bucket_one_goes_on_with_the_copy_of_last_time(object: Object) -> None:
    settings = object.settings(name="cache") | {"retry_for": 0.1}
    with pgqrs.Store(object.url("local"), **settings) as store:
        store.producer(QUEUE).enqueue("a")
    object.proxy.usually = {"GET": answered(503, "SlowDown"), "PUT": answered(503, "SlowDown")}
    with pgqrs.Store(object.url("local"), **settings) as store:
        assert ready(store) == ["a"]
        store.producer(QUEUE).enqueue("b")
        object.proxy.usually.clear()
    assert object.payloads() == ['"a"', '"b"']


# Copies that are not what they were, and objects that are not


@pytest.mark.parametrize("dirty", [False, True])
def test_a_copy_that_is_gone_is_downloaded_and_never_uploaded(
    object: Object, tmp_path: Path, dirty: bool
) -> None:
    cache = tmp_path / "cache"
    object.other().producer(QUEUE).enqueue("a")
    if dirty:
        child(object, cache, "lost with the file", ending="wait")
    else:
        object.open("local", s3_cache=str(cache)).close()
    for path in cache.rglob("write_db.sqlite*"):
        path.unlink()
    store = object.open("local", s3_cache=str(cache))
    assert ready(store) == ["a"]
    store.producer(QUEUE).enqueue("b")
    step(store)
    assert object.payloads() == ['"a"', '"b"']


def test_a_copy_that_is_older_than_it_should_be_is_set_aside(
    object: Object, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for payload in ("one", "two"):
        with pgqrs.Store(object.url("local"), **object.settings() | {"s3_cache": str(cache)}) as s:
            s.producer(QUEUE).enqueue(payload)
        if payload == "one":
            (path,) = cache.rglob("write_db.sqlite")
            older = path.read_bytes()
    path.write_bytes(older)
    store = object.open("local", s3_cache=str(cache))
    assert kept_aside(store) == ['"one"']
    assert ready(store) == ["one", "two"]
    store.producer(QUEUE).enqueue("three")
    step(store)
    assert object.payloads() == ['"one"', '"two"', '"three"']


def test_local_writes_in_a_copy_that_cannot_be_used_are_set_aside_and_reported(
    object: Object, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    child(object, cache, "left behind", ending="wait")
    (base,) = cache.rglob("base.json")
    base.write_text("{")
    store = object.open("local", s3_cache=str(cache))
    assert kept_aside(store) == ['"left behind"']
    with pytest.raises(pgqrs.ConflictError, match="set-aside"):
        store.producer(QUEUE).enqueue("next")
    assert store.producer(QUEUE).enqueue("next") == 1


@pytest.mark.parametrize("mode", ["local", "durable"])
def test_an_object_that_was_replaced_by_an_older_one_leaves_the_newer_copy(
    object: Object, mode: str
) -> None:
    older = object.body()
    store = object.open(mode, by_hand=False, s3_max_staleness=0.0, s3_sync_interval=3600.0)
    store.producer(QUEUE).enqueue("newer")
    store.admin().flush_to_s3()
    object.put(older)
    store.admin().pull_from_s3()
    assert ready(store) == []
    assert kept_aside(store) == ['"newer"']
    if mode == "local":
        with pytest.raises(pgqrs.ConflictError, match="set-aside"):
            store.producer(QUEUE).enqueue("next")


def test_the_report_reaches_a_producer_also_after_a_consumer_has_swallowed_it(
    object: Object,
) -> None:
    store = object.open("local")
    consumer = store.consumer(QUEUE).open()
    store.producer(QUEUE).enqueue("mine")
    object.other().producer(QUEUE).enqueue("theirs")
    step(store)
    with pytest.raises(pgqrs.ConflictError, match="set-aside"):
        consumer.dequeue()
    with pytest.raises(pgqrs.ConflictError, match="set-aside"):
        store.producer(QUEUE).enqueue("next")
    store.producer(QUEUE).enqueue("next")


def test_sigterm_uploads(object: Object, tmp_path: Path) -> None:
    child(object, tmp_path / "cache", "last words", ending="terminate")
    assert object.payloads() == ['"last words"']


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of fork with threads
def test_a_child_of_a_fork_has_a_copy_of_its_own(object: Object) -> None:
    store = object.open("local", by_hand=False)
    store.producer(QUEUE).enqueue("a")
    store.admin().flush_to_s3()
    theirs = store._database.replica.slot.directory  # type: ignore[attr-defined]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.producer(QUEUE).enqueue("b")
            mine = store._database.replica.slot.directory  # type: ignore[attr-defined]
            store.close()
            code = 0 if mine != theirs else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert object.payloads() == ['"a"', '"b"']
    store.admin().pull_from_s3()
    store.producer(QUEUE).enqueue("c")
    store.close()
    assert object.payloads() == ['"a"', '"b"', '"c"']
