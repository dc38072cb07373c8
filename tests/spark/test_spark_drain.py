"""Draining a queue by tasks of Spark: every message once, whoever dies on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pgqrs
from pgqrs.cli.app import app
from pgqrs.spark import allow
from pgqrs.spark.allowing import _Allowed, allowed_function
from pgqrs.spark.drain import Tally, drain, drained
from tests.spark.conftest import install, s3_url
from tests.spark.test_spark_crashes import PATIENCE, ROOT

FUNCTION = "tests.spark.draining:double"
COMPLETED, FAILED = pgqrs.ArchiveReason.COMPLETED, pgqrs.ArchiveReason.FAILED


def fill(store: pgqrs.Store, count: int, **more: Any) -> None:
    store.producer("tasks").enqueue_many([{"n": n} | more for n in range(count)])


def check(store: pgqrs.Store, count: int) -> None:
    found = store.admin().queue_stats("tasks")
    assert (found.ready, found.leased, found.delayed) == (0, 0, 0)
    assert found.archived[COMPLETED] == count - count // 100
    assert found.archived[FAILED] == count // 100
    some = store.admin().list_archive("tasks", reason=COMPLETED, n=count)
    assert all(ended.result == {"twice": 2 * ended.payload["n"]} for ended in some)
    assert len({ended.payload["n"] for ended in some}) == len(some)


@pytest.mark.smoke
def test_what_is_there_is_drained_and_counted(url: str, spark: Any) -> None:
    with pgqrs.Store(url) as store:
        fill(store, 2200)
        run = drain.start("tasks", FUNCTION, 1000, store=store)
        with pgqrs.Worker(store, workflows=[drain]):
            assert run.result(timeout=PATIENCE) == {"completed": 2178, "failed": 22, "retried": 0}
        check(store, 2200)


def test_tasks_that_die_are_tried_again_and_a_killed_driver_is_replaced(
    pg_url: str, spark: Any, tmp_path: Path
) -> None:
    for name in ("fatal", "slow"):
        (tmp_path / name).touch()
    with pgqrs.Store(pg_url) as store:
        fill(store, 4000, directory=str(tmp_path))
        run = drain.start("tasks", FUNCTION, 1000, 8.0, 2, store=store)
        store.admin().configure_queue(drain.queue, lease=8)
        with (tmp_path / "log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.draining", pg_url],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        try:
            give_up_at = time.monotonic() + PATIENCE
            while not (tmp_path / "working").exists():
                assert time.monotonic() < give_up_at
                assert driver.poll() is None
                time.sleep(0.05)
        finally:
            driver.kill()
            driver.wait()
        assert not (tmp_path / "fatal").exists()
        before = drained(store, run.id)
        assert before.completed < 3960
        (tmp_path / "slow").unlink()
        with pgqrs.Worker(store, workflows=[drain]):
            total = run.result(timeout=PATIENCE)
        # The Java process of a killed driver may end a batch while it dies; that is counted too.
        assert total == {"completed": 3960, "failed": 40, "retried": 0}
        assert Tally(**total) == drained(store, run.id)
        check(store, 4000)


def test_by_command(sqlite_database: str, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(sqlite_database)
    with pgqrs.Store(sqlite_database) as store:
        fill(store, 300)
        run = CliRunner().invoke(
            app, ["--dsn", sqlite_database, "spark", "drain", "tasks", FUNCTION, "--json"]
        )
        assert json.loads(run.stdout) == {"completed": 297, "failed": 3, "retried": 0}
        check(store, 300)
        refused = CliRunner().invoke(
            app, ["--dsn", sqlite_database, "spark", "drain", "tasks", "nowhere:at_all"]
        )
        assert refused.exit_code != 0
        assert "nowhere:at_all" in refused.stderr
        monkeypatch.setenv("PGQRS_SPARK_FUNCTIONS", "pricing:*")
        refused = CliRunner().invoke(
            app, ["--dsn", sqlite_database, "spark", "drain", "tasks", FUNCTION]
        )
        assert refused.exit_code != 0
        assert f"this worker does not allow '{FUNCTION}'" in refused.stderr


def test_what_comes_later_is_left_to_others(pg_url: str, spark: Any) -> None:
    from pgqrs.spark.drain import Duty, work

    with pgqrs.Store(pg_url) as store:
        ids = store.producer("tasks").enqueue_many([{"n": n} for n in range(5)])
        run = drain.start("tasks", FUNCTION, store=store)
        duty = Duty(store.config, run.id, "tasks", FUNCTION, ids[2], 1000, 30.0)
        assert list(work(duty)) == [Tally(completed=3)]
        assert store.admin().queue_stats("tasks").ready == 2


def test_what_comes_later_with_a_higher_priority_is_not_touched(url: str) -> None:
    from pgqrs.spark.drain import Duty, config_of_tasks, work

    with pgqrs.Store(url) as store:
        ids = store.producer("tasks").enqueue_many([{"n": n} for n in range(5)])
        store.producer("tasks").enqueue_many([{"n": n} for n in range(5, 9)], priority=5)
        run = drain.start("tasks", FUNCTION, store=store)
        # A batch is smaller than what is in the way.
        duty = Duty(config_of_tasks(store), run.id, "tasks", FUNCTION, ids[-1], 3, 30.0)
        assert list(work(duty)) == [Tally(completed=3), Tally(completed=2)]
        late = store.admin().peek("tasks", 10)
        assert [(message.payload["n"], message.read_ct) for message in late] == [
            (n, 0) for n in range(5, 9)
        ]


def test_where_tasks_learn_the_url(sqlite_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgqrs.spark.drain import Duty, config_of_tasks, where_of, work

    install(sqlite_database)
    with pgqrs.Store(sqlite_database) as store:
        fill(store, 3)
        run = drain.start("tasks", FUNCTION, store=store)
        where = where_of(store, Conf({"spark.pgqrs.urlEnv": "PGQRS_TEST_URL"}))
        config = config_of_tasks(store, where)
        duty = Duty(config, run.id, "tasks", FUNCTION, 10**9, 1000, 30.0, where)
        with pytest.raises(pgqrs.InvalidConfig, match="PGQRS_TEST_URL"):
            list(work(duty))
        monkeypatch.setenv("PGQRS_TEST_URL", sqlite_database)
        assert list(work(duty)) == [Tally(completed=3)]
        assert where_of(store, Conf({})) is None


class Conf:
    """Of a session the settings only."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.conf = settings


