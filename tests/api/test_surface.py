"""The public face: what is exported, that sync and async are twins, what an import costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import pgqrs
from pgqrs import aio, errors
from pgqrs.aio.consumer import AsyncHolder
from pgqrs.aio.transaction import AsyncTransactionWorkflows
from pgqrs.consumer import Holder
from pgqrs.transaction import TransactionWorkflows

TWINS = [
    (pgqrs.Store, pgqrs.AsyncStore),
    (pgqrs.Admin, pgqrs.AsyncAdmin),
    (pgqrs.Producer, pgqrs.AsyncProducer),
    (pgqrs.Consumer, pgqrs.AsyncConsumer),
    (pgqrs.Buffer, pgqrs.AsyncBuffer),
    (pgqrs.Transaction, pgqrs.AsyncTransaction),
    (TransactionWorkflows, AsyncTransactionWorkflows),
    (pgqrs.Worker, pgqrs.AsyncWorker),
    (pgqrs.Workflows, pgqrs.AsyncWorkflows),
    (pgqrs.Run, pgqrs.AsyncRun),
    (pgqrs.StepGuard, pgqrs.AsyncStepGuard),
    (pgqrs.Handle, pgqrs.AsyncHandle),
    (pgqrs.Schedules, pgqrs.AsyncSchedules),
    (Holder, AsyncHolder),
]
ONLY_ASYNC = {"open"}  # what a sync facade does when it is made or first used


def public(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(owner) if not name.startswith("_")}


def test_all_is_what_is_exported() -> None:
    modules = {name for name, value in public(pgqrs).items() if inspect.ismodule(value)}
    assert set(public(pgqrs)) - modules | {"__version__"} == set(pgqrs.__all__)
    assert len(set(pgqrs.__all__)) == len(pgqrs.__all__)
    assert set(public(aio)) >= set(aio.__all__)


def test_every_error_is_exported_and_in_one_tree() -> None:
    for name, value in public(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            assert getattr(pgqrs, name) is value
            assert issubclass(value, pgqrs.PgqrsError)
            assert not hasattr(__builtins__, name)


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS, ids=lambda cls: cls.__name__)
def test_sync_and_async_have_the_same_methods(sync: Any, asynchronous: Any) -> None:
    assert set(public(sync)) - ONLY_ASYNC == set(public(asynchronous)) - ONLY_ASYNC


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS, ids=lambda cls: cls.__name__)
def test_sync_and_async_have_the_same_arguments(sync: Any, asynchronous: Any) -> None:
    compared = 0
    for name, method in public(sync).items():
        if not inspect.isfunction(method) or name in ONLY_ASYNC:
            continue
        twin = getattr(asynchronous, name)
        ours, theirs = inspect.signature(method), inspect.signature(twin)
        assert list(ours.parameters) == list(theirs.parameters), name
        for parameter in ours.parameters.values():
            other = theirs.parameters[parameter.name]
            assert (parameter.kind, parameter.default) == (other.kind, other.default), name
            if name != "using":
                assert parameter.annotation == other.annotation, name
        compared += 1
    assert compared > 1


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_loads_no_heavy_parts() -> None:
    heavy = "boto3 pyspark alembic click rich starlette cloudpickle pytest aiosqlite asyncpg"
    loaded = python(
        f"import sys, pgqrs; print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    assert loaded == "[]"


def test_opening_a_store_needs_no_alembic(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'q.db'}"
    with pgqrs.Store(url) as store:
        store.admin().install()
        store.admin().create_queue("q")
    code = (
        f"import sys, pgqrs; pgqrs.Store({url!r}).producer('q').enqueue(1); "
        "print('alembic' in sys.modules)"
    )
    assert python(code) == "False"


COUNT_CALLS = """
import sys
calls = 0
def count(*_):
    global calls
    calls += 1
sys.setprofile(count)
import sqlalchemy
before = calls
import pgqrs
sys.setprofile(None)
print(before, calls - before)
"""


def test_importing_is_quick() -> None:
    """Measured in function calls, of which a busy machine needs no more than an idle one."""
    theirs, ours = map(int, python(COUNT_CALLS).split())
    assert ours < 2.2 * theirs
