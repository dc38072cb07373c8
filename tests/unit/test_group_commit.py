"""Group commit: who waits shares a transaction, and nobody learns a result before its commit."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.pool import StaticPool

import pgqrs
from pgqrs.stores.group_commit import MOST_AT_ONCE, GroupCommit


class Recorder:
    """A database in memory that counts its commits, and can be made to fail."""

    def __init__(self) -> None:
        self.engine: Engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
        event.listen(self.engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        event.listen(self.engine, "begin", lambda c: c.exec_driver_sql("BEGIN"))
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE t (n INTEGER)"))
        self.commits = 0
        self.at_commit: Callable[[], None] = lambda: None

    def transaction(self, body: Callable[[Connection], None]) -> None:
        with self.engine.connect() as connection, connection.begin() as transaction:
            body(connection)
            self.at_commit()
            transaction.commit()
            self.commits += 1

    def rows(self) -> list[int]:
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT n FROM t ORDER BY n")).scalars())


def inserting(n: int) -> Callable[[Connection], int]:
    def work(connection: Connection) -> int:
        connection.execute(text("INSERT INTO t VALUES (:n)"), {"n": n})
        return n

    return work


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.engine.dispose()


@contextmanager
def held_up(group: GroupCommit, count: int) -> Iterator[None]:
    """Hold the lead until `count` others wait behind it."""
    leading = threading.Event()

    def hold(_: Connection) -> None:
        leading.set()
        deadline = time.monotonic() + 100
        while len(group._waiting) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    leader = threading.Thread(target=group.submit, args=(hold,))
    leader.start()
    leading.wait()
    yield
    leader.join()


def submit_together(group: GroupCommit, works: list[Callable[[Connection], Any]]) -> list[Any]:
    """Submit works that all wait behind one leader. Returns results, or the exceptions raised."""

    def submit(work: Callable[[Connection], Any]) -> Any:
        try:
            return group.submit(work)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(works)) as threads, held_up(group, len(works)):
        futures = [threads.submit(submit, work) for work in works]
    return [future.result() for future in futures]


def test_alone_it_is_a_plain_transaction(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)
    assert [group.submit(inserting(n)) for n in range(3)] == [0, 1, 2]
    assert recorder.commits == 3
    with pytest.raises(ZeroDivisionError):
        group.submit(lambda connection: 1 // 0)
    assert recorder.rows() == [0, 1, 2]


def test_who_waits_shares_one_commit(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)
    results = submit_together(group, [inserting(n) for n in range(16)])
    assert sorted(results) == recorder.rows() == list(range(16))
    assert recorder.commits == 2  # the one that held up the others, and theirs


def test_a_group_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_AT_ONCE > 16
    monkeypatch.setattr("pgqrs.stores.group_commit.MOST_AT_ONCE", 4)
    group = GroupCommit(recorder.transaction)
    submit_together(group, [inserting(n) for n in range(16)])
    assert recorder.rows() == list(range(16))
    assert recorder.commits == 5


def test_an_error_is_its_owners_alone(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)

    def half_done(connection: Connection) -> None:
        inserting(99)(connection)
        raise ValueError("mine")

    results = submit_together(group, [inserting(1), half_done, inserting(2)])
    assert results[0] == 1
    assert isinstance(results[1], ValueError)
    assert results[2] == 2
    assert recorder.rows() == [1, 2]
    assert recorder.commits == 2


def test_nobody_hears_of_a_commit_that_failed(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)

    def fail() -> None:
        if recorder.commits:  # that of the leader before them
            raise OSError("disk full")

    recorder.at_commit = fail
    results = submit_together(group, [inserting(n) for n in range(5)])
    assert [type(result) for result in results] == [OSError] * 5
    assert recorder.rows() == []
    recorder.at_commit = lambda: None
    assert group.submit(inserting(7)) == 7


def test_a_work_that_breaks_the_transaction_fails_alone(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)

    def breaks_everything(connection: Connection) -> None:
        connection.exec_driver_sql("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise OSError("disk full")

    results = submit_together(group, [inserting(1), breaks_everything, inserting(2)])
    assert (results[0], results[2]) == (1, 2)
    assert isinstance(results[1], Exception)
    assert recorder.rows() == [1, 2]


def test_first_come_first_served(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqrs.stores.group_commit.MOST_AT_ONCE", 1)
    group = GroupCommit(recorder.transaction)
    order: list[int] = []
    threads: list[threading.Thread] = []
    with held_up(group, 20):
        for n in range(20):
            thread = threading.Thread(target=group.submit, args=(lambda _, n=n: order.append(n),))
            thread.start()
            threads.append(thread)
            while len(group._waiting) <= n and n < 19:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(20))


def test_an_interrupted_leader_does_not_strand_the_others(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)

    def interrupted(_: Connection) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.submit(interrupted)
    assert group.submit(inserting(1)) == 1


def test_under_load_nothing_is_lost(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction)
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda n: group.submit(inserting(n)), range(1000)))
    assert results == recorder.rows() == list(range(1000))


class TooSlow(Exception):
    """As a soft time limit raises it, from a signal handler."""


def points(call: Callable[[], object], point: int) -> str | None:
    """Raise where Python may run a signal handler: where a function begins, or a call returns.

    Returns where that was; None if the call has fewer such points.
    """
    seen = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal seen
        if event in ("call", "c_return") and "/pgqrs/stores/" in frame.f_code.co_filename:
            seen += 1
            if seen == point:
                raise TooSlow(f"{frame.f_code.co_name}, line {frame.f_lineno}")

    try:
        sys.setprofile(profile)
        call()
    except TooSlow as exc:
        return str(exc)
    finally:
        sys.setprofile(None)
    return None


def enqueues(store: pgqrs.Store, n: int) -> threading.Thread:
    thread = threading.Thread(target=store.producer("q").enqueue, args=(n,), daemon=True)
    thread.start()
    return thread


@pytest.fixture(params=["file", "memory", "engine"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pgqrs.Store]:
    url = "sqlite::memory:" if request.param == "memory" else f"sqlite:///{tmp_path / 'a.db'}"
    engine = create_engine(url, connect_args={"timeout": 5}) if request.param == "engine" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pgqrs.Store(engine or url, upgrade=True) as store:
            store.admin().create_queue("q")
            yield store
        if engine is not None:
            engine.dispose()


@pytest.mark.parametrize("in_turn", [False, True])
def test_an_interrupt_at_any_point_ends_only_the_call_it_hits(
    store: pgqrs.Store, in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_turn:  # as if others were there
        monkeypatch.setattr(GroupCommit, "_submit_at_once", GroupCommit._submit_in_turn)
    producer, point = store.producer("q"), 1
    producer.enqueue(0)
    while where := points(lambda: producer.enqueue("interrupted"), point):
        point += 1
        other = enqueues(store, point)
        other.join(60)
        assert not other.is_alive(), f"nobody can write any more: interrupted in {where}"
    assert point > (30 if in_turn else 15)  # it was tried at more than a few
    stored = [m.payload for m in store.admin().peek("q", 1000) if m.payload != "interrupted"]
    assert stored == [0, *range(2, point + 1)]


def test_an_interrupt_while_others_wait_reaches_none_of_them(store: pgqrs.Store) -> None:
    """The main thread waits in the queue of writers, leads, or is led; others are all around it."""
    producer, ids, stop, errors = store.producer("q"), [], threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            try:
                ids.append(producer.enqueue("other"))
            except BaseException as exc:
                errors.append(exc)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(3)]
    [thread.start() for thread in threads]
    interrupts = 0
    for point in range(1, 60):
        interrupts += points(lambda: producer.enqueue("interrupted"), point) is not None
    stop.set()
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert interrupts > 20
    assert errors == []
    kept = [m.id for m in store.admin().peek("q", 100_000) if m.payload == "other"]
    assert sorted(kept) == sorted(ids)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this system")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in destructors
@pytest.mark.parametrize("seed", [1, 2])
def test_alarms_at_random_moments_end_only_the_call_they_hit(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("seed", seed)
    moments = random.Random(seed)

    def too_slow(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, too_slow)
    hits = 0
    try:
        with pgqrs.Store(
            f"sqlite:///{tmp_path / 'a.db'}", upgrade=True, sqlite_synchronous="OFF"
        ) as store:
            store.admin().create_queue("q")
            producer = store.producer("q")
            for n in range(150):
                others = [enqueues(store, n) for _ in range(2)]
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.00002, 0.003))
                        for _ in range(20):
                            producer.enqueue("interrupted")
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except TooSlow:
                    hits += 1
                for other in others:
                    other.join(60)
                    assert not other.is_alive(), f"nobody can write any more, seed {seed}"
            stored = [m.payload for m in store.admin().peek("q", 100_000)]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits > 50
    assert sorted(n for n in stored if n != "interrupted") == sorted([*range(150)] * 2)


def test_who_waits_for_a_writer_that_does_not_end_gives_up(recorder: Recorder) -> None:
    group = GroupCommit(recorder.transaction, patience=0.2)
    leading, free = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        leading.set()
        free.wait(60)

    holder = threading.Thread(target=group.submit, args=(hold,))
    holder.start()
    leading.wait()
    with pytest.raises(pgqrs.StoreUnavailable, match=r"gave up after 0\.2 s"):
        group.submit(inserting(1))
    free.set()
    holder.join()
    assert group.submit(inserting(2)) == 2
    assert recorder.rows() == [2]  # what was given up is not done later


def test_a_transaction_that_cannot_begin_is_waited_for_once(recorder: Recorder) -> None:
    attempts = []

    def busy(body: Callable[[Connection], None]) -> None:
        attempts.append(1)
        if len(attempts) > 1:
            raise OSError("busy")
        recorder.transaction(body)

    group = GroupCommit(busy)
    results = submit_together(group, [inserting(n) for n in range(5)])
    assert [type(result) for result in results] == [OSError] * 5
    assert len(attempts) == 2
