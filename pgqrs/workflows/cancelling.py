"""Cancelling runs together with their children, level by level.

Whoever ends a run locks it and then those who wait for it: mostly a child, and then its parent.
Cancelling goes from parents to children, and would meet that halfway. So each level has transactions
of its own: from the top all are told to cancel, then from the bottom what nobody runs is ended.

Should the process die in between, the runs at the top are still being cancelled, and their messages
are there to be claimed: a worker that finds such a run tells its children, then ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from pgqrs.repositories import workflows
from pgqrs.stores import Database


def cancel(database: Database, run_ids: Sequence[int]) -> None:
    """Cancel runs and their children: at once what nobody runs, the rest at its next boundary."""
    levels: list[list[int]] = []
    told, below = _tell(database, run_ids)
    while told:
        levels.append(told)
        if not below:
            break
        told, below = _tell(database, below)
    ring: set[str] = set()
    for level in reversed(levels[:-1]):
        ring |= _end(database, level)
    for queue in ring:
        database.ring(queue)


def cancel_children(database: Database, run_id: int, *, closing: bool) -> None:
    """Cancel the children of a run that is about to end; only those that are `closing` unless it is
    being cancelled itself.
    """
    children = database.read(lambda c: workflows.children_of(c, [run_id], closing=closing))
    if children:
        cancel(database, children)


def _tell(database: Database, run_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tell one level to cancel. Returns who was told, and their children. A level without children
    ends in the same transaction.
    """

    def work(connection: Connection) -> tuple[list[int], list[int], frozenset[str]]:
        now = database.now()
        told = workflows.tell_to_cancel(connection, run_ids, now=now)
        below = workflows.children_of(connection, told) if told else []
        ring = frozenset[str]() if below else workflows.end_cancelled(connection, told, now=now)
        return told, below, ring

    told, below, ring = database.write(work, repeatable=True)
    for queue in ring:
        database.ring(queue)
    return told, below


def _end(database: Database, run_ids: Sequence[int]) -> frozenset[str]:
    return database.write(
        lambda c: workflows.end_cancelled(c, run_ids, now=database.now()), repeatable=True
    )
