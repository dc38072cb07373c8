"""A run that claims messages, in a process that is killed at a moment that is told:
`python -m tests.spark.claiming URL DIRECTORY MOMENT`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pgqrs
from pgqrs.spark import Claim, Frame, acknowledge, claim, claims, session, spark_step
from tests.spark.conftest import SETTINGS


def lake(directory: str, *_: Any) -> str:
    return directory


@spark_step(materialize=lake)
def keep(directory: str, claimed: Claim) -> Any:
    return claimed.df().select("id", "payload")


@spark_step
def payloads(kept: Frame) -> list[str]:
    return sorted(row.payload for row in kept.select("payload").collect())


@pgqrs.workflow
def collecting(directory: str) -> dict[str, Any]:
    """From the queue to Parquet, and only then out of the queue."""
    claimed = claim("tasks")
    kept = keep(directory, claimed)
    found = payloads(kept)
    return {"payloads": found, "acknowledged": acknowledge(claimed)}


def die(*_: Any) -> Any:
    """The driver and its Java at once."""
    os.killpg(0, signal.SIGKILL)


def main(url: str, directory: str, moment: str) -> None:
    session("killed", **SETTINGS)
    if moment == "claimed":  # but not recorded
        claims.Claim = die  # type: ignore[assignment, misc]
    else:
        end = claims.end
        claims.end = lambda *args: die(end(*args))  # acknowledged, but not recorded
    with pgqrs.Store(url) as store:
        collecting.run_inline(directory, key="night", store=store)


if __name__ == "__main__":
    main(*sys.argv[1:])
