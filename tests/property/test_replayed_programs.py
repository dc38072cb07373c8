"""Random workflows are run undisturbed, with their steps ending in every order, and with a crash before
and after every call of the database; and then it must all be the same.

- They return the same, or fail alike.
- What a run saw (results, failures, timeouts, in the order in which its branches saw them) in one life
  is the beginning of what it sees in the next one.
- No step that is on record is done again. What transactional steps did, runs that were started, and
  events that were told are there once.
- Every run ends.

Nothing here happens by chance: time, the order of ends and crashes are simulated (see `simulation`). A
program that fails is made smaller as long as it fails, and printed with its seed:

    PGQRS_PROGRAM_SEED=17 python -m pytest tests/property/test_replayed_programs.py    # that alone
    PGQRS_PROGRAMS=2000 python -m pytest -s tests/property/test_replayed_programs.py    # more of them
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, text

import pgqrs
from pgqrs.testing import ManualClock
from pgqrs.workflows.execution import execute_async, registry
from tests.property.programs import RACES, Body, Program, make, smaller
from tests.property.simulation import Ordered, Schedule, Shuffled, SimulatedLoop

PROGRAMS = int(os.environ.get("PGQRS_PROGRAMS", "50"))
FIRST = int(os.environ.get("PGQRS_FIRST_PROGRAM", "0"))
SEED = os.environ.get("PGQRS_PROGRAM_SEED")
CHUNKS = 10
ORDERS = 8
"""Orders in which the steps of one program end, at most."""
SMALLER = 300
"""Smaller programs that are tried, at most, when one fails."""
QUEUE, TASKS = "workflows", "tasks"
LEASE = 600.0
LIVES = 400
"""More than any program needs: a run that is not done by then never will be."""
FAR = 10**12


class Crash(BaseException):
    """As if the process had died here."""


@dataclass
class World:
    """One run of a program: what its steps did, and what it and its children saw in each life."""

    program: Program
    number: int
    schedule: Schedule
    steps: Any = None
    flows: Any = None
    is_dead: bool = False
    crashes: int = 0
    calls: int = 0
    life: int = 0
    seen: dict[str, list[str]] = field(default_factory=dict)
    before: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    done: Counter[tuple[str, int]] = field(default_factory=Counter)
    tries: Counter[str] = field(default_factory=Counter)
    on_record: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    loop: SimulatedLoop | None = None

    def see(self, run: str, what: str) -> None:
        if not self.is_dead:
            self.seen.setdefault(run, []).append(what)

    def act(self, name: str) -> None:
        """A step does something."""
        if self.is_dead:
            raise Crash
        self.done[name, self.life] += 1
        if name in self.on_record:
            self.wrong.append(f"step {name} is on record, and done again")

    def compare(self) -> None:
        """What a run has seen in this life, and in those before."""
        for run, now in self.seen.items():
            before = self.before[run]
            shared = min(len(before), len(now))
            if before[:shared] != now[:shared]:
                self.wrong.append(f"run {run} saw {before}, and then {now}")
            if len(now) > len(before):
                self.before[run] = now
        self.seen = {}


world: World
"""There is one at a time."""


async def turn() -> None:
    assert world.loop is not None
    await world.loop.pass_()
    if world.is_dead:
        raise Crash


# Steps and workflows of all programs


@pgqrs.step
async def work(name: str) -> str:
    await turn()
    world.act(name)
    await turn()
    return name


@pgqrs.step
async def fail(name: str) -> None:
    await turn()
    world.act(name)
    raise ValueError(name)


@pgqrs.step(retry=pgqrs.Retry.fixed(5, max_attempts=50))
async def retried(name: str) -> str:
    await turn()
    return fails_twice(name)


@pgqrs.step(retry=pgqrs.Retry.fixed(5, max_attempts=2))
async def gives_up(name: str) -> None:
    await turn()
    world.act(name)
    raise ValueError(name)


def fails_twice(name: str) -> str:
    world.act(name)
    world.tries[name] += 1
    if world.tries[name] <= 2:
        raise ValueError(name)
    return name


def at_once(name: str) -> str:
    world.act(name)
    return name


def fail_at_once(name: str) -> None:
    world.act(name)
    raise ValueError(name)


sync_work = pgqrs.step(name="sync_work")(at_once)


@pgqrs.step(transactional=True)
def transaction(connection: Connection, name: str) -> str:
    world.act(name)
    insert(connection, name)
    return name


@pgqrs.step(transactional=True)
def undone(connection: Connection, name: str) -> None:
    world.act(name)
    insert(connection, f"{name} undone")
    raise ValueError(name)


def insert(connection: Connection, name: str) -> None:
    connection.execute(
        text("INSERT INTO effects VALUES (:number, :name)"), {"number": world.number, "name": name}
    )


@pgqrs.task(queue=TASKS)
def task(name: str) -> None:
    """Nobody does it: it is enough that it was enqueued."""


STEPS = {
    True: SimpleNamespace(
        task=task,
        work=work,
        sync_work=sync_work,
        transaction=transaction,
        undone=undone,
        fail=fail,
        retried=retried,
        gives_up=gives_up,
    ),
    False: SimpleNamespace(
        task=task,
        work=sync_work,
        sync_work=sync_work,
        transaction=transaction,
        undone=undone,
        fail=pgqrs.step(name="fail")(fail_at_once),
        retried=pgqrs.step(name="retried", retry=pgqrs.Retry.fixed(5, max_attempts=50))(
            fails_twice
        ),
        gives_up=pgqrs.step(name="gives_up", retry=pgqrs.Retry.fixed(5, max_attempts=2))(
            fail_at_once
        ),
    ),
}


@pgqrs.workflow
async def async_program(name: str | None = None) -> Any:
    return await body(name)


@pgqrs.workflow
def sync_program(name: str | None = None) -> Any:
    try:
        body(name).send(None)
    except StopIteration as returned:
        return returned.value
    raise AssertionError("a sync program waits for nothing in an event loop")


FLOWS = {True: async_program, False: sync_program}


def body(name: str | None) -> Any:
    program = world.program
    node, place = (program.root, "p") if name is None else program.of_child(name)
    return Body(world, program, name or "").run(node, place)


# A run of a program


@dataclass(frozen=True)
class Fate:
    """Whether there is a crash: at which call of the database, before it or after it."""

    at: int | None = None
    after: bool = False
    often: int = 1

    def __str__(self) -> str:
        return f"crash {'after' if self.after else 'before'} call {self.at}"


@dataclass(frozen=True)
class Outcome:
    """What can be told of a run when it is over."""

    result: Any
    effects: Counter[str]
    world: World


NUMBERS = count()


@dataclass
class Laboratory:
    """A database in which programs are run, one at a time."""

    store: pgqrs.Store
    clock: ManualClock
    consumer: Any
    runs: int = 0
    crashes: int = 0
    lives: int = 0

    def run(self, program: Program, schedule: Schedule, fate: Fate = Fate()) -> Outcome:
        global world
        world = World(program, next(NUMBERS), schedule, STEPS, FLOWS)
        self.runs += 1
        run = FLOWS[program.is_async].start(store=self.store)
        late = []
        for name, node in program.named("signal"):
            if node.number:
                late.append(name)
            else:
                run.signal(name, f"{name}: word")
        for _ in range(LIVES):
            if (message := self._claim(run, late)) is None:
                break
            self._live(message, run, fate)
            if world.wrong or run.status() == "paused":
                break
        info = run.refresh()
        assert not world.wrong, world.wrong[0]
        assert info.has_ended, f"{info.status}: {info.error}"
        # By chance it may have been the second step of its name.
        error = re.sub(r"#\d+ ", " ", str(info.error))[-40:]
        result = info.output if info.status == "completed" else error
        return Outcome([str(info.status), result], self._effects(run.id), world)

    def _claim(self, run: pgqrs.Run, late: list[str]) -> Any:
        """The next message, when its time has come; None if there is none left."""
        while True:
            if found := self.consumer.dequeue(1):
                return found[0]
            if late:
                with suppress(pgqrs.RunEnded):
                    run.signal(late[0], f"{late.pop(0)}: word")
                continue
            next_at, left = self._next()
            if not left:
                return None
            assert next_at is not None, f"asleep without a reason: {run.refresh()}"
            self.clock.advance(max((next_at - self.clock.now()).total_seconds(), 0.001))

    def _next(self) -> tuple[datetime | None, int]:
        """When the next message may be claimed, and how many there are."""
        messages = self.store.admin().peek(QUEUE, 1000)
        times = [message.vt for message in messages if message.vt.year < 9000]
        return min(times, default=None), len(messages)

    def _live(self, message: Any, run: pgqrs.Run, fate: Fate) -> None:
        """One life of a run, or of one of its children."""
        self.lives += 1
        world.life += 1
        world.is_dead = False
        world.on_record = self._on_record(run.id)
        undo = crashing(self.store._database, fate)
        try:
            if FLOWS[world.program.is_async].is_async:
                self._execute_async(message)
            else:
                self.store.workflows.execute(message, [sync_program])
        except (Crash, BaseExceptionGroup):
            if not world.is_dead:
                raise
        finally:
            undo()
        world.compare()
        if world.is_dead:
            self.crashes += 1
            self.clock.advance(LEASE + 1)

    def _execute_async(self, message: Any) -> None:
        loop = world.loop = SimulatedLoop(self.clock, world.schedule)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(
                execute_async(
                    self.store._database,
                    registry([async_program]),
                    message,
                    offload=loop.offload,
                )
            )

    def _on_record(self, run_id: int) -> set[str]:
        """The names of steps that have ended, of all runs since."""
        rows = self._rows(
            "SELECT CAST(output AS TEXT) FROM pgqrs_workflow_steps WHERE workflow_id >= :id "
            "AND status IN ('completed', 'failed') AND output IS NOT NULL AND digest IS NOT NULL",
            id=run_id,
        )
        found = [json.loads(row) for (row,) in rows]
        names = [one.get("message") if isinstance(one, dict) else one for one in found]
        return {name for name in names if isinstance(name, str)}

    def _effects(self, run_id: int) -> Counter[str]:
        """What is there of the run and its children."""
        found = Counter(
            name
            for (name,) in self._rows(
                "SELECT name FROM effects WHERE number = :number", number=world.number
            )
        )
        for name, times in self._rows(
            "SELECT name, count(*) FROM pgqrs_workflow_events WHERE workflow_id >= :id "
            "AND kind = 'event' GROUP BY name",
            id=run_id,
        ):
            found[f"{name} told"] += times
        for (given,) in self._rows(
            "SELECT CAST(input AS TEXT) FROM pgqrs_workflows WHERE id > :id", id=run_id
        ):
            found[f"{child_of(given)} started"] += 1
        for message in (tasks := self.store.admin().peek(TASKS, 1000)):
            found[f"{message.payload['args'][0]} enqueued"] += 1
        if tasks:
            self.store.admin().purge_queue(TASKS)
        return found

    def _rows(self, sql: str, **bound: Any) -> list[Any]:
        return self.store.read(lambda c: [tuple(row) for row in c.execute(text(sql), bound)])


def child_of(given: str) -> str:
    """The name of a child, from its arguments."""
    return str(json.loads(given)["args"][0])


def crashing(database: Any, fate: Fate) -> Callable[[], None]:
    """Let the process die at a call of the database. Returns what undoes this."""
    kinds = ("write", "write_once") if fate.after else ("write", "write_once", "read")
    real = {kind: getattr(database, kind) for kind in ("write", "write_once", "read")}

    def dying(kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if world.is_dead:
                raise Crash
            is_last = False
            if kind in kinds:
                world.calls += 1
                is_last = world.crashes < fate.often and world.calls == fate.at
            if is_last and not fate.after:
                die()
            result = real[kind](*args, **kwargs)
            if is_last:
                die()
            return result

        return call

    def die() -> None:
        world.is_dead = True
        world.crashes += 1
        world.calls = 0
        raise Crash

    for kind in real:
        setattr(database, kind, dying(kind))

    def undo() -> None:
        for kind in real:
            delattr(database, kind)

    return undo


# The checks


def check(laboratory: Laboratory, program: Program, seed: int, *, orders: int, every: int) -> None:
    """Run a program in all ways, and compare."""
    races = tuple(f"{name}." for name, _ in program.named(*RACES))

    def certain(effects: Counter[str]) -> Counter[str]:
        return Counter({k: n for k, n in effects.items() if not k.startswith(races)})

    def compare(outcome: Outcome, how: object) -> None:
        assert outcome.result == plain.result, how
        assert certain(outcome.effects) == certain(plain.effects), how
        assert set(outcome.effects.values()) <= {1}, (how, outcome.effects)
        assert not any("undone" in name for name in outcome.effects), (how, outcome.effects)

    plain = laboratory.run(program, Schedule())
    compare(plain, "undisturbed")
    fails = any(name.count(".") == 1 for name, _ in program.named("raises"))
    assert plain.result[0] == ("failed" if fails else "completed"), plain.result
    schedule: Ordered | None = Ordered()
    for _ in range(orders if program.is_async else 0):
        assert schedule is not None
        compare(attempt(laboratory, program, schedule, Fate()), f"order {schedule._told}")
        schedule = schedule.following()
        if schedule is None:
            break
    dice = Random(seed)
    for after in (False, True):
        for at in range(1 + dice.randrange(every), FAR, every):
            fate = Fate(at, after)
            outcome = attempt(laboratory, program, Shuffled(seed), fate)
            compare(outcome, fate)
            if not outcome.world.crashes:
                break
    for _ in range(3):
        fate = Fate(dice.randint(1, 12), dice.random() < 0.5, often=8)
        compare(attempt(laboratory, program, Shuffled(dice.random()), fate), (fate, "often"))


def attempt(laboratory: Laboratory, program: Program, schedule: Schedule, fate: Fate) -> Outcome:
    try:
        return laboratory.run(program, schedule, fate)
    except BaseException as exc:
        exc.add_note(f"{fate}, {type(schedule).__name__} {getattr(schedule, '_told', '')}")
        raise


def shrink(fails: Callable[[Program], bool], program: Program) -> Program:
    """The smallest program found that fails, too."""
    tried = 0
    while True:
        for less in smaller(program):
            tried += 1
            if tried > SMALLER:
                return program
            if fails(less):
                program = less
                break
        else:
            return program


@contextmanager
def laboratory(url: str) -> Iterator[Laboratory]:
    clock = ManualClock()
    options = {"sqlite_synchronous": "off"} if url.startswith("sqlite") else {}
    with pgqrs.Store(url, clock=clock, upgrade=True, **options) as store:
        store.admin().create_queue(QUEUE, lease=LEASE, max_read_ct=1000, if_not_exists=True)
        store.admin().create_queue(TASKS, if_not_exists=True)
        sql = "CREATE TABLE IF NOT EXISTS effects (number INTEGER NOT NULL, name TEXT NOT NULL)"
        store.write(lambda connection: connection.exec_driver_sql(sql).close())
        with store.consumer(QUEUE) as consumer:
            yield Laboratory(store, clock, consumer)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs that fail, and are paused while a smaller program is looked for, are not worth a line."""
    logger = logging.getLogger("pgqrs")
    logger.disabled, before = True, logger.disabled
    workflows = logging.getLogger("pgqrs.workflows")
    workflows.disabled = True
    yield
    logger.disabled = workflows.disabled = before


