"""Keys, groups and limits between real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

import pgqrs
from tests.acceptance.test_processes import children, rounds

PROCESSES = 4
ROUNDS, MOST_ROUNDS = 3, 50
GROUPS, EACH = 8, 8


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(database, upgrade=True) as store:
        yield store


def test_of_processes_with_the_same_keys_one_enqueues(database: str, store: pgqrs.Store) -> None:
    with children("enqueue_keys", database, PROCESSES) as racers:
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        for number in range(ROUNDS):
            store.admin().create_queue(f"round {number}")
            for racer in racers:
                racer.tell(f"round {number}")
            answers = [racer.answer() for racer in racers]
            ids = {key: {answer[key][0] for answer in answers} for key in answers[0]}
            created = Counter(key for answer in answers for key in answer if answer[key][1])
            assert all(len(found) == 1 for found in ids.values())
            assert created == Counter(ids.keys())
            assert store.admin().queue_stats(f"round {number}").ready == len(ids)


def test_processes_keep_the_order_of_every_group(database: str, store: pgqrs.Store) -> None:
    with children("drain_and_log", database, PROCESSES) as racers:
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        shares: list[int] = []
        for number in rounds(shares, ROUNDS, MOST_ROUNDS):
            queue = f"round {number}"
            store.admin().create_queue(queue)
            names = [f"group {n % GROUPS}" for n in range(GROUPS * EACH)]
            payloads = [[name, n // GROUPS] for n, name in enumerate(names)]
            store.producer(queue).enqueue_many(payloads, groups=names)
            for racer in racers:
                racer.tell(f"{queue}:{len(payloads)}")
            logs = [racer.answer() for racer in racers]
            done = sorted(entry for log in logs for entry in log)
            for name in set(names):
                mine = [(at, what, n) for at, what, group, n, _ in done if group == name]
                expected = [(what, n) for n in range(EACH) for what in ("begin", "end")]
                assert [(what, n) for _, what, n in mine] == expected
            shares.append(sum(bool(log) for log in logs))


def test_processes_never_exceed_the_limits(database: str, store: pgqrs.Store) -> None:
    with children("drain_and_log", database, PROCESSES) as racers:
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        for number in range(ROUNDS):
            queue = f"round {number}"
            store.admin().create_queue(queue, max_in_flight=5, max_in_flight_per_key=2)
            keys = [f"key {n % 4}" for n in range(80)]
            payloads = [["", n] for n in range(80)]
            store.producer(queue).enqueue_many(payloads, keys=keys, unique=None)
            for racer in racers:
                racer.tell(f"{queue}:{len(payloads)}")
            done = sorted(entry for racer in racers for entry in racer.answer())
            in_flight: Counter[str] = Counter()
            for _, what, _, _, key in done:
                in_flight[key] += 1 if what == "begin" else -1
                assert in_flight.total() <= 5
                assert max(in_flight.values()) <= 2
            assert len(done) == 2 * len(payloads)
