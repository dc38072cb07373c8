"""Many new runs of one workflow at once: two statements, and one more if they have keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Text, bindparam, cast, column, insert, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from pgqrs.models import queues, workflows
from pgqrs.payloads import Batch
from pgqrs.repositories import messages
from pgqrs.repositories.expressions import at, is_one_of
from pgqrs.repositories.messages import pieces
from pgqrs.repositories.starting import RUN_VALUES, payload
from pgqrs.sqltypes import JsonText
from pgqrs.types import RunStatus


class NewRun(NamedTuple):
    """The input of a run, as JSON, and its key."""

    input: str
    key: str | None


class StartedMany(NamedTuple):
    """The runs in the order in which they were asked for; whether there are new ones, and whether
    somebody elsewhere waits for them.
    """

    ids: list[int]
    any_new: bool
    waited_for: bool


class _Rows(FunctionElement[Any]):
    name = "pgqrs_new_runs"
    inherit_cache = True


@compiles(_Rows, "postgresql")
def _rows_postgres(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT CAST(value->>0 AS BIGINT) AS message_id, value->>1 AS input, value->>2 AS run_key "
        f"FROM jsonb_array_elements(CAST({text} AS JSONB)))"
    )


@compiles(_Rows, "sqlite")
def _rows_sqlite(element: _Rows, compiler: Any, **kw: Any) -> str:
    (text,) = (compiler.process(clause, **kw) for clause in element.clauses)
    return (
        "(SELECT json_extract(value, '$[0]') AS message_id, json_extract(value, '$[1]') AS input, "
        f"json_extract(value, '$[2]') AS run_key FROM json_each({text}))"
    )


_rows = _Rows(bindparam("rows", type_=Text())).table_valued(
    column("message_id", BigInteger()),
    column("input", Text()),
    column("run_key", Text()),
    name="new_runs",
)
_values = RUN_VALUES | {
    "key": _rows.c.run_key,
    "input": cast(_rows.c.input, JsonText()),
    "message_id": _rows.c.message_id,
    "queue_id": select(queues.c.id)
    .where(queues.c.queue_name == bindparam("queue", type_=Text()))
    .scalar_subquery(),
}
# In the order of their messages, so that runs have ascending ids, too.
_INSERT = (
    insert(workflows)
    .from_select(list(_values), select(*_values.values()).order_by(_rows.c.message_id))
    .returning(workflows.c.id, workflows.c.message_id)
)
_BY_KEYS = select(workflows.c.key, workflows.c.id).where(
    workflows.c.name == bindparam("new_name", type_=Text()),
    is_one_of(workflows.c.key, "keys"),
)


def start_many(
    connection: Connection,
    runs: Sequence[NewRun],
    *,
    name: str,
    queue: str,
    version: str | None,
    timeout: float | None,
    deadline: datetime | None,
    delay: float,
    eta: datetime | None,
    priority: int,
    headers: str | None = None,
    now: datetime | None,
) -> StartedMany:
    """New runs and their messages; for a key that a run has, that run. All of them or none."""
    by_key = _find(connection, name, [run.key for run in runs if run.key is not None])
    new = _first_of_each_key(runs, by_key)
    if not new:
        return StartedMany([by_key[run.key or ""] for run in runs], False, False)
    sent = messages.enqueue(
        connection,
        queue,
        Batch(len(new), None, [payload(name)] * len(new)),
        headers=headers,
        priority=priority,
        delay=delay,
        eta=eta,
        ttl=None,
        expires_at=None,
        producer=None,
        now=now,
    )
    bound: dict[str, Any] = {
        "new_name": name,
        "new_parent": None,
        "new_parent_close": None,
        "new_version": version,
        "new_fork": None,
        "new_status": RunStatus.PENDING,
        "queue": queue,
    } | at(
        now=(now, 0.0),
        deadline=(now, timeout) if deadline is None else (deadline, 0.0),
        begun=(now, None),
    )
    of_message = _insert(connection, list(zip(sent.ids, new, strict=True)), bound)
    ids = [of_message[id] for id in sent.ids]
    by_key |= {run.key: id for run, id in zip(new, ids, strict=True) if run.key is not None}
    keyless = iter(id for run, id in zip(new, ids, strict=True) if run.key is None)
    in_order = [next(keyless) if run.key is None else by_key[run.key] for run in runs]
    return StartedMany(in_order, True, sent.waited_for)


def _find(connection: Connection, name: str, keys: list[str]) -> dict[str, int]:
    if not keys:
        return {}
    found = connection.execute(_BY_KEYS, {"new_name": name, "keys": sorted(set(keys))})
    return {row.key: row.id for row in found}


def _first_of_each_key(runs: Sequence[NewRun], taken: dict[str, int]) -> list[NewRun]:
    """Those to be started: the first with a key that no run has, and all without one."""
    seen: set[str | None] = set(taken)
    new: list[NewRun] = []
    for run in runs:
        if run.key is None or run.key not in seen:
            new.append(run)
        seen.add(run.key)
    return new


def _insert(
    connection: Connection, new: list[tuple[int, NewRun]], bound: dict[str, Any]
) -> dict[int, int]:
    """The ids of the runs by those of their messages."""
    ids: dict[int, int] = {}
    for piece in pieces(new, size=lambda one: len(one[1].input)):
        rows = json.dumps([(int(id), *run) for id, run in piece])
        inserted = connection.execute(_INSERT, bound | {"rows": rows})
        ids |= {message_id: run_id for run_id, message_id in inserted}
    return ids
