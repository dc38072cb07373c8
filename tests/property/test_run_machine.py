"""A run against a model of itself: whatever is done to it, in any order, on both databases.

The model knows where a run stands. Hypothesis looks for a sequence after which database and model
disagree, or which takes a step that `decide.TRANSITIONS` does not allow: above all, one out of an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import pgqrs
from pgqrs.outcomes import Settled
from pgqrs.testing import ManualClock
from pgqrs.types import ENDED, RunStatus
from pgqrs.workflows.decide import TRANSITIONS

S = RunStatus
LEASE, MAX_ATTEMPTS = 30.0, 2


plans = st.lists(
    st.sampled_from(["", "", "", "crash", "fail", "pause", "signal", "cancel"]), max_size=3
)
controls = st.sampled_from(
    ["pause", "resume", "resume", "retry", "retry", "signal", "signal", "drive_by_hand", "cancel"]
)


class Crash(BaseException):
    """As if the process had died here."""


class RunMachine(RuleBasedStateMachine):
    store: pgqrs.Store
    clock: ManualClock

    def __init__(self) -> None:
        super().__init__()
        self.queue = f"runs {id(self)} {self.clock.now()}"
        self.store.admin().create_queue(self.queue, lease=LEASE, max_read_ct=MAX_ATTEMPTS)
        self.effects: list[int] = []
        self.plan: list[str] = []
        """What the next calls of the step do; nothing is to succeed."""
        self.workflow = self._workflow()
        self.run = self.workflow.options(queue=self.queue, store=self.store).start()
        self.seen = S.PENDING
        self.was_held: list[pgqrs.Message] = []
        self.consumer = self.store.consumer(self.queue).open()

    def _workflow(self) -> Any:
        @pgqrs.step(retry=pgqrs.Retry.fixed(5, max_attempts=2))
        def act(n: int) -> int:
            what = self.plan.pop(0) if self.plan else "succeed"
            if what == "crash":
                raise Crash
            if what == "fail":
                raise ValueError(n)
            if what in ("cancel", "pause", "signal"):
                getattr(self, what)()
            self.effects.append(n)
            return n

        @pgqrs.workflow
        def act_and_wait() -> list[Any]:
            first = act(1)
            pgqrs.sleep(10)
            second = act(2)
            word = pgqrs.wait_for_event("word", timeout=20, default="none")
            return [first, second, word]

        return act_and_wait

    def teardown(self) -> None:
        self.consumer.close()
        self.run.cancel()
        self.store.admin().delete_queue(self.queue, force=True)

    @rule(plan=plans, later=st.sampled_from([0, 5, 10, 20, 31]))
    def work(self, plan: list[str], later: int) -> None:
        self._work(plan, later)

    def _work(self, plan: list[str], later: int) -> None:
        self.clock.advance(later)
        self.plan = plan
        for message in self.consumer.dequeue(5):
            assert self.seen not in ENDED
            self.was_held.append(message)
            try:
                outcome = self.store.workflows.execute(message, [self.workflow])
            except Crash:
                continue
            assert outcome == Settled()
        self.plan = []

    @rule()
    def a_zombie_wakes_up(self) -> None:
        """Somebody who held the message once runs the run again, and changes nothing."""
        if not self.was_held or self._held_now() == self.was_held[-1].read_ct:
            return
        before, effects = self.run.refresh(), list(self.effects)
        message = self.was_held[-1]
        assert self.store.workflows.execute(message, [self.workflow]) == Settled()
        assert (self.run.refresh(), self.effects) == (before, effects)

    def _held_now(self) -> int | None:
        for message in self.store.admin().peek(self.queue, 10):
            if message.consumer_worker_id is not None:
                return message.read_ct
        return None

    @rule(how=controls)
    def control(self, how: str) -> None:
        getattr(self, how)()

    @rule()
    def go_on(self) -> None:
        """Undo what keeps it from going on, so that ends are reached too."""
        if self.run.status() is S.PAUSED:
            self.run.resume()
        self._work([], 20)

    def cancel(self) -> None:
        status = self.run.cancel()
        if self.seen in ENDED:
            assert status is self.seen
        else:
            assert status in (S.CANCELLING, S.CANCELLED)

    def pause(self) -> None:
        self._try(self.run.pause, {S.PENDING, S.RUNNING, S.SUSPENDED, S.PAUSED})

    def resume(self) -> None:
        self._try(self.run.resume, {S.PENDING, S.RUNNING, S.SUSPENDED, S.PAUSED})

    def retry(self) -> None:
        if self._try(self.run.retry, {S.FAILED}):
            assert self.run.status() is S.PENDING

    def signal(self) -> None:
        self._try(lambda: self.run.signal("word", "said"), set(S) - ENDED)

    def drive_by_hand(self) -> None:
        for call in (self.run.start, self.run.complete, lambda: self.run.fail("no")):
            with pytest.raises(pgqrs.PgqrsError):
                call()

    def _try(self, call: Any, allowed: set[RunStatus]) -> bool:
        """It is refused where it is not allowed, and only there."""
        status = self.run.status()
        if status in allowed:
            call()
            return True
        with pytest.raises(pgqrs.RunEnded):
            call()
        return False

    @invariant()
    def it_goes_only_where_it_may(self) -> None:
        if not hasattr(self, "consumer"):
            return
        status = self.run.status()
        assert status is self.seen or status in reachable(self.seen), (self.seen, status)
        self.seen = status

    @invariant()
    def a_live_run_has_its_message_and_no_other(self) -> None:
        if not hasattr(self, "consumer"):
            return
        found = [message.id for message in self.store.admin().peek(self.queue, 10)]
        run = self.run.refresh()
        assert found == ([] if run.has_ended else [run.message_id])

    @invariant()
    def what_is_recorded_was_done_once_since(self) -> None:
        if not hasattr(self, "consumer"):
            return
        if self.seen is S.COMPLETED:
            assert self.run.result(timeout=0)[:2] == [1, 2]
        done = [step.output for step in self.run.steps() if step.step_id.startswith("act")]
        assert [n for n in done if isinstance(n, int)] == self.effects


def reachable(status: RunStatus) -> set[RunStatus]:
    """Where a run may be after any number of steps."""
    found: set[RunStatus] = set()
    todo = list(TRANSITIONS[status])
    while todo:
        reached = todo.pop()
        if reached not in found:
            found.add(reached)
            todo += TRANSITIONS[reached]
    return found


def test_an_end_is_an_end() -> None:
    assert {status for status in S if not TRANSITIONS[status]} == ENDED - {S.FAILED}
    assert TRANSITIONS[S.FAILED] == {S.PENDING}
    assert reachable(S.CANCELLING) == {S.CANCELLED}


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    # Nothing here waits for a disk: this is about what is true, not about what survives.
    with pgqrs.Store(
        database, clock=ManualClock(), upgrade=True, sqlite_synchronous="off"
    ) as store:
        yield store


def test_any_sequence_of_operations_on_a_run(store: pgqrs.Store) -> None:
    clock = store._database.clock
    machine = type("Machine", (RunMachine,), {"store": store, "clock": clock})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
