"""A run that was begun by one version of a module is finished by another, in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pgqrs

ROOT = Path(__file__).parents[2]
WORK = """
import sys
sys.path.insert(0, {root!r})
import app, pgqrs
with pgqrs.Store({url!r}) as store:
    pgqrs.Worker(store, workflows=[app.ship]).run(until_empty=True)
"""
VERSION_A = """
import pgqrs

@pgqrs.step
def pack(item): return f"{item} packed"

@pgqrs.step
def send(parcel): return f"{parcel}, sent"

@pgqrs.workflow(version="A")
def ship(item):
    parcel = pack(item)
    pgqrs.wait_for_event("label")
    return send(parcel)
"""
VERSION_B = '''
"""Reformatted, commented, with another way to say the same, and one more step at the end."""
from pgqrs import step, wait_for_event, workflow

SUFFIX = ", sent"


@step
def pack(item, *, carefully=True):
    # Another body: it is on record, and so it is not run again.
    raise AssertionError("packed twice")


@step
def send(parcel):
    return parcel + SUFFIX


@step
def thank(text):
    return f"{text}, thank you"


@workflow(version="B")
def ship(item):
    """Documented now."""
    packed = pack(item, carefully=False)
    for _ in range(1):
        wait_for_event("label", timeout=None)
    return thank(send(packed))
'''
CONTRADICTION = VERSION_A.replace("parcel = pack(item)", "parcel = send(item)")


def work(directory: Path, url: str, version: str) -> None:
    """A process with this version of the module works until nothing is left to do."""
    deployed = directory / f"{len(list(directory.iterdir()))}"
    deployed.mkdir()
    (deployed / "app.py").write_text(version)
    code = WORK.format(root=str(ROOT), url=url)
    subprocess.run([sys.executable, "-c", code], cwd=deployed, check=True, timeout=500)


def test_another_version_finishes_what_one_began(database: str, tmp_path: Path) -> None:
    with pgqrs.Store(database, upgrade=True) as store:
        input = {"args": ["book"], "kwargs": {}}
        fine = store.workflows.create("ship", input, queue="workflows", version="A")
        contradicted = store.workflows.create("ship", input, queue="workflows", version="A")
        work(tmp_path, database, VERSION_A)
        assert (fine.status(), contradicted.status()) == ("suspended", "suspended")
        fine.signal("label")
        work(tmp_path, database, VERSION_B)
        assert fine.result(timeout=0) == "book packed, sent, thank you"
        contradicted.signal("label")
        work(tmp_path, database, CONTRADICTION)
        found = contradicted.refresh()
        assert found.status == "paused"
        assert "asks for step send where its history has step pack" in (found.error or "")
        contradicted.resume()
        work(tmp_path, database, VERSION_A)
        assert contradicted.result(timeout=0) == "book packed, sent"
        assert contradicted.refresh().version == "A"
