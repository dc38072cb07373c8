"""A queue against a model of itself: any sequence of operations, on both databases.

The model is a few dictionaries. Hypothesis looks for a sequence after which database and model
disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import pgqrs
from pgqrs.testing import ManualClock

LEASE, MAX_ATTEMPTS = 10.0, 3
delays = st.sampled_from([0, 0, 0, 3, 15])
workers = st.sampled_from([0, 1])


@dataclass
class Expected:
    """What should be true of one message."""

    id: int
    priority: int
    vt: datetime
    read_ct: int = 0
    released: int = 0
    holder: int | None = None
    held: dict[int, pgqrs.Message] = field(default_factory=dict)
    """The last claim of each worker, also when it is lost."""

    @property
    def attempts(self) -> int:
        return self.read_ct - self.released


class QueueMachine(RuleBasedStateMachine):
    store: pgqrs.Store
    clock: ManualClock

    def __init__(self) -> None:
        super().__init__()
        self.admin = self.store.admin()
        self.name = f"queue {id(self)} {self.clock.now()}"
        self.admin.create_queue(self.name, lease=LEASE, max_read_ct=MAX_ATTEMPTS)
        self.producer = self.store.producer(self.name)
        self.consumers = [self.store.consumer(self.name).open() for _ in range(2)]
        self.live: dict[int, Expected] = {}
        self.ended: dict[int, str] = {}
        self.deleted: set[int] = set()
        self.paused = False

    def teardown(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.admin.delete_queue(self.name, force=True)

    @rule(priority=st.integers(-2, 2), delay=delays, count=st.integers(1, 4))
    def enqueue(self, priority: int, delay: float, count: int) -> None:
        ids = self.producer.enqueue_many(range(count), priority=priority, delay=delay)
        for id in ids:
            self.live[id] = Expected(id, priority, self.clock.now() + timedelta(seconds=delay))

    @rule(who=workers, n=st.integers(1, 4))
    def dequeue(self, who: int, n: int) -> None:
        claimed = self.consumers[who].dequeue(n)
        if self.paused:
            assert claimed == []
            return
        now = self.clock.now()
        due = [message for message in self.live.values() if message.vt <= now]
        for message in due:
            if message.holder is not None and message.attempts >= MAX_ATTEMPTS:
                self.ended[message.id] = "failed"
                del self.live[message.id]
        expected = sorted(
            (message for message in due if message.id in self.live),
            key=lambda message: (-message.priority, message.id),
        )[:n]
        assert [message.id for message in claimed] == [message.id for message in expected]
        for message, model in zip(claimed, expected, strict=True):
            model.read_ct += 1
            model.holder = who
            model.vt = now + timedelta(seconds=LEASE)
            model.held[who] = message
            assert (message.read_ct, message.attempt) == (model.read_ct, model.attempts)
            assert message.vt == model.vt

    @rule(who=workers, pick=st.randoms(use_true_random=False), data=st.data())
    def end(self, who: int, pick: Any, data: st.DataObject) -> None:
        """Do something with a claim of this worker, whether or not it still holds it."""
        claims = [message for message in self.live.values() if who in message.held]
        if not claims:
            return
        model = pick.choice(claims)
        message = model.held[who]
        holds = model.holder == who and model.read_ct == message.read_ct
        how = data.draw(st.sampled_from(["ack", "fail", "release", "extend", "delete"]))
        delay = data.draw(delays)
        consumer = self.consumers[who]
        call = {
            "ack": lambda: consumer.ack(message),
            "fail": lambda: consumer.fail(message, "error", delay=delay),
            "release": lambda: consumer.release(message, delay=delay),
            "extend": lambda: consumer.extend(message, 20),
            "delete": lambda: consumer.delete(message),
        }[how]
        if not holds:
            with pytest.raises(pgqrs.LeaseLost):
                call()
            return
        call()
        getattr(self, f"_{how}")(model, delay)

    def _ack(self, model: Expected, _: float) -> None:
        self.ended[model.id] = "completed"
        del self.live[model.id]

    def _fail(self, model: Expected, delay: float) -> None:
        if model.attempts >= MAX_ATTEMPTS:
            self.ended[model.id] = "failed"
            del self.live[model.id]
        else:
            self._back(model, delay)

    def _release(self, model: Expected, delay: float) -> None:
        model.released += 1
        self._back(model, delay)

    def _extend(self, model: Expected, _: float) -> None:
        model.vt = self.clock.now() + timedelta(seconds=20)

    def _delete(self, model: Expected, _: float) -> None:
        self.deleted.add(model.id)
        del self.live[model.id]

    def _back(self, model: Expected, delay: float) -> None:
        model.holder = None
        model.vt = self.clock.now() + timedelta(seconds=delay)

    @rule(seconds=st.sampled_from([1, 5, 11]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        (self.admin.pause_queue if self.paused else self.admin.resume_queue)(self.name)

    @rule()
    def replay(self) -> None:
        dead = self.admin.dead_letters(self.name)
        if dead:
            (new,) = self.admin.replay(dead[0].original_message_id)
            self.live[new] = Expected(new, dead[0].priority, self.clock.now())

    @invariant()
    def nothing_is_lost(self) -> None:
        assert {message.id for message in self.admin.peek(self.name, 1000)} == set(self.live)
        archived = self.admin.list_archive(self.name, n=1000)
        assert {found.original_message_id: found.archive_reason for found in archived} == self.ended

    @invariant()
    def the_counts_agree(self) -> None:
        now = self.clock.now()
        found = self.admin.queue_stats(self.name)
        due = [message for message in self.live.values() if message.vt <= now]
        later = [message for message in self.live.values() if message.vt > now]
        assert found.ready == len(due)
        assert found.leased == sum(message.holder is not None for message in later)
        assert found.delayed == sum(message.holder is None for message in later)


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    # Nothing here waits for a disk: this is about what is true, not about what survives.
    with pgqrs.Store(
        database, clock=ManualClock(), upgrade=True, sqlite_synchronous="off"
    ) as store:
        yield store


def test_any_sequence_of_operations(store: pgqrs.Store) -> None:
    clock = store._database.clock
    machine = type("Machine", (QueueMachine,), {"store": store, "clock": clock})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
