"""PostgreSQL: all transactions lock in one order, so none waits for another that waits for it.

An outsider holds a lock until the library waits for it; then what the library holds is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine

import pgqrs

LIMIT = 100.0
"""Seconds: far more than anything here takes."""
Outsider = psycopg.Connection[Any]


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("q", lease=600)
        yield store


@pytest.fixture
def outsider(postgres_database: str) -> Iterator[Outsider]:
    with psycopg.connect(postgres_database) as connection:
        yield connection


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    threads = ThreadPoolExecutor(4)
    yield threads.submit
    threads.shutdown()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def somebody_waits(dsn: str) -> bool:
    asked = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with psycopg.connect(dsn) as connection:
        return bool(connection.execute(asked).fetchone()[0])  # type: ignore[index]


def is_locked(dsn: str, table: str) -> bool:
    """Whether somebody has locked any row of a table."""
    with psycopg.connect(dsn) as connection:
        try:
            connection.execute(f"SELECT 1 FROM {table} FOR UPDATE NOWAIT")
        except psycopg.errors.LockNotAvailable:
            return True
        return False


def ends(store: pgqrs.Store) -> dict[str, Callable[[], Any]]:
    """All that takes a message of a group out, or adds one."""
    consumer = store.consumer("q").open()
    (first,) = consumer.dequeue()
    return {
        "ack": lambda: consumer.ack(first),
        "ack by id": lambda: consumer.ack(first.id),
        "fail": lambda: consumer.fail(first, dead=True),
        "delete": lambda: consumer.delete(first),
        "cancel": lambda: store.admin().cancel(first.id + 1),
        "purge": lambda: store.admin().purge_queue("q"),
        "enqueue": lambda: store.producer("q").enqueue(3, group="g", key="k"),
    }


@pytest.mark.parametrize(
    "how", ["ack", "ack by id", "fail", "delete", "cancel", "purge", "enqueue"]
)
def test_who_waits_for_a_group_has_locked_no_message_and_no_key(
    store: pgqrs.Store,
    postgres_database: str,
    outsider: Outsider,
    background: Callable[..., Future[Any]],
    how: str,
) -> None:
    store.producer("q").enqueue_many(
        [1, 2], groups=["g", "g"], keys=["k", "other"], unique="queued"
    )
    end = ends(store)[how]
    outsider.execute("SELECT 1 FROM pgqrs_groups FOR UPDATE")
    done = background(end)
    until(lambda: somebody_waits(postgres_database))
    assert not is_locked(postgres_database, "pgqrs_messages")
    assert not is_locked(postgres_database, "pgqrs_keys")
    outsider.rollback()
    done.result(LIMIT)


def test_expired_messages_of_a_group_that_is_locked_keep_nobody_waiting(
    store: pgqrs.Store, outsider: Outsider, background: Callable[..., Future[Any]]
) -> None:
    producer, consumer = store.producer("q"), store.consumer("q").open()
    producer.enqueue("old", group="g", ttl=0)
    producer.enqueue("old too", ttl=0)
    outsider.execute("SELECT 1 FROM pgqrs_groups FOR UPDATE")
    producer.enqueue("fresh")
    found: list[Any] = []
    until(lambda: bool(found) or bool(found.extend(background(consumer.dequeue, 3).result(LIMIT))))
    assert [message.payload for message in found] == ["fresh"]
    assert store.admin().queue_stats("q").archived["expired"] == 1
    outsider.rollback()
    until(lambda: store.admin().expire("q") == 1)


def test_the_order_of_locks_is_that_of_the_names(store: pgqrs.Store) -> None:
    """Many at once, with groups in any order: nobody is refused."""
    barrier, names = threading.Barrier(4), [f"g{n}" for n in range(20)]
    engine = create_engine(store.engine.url, isolation_level="READ COMMITTED")

    def enqueue(number: int) -> None:
        barrier.wait(LIMIT)
        for turn in range(20):
            order = names if (number + turn) % 2 else names[::-1]
            with engine.begin() as connection:
                store.using(connection).enqueue_many("q", range(20), groups=order)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enqueue, range(4)))
    engine.dispose()
    stats = store.admin().queue_stats("q")
    assert (stats.ready, stats.blocked) == (20, 4 * 20 * 20 - 20)


def test_purging_goes_on_until_locked_messages_are_free(
    store: pgqrs.Store,
    postgres_database: str,
    outsider: Outsider,
    background: Callable[..., Future[Any]],
) -> None:
    ids = store.producer("q").enqueue_many(range(2500))
    locked = ids[10], ids[1700]
    outsider.execute("SELECT 1 FROM pgqrs_messages WHERE id = ANY(%s) FOR UPDATE", (list(locked),))
    done = background(store.admin().purge_queue, "q")
    until(lambda: store.admin().queue_stats("q").ready == 2)
    until(lambda: somebody_waits(postgres_database))
    late = store.producer("q").enqueue("not yet there when purging began")
    assert not done.done()
    outsider.rollback()
    assert done.result(LIMIT) == 2500
    assert [message.id for message in store.admin().peek("q")] == [late]


def test_a_queue_is_deleted_by_force_beside_an_application_that_acks_and_enqueues(
    store: pgqrs.Store, postgres_database: str, background: Callable[..., Future[Any]]
) -> None:
    store.producer("q").enqueue_many([1, 2], groups=["g", None])
    engine = create_engine(store.engine.url, isolation_level="READ COMMITTED")
    (first, _) = store.consumer("q").dequeue(2)
    with engine.begin() as connection:
        store.using(connection).ack(first)
        done = background(store.admin().delete_queue, "q", force=True)
        until(lambda: is_locked(postgres_database, "pgqrs_queues"))
        store.using(connection).enqueue("q", "next")
    done.result(LIMIT)
    assert store.admin().list_queues() == []
    engine.dispose()


def dead_letter(store: pgqrs.Store, payload: Any) -> int:
    id = store.producer("q").enqueue(payload)
    with store.consumer("q") as consumer:
        consumer.fail(consumer.dequeue()[0], dead=True)
    return int(id)


def test_a_queue_is_not_deleted_while_messages_are_replayed_into_it(
    store: pgqrs.Store,
    postgres_database: str,
    outsider: Outsider,
    background: Callable[..., Future[Any]],
) -> None:
    id = dead_letter(store, "precious")
    outsider.execute("SELECT 1 FROM pgqrs_archive FOR UPDATE")
    replayed = background(store.admin().replay, id)
    until(lambda: somebody_waits(postgres_database))
    deleted = background(store.admin().delete_queue, "q")
    outsider.rollback()
    (new,) = replayed.result(LIMIT)
    with pytest.raises(pgqrs.QueueNotEmpty):
        deleted.result(LIMIT)
    assert store.admin().get_message(new).payload == "precious"


@pytest.mark.parametrize("how", ["purged", "deleted with its queue"])
def test_what_is_gone_when_its_turn_comes_is_not_replayed(
    store: pgqrs.Store,
    postgres_database: str,
    outsider: Outsider,
    background: Callable[..., Future[Any]],
    how: str,
) -> None:
    first, second = dead_letter(store, 1), dead_letter(store, 2)
    outsider.execute("DELETE FROM pgqrs_archive WHERE original_message_id = %s", (second,))
    if how != "purged":
        outsider.execute("DELETE FROM pgqrs_workers")
        outsider.execute("DELETE FROM pgqrs_archive")
        outsider.execute("DELETE FROM pgqrs_queues")
    replayed = background(store.admin().replay, [first, second])
    until(lambda: somebody_waits(postgres_database))
    outsider.commit()
    with pytest.raises(pgqrs.MessageNotFound) as caught:
        replayed.result(LIMIT)
    assert caught.value.id == (second if how == "purged" else first)
    if how == "purged":
        assert store.admin().peek("q") == []
        assert store.admin().replay_dead_letters("q") == 1


def test_purging_the_archive_waits_for_who_replays_from_it(
    store: pgqrs.Store,
    postgres_database: str,
    outsider: Outsider,
    background: Callable[..., Future[Any]],
) -> None:
    id = dead_letter(store, "precious")
    outsider.execute("SELECT 1 FROM pgqrs_archive FOR UPDATE")
    purged = background(store.admin().purge_archive, "q", older_than=0)
    until(lambda: somebody_waits(postgres_database))
    outsider.rollback()
    assert purged.result(LIMIT) == 1
    with pytest.raises(pgqrs.MessageNotFound):
        store.admin().replay(id)


def test_cancelling_a_parent_meets_children_that_end(store: pgqrs.Store) -> None:
    @pgqrs.workflow
    def child(n: int) -> None:
        time.sleep(0.01 * (n % 5))

    @pgqrs.workflow
    def parent() -> None:
        for started in [child.start(n) for n in range(8)]:
            started.result()

    store.admin().create_queue("workflows", lease=600)
    before = deadlocks(store)
    with pgqrs.use(store), pgqrs.Worker(store, workflows=[parent, child], concurrency=8):
        for turn in range(12):
            run = parent.start()
            until(lambda run=run, turn=turn: len(run.steps()) > turn % 9 or run.refresh().has_ended)
            run.cancel()
        until(lambda: not live(store))
    assert deadlocks(store) == before


def live(store: pgqrs.Store) -> list[Any]:
    return [run for run in store.workflows.list_runs(n=1000) if not run.has_ended]


def deadlocks(store: pgqrs.Store) -> int:
    asked = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(store.read(lambda c: c.exec_driver_sql(asked).scalar_one()))


def test_of_many_who_acquire_a_step_at_once_one_has_it(
    store: pgqrs.Store, background: Callable[..., Future[Any]]
) -> None:
    for _ in range(20):
        run = store.workflows.create("by hand")
        run.start()
        together = threading.Barrier(4)

        def acquire(run: pgqrs.Run = run, together: threading.Barrier = together) -> Any:
            together.wait()
            try:
                return run.acquire_step("x")
            except pgqrs.StepNotReady:
                return None

        guards = [each.result() for each in [background(acquire) for _ in range(4)]]
        ended = []
        for guard in guards:
            if guard is not None:
                try:
                    guard.success(guard.attempt)
                    ended.append(guard)
                except pgqrs.LeaseLost:
                    pass
        assert len(ended) == 1


@pytest.mark.parametrize(
    "limits", [{}, {"max_in_flight": 9}, {"max_in_flight_per_key": 9}], ids=str
)
def test_an_expired_message_of_a_locked_group_keeps_no_other_back(
    store: pgqrs.Store, limits: dict[str, int]
) -> None:
    store.admin().configure_queue("q", **limits)
    producer = store.producer("q")
    expired = producer.enqueue("expired", group="one", ttl=0.001)
    producer.enqueue("other")
    with store.consumer("q") as consumer, store.engine.connect() as connection:
        with connection.begin():
            store.using(connection).enqueue("q", "next", group="one")
            assert [message.payload for message in consumer.dequeue()] == ["other"]
            assert consumer.dequeue() == []
            assert store.admin().peek("q", 1)[0].id == expired
            assert store.admin().expire("q") == 0
        assert [message.payload for message in consumer.dequeue()] == ["next"]
    assert store.admin().get_archived(expired).archive_reason == "expired"
