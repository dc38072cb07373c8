"""Producers and consumers as processes, with everything that a queue can be told, while they are killed,
frozen, cut off from the database, and the clock is set; and what they say of it is judged.

`tests.acceptance.chaotic` is what the processes do, `tests.acceptance.history` judges. A round ends when
every message is in the archive, or when nothing has moved for so long that something is stuck.

    PGQRS_CHAOS_SEED=17 python -m pytest tests/acceptance/test_chaos.py      # as it was with this seed
    PGQRS_CHAOS_ROUNDS=80 python -m pytest -s tests/acceptance/test_chaos.py    # about an hour

The seed decides what is sent, what is done with it, and who is hit by what; not how the operating
system lets the processes run. So a seed that found something may have to be tried several times. The
directory of a round that failed is kept; its name is in the error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

import pgqrs
from tests.acceptance import chaotic
from tests.acceptance.chaotic import Log, SharedClock
from tests.acceptance.history import Limits, check, read
from tests.conftest import create_database

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.acceptance.chaotic"])  # starting Python takes far longer
ROUNDS = int(os.environ.get("PGQRS_CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("PGQRS_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
LEASE = 1.0
PRODUCERS, MESSAGES = 3, 200
CONSUMERS = 5
BLOWS = 16
"""How often a process is hit, or the database, or the clock, in one round."""
STUCK = 45.0
"""Seconds without anything being enqueued or archived after which it is said to be stuck: far longer
than any lease, delay, period or jump of the clock here.
"""

QUEUES: dict[str, dict[str, Any]] = {
    "limited": {"keys": 20, "unique": False, "groups": 0, "expiring": 0.4},
    "rated": {"keys": 0, "unique": False, "groups": 0, "expiring": 0.1},
    "grouped": {"keys": 0, "unique": False, "groups": 4, "expiring": 0.2},
    "unique": {"keys": 12, "unique": True, "groups": 0, "expiring": 0.2},
    "all": {"keys": 10, "unique": False, "groups": 5, "expiring": 0.2},
}
"""What is enqueued there: see `chaotic._message`."""
LIMITS = {
    "limited": Limits(max_in_flight=2, max_in_flight_per_key=1),
    "rated": Limits(rate=(10, 0.5)),
    "grouped": Limits(),
    "unique": Limits(),
    "all": Limits(max_in_flight=3, max_in_flight_per_key=2, rate=(20, 0.5)),
}
ROWS = {
    "messages": """
        SELECT m.id, q.queue_name, m.payload FROM pgqrs_messages m
        LEFT JOIN pgqrs_queues q ON q.id = m.queue_id""",
    "archive": """
        SELECT a.original_message_id, q.queue_name, a.payload, a.archive_reason FROM pgqrs_archive a
        LEFT JOIN pgqrs_queues q ON q.id = a.queue_id""",
}


class Database:
    """The database of one round, past the library."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.is_postgres = url.startswith("postgres")
        self.clock_path = None if self.is_postgres else directory / "clock"
        if self.clock_path is not None:
            self.clock_path.write_bytes(bytes(8))
        self.clock = SharedClock(self.clock_path) if self.clock_path else None
        with pgqrs.Store(url, upgrade=True, **self.settings) as store:
            for name, limits in LIMITS.items():
                store.admin().create_queue(
                    name,
                    lease=LEASE,
                    max_read_ct=10_000,
                    max_in_flight=limits.max_in_flight,
                    max_in_flight_per_key=limits.max_in_flight_per_key,
                    rate=None if limits.rate is None else pgqrs.Rate(*limits.rate),
                )

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.clock is None else {"clock": self.clock}

    def drop(self) -> None:
        if self.is_postgres:
            url = make_url(self.url)
            server = url.set(database="postgres").render_as_string(hide_password=False)
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE {url.database} WITH (FORCE)")  # type: ignore[arg-type]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        if self.is_postgres:
            with psycopg.connect(self.url, autocommit=True) as connection:
                return connection.execute(sql).fetchall()  # type: ignore[arg-type]
        with closing(
            sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=60)
        ) as connection:
            return connection.execute(sql).fetchall()

    def final(self) -> dict[str, Any]:
        """What the tables hold, for the judge."""
        found = {}
        for table, sql in ROWS.items():
            keys = ("id", "queue", "name", "reason")
            found[table] = [dict(zip(keys, row, strict=False)) for row in self.rows(sql)]
        for row in (*found["messages"], *found["archive"]):
            if not self.is_postgres:  # JSON is text there
                row["name"] = json.loads(row["name"])
        return found

    def moved(self) -> tuple[int, int]:
        """Counts that change whenever anything is enqueued or archived; the first is what is left."""
        ((left,),) = self.rows("SELECT count(*) FROM pgqrs_messages")
        ((done,),) = self.rows("SELECT count(*) FROM pgqrs_archive")
        return int(left), int(done)


