"""Workflows whose workers are killed. `python -m tests.acceptance.crashing URL SEED` is such a worker.

Every effect is a row. A plain step writes it by itself, and looks first whether it is on record
already, which would be wrong. By chance a step kills its own process, after its effect and before
its record.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

from sqlalchemy import Connection, text

import pgqrs

STEPS = 5
DEADLY = 0.02
TABLES = (
    "CREATE TABLE effects (run TEXT NOT NULL, step TEXT NOT NULL)",
    "CREATE TABLE wrongs (run TEXT NOT NULL, step TEXT NOT NULL)",
)
ADD = "INSERT INTO {} VALUES (:run, :step)"
ON_RECORD = """
SELECT count(*) FROM pgqrs_workflow_steps s JOIN pgqrs_workflows w ON w.id = s.workflow_id
WHERE w.key = :run AND s.step_id = :step AND s.status = 'completed'
"""
dice = random.Random()
store: pgqrs.Store


def perhaps_die() -> None:
    if dice.random() < DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)


def plain_effect(run: str, step: str) -> str:
    def work(connection: Connection) -> None:
        bound = {"run": run, "step": step}
        if connection.execute(text(ON_RECORD), bound).scalar_one():
            connection.execute(text(ADD.format("wrongs")), bound)
        connection.execute(text(ADD.format("effects")), bound)

    store.write(work)
    perhaps_die()
    return step


def effect_in(connection: Connection, run: str, step: str) -> str:
    connection.execute(text(ADD.format("effects")), {"run": run, "step": step})
    perhaps_die()
    return step


plain = {
    name: pgqrs.step(name=name)(lambda run, name=name: plain_effect(run, name))
    for name in ("plain 1", "plain 3", "plain 5")
}
transactional = {
    name: pgqrs.step(name=name, transactional=True)(
        lambda connection, run, name=name: effect_in(connection, run, name)
    )
    for name in ("transactional 2", "transactional 4")
}


@pgqrs.workflow
def work(run: str) -> list[Any]:
    return [
        plain["plain 1"](run),
        transactional["transactional 2"](run),
        plain["plain 3"](run),
        transactional["transactional 4"](run),
        plain["plain 5"](run),
    ]


if __name__ == "__main__":
    dice.seed(int(sys.argv[2]))
    with pgqrs.Store(sys.argv[1]) as store:
        pgqrs.Worker(store, workflows=[work], concurrency=4, prefetch=0).run()
