"""Workers are killed, frozen for longer than their leases, told to leave, and cut off by a restart of
the server while they run workflows of every kind; and somebody else, who knows the tables alone, judges.

`PGQRS_ACCEPTANCE=full` (`nox -s acceptance`) runs the large size, `PGQRS_STRESS_RUNS=1000` that many
runs. Who is hit, and when, is decided by the count of records and a seed, which is printed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count, cycle
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqrs
import pgqrs.testing
from pgqrs.repositories import events
from pgqrs.testing.postgres import LocalPostgres, local_postgres
from pgqrs.types import EventKind
from tests.acceptance import crashing
from tests.acceptance.crashing import PLAIN, TRANSACTIONAL, line, net

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.acceptance.crashing"])
FULL = os.environ.get("PGQRS_ACCEPTANCE") == "full"
RUNS = int(os.environ.get("PGQRS_STRESS_RUNS", "400" if FULL else "20"))
WORKERS = 3
TROUBLE_EVERY = 30
"""Records. By the clock, a busy machine might never get beyond starting processes."""
STUCK = 120.0
"""Seconds without a record after which something is stuck: far longer than any lease or timer here."""
LEASE = 2.0
KINDS = ("killed", "frozen", "told to leave")
ENDED = "('completed', 'failed', 'cancelled')"
ASLEEP = f"""
SELECT w.id, w.name, w.status FROM pgqrs_workflows w
LEFT JOIN pgqrs_messages m ON m.id = w.message_id
WHERE w.status NOT IN {ENDED} AND (m.id IS NULL OR (
    NOT m.ready AND m.vt > '9000-01-01'
    AND NOT EXISTS (
        SELECT 1 FROM pgqrs_workflow_waits t JOIN pgqrs_workflows o ON o.id = t.awaited_id
        WHERE t.waiter_id = w.id AND o.status NOT IN {ENDED})
    AND NOT EXISTS (
        SELECT 1 FROM pgqrs_workflow_steps s
        WHERE s.workflow_id = w.id AND s.status = 'pending'
        AND s.step_id LIKE '%pgqrs.wait_for_event:go'
        AND NOT EXISTS (
            SELECT 1 FROM pgqrs_workflow_events e
            WHERE e.workflow_id = w.id AND e.kind = 'signal' AND e.consumed_by IS NULL))))
"""
"""Runs that nothing would wake: no time, no run they wait for, no signal that is still to come."""


class Judge:
    """Looks at the tables, past the library."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        give_up_at = time.monotonic() + STUCK
        while True:
            try:
                return self._rows(sql)
            except (psycopg.OperationalError, sqlite3.OperationalError):
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.1)  # the server is restarted

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        if self._url.startswith("postgres"):
            with psycopg.connect(self._url, autocommit=True) as connection:
                return connection.execute(sql).fetchall()  # type: ignore[arg-type]
        with closing(
            sqlite3.connect(self._url.removeprefix("sqlite:///"), timeout=60)
        ) as connection:
            return connection.execute(sql).fetchall()

    def records(self) -> int:
        return int(
            self.rows("SELECT count(*) FROM pgqrs_workflow_steps WHERE seq IS NOT NULL")[0][0]
        )

    def left(self) -> int:
        sql = f"SELECT count(*) FROM pgqrs_workflows WHERE status NOT IN {ENDED}"
        return int(self.rows(sql)[0][0])

    def check(self, runs: dict[str, Any]) -> Counter[str]:
        """All that must be so when every run has ended. Returns how much there was."""
        assert self.rows("SELECT * FROM wrongs") == []
        failed = (
            "SELECT name, error FROM pgqrs_workflows WHERE status = 'failed' AND name <> 'failing'"
        )
        assert self.rows(failed) == []
        ended = Counter(self.rows("SELECT name, status FROM pgqrs_workflows"))
        lines = sum(flow is line for flow in runs.values())
        assert ended == {
            ("line", "completed"): lines,
            ("failing", "failed"): lines,
            ("net", "completed"): len(runs) - lines,
            ("leaf", "completed"): len(runs) - lines,
        }
        assert self.rows("SELECT id FROM pgqrs_messages") == []
        effects = Counter(self.rows("SELECT name, kind FROM effects"))
        once = {
            (f"{run} {one}", "transactional") for run in runs for one in TRANSACTIONAL[runs[run]]
        }
        assert {key: n for key, n in effects.items() if key[1] != "plain"} == dict.fromkeys(once, 1)
        plain = {(f"{run} {one}", "plain") for run in runs for one in PLAIN[runs[run]]}
        assert {key for key in effects if key[1] == "plain"} == plain
        twice = Counter(key[1] for key, n in effects.items() if n > 1)
        recorded = self.rows(
            "SELECT workflow_id, step_id, count(*) FROM pgqrs_workflow_steps "
            "GROUP BY workflow_id, step_id HAVING count(*) > 1"
        )
        assert recorded == []
        return Counter({"records": self.records(), "plain effects repeated": twice["plain"]})


