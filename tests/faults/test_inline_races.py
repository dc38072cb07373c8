"""Scripts that run the same run at the same time."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pgqrs

SCRIPTS, ROUNDS = 4, 25


def test_scripts_that_race_for_a_key_share_one_run(database: str) -> None:
    done: Counter[str] = Counter()

    @pgqrs.step
    def work(key: str) -> str:
        done[key] += 1
        return key

    @pgqrs.workflow
    def race(key: str) -> str:
        return work(key)

    with pgqrs.Store(database, upgrade=True) as store, ThreadPoolExecutor(SCRIPTS) as scripts:
        together = Barrier(SCRIPTS)

        def run(key: str) -> str:
            together.wait()
            return race.run_inline(key, key=key, store=store)

        for number in range(ROUNDS):
            keys = [f"round {number}"] * SCRIPTS
            assert list(scripts.map(run, keys)) == keys
    assert set(done.values()) == {1}
    assert len(done) == ROUNDS
