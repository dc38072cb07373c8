"""Real processes, killed for real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pgqrs

ROOT = Path(__file__).parents[2]
PROCESSES = 4
ROUNDS, MOST_ROUNDS = 12, 100
"""More rounds than the first number only if no two processes came to work in one of them."""
MESSAGES = 320


class Child:
    """A process that answers in lines of JSON."""

    def __init__(self, name: str, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.children", name, url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> str:
        """Kill it. Returns what it had said and nobody had read."""
        self.process.kill()
        said, _ = self.process.communicate()
        return said


@contextmanager
def children(name: str, url: str, count: int = 1) -> Iterator[list[Child]]:
    started = [Child(name, url) for _ in range(count)]
    try:
        yield started
    finally:
        for child in started:
            child.end()


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database) as store:
        store.admin().install()
        store.admin().create_queue("tasks", lease=1)
        yield store


def wait_for_message(consumer: pgqrs.Consumer) -> pgqrs.Message:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if claimed := consumer.dequeue():
            return claimed[0]
        time.sleep(0.05)
    raise AssertionError("the message did not come back")


def test_processes_never_share_a_message(database: str, store: pgqrs.Store) -> None:
    admin = store.admin()
    with children("drain", database, PROCESSES) as racers:
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        shares: list[int] = []
        for number in rounds(shares, ROUNDS, MOST_ROUNDS):
            admin.create_queue(f"round {number}")
            ids = store.producer(f"round {number}").enqueue_many(range(MESSAGES))
            for racer in racers:
                racer.tell(f"round {number}")
            found = [racer.answer() for racer in racers]
            assert sorted(id for part in found for id in part) == ids
            assert admin.queue_stats(f"round {number}").archived["completed"] == MESSAGES
            shares.append(sum(bool(part) for part in found))


def rounds(shares: list[int], enough: int, most: int) -> Iterator[int]:
    """Numbers of rounds until there were enough, and in one of them more than one took part."""
    for number in range(most):
        if number >= enough and max(shares) > 1:
            return
        yield number
    raise AssertionError("they never raced")


def test_a_killed_consumers_message_comes_back_by_itself(database: str, store: pgqrs.Store) -> None:
    id = store.producer("tasks").enqueue("precious")
    with children("hold", database) as (victim,):
        assert victim.answer() == [id, 1]
        victim.signal(signal.SIGKILL)
        victim.process.wait()
    with store.consumer("tasks") as consumer:
        message = wait_for_message(consumer)
        assert (message.id, message.payload, message.read_ct) == (id, "precious", 2)
        consumer.ack(message)
    assert store.admin().get_archived(id).archive_reason == "completed"


@pytest.mark.parametrize("late", ["ack", "release", "delete", "fail"])
def test_a_frozen_consumer_that_wakes_up_too_late_is_refused(
    database: str, store: pgqrs.Store, late: str
) -> None:
    id = store.producer("tasks").enqueue("precious")
    with children("hold", database) as (zombie,), store.consumer("tasks", lease=300) as consumer:
        assert zombie.answer() == [id, 1]
        zombie.signal(signal.SIGSTOP)
        message = wait_for_message(consumer)
        assert (message.id, message.read_ct) == (id, 2)
        zombie.signal(signal.SIGCONT)
        zombie.tell(late)
        assert zombie.answer() == ["lost", id]
        assert store.admin().get_message(id) == message
        consumer.ack(message)
        zombie.tell(late)
        assert zombie.answer() == ["lost", id]


def test_what_was_enqueued_survives_the_producers_death(database: str, store: pgqrs.Store) -> None:
    for _ in range(5):
        with children("enqueue_forever", database) as (victim,):
            said = [victim.answer() for _ in range(20)]
            said += [
                json.loads(line) for line in victim.end().splitlines(True) if line.endswith("\n")
            ]
        kept = {message.id for message in store.admin().peek("tasks", 100_000)}
        assert kept >= set(said)
        # All of a batch or none of it: the single ones and the threes together.
        assert len(kept) == store.admin().queue_stats("tasks").ready
        triples = [m for m in store.admin().peek("tasks", 100_000) if m.payload in (1, 2, 3)]
        assert len(triples) % 3 == 0


def test_a_buffer_that_is_killed_loses_nothing_and_acks_nothing_else(
    database: str, store: pgqrs.Store
) -> None:
    ids = store.producer("tasks").enqueue_many(range(400))
    with children("buffer", database) as (victim,):
        acked = [victim.answer() for _ in range(150)]
        acked += [json.loads(line) for line in victim.end().splitlines(True) if line[-1] == "\n"]
    finished = {found.original_message_id for found in store.admin().list_archive("tasks", n=1000)}
    assert finished <= set(acked), "something was acked that nobody acked"
    assert finished, "it died before its first batch"
    with store.consumer("tasks", lease=60) as consumer:
        with consumer.buffer(100, wait=100) as buffer:
            while finished != set(ids):  # the leases of the dead lapse meanwhile
                message = next(buffer)
                assert message.id not in finished
                finished.add(message.id)
                buffer.ack(message)
        assert finished == set(ids)
    assert store.admin().queue_stats("tasks").archived["completed"] == len(ids)
