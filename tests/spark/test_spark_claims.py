"""Messages that a run claims at its beginning and acknowledges at its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from pgqrs.spark import acknowledge, claim
from tests.spark.claiming import collecting

TEXTS = sorted(str(n) for n in range(25))


def state(store: pgqrs.Store) -> tuple[int, int, int]:
    """Messages that are ready, in flight, and done."""
    found = store.admin().queue_stats("tasks")
    return found.ready, found.leased, found.archived[pgqrs.ArchiveReason.COMPLETED]


@pytest.fixture
def fill(url: str) -> Iterator[pgqrs.Store]:
    with pgqrs.Store(url) as store:
        store.producer("tasks").enqueue_many(range(25))
        yield store


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


def test_a_table_of_what_is_claimed_claims_nothing(spark: Any, fill: pgqrs.Store, url: str) -> None:
    options = {"url": url, "queue": "tasks", "stream": "nobody"}
    assert spark.read.format("pgqrs").options(**options, mode="claim").load().count() == 0
    with pytest.raises(Exception, match="mode: tail is for readStream"):
        spark.read.format("pgqrs").options(**options, mode="tail").load().count()
    assert state(fill) == (25, 0, 0)


def killed(url: str, directory: Path, moment: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.spark.claiming", url, str(directory), moment],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == -9, child.stderr


def test_drivers_that_are_killed(spark: Any, pg_url: str, tmp_path: Path) -> None:
    with pgqrs.Store(pg_url) as store:
        store.admin().create_queue(collecting.queue, lease=3)
        store.producer("tasks").enqueue_many(range(25))
        killed(pg_url, tmp_path, "claimed")
        assert state(store) == (0, 25, 0)
        killed(pg_url, tmp_path, "acknowledged")
        assert state(store) == (0, 0, 25)
        store.producer("tasks").enqueue("later")
        done = collecting.run_inline(str(tmp_path), key="night", store=store)
        assert done == {"payloads": TEXTS, "acknowledged": 25}
        assert state(store) == (1, 0, 25)
