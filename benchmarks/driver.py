"""What both sides of a comparison can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

Backend = Literal["sqlite", "postgres"]
Side = Literal["raw", "pgqrs", "buffer", "limited"]
QUEUE = "bench"
LEASE = 3600.0


class Driver(Protocol):
    """Durable operations on one queue. What `claim` returns is what `ack` takes."""

    def enqueue(self, payload: Any) -> int: ...

    def enqueue_many(self, payloads: list[Any]) -> list[int]: ...

    def claim(self, n: int) -> Sequence[Any]: ...

    def ack(self, claimed: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


def payloads(n: int) -> list[dict[str, Any]]:
    """Messages as applications send them: small objects, about a hundred bytes of JSON."""
    return [
        {
            "job": "resize",
            "image": f"photos/{i}.jpg",
            "width": 640,
            "height": 480,
            "tags": ["a", "b"],
        }
        for i in range(n)
    ]
