"""Messages that a run claims at its beginning and acknowledges at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

import pgqrs
from pgqrs.spark import Frame, acknowledge, claim, spark_step
from tests.spark.claiming import collecting, keep
from tests.spark.conftest import install
from tests.spark.test_spark_export import killed_at_once

TEXTS = sorted(str(n) for n in range(25))


def state(store: pgqrs.Store, queue: str = "tasks") -> tuple[int, int, int]:
    """Messages that are ready, in flight, and done."""
    found = store.admin().queue_stats(queue)
    return found.ready, found.leased, found.archived[pgqrs.ArchiveReason.COMPLETED]


@pytest.fixture
def fill(url: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many(range(25))
        yield store


@pytest.mark.smoke
def test_a_run_has_its_messages_to_its_end(spark: Any, fill: pgqrs.Store, tmp_path: Path) -> None:
    @pgqrs.step
    def look() -> tuple[int, int, int]:
        fill.producer("tasks").enqueue("later")
        return state(fill)

    @pgqrs.workflow
    def looking(limit: int) -> Any:
        claimed = claim("tasks", limit)
        meanwhile = look()
        return claimed.rows, meanwhile, acknowledge(claimed)

    assert looking.run_inline(20, store=fill) == [20, [6, 20, 0], 20]
    assert state(fill) == (6, 0, 20)
    assert fill.admin().list_streams() == []
    done = collecting.run_inline(str(tmp_path), store=fill)
    assert (len(done["payloads"]), done["acknowledged"]) == (6, 6)
    done = collecting.run_inline(str(tmp_path), store=fill)
    assert done == {"payloads": [], "acknowledged": 0}


def test_batches_of_any_number(
    spark: Any, fill: pgqrs.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.claims.LARGEST", 10)
    done = collecting.run_inline(str(tmp_path), store=fill)
    assert done == {"payloads": TEXTS, "acknowledged": 25}


def test_all_messages_of_a_group_are_claimed(
    spark: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqrs.spark.claims.LARGEST", 10)

    @pgqrs.step
    def look() -> tuple[int, int, int]:
        store.producer("tasks").enqueue("later", group="group 1")
        return state(store)

    @pgqrs.workflow
    def looking() -> Any:
        claimed = claim("tasks")
        return claimed.rows, look(), acknowledge(claimed)

    groups = [f"group {n % 3}" for n in range(24)]
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many(range(24), groups=groups)
        assert looking.run_inline(store=store) == [24, [0, 24, 0], 24]
        assert state(store) == (1, 0, 24)


def test_what_was_released_meanwhile_is_not_acknowledged(spark: Any, fill: pgqrs.Store) -> None:
    @pgqrs.step
    def release() -> int:
        (stream,) = fill.admin().list_streams()
        return fill.admin().release_stream(stream.name)

    @pgqrs.workflow
    def losing() -> list[int]:
        claimed = claim("tasks")
        return [release(), acknowledge(claimed)]

    assert losing.run_inline(store=fill) == [25, 0]
    assert state(fill) == (25, 0, 0)


def test_nothing_is_acknowledged_unless_what_was_written_is_there(
    spark: Any, sqlite_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster whose executors write to directories that the driver does not see."""

    @spark_step
    def lose(kept: Frame) -> None:
        rmtree(kept.path)

    @pgqrs.workflow
    def losing() -> int:
        claimed = claim("tasks")
        lose(keep(str(tmp_path), claimed))
        return acknowledge(claimed)

    install(sqlite_database)
    with pgqrs.Store(sqlite_database) as store:
        store.producer("tasks").enqueue_many(range(25))
        with pytest.raises(pgqrs.RunFailed, match=r"FrameLost.* had 25 rows .* and has 0 now"):
            losing.run_inline(store=store)
        assert state(store) == (0, 25, 0)
        for stream in store.admin().list_streams():
            store.admin().release_stream(stream.name)
        monkeypatch.setattr("pgqrs.spark.frames.count_rows", lambda _path: 0)
        with pytest.raises(pgqrs.RunFailed, match=r"ExportMismatch.* has 0 rows, and 25 were read"):
            collecting.run_inline(str(tmp_path), store=store)
        assert state(store) == (0, 25, 0)


def test_a_table_of_what_is_claimed_claims_nothing(spark: Any, fill: pgqrs.Store, url: str) -> None:
    options = {"url": url, "queue": "tasks", "stream": "nobody"}
    assert spark.read.format("pgqrs").options(**options, mode="claim").load().count() == 0
    with pytest.raises(Exception, match="mode: tail is for readStream"):
        spark.read.format("pgqrs").options(**options, mode="tail").load().count()
    assert state(fill) == (25, 0, 0)


def test_drivers_that_are_killed(spark: Any, pg_url: str, tmp_path: Path) -> None:
    runs = {queue: {"directory": str(tmp_path), "queue": queue} for queue in ("tasks", "others")}
    with pgqrs.Store(pg_url) as store:
        store.admin().create_queue(collecting.queue, lease=3)
        for queue in runs:
            store.producer(queue).enqueue_many(range(25))
        killed_at_once(
            pg_url,
            [
                ("tasks", "claimed", "collecting", runs["tasks"]),
                ("others", "acknowledged", "collecting", runs["others"]),
            ],
        )
        assert state(store, "tasks") == (0, 25, 0)
        assert state(store, "others") == (0, 0, 25)
        store.producer("others").enqueue("later")
        for queue, arguments in runs.items():
            done = collecting.run_inline(**arguments, key=queue, store=store)
            assert done == {"payloads": TEXTS, "acknowledged": 25}
        assert state(store, "tasks") == (0, 0, 25)
        assert state(store, "others") == (1, 0, 25)
