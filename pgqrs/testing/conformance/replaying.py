"""Replay tells the truth: the same values in the same order in every life of a run, or it is paused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import pgqrs
from pgqrs import RunPaused, RunStatus, StepFailed, StepStatus
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.conformance.harness import Crash, Drain

# Order


def test_branches_that_take_work_from_a_queue_get_their_own_results(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    taken: list[str] = []
    others_done: list[asyncio.Event] = []

    @pgqrs.step
    async def fetch(item: str) -> str:
        taken.append(item)
        if item == "A":
            await others_done[0].wait()  # it is the first to begin, and the last to end
        return f"content of {item}"

    @pgqrs.workflow
    async def pool() -> dict[str, str]:
        others_done.append(asyncio.Event())
        queue: asyncio.Queue[str] = asyncio.Queue()
        out: dict[str, str] = {}
        for item in "ABCD":
            queue.put_nowait(item)

        async def branch() -> None:
            while not queue.empty():
                item = queue.get_nowait()
                out[item] = await fetch(item)
                if len(out) == 3:
                    others_done[0].set()

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(branch())
        for _ in range(2):
            await pgqrs.sleep(10)  # after this the run is replayed
        return out

    run = pool.start(store=store)
    for _ in range(3):
        drain(pool)
        clock.advance(10)
    assert run.result(timeout=0) == {item: f"content of {item}" for item in "ABCD"}
    assert sorted(taken) == list("ABCD")


def test_what_as_completed_starts_begins_in_the_order_given(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    """It puts coroutines into a set, from which they come in another order in each process."""
    begun: list[int] = []

    @pgqrs.step
    async def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    async def work() -> list[int]:
        async def one(n: int) -> int:
            begun.append(n)
            return await double(n)

        found = [await ended for ended in asyncio.as_completed([one(n) for n in range(16)])]
        await pgqrs.sleep(10)  # after this the run is replayed
        return sorted(found)

    run = work.start(store=store)
    for _ in range(2):
        drain(work)
        clock.advance(10)
    assert run.result(timeout=0) == [2 * n for n in range(16)]
    assert begun == 2 * list(range(16))


def test_coroutines_whose_order_as_completed_has_lost_pause_the_run(
    store: Any, drain: Drain
) -> None:
    @pgqrs.step
    async def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    async def unordered() -> list[int]:
        async def one(n: int) -> int:
            return await double(n)

        return [await ended for ended in asyncio.as_completed({one(n) for n in range(3)})]

    @pgqrs.workflow
    async def fine() -> list[int]:
        calls = {double(n) for n in range(3)}  # each got its identity when it was made
        return sorted([await ended for ended in asyncio.as_completed(calls)])

    run, other = unordered.start(store=store), fine.start(store=store)
    drain(unordered, fine)
    assert run.status() is RunStatus.PAUSED
    assert "asyncio.as_completed" in (run.refresh().error or "")
    assert other.result(timeout=0) == [0, 2, 4]


def test_a_set_of_tasks_has_the_same_order_in_every_life(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    orders: list[list[int]] = []

    @pgqrs.step
    async def double(n: int) -> int:
        return 2 * n

    @pgqrs.workflow
    async def work() -> None:
        spare = [object() for _ in range(len(orders))]  # tasks have other addresses in each life
        tasks = [asyncio.create_task(double(n)) for n in range(16)]
        done, _ = await asyncio.wait(tasks)
        orders.append([tasks.index(task) for task in done])
        await pgqrs.sleep(10)
        await pgqrs.sleep(10)
        del spare

    run = work.start(store=store)
    for _ in range(3):
        drain(work)
        clock.advance(10)
    run.result(timeout=0)
    assert len(orders) == 3
    assert orders == 3 * orders[:1]


def test_a_call_that_was_being_cut_short_in_a_crash_ends_after_all_that_is_on_record(
    store: Any, drain: Drain, crash_once: Drain
) -> None:
    is_cut: list[asyncio.Event] = []
    lives: list[list[str]] = []

    @pgqrs.step
    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cut[-1].set()
            await asyncio.Event().wait()  # it takes its time

    @pgqrs.step
    async def first() -> None:
        return

    @pgqrs.step
    async def second() -> None:
        await is_cut[-1].wait()

    @pgqrs.step
    async def third() -> None:
        if len(lives) == 1:
            raise Crash

    @pgqrs.workflow
    async def work() -> list[str]:
        is_cut.append(asyncio.Event())
        lives.append([])

        async def cutting() -> None:
            task = asyncio.create_task(linger())
            await first()
            task.cancel()
            await asyncio.wait([task])
            lives[-1].append("cut")

        async def other() -> None:
            await second()
            lives[-1].append("second")
            await third()

        await asyncio.gather(cutting(), other())
        return lives[-1]

    run = work.start(store=store)
    crash_once(work)
    drain(work)
    assert run.result(timeout=0) == ["second", "cut"]
    assert lives[0] == ["second"]


def test_as_completed_with_a_timeout_is_not_waited_for_elsewhere(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    """Its timeout counts in this process alone: while it does, the run is not suspended."""
    lives: list[list[Any]] = []

    @pgqrs.step
    async def quick() -> str:
        return "quick"

    @pgqrs.workflow
    async def work() -> list[Any]:
        async def slow() -> None:
            await pgqrs.sleep(1000)

        lives.append([])
        try:
            for ended in asyncio.as_completed([slow()], timeout=0.05):
                await ended
        except TimeoutError:
            lives[-1].append("over")
        lives[-1].append(await quick())
        await pgqrs.sleep(10)  # after this the run is replayed
        return lives[-1]

    run = work.start(store=store)
    for _ in range(2):
        drain(work)
        clock.advance(10)
    assert run.result(timeout=0) == ["over", "quick"]
    assert lives == 2 * [["over", "quick"]]


def test_the_winner_of_a_race_stays_the_winner(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    bought: list[asyncio.Event] = []

    @pgqrs.step
    async def quote(who: str) -> str:
        if who == "slow":
            await bought[0].wait()
        return who

    @pgqrs.step
    async def buy(who: str) -> str:
        bought[0].set()
        return who

    @pgqrs.workflow
    async def race() -> list[str]:
        bought.append(asyncio.Event())
        quotes = [asyncio.create_task(quote("slow")), asyncio.create_task(quote("fast"))]
        winner = await next(iter(asyncio.as_completed(quotes)))
        bought_from = await buy(winner)
        await asyncio.gather(*quotes)
        await pgqrs.sleep(10)
        return [winner, bought_from]

    run = race.start(store=store)
    drain(race)
    clock.advance(10)
    drain(race)
    assert run.result(timeout=0) == ["fast", "fast"]


def test_a_timer_that_fired_after_a_step_does_so_again(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.step
    async def work() -> str:
        return "worked"

    @pgqrs.workflow
    async def race() -> list[str]:
        order: list[str] = []

        async def timer() -> None:
            await pgqrs.sleep(10)
            order.append("timer")

        async def worker() -> None:
            order.append(await work())
            order.append(await work())

        await asyncio.gather(timer(), worker())
        await pgqrs.sleep(10)
        return order

    run = race.start(store=store)
    for _ in range(3):
        drain(race)
        clock.advance(10)
    assert run.result(timeout=0) == ["worked", "worked", "timer"]


def test_what_is_not_on_record_waits_for_what_is(
    store: Any, drain: Drain, crash_once: Drain, clock: ManualClock
) -> None:
    done: list[str] = []

    @pgqrs.step
    async def first() -> str:
        done.append("first")
        return "first"

    @pgqrs.step
    async def second() -> str:
        if "second" not in done:
            done.append("second")
            raise Crash
        done.append("second")
        return "second"

    @pgqrs.workflow
    async def two() -> list[str]:
        seen: list[str] = []

        async def branch(step: Any) -> None:
            seen.append(await step())

        await asyncio.gather(branch(first), branch(first))
        await asyncio.gather(branch(second), branch(first))
        return seen

    store.admin().create_queue("workflows", lease=30, max_read_ct=3, if_not_exists=True)
    run = two.start(store=store)
    crash_once(two)
    drain(two)
    assert sorted(run.result(timeout=0)) == ["first", "first", "first", "second"]
    assert done.count("second") == 2


# Arguments


@pgqrs.step
def fetch(item: str, *, quickly: bool = False) -> str:
    return f"content of {item}"


def version(body: Callable[[], Any]) -> Any:
    return pgqrs.workflow(name="changing")(body)


def test_the_same_step_in_another_order_is_a_mismatch(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    def fetching(items: str) -> Any:
        @version
        def changing() -> list[str]:
            found = [fetch(item) for item in items]
            pgqrs.sleep(10)
            return found

        return changing

    old, new = fetching("AB"), fetching("BA")
    run = old.start(store=store)
    drain(old)
    clock.advance(10)
    drain(new)
    found = run.refresh()
    assert found.status is RunStatus.PAUSED
    assert "step fetch('B')" in found.error
    assert "step fetch with other arguments, and these for step fetch#2" in found.error
    assert "ReplayMismatch" in found.error
    run.resume()
    assert run.refresh().error is None
    drain(old)
    assert run.result(timeout=0) == ["content of A", "content of B"]


def test_other_arguments_of_a_step_that_occurs_once_are_fine(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @version
    def old() -> str:
        found = fetch("A")
        pgqrs.sleep(10)
        return found

    @version
    def new() -> str:
        found = fetch("A", quickly=True)
        pgqrs.sleep(10)
        return found

    @version
    def twice() -> str:
        found = fetch("B")
        pgqrs.sleep(10)
        return found + fetch("A")

    fine, wrong = old.start(store=store), old.start(store=store)
    drain(old)
    wrong.pause()
    clock.advance(10)
    drain(new)
    assert fine.result(timeout=0) == "content of A"
    wrong.resume()
    drain(twice)  # now it occurs twice, and the first one was another
    assert wrong.status() is RunStatus.PAUSED
    assert "step fetch('B')" in wrong.refresh().error


def test_arguments_without_a_digest_are_not_compared(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.step
    def name_of(thing: Any) -> str:
        return type(thing).__name__

    @pgqrs.workflow
    def look() -> list[str]:
        found = [name_of(object()), name_of(asyncio.Lock())]
        pgqrs.sleep(10)
        return found

    run = look.start(store=store)
    drain(look)
    clock.advance(10)
    drain(look)
    assert run.result(timeout=0) == ["object", "Lock"]


# Values


@dataclass
class Old:
    amount: int


@dataclass
class New:
    amount: int
    currency: str


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (float, 3),
        (float, None),
        (Any, -0.0),
        (Any, {"b": 1, "a": 2, "aa": 3}),
        (Mapping[str, int], {"z": 1, "b": 2}),
        (Sequence[str], ("a", "b")),
        (tuple[int, ...], (1, 2)),
        (Old, Old(1)),
        (Old | None, None),
        (None, None),
        (str, None),
        (int, True),
    ],
    ids=repr,
)
def test_a_result_is_the_same_in_every_life(
    store: Any, drain: Drain, clock: ManualClock, hint: Any, value: Any
) -> None:
    seen: list[str] = []

    def give() -> Any:
        return value

    give.__annotations__["return"] = hint
    step = pgqrs.step(give)

    @pgqrs.workflow
    def look() -> None:
        seen.append(repr(step()))
        pgqrs.sleep(10)

    run = look.start(store=store)
    drain(look)
    clock.advance(10)
    drain(look)
    run.result(timeout=0)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_arguments_are_the_same_in_every_life(store: Any, clock: ManualClock, drain: Drain) -> None:
    seen: list[str] = []

    @pgqrs.workflow
    def look(given: dict[str, float]) -> None:
        seen.append(repr(given))
        pgqrs.sleep(10)

    look.start({"b": 1, "a": -0.0, "aa": 2}, store=store)
    drain(look)
    clock.advance(10)
    drain(look)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_result_that_would_not_come_back_fails_the_step(store: Any, drain: Drain) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Login(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        password: pydantic.SecretStr  # type: ignore[name-defined]

    def log_in() -> Any:
        return Login(password="hunter2")

    log_in.__annotations__["return"] = Login
    step = pgqrs.step(log_in)

    @pgqrs.workflow
    def use() -> str:
        try:
            step()
        except StepFailed as error:
            return error.message
        return "kept"

    run = use.start(store=store)
    drain(use)
    assert "would come back as something else" in run.result(timeout=0)
    assert "hunter2" not in repr(run.steps())


def test_a_record_that_new_code_cannot_read_pauses_the_run(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    log: list[str] = []

    def shop_with(kind: Any) -> Any:
        def pay() -> Any:
            log.append("paid")
            return Old(1)

        pay.__annotations__["return"] = kind
        step = pgqrs.step(pay)

        @pgqrs.workflow(name="shop")
        def shop() -> int:
            try:
                paid = step()
            except Exception:
                log.append("refunded")
                raise
            pgqrs.sleep(10)
            return int(paid.amount)

        return shop

    old, new = shop_with(Old), shop_with(New)
    run = old.start(store=store)
    drain(old)
    clock.advance(10)
    drain(new)
    assert run.status() is RunStatus.PAUSED
    assert "the result of pay cannot be read" in run.refresh().error
    run.resume()
    drain(old)
    assert run.result(timeout=0) == 1
    assert log == ["paid"]


def test_arguments_that_new_code_does_not_take_pause_the_run(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow(name="greet")
    def old(name: str) -> str:
        pgqrs.sleep(10)
        return name

    @pgqrs.workflow(name="greet")
    def new() -> str:
        pgqrs.sleep(10)
        return "you"

    run = old.start("me", store=store)
    drain(old)
    clock.advance(10)
    drain(new)
    assert run.status() is RunStatus.PAUSED
    assert "its arguments" in (run.refresh().error or "")
    run.resume()
    drain(old)
    assert run.result(timeout=0) == "me"


# Paused runs


def test_all_runs_that_match_are_resumed(store: Any, drain: Drain, clock: ManualClock) -> None:
    @version
    def old() -> str:
        fetch("A")
        pgqrs.sleep(10)
        return "done"

    @version
    def new() -> str:
        pgqrs.sleep(10)
        return fetch("A")

    @pgqrs.workflow
    def other() -> str:
        pgqrs.sleep(10)
        return "other"

    parked = [old.options(version=v).start(store=store) for v in ("1", "1", "2")]
    by_hand, of_another = old.start(store=store), other.start(store=store)
    drain(old, other)
    by_hand.pause()
    of_another.pause()
    clock.advance(10)
    drain(new, other)
    assert {run.status() for run in (*parked, by_hand, of_another)} == {RunStatus.PAUSED}
    assert store.workflows.resume_all(name="changing", parked=True, version="2") == 1
    assert store.workflows.resume_all(error="no such error") == 0
    assert store.workflows.resume_all(error="history has step fetch") == 2
    drain(old, other)
    assert [run.result(timeout=0) for run in parked] == ["done"] * 3
    assert by_hand.status() is of_another.status() is RunStatus.PAUSED
    assert store.workflows.resume_all() == 2
    drain(old, other)
    assert (by_hand.result(timeout=0), of_another.result(timeout=0)) == ("done", "other")


def test_a_run_that_is_run_inline_says_that_it_is_paused(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @version
    def old() -> str:
        fetch("A")
        pgqrs.sleep(10)
        return "done"

    @version
    def new() -> str:
        pgqrs.sleep(10)
        return "done"

    run = old.start(store=store, key="one")
    drain(old)
    clock.advance(10)
    with pytest.raises(RunPaused, match="history has step fetch"):
        new.run_inline(store=store, key="one")
    assert run.status() is RunStatus.PAUSED


def test_a_paused_run_can_be_cancelled(store: Any, drain: Drain, clock: ManualClock) -> None:
    @version
    def old() -> None:
        fetch("A")
        pgqrs.sleep(10)

    @version
    def new() -> None:
        pgqrs.sleep(10)

    run = old.start(store=store)
    drain(old)
    clock.advance(10)
    drain(new)
    assert run.cancel() is RunStatus.CANCELLED


# Calls that the workflow cuts short


class Limits(list[float]):
    """How long a timeout is in each life of a run: what passes on replay is no time."""

    def next(self) -> float:
        return self.pop(0) if len(self) > 1 else self[0]


def test_a_timeout_has_the_same_outcome_on_replay(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    asked: list[str] = []
    limits = Limits([0.05, 3600])

    @pgqrs.step
    async def ask() -> str:
        asked.append("ask")
        await asyncio.sleep(3600)
        return "answer"

    @pgqrs.step
    async def fall_back() -> str:
        asked.append("fall back")
        return "fallback"

    @pgqrs.workflow
    async def flow() -> str:
        try:
            async with asyncio.timeout(limits.next()):
                answer = await ask()
        except TimeoutError:
            answer = await fall_back()
        await pgqrs.sleep(10)
        return answer

    run = flow.start(store=store)
    drain(flow)
    assert [(step.step_id, step.status) for step in run.steps()][:2] == [
        ("ask", StepStatus.CANCELLED),
        ("fall_back", StepStatus.COMPLETED),
    ]
    clock.advance(10)
    drain(flow)  # at once: the hour is that of the timeout, not of the run
    assert run.result(timeout=0) == "fallback"
    assert asked == ["ask", "fall back"]


def test_of_two_timeouts_the_same_one_is_over_on_replay(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    outer, inner = Limits([0.05, 3600]), Limits([3600, 1800])

    @pgqrs.step
    async def ask() -> None:
        await asyncio.sleep(3600)

    @pgqrs.workflow
    async def flow() -> str:
        which = "none"
        try:
            async with asyncio.timeout(outer.next()):
                try:
                    async with asyncio.timeout(inner.next()):
                        await ask()
                except TimeoutError:
                    which = "inner"
        except TimeoutError:
            which = "outer"
        await pgqrs.sleep(10)
        return which

    run = flow.start(store=store)
    drain(flow)
    clock.advance(10)
    drain(flow)
    assert run.result(timeout=0) == "outer"


def test_no_time_passes_while_a_run_is_replayed(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    limits = Limits([3600, 0])

    @pgqrs.step
    async def ask() -> str:
        return "answer"

    @pgqrs.workflow
    async def flow() -> list[str]:
        async with asyncio.timeout(limits.next()):
            answers = [await ask() for _ in range(20)]
        await pgqrs.sleep(10)
        return answers

    run = flow.start(store=store)
    drain(flow)
    clock.advance(10)
    drain(flow)
    assert run.result(timeout=0) == ["answer"] * 20


def test_siblings_of_a_failed_branch_are_on_record_and_are_made_again_by_a_retry(
    store: Any, drain: Drain
) -> None:
    began: list[str] = []
    broken = [True]

    @pgqrs.step
    async def wait_long() -> str:
        began.append("long")
        if broken:
            await asyncio.sleep(3600)
        return "long"

    @pgqrs.step
    async def fail() -> str:
        if broken:
            while not began:
                await asyncio.sleep(0.01)
            raise ValueError("broken")
        return "mended"

    @pgqrs.workflow
    async def flow() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(step()) for step in (wait_long, fail)]
        return [task.result() for task in tasks]

    run = flow.start(store=store)
    drain(flow)
    assert run.status() is RunStatus.FAILED
    found = {step.step_id: step.status for step in run.steps()}
    assert found == {"fail": StepStatus.FAILED, "wait_long": StepStatus.CANCELLED}
    broken.clear()
    run.retry()
    drain(flow)
    assert run.result(timeout=0) == ["long", "mended"]


def test_a_signal_that_a_cancelled_wait_got_is_for_the_next_one(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    async def flow() -> list[Any]:
        first = asyncio.create_task(pgqrs.wait_for_event("word"))
        await pgqrs.sleep(10)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return [first.cancelled(), await pgqrs.wait_for_event("word")]

    run = flow.start(store=store)
    drain(flow)
    clock.advance(10)
    drain(flow)
    run.signal("word", "said")
    drain(flow)
    assert run.result(timeout=0) == [True, "said"]


# Timeouts that last


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "too late"])
@pytest.mark.parametrize("is_async", [False, True], ids=["of sync", "of async"])
def test_a_durable_timeout(
    store: Any, drain: Drain, clock: ManualClock, is_async: bool, is_late: bool
) -> None:
    @pgqrs.step
    def note(what: str) -> str:
        return what

    @pgqrs.workflow(name="wait")
    def wait() -> list[str]:
        seen = [note("begun")]
        try:
            with pgqrs.timeout(3600):
                seen.append(pgqrs.wait_for_event("word"))
                seen.append(note("got it"))
        except TimeoutError:
            seen.append(note("nothing"))
        pgqrs.sleep(10)
        return [*seen, note("done")]

    @pgqrs.workflow(name="wait")
    async def wait_async() -> list[str]:
        seen = [await note.acall("begun")]
        try:
            async with pgqrs.timeout(3600):
                seen.append(await pgqrs.wait_for_event("word"))
                seen.append(await note.acall("got it"))
        except TimeoutError:
            seen.append(await note.acall("nothing"))
        await pgqrs.sleep(10)
        return [*seen, await note.acall("done")]

    flow: Any = wait_async if is_async else wait
    run = flow.start(store=store)
    drain(flow)
    assert run.status() is RunStatus.SUSPENDED
    clock.advance(3599)
    drain(flow)
    assert run.status() is RunStatus.SUSPENDED
    if is_late:
        clock.advance(1)
    else:
        run.signal("word", "said")
    drain(flow)
    run.signal("word", "too late")
    clock.advance(10_000)
    drain(flow)
    middle = ["nothing"] if is_late else ["said", "got it"]
    assert run.result(timeout=0) == ["begun", *middle, "done"]


@pytest.mark.parametrize("is_async", [False, True], ids=["of sync", "of async"])
def test_the_outer_of_two_durable_timeouts(
    store: Any, drain: Drain, clock: ManualClock, is_async: bool
) -> None:
    @pgqrs.workflow(name="wait")
    def wait() -> str:
        which = "none"
        try:
            with pgqrs.timeout(10):
                try:
                    with pgqrs.timeout(20):
                        pgqrs.wait_for_event("word")
                except TimeoutError:
                    which = "inner"
        except TimeoutError:
            which = "outer"
        pgqrs.sleep(10)
        return which

    @pgqrs.workflow(name="wait")
    async def wait_async() -> str:
        which = "none"
        try:
            async with pgqrs.timeout(10):
                try:
                    async with pgqrs.timeout(20):
                        await pgqrs.wait_for_event("word")
                except TimeoutError:
                    which = "inner"
        except TimeoutError:
            which = "outer"
        await pgqrs.sleep(10)
        return which

    flow: Any = wait_async if is_async else wait
    run = flow.start(store=store)
    for _ in range(3):
        drain(flow)
        clock.advance(15)
    assert run.result(timeout=0) == "outer"


def test_a_run_that_a_timeout_failed_has_the_whole_time_after_a_retry(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    @pgqrs.workflow
    async def wait() -> str:
        async with pgqrs.timeout(10):
            word: str = await pgqrs.wait_for_event("word")
        return word

    run = wait.start(store=store)
    drain(wait)
    clock.advance(10)
    drain(wait)
    assert run.status() is RunStatus.FAILED
    run.retry()
    drain(wait)
    assert run.status() is RunStatus.SUSPENDED
    run.signal("word", "said")
    drain(wait)
    assert run.result(timeout=0) == "said"


# Waiting beside others


def test_a_timer_fires_while_a_step_of_another_branch_is_in_flight(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    fired = threading.Event()

    @pgqrs.step
    def work() -> str:
        while not fired.wait(0.02):
            clock.advance(1)
        return "worked"

    @pgqrs.workflow
    async def flow() -> list[str]:
        async def timer() -> str:
            await pgqrs.sleep(10)
            fired.set()
            return "fired"

        return list(await asyncio.gather(work(), timer()))  # type: ignore[call-overload]

    run = flow.start(store=store)
    assert drain(flow) == 1
    assert run.result(timeout=0) == ["worked", "fired"]


def test_a_signal_arrives_while_a_step_of_another_branch_is_in_flight(
    store: Any, drain: Drain
) -> None:
    got: list[asyncio.Event] = []

    @pgqrs.step
    def say() -> None:
        run.signal("word", "said")

    @pgqrs.step
    async def work() -> str:
        await got[0].wait()
        return "worked"

    @pgqrs.workflow
    async def flow() -> list[Any]:
        got.append(asyncio.Event())

        async def listen() -> str:
            word: str = await pgqrs.wait_for_event("word")
            got[0].set()
            return word

        async def speak() -> None:
            await say.acall()

        return list(await asyncio.gather(work(), listen(), speak()))[:2]

    run = flow.start(store=store)
    assert drain(flow) == 1
    assert run.result(timeout=0) == ["worked", "said"]


def test_a_step_is_tried_again_while_one_of_another_branch_is_in_flight(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    tried: list[int] = []
    done = threading.Event()

    @pgqrs.step(retry=pgqrs.Retry.fixed(5, max_attempts=3))
    async def flaky() -> int:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("not yet")
        return len(tried)

    @pgqrs.step
    def work() -> str:
        while not done.wait(0.02):
            clock.advance(1)
        return "worked"

    @pgqrs.workflow
    async def flow() -> list[Any]:
        async def try_it() -> int:
            found: int = await flaky()
            done.set()
            return found

        return list(await asyncio.gather(work(), try_it()))  # type: ignore[call-overload]

    run = flow.start(store=store)
    assert drain(flow) == 1
    assert run.result(timeout=0) == ["worked", 3]
    assert {step.step_id: step.attempts for step in run.steps()} == {"work": 1, "1/flaky": 3}


def test_a_run_is_not_suspended_while_a_branch_waits_for_something_else(
    store: Any, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    @pgqrs.step
    async def ask() -> None:
        asked.append(1)

    @pgqrs.workflow
    async def flow() -> str:
        async def asker() -> None:
            await asyncio.sleep(0.2)  # or any I/O of its own
            await ask()

        _, word = await asyncio.gather(asker(), pgqrs.wait_for_event("word"))
        return str(word)

    run = flow.start(store=store)
    drain(flow)
    assert asked == [1]
    assert run.status() is RunStatus.SUSPENDED
    named = [r.getMessage() for r in caplog.records if "not durable" in r.getMessage()]
    assert len(named) == 1
    assert "asker" in named[0]
    assert "sleep" in named[0]
    run.signal("word", "said")
    drain(flow)
    assert run.result(timeout=0) == "said"
    assert asked == [1]


@pytest.mark.parametrize("how", ["group", "gather", "queue", "event", "lock", "wait", "nested"])
def test_a_run_is_suspended_however_its_branches_wait_for_each_other(
    store: Any, drain: Drain, how: str
) -> None:
    @pgqrs.workflow
    async def flow(how: str) -> str:
        queue: asyncio.Queue[str] = asyncio.Queue()
        came, lock = asyncio.Event(), asyncio.Lock()

        async def listen() -> str:
            async with lock:
                word: str = await pgqrs.wait_for_event("word")
            queue.put_nowait(word)
            came.set()
            return word

        task = asyncio.create_task(listen())
        if how == "queue":
            return await queue.get()
        if how == "event":
            await came.wait()
        elif how == "lock":
            await asyncio.sleep(0)
            async with lock:
                pass
        elif how == "wait":
            await asyncio.wait({task})
        elif how == "gather":
            await asyncio.gather(task)
        elif how == "nested":
            await asyncio.gather(asyncio.gather(asyncio.gather(task)))
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.wait({task}))
        return await task

    run = flow.start(how, store=store)
    assert drain(flow) == 1
    assert run.status() is RunStatus.SUSPENDED
    run.signal("word", "said")
    drain(flow)
    assert run.result(timeout=0) == "said"


def test_what_a_run_leaves_behind_does_not_go_on(store: Any, drain: Drain) -> None:
    noted: list[str] = []

    @pgqrs.step
    async def note(what: str) -> None:
        noted.append(what)

    @pgqrs.workflow
    async def flow() -> str:
        async def later() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await note("after the end")

        left = asyncio.create_task(later())
        await note("first")
        return "left behind" if not left.done() else "done"

    run = flow.start(store=store)
    drain(flow)
    assert run.result(timeout=0) == "left behind"
    assert noted == ["first"]
    assert [step.step_id for step in run.steps()] == ["note"]


def test_a_map_with_attempts_is_replayed_in_its_order(
    store: Any, drain: Drain, clock: ManualClock
) -> None:
    tried: dict[int, int] = {}

    @pgqrs.step(retry=pgqrs.Retry.fixed(5, max_attempts=3))
    async def work(n: int) -> int:
        tried[n] = tried.get(n, 0) + 1
        if n % 3 == 0 and tried[n] < 2:
            raise ValueError(n)
        return n * n

    @pgqrs.workflow
    async def flow() -> list[int]:
        found: list[int] = await pgqrs.map(work, range(10), concurrency=2)
        await pgqrs.sleep(10)
        return found

    run = flow.start(store=store)
    for _ in range(4):
        drain(flow)
        clock.advance(10)
    assert run.result(timeout=0) == [n * n for n in range(10)]
    assert tried == {n: 2 if n % 3 == 0 else 1 for n in range(10)}


def test_a_map_that_is_cut_short_is_replayed(store: Any, drain: Drain, clock: ManualClock) -> None:
    begun: list[int] = []

    @pgqrs.step
    async def hang(n: int) -> None:
        begun.append(n)
        await asyncio.sleep(3600)

    @pgqrs.step
    async def first() -> str:
        return "first"

    @pgqrs.workflow
    async def flow() -> str:
        items = asyncio.create_task(all_of_them())
        winner = await first()
        items.cancel()
        await asyncio.wait([items])
        last = await first()
        await pgqrs.sleep(10)
        return f"{winner} and {last}"

    async def all_of_them() -> None:
        await pgqrs.map(hang, range(3), concurrency=1)  # two of them wait for their place

    run = flow.start(store=store)
    drain(flow)
    clock.advance(11)
    drain(flow)
    assert run.result(timeout=0) == "first and first"
    assert begun == [0]
