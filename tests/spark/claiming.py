"""A run that has messages of a queue to its end."""

from __future__ import annotations

from typing import Any

import pgqrs
from pgqrs.spark import Claim, Frame, acknowledge, claim, spark_step


def lake(directory: str, *_: Any) -> str:
    return directory


@spark_step(materialize=lake)
def keep(directory: str, claimed: Claim) -> Any:
    return claimed.df().select("id", "payload")


@spark_step
def payloads(kept: Frame) -> list[str]:
    return sorted(row.payload for row in kept.select("payload").collect())


@pgqrs.workflow
def collecting(directory: str, queue: str = "tasks") -> dict[str, Any]:
    """From the queue to Parquet, and only then out of the queue."""
    claimed = claim(queue)
    kept = keep(directory, claimed)
    found = payloads(kept)
    return {"payloads": found, "acknowledged": acknowledge(claimed)}
