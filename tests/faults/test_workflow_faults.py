"""Answers of the database get lost while a run records what it does."""

from __future__ import annotations

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
        return act(1)  # type: ignore[call-arg]

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
