"""Answers of the database get lost while a run records what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, make_url, text

import pgqrs
from pgqrs.outcomes import Settled
from tests.faults.proxy import Proxy


@pytest.fixture
def proxy(postgres_database: str) -> Iterator[Proxy]:
    proxy = Proxy(make_url(postgres_database).port or 5432)
    yield proxy
    proxy.close()


@pytest.fixture
def store(postgres_database: str, proxy: Proxy) -> Iterator[pgqrs.Store]:
    """A store behind the proxy."""
    with pgqrs.Store(postgres_database) as direct:
        direct.admin().install()
        direct.write(lambda c: c.exec_driver_sql("CREATE TABLE effects (n INTEGER)"))
    url = make_url(postgres_database).set(host="127.0.0.1", port=proxy.port)
    with pgqrs.Store(url.render_as_string(hide_password=False)) as store:
        store.admin().create_queue("workflows", lease=600)
        yield store


def claim(store: pgqrs.Store, consumer: pgqrs.Consumer) -> pgqrs.Message:
    (message,) = consumer.dequeue()
    return message


def effects(store: pgqrs.Store) -> list[Any]:
    return store.read(lambda c: list(c.execute(text("SELECT n FROM effects")).scalars()))


def test_a_record_whose_answer_is_lost_is_found(store: pgqrs.Store, proxy: Proxy) -> None:
    done: list[int] = []

    @pgqrs.step
    def act(n: int) -> int:
        done.append(n)
        if n == 1:
            proxy.lose_next_answer()  # that to the record of this step
        return n

    @pgqrs.workflow
    def work() -> list[int]:
        return [act(1), act(2)]

    run = work.start(store=store)
    with store.consumer("workflows") as consumer:
        assert store.workflows.execute(claim(store, consumer), [work]) == Settled()
    assert proxy.lost.is_set()
    assert run.result(timeout=0) == [1, 2]
    assert done == [1, 2]


def test_a_commit_whose_answer_is_lost_is_not_repeated(store: pgqrs.Store, proxy: Proxy) -> None:
    done: list[int] = []

    def lose(_: Connection) -> None:
        if done and not proxy.lost.is_set():
            proxy.lose_next_answer()

    @pgqrs.step(transactional=True)
    def act(connection: Connection, n: int) -> int:
        connection.execute(text("INSERT INTO effects VALUES (:n)"), {"n": n})
        done.append(n)
        return n

    @pgqrs.workflow
    def work() -> int:
        return act(1)

    run = work.start(store=store)
    with store.consumer("workflows") as consumer:
        message = claim(store, consumer)
        event.listen(Engine, "commit", lose)  # the next answer is that to COMMIT
        try:
            with pytest.raises(pgqrs.CommitUncertain):
                store.workflows.execute(message, [work])
        finally:
            event.remove(Engine, "commit", lose)
        assert proxy.lost.is_set()
        consumer.fail(message, "as a worker does")
        assert store.workflows.execute(claim(store, consumer), [work]) == Settled()
    assert run.result(timeout=0) == 1
    assert (done, effects(store)) == ([1], [1])


def test_a_transactional_step_that_loses_a_deadlock_is_repeated(
    postgres_database: str,
) -> None:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.write(lambda c: c.exec_driver_sql("CREATE TABLE accounts (id INT, amount INT)"))
        store.write(lambda c: c.exec_driver_sql("INSERT INTO accounts VALUES (1, 0), (2, 0)"))
        change = text("UPDATE accounts SET amount = amount + :by WHERE id = :id")
        together, calls = threading.Barrier(2), []

        @pgqrs.step(transactional=True)
        def move(connection: Connection, source: int, target: int) -> None:
            calls.append(source)
            connection.execute(change, {"id": source, "by": -1})
            if len(calls) <= 2:
                together.wait(60)
            connection.execute(change, {"id": target, "by": 1})

        @pgqrs.workflow
        def work(source: int, target: int) -> None:
            move(source, target)

        with pgqrs.use(store), pgqrs.Worker(store, workflows=[work], concurrency=2):
            for run in [work.start(1, 2), work.start(2, 1)]:
                run.result(timeout=120)
        amounts = store.read(
            lambda c: c.exec_driver_sql("SELECT amount FROM accounts ORDER BY id").scalars().all()
        )
        assert amounts == [0, 0]
        assert len(calls) >= 3  # the one that lost may be first again, and lose again


def test_a_transactional_step_that_loses_its_connection_is_repeated(
    postgres_database: str,
) -> None:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.write(lambda c: c.exec_driver_sql("CREATE TABLE effects (n INTEGER)"))
        calls = []

        @pgqrs.step(transactional=True)
        def write(connection: Connection) -> int:
            calls.append(1)
            connection.execute(text("INSERT INTO effects VALUES (1)"))
            process = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            if len(calls) == 1:  # as a restart of the server does it
                end = f"SELECT pg_terminate_backend({process}, 60000)"
                store.read(lambda c: c.exec_driver_sql(end).close())
            return connection.execute(text("SELECT 1")).scalar_one()

        @pgqrs.workflow
        def work() -> int:
            return write()

        assert work.run_inline(store=store) == 1
        assert (effects(store), len(calls)) == ([1], 2)


@pytest.mark.parametrize("effect", ["enqueue", "signal"])
def test_an_effect_whose_commit_got_no_answer_is_not_repeated(
    store: pgqrs.Store, proxy: Proxy, effect: str
) -> None:
    store.admin().create_queue("mails")
    bodies: list[int] = []

    def lose(_: Connection) -> None:
        if bodies and not proxy.lost.is_set():
            proxy.lose_next_answer()

    @pgqrs.task(queue="mails")
    def mail() -> None: ...

    @pgqrs.workflow
    def other() -> Any:
        return pgqrs.wait_for_event("go")

    @pgqrs.workflow
    def work(told: int) -> int:
        bodies.append(1)
        if effect == "enqueue":
            return mail.enqueue().id
        store.workflows.signal(told, "go")
        return 0

    told = other.start(store=store)
    with store.consumer("workflows") as consumer:
        store.workflows.execute(claim(store, consumer), [other])
        run = work.start(told.id, store=store)
        message = claim(store, consumer)
        event.listen(Engine, "commit", lose)  # the next answer is that to COMMIT
        try:
            assert store.workflows.execute(message, [work]) == Settled()
        finally:
            event.remove(Engine, "commit", lose)
    assert proxy.lost.is_set()
    if effect == "enqueue":
        (sent,) = store.admin().peek("mails")
        assert run.result(timeout=0) == sent.id
    signals = store.read(
        lambda c: c.execute(text("SELECT count(*) FROM pgqrs_workflow_events")).scalar_one()
    )
    assert signals == (1 if effect == "signal" else 0)
    assert len(run.steps()) == 1


def test_transactions_that_start_a_run_of_one_key_find_the_same(postgres_database: str) -> None:
    @pgqrs.workflow
    def flow() -> None: ...

    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.write(lambda c: c.exec_driver_sql("CREATE TABLE effects (n INTEGER)"))
        insert = text("INSERT INTO effects VALUES (1)")
        ids: list[int] = []

        def second() -> None:
            with store.engine.begin() as connection:
                connection.execute(insert)
                began.set()
                ids.append(flow.start(key="one", store=store.using(connection)).id)
                connection.execute(insert)  # the transaction is as good as before

        began, thread = threading.Event(), threading.Thread(target=second)
        with store.engine.begin() as connection:
            ids.append(flow.start(key="one", store=store.using(connection)).id)
            thread.start()
            assert began.wait(60)
            while not waits_for_a_lock(connection):
                time.sleep(0.01)
        thread.join()
        assert len(set(ids)) == 1
        assert effects(store) == [1, 1]
        assert len(store.workflows.list_runs()) == len(store.admin().peek("workflows")) == 1


def waits_for_a_lock(connection: Connection) -> bool:
    found = connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one()
    return bool(found)