class Round:
    """One database, its processes, and what hits them."""

    def __init__(self, database: Database, directory: Path, seed: int) -> None:
        self.database = database
        self.directory = directory
        self.dice = random.Random(seed)
        self.log = Log(directory / "test.log")
        self.producers: dict[str, Process] = {}
        self.consumers: dict[str, Process] = {}
        self._started = 0

    def start(self, kind: str) -> None:
        self._started += 1
        name = f"{kind}-{self._started}"
        settings = {
            "name": name,
            "seed": self.dice.random(),
            "url": self.database.url,
            "clock": self.database.clock_path and str(self.database.clock_path),
            "directory": str(self.directory),
            "queues": QUEUES,
            "lease": LEASE,
            "number": MESSAGES,
        }
        process = PROCESSES.Process(target=chaotic.main, args=(kind, settings), name=name)
        process.start()
        (self.producers if kind == "produce" else self.consumers)[name] = process

    def run(self) -> None:
        try:
            for kind, number in (("consume", CONSUMERS), ("produce", PRODUCERS)):
                for _ in range(number):
                    self.start(kind)
            for number in range(BLOWS):
                self._wait_until((number + 1) * PRODUCERS * MESSAGES // (BLOWS + 4))
                self._blow()
            self._wait_until(None)
            (self.directory / "over").touch()
            for process in self.consumers.values():
                process.join(STUCK)
        finally:
            for process in (*self.producers.values(), *self.consumers.values()):
                process.kill()
                process.join()

    # What hits them

    def _blow(self) -> None:
        blows: list[Callable[[], None]] = [self._kill, self._freeze, self._freeze]
        blows += [self._cut_off, self._cut_off] if self.database.is_postgres else [self._set_clock]
        self.dice.choice(blows)()

    def _victim(self) -> tuple[str, str, Process]:
        kind = self.dice.choice(("consume", "consume", "produce"))
        running = self.producers if kind == "produce" else self.consumers
        name = self.dice.choice(list(running))
        return kind, name, running[name]

    def _kill(self) -> None:
        kind, name, process = self._victim()
        self.log.write("killed", victim=name, t=time.monotonic())
        running = process.is_alive()
        process.kill()
        process.join()
        if kind == "consume":
            del self.consumers[name]
        if running:
            self.start(kind)

    def _freeze(self) -> None:
        """Longer than a lease; meanwhile others go on."""
        _, name, process = self._victim()
        self.log.write("frozen", victim=name, t=time.monotonic())
        pause = LEASE * self.dice.uniform(1.2, 2.0)
        with suppress(ProcessLookupError):  # a producer may have ended just now
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(pause)
                os.kill(process.pid, signal.SIGCONT)

    def _cut_off(self) -> None:
        """End one connection of the server, or all."""
        others = self.database.rows(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        pids = [pid for (pid,) in others]
        chosen = pids if self.dice.random() < 0.2 else self.dice.sample(pids, min(len(pids), 2))
        self.log.write("cut off", pids=chosen, t=time.monotonic())
        self.database.rows(
            f"SELECT pg_terminate_backend(pid) FROM unnest(ARRAY{chosen}::int[]) pid"
        )

    def _set_clock(self) -> None:
        by = self.dice.choice((-3.0, -0.5, 0.5, 3.0, 20.0))
        assert self.database.clock is not None
        before = time.monotonic()
        self.database.clock.offset += by
        self.log.write("jump", t0=before, t=time.monotonic(), by=by)

    def _wait_until(self, done: int | None) -> None:
        """Until so many are in the archive, or nothing is left and the producers have ended. By count:
        gives up only when nothing moves any more.
        """
        seen, since = (-1, -1), time.monotonic()
        while time.monotonic() < since + STUCK:
            producing = any(process.is_alive() for process in self.producers.values())
            moved = self.database.moved()
            if (not producing and not moved[0]) or (done is not None and moved[1] >= done):
                return
            if moved != seen:
                seen, since = moved, time.monotonic()
            time.sleep(0.05)


@contextmanager
def kept_if_it_fails(name: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"pgqrs-chaos-{name}-"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.timeout(300 + 120 * ROUNDS)
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_no_promise_is_broken(backend: str, request: pytest.FixtureRequest) -> None:
    for number in range(ROUNDS):
        seed = SEED + number
        print(f"PGQRS_CHAOS_SEED={seed}", flush=True)
        with kept_if_it_fails(backend) as directory:
            if backend == "postgres":
                url = create_database(request.getfixturevalue("postgres"))
            else:
                url = f"sqlite:///{directory / 'queues.db'}"
            one = Round(Database(url, directory), directory, seed)
            one.run()
            lines = read(sorted(directory.glob("*.log")))
            final = one.database.final()
            (directory / "final.json").write_text(json.dumps(final))
            wrong = check(lines, LIMITS, final)
            wrong += [
                f"{name} ended with {process.exitcode}: {directory / name}.err"
                for name, process in (one.consumers | one.producers).items()
                if process.exitcode not in (0, -signal.SIGKILL)
            ]
            assert not wrong, "\n".join(
                [f"PGQRS_CHAOS_SEED={seed}, {backend}, {directory}:", *wrong]
            )
            counts = counted(lines, final)
            print(f"PGQRS_CHAOS_SEED={seed} {backend}: {counts}", flush=True)
            # A round in which nobody lost a lease, and no buffer was used, would prove little.
            for wanted in ("completed", "expired", "lost", "taken"):
                assert counts.get(wanted), (wanted, counts)
            one.database.drop()


def counted(lines: list[dict[str, Any]], final: dict[str, Any]) -> dict[str, int]:
    """How much happened in a round."""
    done = Counter(line["do"] for line in lines)
    return {
        **Counter(row["reason"] for row in final["archive"]),
        "claimed": sum(len(line["messages"]) for line in lines if line["do"] == "dequeued"),
        "lost": sum(len(line["lost"]) for line in lines if line["do"] == "ended"),
        **{do: done[do] for do in ("taken", "refused", "killed", "frozen", "cut off", "jump")},
    }