class Fleet:
    """Workers that are hit and replaced."""

    def __init__(self, url: str, dice: random.Random, directory: Path) -> None:
        self._url, self._dice, self._directory = url, dice, directory
        self._workers: list[Process] = []
        self._frozen: dict[Process, threading.Timer] = {}
        self._leaving: list[Process] = []
        self.done: Counter[str] = Counter()
        for _ in range(WORKERS):
            self._start()

    def _start(self) -> None:
        errors = str(self._directory / "errors")
        args = (self._url, self._dice.random(), errors)
        process = PROCESSES.Process(target=crashing.main, args=args)
        process.start()
        self._workers.append(process)

    def look(self) -> None:
        """Replace the dead."""
        for process in [process for process in self._workers if not process.is_alive()]:
            assert process.exitcode == -signal.SIGKILL, (process.exitcode, self._directory)
            self.done["killed itself"] += 1
            self._workers.remove(process)
            self._start()

    def _thaw(self, process: Process) -> None:
        self._tell(process, signal.SIGCONT)
        self._frozen.pop(process, None)

    @staticmethod
    def _tell(process: Process, number: int) -> None:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    def _victim(self) -> Process | None:
        free = [process for process in self._workers if process not in self._frozen]
        return self._dice.choice(free) if len(free) > 1 else None  # one is to go on

    def kill(self) -> None:
        if (victim := self._victim()) is not None:
            victim.kill()
            victim.join()
            self._workers.remove(victim)
            self._start()
            self.done["killed"] += 1

    def freeze(self) -> None:
        if (victim := self._victim()) is not None:
            self._tell(victim, signal.SIGSTOP)
            # By a thread of its own: it may hold the lock of the database, for which this one waits.
            pause = LEASE * self._dice.uniform(1.2, 2)
            self._frozen[victim] = threading.Timer(pause, self._thaw, (victim,))
            self._frozen[victim].start()
            self.done["frozen"] += 1

    def send_away(self) -> None:
        if (victim := self._victim()) is not None:
            self._tell(victim, signal.SIGTERM)
            self._workers.remove(victim)
            self._leaving.append(victim)
            self._start()
            self.done["told to leave"] += 1

    def leave(self) -> None:
        """All of them: each ends by itself."""
        for timer in list(self._frozen.values()):
            timer.join()
        for process in self._workers:
            self._tell(process, signal.SIGTERM)
        for process in (*self._leaving, *self._workers):
            process.join(STUCK)
            # One that was started just now may not listen to signals yet; others kill themselves.
            assert process.exitcode in (0, -signal.SIGTERM, -signal.SIGKILL), process.exitcode

    def end(self) -> None:
        for timer in list(self._frozen.values()):
            timer.join()
        for process in (*self._leaving, *self._workers):
            process.kill()
            process.join()


