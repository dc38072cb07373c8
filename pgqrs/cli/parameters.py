"""The kinds of values that options take."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import click

SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class DurationType(click.ParamType):
    """Seconds, or a number with a unit."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", value.strip())
        if found is None:
            self.fail(f"{value!r} is not a duration such as 30, 1.5s, 5m, 2h or 7d", param, ctx)
        return float(found[1]) * SECONDS[found[2] or "s"]


class MomentType(click.ParamType):
    """A point in time, with its time zone."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        try:
            moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time such as 2030-01-31T08:00:00Z", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone; add Z or an offset like +02:00", param, ctx)
        return moment


DURATION = DurationType()
MOMENT = MomentType()

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
limit = click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=10, help="At most so many."
)
after = click.option(
    "--after", type=click.IntRange(min=0), default=0, help="The last id of the page before."
)
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
