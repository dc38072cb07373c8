"""Options of the data source: asked for by name, checked in one place.

They are text, and Spark does not mind their case. An option that nobody knows is a slip of the pen, and
refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqrs.config import Config
from pgqrs.errors import InvalidArgument, InvalidConfig
from pgqrs.spark.importing import imported
from pgqrs.types import aware

OF_SPARK = (
    "checkpointLocation",
    "queryName",
    "recoverFromCheckpointLocation",
    "asyncProgressTrackingEnabled",
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
"""Options of a query, which Spark hands on to its sources and sinks."""
WHERE = ("url", "urlEnv", "urlProvider", "databaseSchema")
"""Options that say which database."""


class Options:
    """What was given for one read or write."""

    def __init__(self, given: Mapping[str, str], known: Iterable[str]) -> None:
        names = {name.lower(): name for name in (*WHERE, *known)}
        its_own = set(map(str.lower, OF_SPARK))
        self._given = {
            name.lower(): value for name, value in given.items() if name.lower() not in its_own
        }
        for name in self._given.keys() - names.keys():
            raise InvalidArgument(name, f"no such option; there are {', '.join(names.values())}")

    def text(self, name: str) -> str | None:
        """An option as it is; None if it was not given, or is empty."""
        return self._given.get(name.lower()) or None

    def required(self, name: str) -> str:
        """An option that must be given."""
        value = self.text(name)
        if value is None:
            raise InvalidArgument(name, "this option must be given")
        return value

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """One of these words."""
        value, words = self.text(name) or default, list(choices)
        if value not in words:
            raise InvalidArgument(name, f"expected one of {', '.join(words)}, got {value!r}")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """Words with commas between them."""
        value = self.text(name)
        return None if value is None else tuple(word.strip() for word in value.split(","))

    def whole(self, name: str, *, low: int, high: int = 2**31 - 1) -> int | None:
        """A whole number."""
        number: int | None = self._number(name, int, "a whole number", low, high)
        return number

    def number(self, name: str, *, low: float = 0.0) -> float | None:
        """A number, as of seconds."""
        number: float | None = self._number(name, float, "a number", low, 1e12)
        return number

    def moment(self, name: str) -> datetime | None:
        """A time, with its zone."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return aware(name, datetime.fromisoformat(value))
        except ValueError as exc:
            example = "2026-11-16T00:00:00+00:00"
            raise InvalidArgument(name, f"expected a time like {example}, got {value!r}") from exc

    def where(self) -> Where:
        """Which database."""
        given = [name for name in ("url", "urlEnv", "urlProvider") if self.text(name) is not None]
        if len(given) > 1:
            raise InvalidArgument(given[-1], f"give {' or '.join(given)}, not both")
        return Where(
            self.text("url"),
            self.text("urlEnv") or "PGQRS_DSN",
            self.text("databaseSchema"),
            self.text("urlProvider"),
        )

    def _number(self, name: str, kind: Any, expected: str, low: float, high: float) -> Any:
        value = self.text(name)
        if value is None:
            return None
        try:
            number = kind(value)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise InvalidArgument(name, f"expected {expected} from {low}, got {value!r}")
        return number


@dataclass(frozen=True, slots=True)
class Where:
    """Which database, as far as it may be known to plans: of a URL that is in the environment only the
    variable, which is looked at where it is used; and of one that a function tells only its name.
    """

    url: str | None
    variable: str
    schema: str | None = None
    provider: str | None = None

    def config(self) -> Config:
        """The settings, here and now."""
        schema = {} if self.schema is None else {"schema": self.schema}
        return Config.from_dsn(self.address(), **schema)

    def address(self) -> str:
        """The URL, here and now."""
        if self.provider is not None:
            return str(imported(self.provider, "urlProvider")())
        url = self.url or os.environ.get(self.variable)
        if url is None:
            raise InvalidConfig(
                f"no database: give the option url, or set {self.variable} where Spark runs, before "
                f"it is started, on the driver and on every executor (spark.executorEnv."
                f"{self.variable})"
            )
        return url

    def __repr__(self) -> str:
        return f"Where({'url' if self.url else self.provider or self.variable})"
