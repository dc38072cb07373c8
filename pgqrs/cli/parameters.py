"""The kinds of values that options take, and the options that many commands share."""

from __future__ import annotations

import re
from datetime import datetime

import click

from pgqrs import Rate

SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Seconds, or a number with a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 30, 1.5s, 5m, 2h or 7d")
    return float(found[1]) * SECONDS[found[2] or "s"]


def moment(text: str) -> datetime:
    """A point in time, with its time zone."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time such as 2030-01-31T08:00:00Z") from None
    if parsed.tzinfo is None:
        raise click.BadParameter(f"{text!r} has no time zone; add Z or an offset like +02:00")
    return parsed


def rate(text: str) -> Rate:
    """A number of messages, and the time they are for."""
    number, slash, period = text.partition("/")
    if not number.strip().isdecimal() or not int(number):
        raise click.BadParameter(f"{text!r} is not a rate such as 5/s, 100/1m or 1000/2h")
    unit = period.strip()
    if slash and unit in SECONDS:
        return Rate(int(number), per=SECONDS[unit])
    return Rate(int(number), per=duration(unit) if slash else 1.0)


def unique(text: str) -> str | float:
    """A scope of unique keys."""
    return text if text in ("queued", "unfinished") else duration(text)


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
limit = click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=10, help="At most so many."
)
after = click.option(
    "--after", type=click.IntRange(min=0), default=0, help="The last id of the page before."
)
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
