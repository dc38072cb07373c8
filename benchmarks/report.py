"""Results, and the tables they are shown in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from statistics import median
from typing import Any, Literal

from rich.table import Table

from benchmarks.driver import Backend

Columns = tuple[str, str]
"""What the baseline and the measured column are called."""


@dataclass(frozen=True, slots=True)
class Result:
    """Two things measured in turns, round by round, and what their quotient should be."""

    backend: Backend
    name: str
    unit: Literal["per second", "µs", "at rest"]
    baseline_rounds: list[float]
    measured_rounds: list[float]
    target: float | None
    """Rates: at least. Times: at most."""
    at_most: float | None = None
    """What was measured, in its unit, whatever the baseline is."""

    @property
    def baseline(self) -> float:
        """Not a number where there is nothing to compare with."""
        return median(self.baseline_rounds) if self.baseline_rounds else nan

    @property
    def measured(self) -> float:
        return median(self.measured_rounds)

    @property
    def ratio(self) -> float:
        return self.measured / self.baseline

    @property
    def met(self) -> bool | None:
        if self.at_most is not None:
            return self.measured <= self.at_most
        if self.target is None:
            return None
        return self.ratio <= self.target if self.unit == "µs" else self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        medians = {"baseline": self.baseline, "measured": self.measured}
        computed = medians | {"ratio": self.ratio}
        shown = {name: None if isnan(value) else value for name, value in computed.items()}
        return asdict(self) | shown | {"met": self.met}


def table(title: str, columns: Columns, results: Sequence[Result]) -> Table:
    """For the terminal."""
    shown = Table(title=title, title_justify="left")
    for name in _header(columns)[:2]:
        shown.add_column(name)
    for name in _header(columns)[2:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for result in results:
        style = "red" if result.met is False else None
        shown.add_row(*_cells(result), style=style)
    return shown


def markdown(title: str, columns: Columns, results: Sequence[Result]) -> str:
    """For a README."""
    rows = [_header(columns), ("---", "---", *["---:"] * 5), *map(_cells, results)]
    return "\n".join([f"{title}\n", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _header(columns: Columns) -> tuple[str, ...]:
    return ("backend", "benchmark", *columns, "ratio", "target", "met")


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.backend,
        result.name,
        _number(result.baseline),
        _number(result.measured),
        "" if isnan(result.ratio) else f"{result.ratio:.2f}",
        _target(result),
        {True: "yes", False: "NO", None: ""}[result.met],
    )


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _target(result: Result) -> str:
    if result.at_most is not None:
        return f"≤ {result.at_most:,.0f}"
    sign = "≤" if result.unit == "µs" else "≥"
    return "" if result.target is None else f"{sign} {result.target}"