def check_all(url: str, seeds: list[int], *, orders: int = ORDERS, every: int = 1) -> None:
    runs = crashes = lives = 0
    for seed in seeds:
        program = make(seed)
        try:
            with laboratory(url) as lab:
                check(lab, program, seed, orders=orders, every=every)
        except BaseException as exc:
            report(url, seed, program, exc, orders=orders, every=every)
            raise
        runs, crashes, lives = runs + lab.runs, crashes + lab.crashes, lives + lab.lives
    done = f"{runs} runs, {crashes} crashes, {lives} lives"
    print(f"programs {seeds[0]} to {seeds[-1]}: {done}", flush=True)
    gc.collect()  # tasks that died of a crash are complained of now, not in the middle of a report


def report(url: str, seed: int, program: Program, error: BaseException, **options: Any) -> None:
    """Say which program failed, and the smallest that does."""

    def fails(less: Program) -> bool:
        try:
            with laboratory(url) as fresh:
                check(fresh, less, seed, **options)
        except Exception:
            return True
        return False

    print(f"PGQRS_PROGRAM_SEED={seed}: {program}")
    if isinstance(error, Exception) and url.startswith("sqlite"):
        print(f"a smaller one that fails: {shrink(fails, program)}", flush=True)


@pytest.mark.parametrize("chunk", range(1 if SEED else CHUNKS))
def test_programs_do_the_same_whatever_happens(chunk: int) -> None:
    share = PROGRAMS // CHUNKS
    seeds = range(FIRST + chunk * share, FIRST + (chunk + 1) * share)
    for first in range(0, len(seeds), 10):
        check_all("sqlite::memory:", [int(SEED)] if SEED else list(seeds)[first : first + 10])


ON_POSTGRES = 1 if SEED else max(PROGRAMS // 10, 1)


@pytest.mark.parametrize("chunk", range(1 if SEED else 2))
def test_programs_do_the_same_on_postgres(postgres_database: str, chunk: int) -> None:
    """Fewer of them, and not a crash at every call: each takes far longer there."""
    share = ON_POSTGRES // 2
    seeds = list(range(FIRST + chunk * share, FIRST + (chunk + 1) * share))
    check_all(postgres_database, [int(SEED)] if SEED else seeds, orders=3, every=4)
