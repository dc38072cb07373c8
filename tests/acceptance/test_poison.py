"""One run that kills its workers fails for good, and takes none of its neighbours along."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pgqrs
from tests.acceptance.poison import innocent, poison

ROOT = Path(__file__).parents[2]
LIMIT = 280.0
"""Seconds: far more than it takes."""


def test_a_poison_run_fails_alone(database: str) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("workflows", lease=2, max_read_ct=4)
        with pgqrs.use(store):
            killer = poison.start(0.5)
            # Each takes longer than the poison lets them live, and has nothing on record until then.
            runs = [innocent.start(1.5) for _ in range(3)]
        command = [sys.executable, "-m", "tests.acceptance.poison", database]
        worker, deaths = subprocess.Popen(command, cwd=ROOT), 0
        deadline = time.monotonic() + LIMIT
        try:
            while not all(run.refresh().has_ended for run in (killer, *runs)):
                assert time.monotonic() < deadline, [run.refresh() for run in (killer, *runs)]
                if worker.poll() is not None:
                    assert worker.returncode == 77
                    deaths += 1
                    worker = subprocess.Popen(command, cwd=ROOT)
                time.sleep(0.05)
        finally:
            worker.kill()
            worker.wait()
        assert [str(run.status()) for run in runs] == ["completed"] * 3
        assert killer.status() == "failed"
        assert deaths == 4


def test_a_step_that_was_cut_off_shows_its_attempts(database: str) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        store.admin().create_queue("workflows", lease=2, max_read_ct=4)
        run = innocent.start(600, store=store)
        command = [sys.executable, "-m", "tests.acceptance.poison", database]
        for attempt in (1, 2):
            worker = subprocess.Popen(command, cwd=ROOT)
            deadline = time.monotonic() + LIMIT
            try:
                while [(str(s.status), s.attempts) for s in run.steps()] != [("running", attempt)]:
                    assert time.monotonic() < deadline, run.steps()
                    time.sleep(0.05)
            finally:
                worker.kill()
                worker.wait()
        run.cancel()
