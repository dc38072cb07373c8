"""A row of a message that somebody has locked holds up neither renewal nor end of any other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

import pgqrs
from pgqrs.testing.conformance.harness import worker
from pgqrs.testing.portal import Portal, Synced

LONG = 60
LEASE = 3
"""Seconds; a renewal that waits for a lock waits ten times as long."""


@contextmanager
def opened(dsn: str, face: str) -> Iterator[Any]:
    with pgqrs.Store(dsn, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=LEASE)
        if face == "sync":
            yield store
            return
    portal = Portal()
    try:
        with Synced(portal, portal.run(lambda: pgqrs.connect(dsn))) as wrapped:
            yield wrapped
    finally:
        portal.close()


@contextmanager
def held_by_worker(store: Any) -> Iterator[None]:
    """Two messages are in the hands of a worker."""
    begun, go_on = threading.Barrier(3, timeout=LONG), threading.Event()

    def handle(message: pgqrs.Message) -> None:
        if message.read_ct == 1:
            begun.wait()
            go_on.wait(LONG)

    with worker(store, handlers={"tasks": handle}):
        begun.wait()
        yield
        go_on.set()
        until(lambda: store.admin().queue_stats("tasks").archived["completed"] == 2)


@contextmanager
def held_by_buffer(store: Any) -> Iterator[None]:
    """Two messages are in the hands of a buffer."""
    with store.consumer("tasks") as consumer, consumer.buffer(2, wait=0) as buffer:
        _, other = next(buffer), next(buffer)
        yield
        buffer.ack(other)  # the first one's lease has lapsed while it was locked


@pytest.mark.parametrize("holding", [held_by_worker, held_by_buffer])
@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_locked_message_does_not_keep_others_from_being_renewed(
    postgres_database: str, face: str, holding: Callable[[Any], Any]
) -> None:
    with opened(postgres_database, face) as store:
        locked, other = store.producer("tasks").enqueue_many([1, 2])
        with holding(store), locking(postgres_database, locked):
            for _ in range(4):
                vt = store.admin().get_message(other).vt
                until(partial(is_renewed, store, other, since=vt))
            assert store.admin().get_message(other).read_ct == 1
        assert store.admin().get_archived(other).read_ct == 1
        if holding is held_by_worker:  # which handles it again
            assert store.admin().get_archived(locked).archive_reason == "completed"


def test_a_locked_message_is_renewed_when_it_is_free_again(
    postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(postgres_database, "sync") as store:
        id = store.producer("tasks").enqueue(1)
        with store.consumer("tasks") as consumer, consumer.buffer(1, lease=3 * LEASE) as buffer:
            message = next(buffer)
            with locking(postgres_database, id):
                until(lambda: "locked by another transaction" in caplog.text)
            until(partial(is_renewed, store, id, since=message.vt))
            buffer.ack(message)
        assert store.admin().get_archived(id).read_ct == 1
    assert caplog.text.count("locked by another transaction") == 1


@pytest.mark.parametrize("result", [None, "kept"])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_locked_message_does_not_keep_others_from_ending(
    postgres_database: str, face: str, others: int, result: str | None
) -> None:
    """It is handled with others, or alone, before those that come later."""
    begun, go_on = threading.Barrier(2 + others, timeout=LONG), threading.Event()

    def handle(message: pgqrs.Message) -> str | None:
        if message.payload != "late":
            begun.wait()
            go_on.wait(LONG)
        return result

    def completed(store: Any) -> int:
        return int(store.admin().queue_stats("tasks").archived["completed"])

    with opened(postgres_database, face) as store:
        producer = store.producer("tasks")
        locked, *_ = producer.enqueue_many(range(1 + others))
        with worker(store, handlers={"tasks": handle}, lease=LONG):
            begun.wait()
            with locking(postgres_database, locked):
                go_on.set()
                until(lambda: completed(store) == others)
                late = producer.enqueue("late")
                until(lambda: completed(store) == others + 1)
                assert store.admin().get_message(locked).read_ct == 1
            until(lambda: completed(store) == others + 2)
        for id in (locked, late):
            ended = store.admin().get_archived(id)
            assert (ended.read_ct, ended.result) == (1, result)


def is_renewed(store: Any, id: int, *, since: datetime) -> bool:
    return bool(store.admin().get_message(id).vt > since)


@contextmanager
def locking(dsn: str, id: int) -> Iterator[None]:
    """Somebody has locked a message, and does nothing else."""
    plain = make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as outsider:
        outsider.execute("SELECT 1 FROM pgqrs_messages WHERE id = %s FOR UPDATE", (id,))
        yield
        outsider.rollback()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
