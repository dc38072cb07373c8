"""Rows that a database cannot hand over at all: they were written past the library."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text

import pgqrs
from pgqrs.streams import Stream

BOMB = "[" + ",".join(["1e131071"] * 8200) + "]"
"""A few kilobytes of JSONB, and more than a gigabyte as text, which PostgreSQL refuses to make."""


@pytest.fixture
def store(postgres_database: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=60, max_read_ct=3)
        yield store


def plant(store: pgqrs.Store, id: int, *, table: str = "messages", column: str = "id") -> None:
    with psycopg.connect(store.config.dsn or "") as connection:
        connection.execute(
            f"UPDATE pgqrs_{table} SET payload = %s::jsonb WHERE {column} = %s", (BOMB, id)
        )


@pytest.mark.parametrize("limits", [{}, {"max_in_flight": 10}], ids=["no limits", "limits"])
def test_a_bomb_of_numbers_harms_nothing_beside_it(
    store: pgqrs.Store, limits: dict[str, int]
) -> None:
    admin = store.admin()
    admin.configure_queue("tasks", **limits)
    ids = store.producer("tasks").enqueue_many(range(4))
    plant(store, ids[1])
    assert [message.id for message in admin.peek("tasks")] == ids
    assert "cannot be read" in admin.get_message(ids[1]).payload
    seen: list[pgqrs.Message] = []
    with store.consumer("tasks", lease=60) as consumer:
        while found := consumer.dequeue(2):
            seen += found
            consumer.ack_many(found)
    assert [message.id for message in seen] == [ids[0], *ids[2:]]
    (dead,) = admin.dead_letters("tasks")
    assert dead.original_message_id == ids[1]
    assert "the stored row cannot be read" in (dead.error or "")
    assert len(admin.list_archive("tasks")) == 4


def test_a_bomb_in_the_archive_hides_no_result(store: pgqrs.Store) -> None:
    ids = store.producer("tasks").enqueue_many(range(3))
    with store.consumer("tasks") as consumer:
        consumer.ack_many(consumer.dequeue(3), results=["a", "b", "c"])
    plant(store, ids[1], table="archive", column="original_message_id")
    found = store.admin().list_archive("tasks")
    assert [message.payload for message in found[::2]] == [0, 2]
    assert store.admin().get_archived(ids[2]).result == "c"


def test_text_that_is_no_text_harms_nothing_beside_it(sqlite_database: str) -> None:
    with pgqrs.Store(sqlite_database, upgrade=True) as store:
        store.admin().create_queue("tasks", lease=60, max_read_ct=3)
        ids = store.producer("tasks").enqueue_many(range(4))
        with store.engine.begin() as connection:
            connection.execute(
                text("UPDATE pgqrs_messages SET payload = CAST(x'5bff5d' AS TEXT) WHERE id = :id"),
                {"id": ids[1]},
            )
        assert [message.id for message in store.admin().peek("tasks")] == ids
        with store.consumer("tasks") as consumer:
            found = [message.id for message in consumer.dequeue(10)]
        assert found == [ids[0], *ids[2:]]
        (dead,) = store.admin().dead_letters("tasks")
        assert dead.original_message_id == ids[1]


def test_a_stream_goes_on_after_a_message_that_cannot_be_read(database: str) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        ids = store.producer("tasks").enqueue_many(range(4))
        largest = 2**31 - 1 if store.backend_name == "postgres" else 2**63 - 1
        with store.engine.begin() as connection:
            change = f"UPDATE pgqrs_messages SET read_ct = {largest} WHERE id = {ids[1]}"
            connection.execute(text(change))
        stream = Stream(store._database, "nightly", "tasks")
        batch = stream.next_batch(0, limit=10)
        assert batch is not None
        assert sorted(batch.holds.tokens) == [ids[0], *ids[2:]]
        stream.close()
        assert [dead.original_message_id for dead in store.admin().dead_letters("tasks")] == [
            ids[1]
        ]
