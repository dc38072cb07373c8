"""Claims and enqueues find their rows by index, and sort nothing that grows.

The benchmark measures that the cost is flat; this finds out when a change makes it impossible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text

import pgqrs
from pgqrs.repositories import limits

FILL = """
INSERT INTO pgqrs_messages (queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at, payload)
SELECT q.id, n.n % 3, {ready}, {vt}, 0, 0, {now}, '{{}}'
FROM pgqrs_queues q, {numbers} AS n
"""
POSTGRES = {
    "numbers": "generate_series(1, 20000)",
    "now": "now()",
    "later": "now() + interval '1 day'",
    "true": "true",
    "false": "false",
}
SQLITE = {
    "numbers": "(WITH RECURSIVE c(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM c LIMIT 20000) "
    "SELECT n FROM c)",
    "now": "'2026-01-01T00:00:00.000000Z'",
    "later": "'2099-01-01T00:00:00.000000Z'",
    "true": "1",
    "false": "0",
}


@pytest.fixture
def store(database: str) -> Iterator[pgqrs.Store]:
    """A store with many messages, half of them ready and half of them delayed."""
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        words = POSTGRES if store.backend_name == "postgres" else SQLITE

        def fill(connection: Connection) -> None:
            for ready, vt in (("true", "now"), ("false", "later")):
                sql = FILL.format(
                    numbers=words["numbers"], now=words["now"], ready=words[ready], vt=words[vt]
                ).replace(" AS n\n", " AS n(n)\n" if words is POSTGRES else " AS n\n")
                connection.execute(text(sql))
            connection.execute(text("ANALYZE pgqrs_messages"))

        store.write(fill)
        yield store


def explained(store: pgqrs.Store, use: Any) -> str:
    """The plans of all statements that `use` executes."""
    seen: list[tuple[str, Any]] = []

    def listen(
        _connection: Any, _cursor: Any, statement: str, parameters: Any, _c: Any, _m: Any
    ) -> None:
        if "pgqrs_messages" in statement:
            seen.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", listen)
    use()
    event.remove(Engine, "before_cursor_execute", listen)
    assert seen
    explain = (
        "EXPLAIN (FORMAT JSON) " if store.backend_name == "postgres" else "EXPLAIN QUERY PLAN "
    )

    def plan(connection: Connection) -> str:
        return "\n".join(
            json.dumps([list(row) for row in connection.exec_driver_sql(explain + sql, bound)])
            for sql, bound in seen
        )

    return store.read(plan)


def reads_by_index(plan: str) -> bool:
    """Whether no statement looks at all messages."""
    return "SCAN pgqrs_messages" not in plan and not any(
        _scans_messages(json.loads(line)) for line in plan.splitlines()
    )


def _scans_messages(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_scans_messages, node))
    if not isinstance(node, dict):
        return False
    kind, relation = node.get("Node Type"), node.get("Relation Name")
    if relation == "pgqrs_messages" and kind in ("Seq Scan", "Bitmap Heap Scan"):
        return True
    return any(map(_scans_messages, node.values()))


def test_a_claim_walks_the_two_indexes_of_messages(store: pgqrs.Store) -> None:
    with store.consumer("tasks") as consumer:
        plan = explained(store, lambda: consumer.dequeue(10))
    assert reads_by_index(plan), plan
    assert "ix_pgqrs_messages_ready" in plan
    assert "ix_pgqrs_messages_waiting" in plan
    assert "USE TEMP B-TREE" not in plan


def test_ending_claims_finds_messages_by_id(store: pgqrs.Store) -> None:
    with store.consumer("tasks") as consumer:
        a, b, c, d, e = consumer.dequeue(5)
        for end in (
            lambda: consumer.ack(a),
            lambda: consumer.fail(b),
            lambda: consumer.release(c),
            lambda: consumer.extend(d, 5),
            lambda: consumer.delete(e),
        ):
            plan = explained(store, end)
            assert reads_by_index(plan), plan


def test_the_first_of_a_group_is_found_in_the_index_of_groups(store: pgqrs.Store) -> None:
    """Also if the server knows of one group that has most messages, and thinks that all do."""
    store.producer("tasks").enqueue_many(range(2000), groups=["large"] * 2000)
    store.write(lambda c: c.execute(text("DELETE FROM pgqrs_messages WHERE group_key IS NULL")))
    store.write(lambda c: c.execute(text("ANALYZE pgqrs_messages")))
    with store.consumer("tasks") as consumer:
        (message,) = consumer.dequeue(1)
        plan = explained(store, lambda: consumer.ack(message))
    assert "SCAN pgqrs_messages" not in plan, plan
    assert not re.search(r'"Filter": "[^"]*group_key', plan), plan


def test_groups_and_keys_find_messages_by_index(store: pgqrs.Store) -> None:
    names = [f"group {n % 50}" for n in range(500)]
    producer = store.producer("tasks")
    producer.enqueue_many(range(500), groups=names, keys=map(str, range(500)))
    plan = explained(store, lambda: producer.enqueue(1, group="group 1", key="499"))
    assert reads_by_index(plan), plan
    plan = explained(store, lambda: producer.enqueue(1, group="group 1", key="new"))
    assert reads_by_index(plan), plan
    assert "ix_pgqrs_messages_group" in plan
    with store.consumer("tasks") as consumer:
        held = next(message for message in consumer.dequeue(30_000) if message.group)
        plan = explained(store, lambda: consumer.ack(held))
    assert reads_by_index(plan), plan
    assert "ix_pgqrs_messages_group" in plan


def test_claims_from_a_queue_with_limits_find_messages_by_index(store: pgqrs.Store) -> None:
    store.admin().configure_queue(
        "tasks", max_in_flight=500, max_in_flight_per_key=2, rate=pgqrs.Rate(1000)
    )
    keys = [f"key {n % 5}" for n in range(100)]
    store.producer("tasks").enqueue_many(range(100), keys=keys, unique=None, priority=9)
    with store.consumer("tasks") as consumer:
        held = consumer.dequeue(20)
        consumer.ack_many(held)
        if store.backend_name == "postgres":  # in a function, whose plans nobody sees
            scans = store.write(lambda connection: _scans_of_claim(connection, consumer))
            assert scans["pgqrs_messages"] == 0
            assert scans["ix_pgqrs_messages_parked"] > 0
            assert scans["ix_pgqrs_messages_ready"] > 0
            return
        plan = explained(store, lambda: consumer.dequeue(20))
    assert reads_by_index(plan), plan
    assert "ix_pgqrs_messages_parked" in plan


def _scans_of_claim(connection: Connection, consumer: pgqrs.Consumer) -> dict[str, int]:
    """How often a claim within limits has scanned the table, and each of its indexes."""
    options: dict[str, Any] = {"worker": consumer.worker_id, "lease": None, "now": None}
    assert len(limits.claim(connection, "tasks", limit=20, **options).messages) == 20
    found = connection.exec_driver_sql(
        "SELECT relname, pg_stat_get_xact_numscans(oid) FROM pg_class "
        "WHERE relname = 'pgqrs_messages' OR relname LIKE 'ix_pgqrs_messages%%'"
    )
    return dict(found.all())


def test_plans_made_for_an_empty_table_are_good_for_a_full_one(postgres_database: str) -> None:
    with pgqrs.Store(postgres_database, upgrade=True) as store:
        store.admin().create_queue("tasks")
        with psycopg.connect(postgres_database, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE) pgqrs_messages")
        with store.consumer("tasks") as consumer:
            for _ in range(20):  # until the server has settled on a plan
                assert consumer.dequeue(10) == []
            plans = store.read(_plans_of_claims)
    assert plans
    assert "Seq Scan on pgqrs_messages" not in plans, plans


def _plans_of_claims(connection: Connection) -> str:
    """Of the prepared statements of this connection; a single read has the one that claimed."""
    prepared = connection.exec_driver_sql(
        "SELECT name, cardinality(parameter_types) FROM pg_prepared_statements "
        "WHERE statement LIKE '%%SKIP LOCKED%%' AND generic_plans > 0"
    ).all()
    return "\n".join(
        line
        for name, count in prepared
        for (line,) in connection.exec_driver_sql(
            f"EXPLAIN EXECUTE {name} ({', '.join(['NULL'] * count)})"
        )
    )