class Stress:
    """Runs of every kind, and what happens to their workers."""

    def __init__(self, url: str, dice: random.Random, directory: Path) -> None:
        self._url, self._dice, self._directory = url, dice, directory
        self.judge = Judge(url)
        self.fleet: Fleet

    @contextmanager
    def store(self) -> Iterator[pgqrs.Store]:
        with pgqrs.Store(self._url, upgrade=True, retry_for=120) as store:
            store.admin().create_queue(line.queue, lease=LEASE, max_read_ct=1000)
            for table in crashing.TABLES:
                store.write(
                    lambda connection, table=table: connection.exec_driver_sql(table).close()
                )
            yield store

    def run(self, restart: Callable[[], None] | None = None) -> Counter[str]:
        with self.store() as store:
            flows = {f"run {n}": (line, net)[n % 2] for n in range(RUNS)}
            runs = [flow.start(name, store=store) for name, flow in flows.items()]
            self._dice.shuffle(runs)
            self.fleet = fleet = Fleet(self._url, self._dice, self._directory)
            kinds = [fleet.kill, fleet.freeze, fleet.send_away, *([restart] if restart else [])]
            try:
                self._go_on(runs, kinds)
                fleet.leave()
            finally:
                fleet.end()
        return self.judge.check(flows) + fleet.done

    def _go_on(self, runs: list[Any], kinds: list[Callable[[], None]]) -> None:
        troubles, trouble_at = cycle(kinds), TROUBLE_EVERY
        seen, since = -1, time.monotonic()
        for number in count():
            records = self.judge.records()
            assert self.judge.rows(ASLEEP) == []
            if not self.judge.left():
                return
            if records != seen:
                seen, since = records, time.monotonic()
            assert time.monotonic() < since + STUCK, self._waiting()
            self.fleet.look()
            # The last signals come when everything has happened that is to happen.
            is_enough = all(self.fleet.done[kind] for kind in KINDS)
            if runs and number % 2 and (is_enough or len(runs) > 3):
                runs.pop().signal("go", "word")
            if records >= trouble_at or (len(runs) <= 3 and not is_enough):
                next(troubles)()
                trouble_at = records + TROUBLE_EVERY
            time.sleep(self._dice.uniform(0.01, 0.05))

    def _waiting(self) -> list[tuple[Any, ...]]:
        return self.judge.rows(
            "SELECT w.id, w.name, w.status, w.wake_at, m.ready, m.vt, m.read_ct FROM pgqrs_workflows w "
            f"LEFT JOIN pgqrs_messages m ON m.id = w.message_id WHERE w.status NOT IN {ENDED}"
        )


# The judge himself


def test_the_judge_notices_what_is_wrong(
    sqlite_database: str, dice: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress = Stress(sqlite_database, dice, tmp_path)
    with stress.store() as store, store.consumer(line.queue) as consumer:
        monkeypatch.setattr(crashing, "store", store, raising=False)
        monkeypatch.setattr(crashing, "DEADLY", 0.0)
        run = line.start("run", store=store)
        # Until it waits for its signal: a step that failed is pending, too.
        while not any("wait_for_event" in step.step_id for step in run.steps()):
            for message in consumer.dequeue(1, wait=1):
                store.workflows.execute(message, crashing.WORKFLOWS)
        assert stress.judge.rows(ASLEEP) == []
        # A signal that wakes nobody.
        now = pgqrs.testing.ManualClock().now()
        store.write(
            lambda c: events.add(
                c, run.id, kind=EventKind.SIGNAL, name="go", payload='"word"', now=now
            )
        )
        assert len(stress.judge.rows(ASLEEP)) == 1
        run.signal("go", "word")
        assert stress.judge.rows(ASLEEP) == []
        # A step that is on record, done again by a life that should know.
        (message,) = consumer.dequeue(1)
        crashing.begin_life()
        crashing.plain_effect("run a")
        assert len(stress.judge.rows("SELECT * FROM wrongs")) == 1
        store.workflows.execute(message, crashing.WORKFLOWS)
    with pytest.raises(AssertionError):
        stress.judge.check({"run": line})


# The stress


class Server:
    """A server that is restarted, in turns at once and in order."""

    def __init__(self, server: LocalPostgres) -> None:
        self._server = server
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1
        self._server.restart(immediately=self.restarts % 2 == 1)


@pytest.mark.timeout(300 + 5 * RUNS)
def test_killed_workers_lose_and_repeat_nothing(
    sqlite_database: str, dice: random.Random, tmp_path: Path
) -> None:
    say("SQLite", Stress(sqlite_database, dice, tmp_path).run())


@pytest.mark.timeout(300 + 5 * RUNS)
def test_killed_workers_and_restarted_servers_lose_and_repeat_nothing(
    dice: random.Random, tmp_path: Path
) -> None:
    with local_postgres() as found:
        server = Server(found)
        done = Stress(found.dsn, dice, tmp_path).run(server.restart)
    assert server.restarts
    say("PostgreSQL", done + Counter({"restarts": server.restarts}))


def say(database: str, done: Counter[str]) -> None:
    print(f"{database}, {RUNS} runs: {dict(done)}")
