"""Group commit: who waits shares a transaction, and nobody learns a result before its commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.pool import StaticPool

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

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self.engine.connect() as connection, connection.begin() as transaction:
            yield connection
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
        deadline = time.monotonic() + 30
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
        if len(group._waiting) == 0:
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