def test_only_what_a_worker_allows_is_called(
    sqlite_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.allowing._allowed", _Allowed())
    assert allowed_function(FUNCTION) == FUNCTION
    monkeypatch.setenv("PGQRS_SPARK_FUNCTIONS", "pricing:*, tests.spark.draining:double")
    assert allowed_function("pricing:with_tax") == "pricing:with_tax"
    assert allowed_function(FUNCTION) == FUNCTION
    allow(functions=["pricing:*"])
    for refused in (FUNCTION, "os:system", "pricing.more:f"):
        with pytest.raises(pgqrs.InvalidArgument, match="this worker does not allow"):
            allowed_function(refused)


def test_tasks_that_lose_a_race_for_an_object_try_again(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgqrs.spark.drain import Duty, config_of_tasks, events, work

    url = s3_url(moto)
    install(url)
    with pgqrs.Store(url) as store:
        fill(store, 5)
        run = drain.start("tasks", FUNCTION, store=store)
        add, rivals = events.add, [store.producer("others")]

        def add_too_late(*args: Any, **kwargs: Any) -> Any:
            while rivals:
                rivals.pop().enqueue("first")
            return add(*args, **kwargs)

        monkeypatch.setattr(events, "add", add_too_late)
        duty = Duty(config_of_tasks(store), run.id, "tasks", FUNCTION, 10**9, 1000, 30.0)
        assert list(work(duty)) == [Tally(completed=5)]
        assert rivals == []
        assert drained(store, run.id) == Tally(completed=5)


@pytest.mark.parametrize("function", ["tests.spark.draining:missing", "nowhere:at_all"])
def test_functions_that_are_not_there_are_named(function: str) -> None:
    from pgqrs.spark.drain import load

    with pytest.raises(pgqrs.InvalidArgument, match=function):
        load(function)
