"""Choosing among finished messages by what is in them.

What the database can choose by itself, reasons and times, is in the SQL. The rest is compared here,
a page at a time: text and JSON are equal on one database in ways they are not on another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pgqrs.errors import InvalidArgument
from pgqrs.types import ArchivedMessage, ArchiveReason, aware


class _Anything:
    """Tells a payload that was not given from one given as None."""

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING: Final[Any] = _Anything()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFilter:
    """Which finished messages are meant."""

    reasons: tuple[ArchiveReason, ...]
    since: datetime | None
    until: datetime | None
    error: str | None
    payload: Any
    headers: Mapping[str, Any] | None

    @property
    def looks_inside(self) -> bool:
        """Whether `matches` may refuse what the database has chosen."""
        return not (self.error is None and self.payload is ANYTHING and self.headers is None)

    def matches(self, message: ArchivedMessage) -> bool:
        """Whether the error, the payload and the headers are as wanted."""
        return (
            (self.error is None or self.error in (message.error or ""))
            and (self.payload is ANYTHING or _fits(self.payload, message.payload))
            and (self.headers is None or _fits(self.headers, message.headers or {}))
        )


def archive_filter(
    *,
    reason: ArchiveReason | str | None,
    since: datetime | None,
    until: datetime | None,
    error: str | None,
    payload: Any,
    headers: Mapping[str, Any] | None,
) -> ArchiveFilter:
    """From what an application says; an error names the argument that cannot be used."""
    if error is not None and not isinstance(error, str):
        raise InvalidArgument("error", f"expected text, got {error!r}")
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidArgument("headers", f"expected a mapping, got {headers!r}")
    for name, value in (("payload", payload), ("headers", headers)):
        if value is not ANYTHING:
            _check(name, value)
    return ArchiveFilter(
        reasons=reasons(reason),
        since=None if since is None else aware("since", since),
        until=None if until is None else aware("until", until),
        error=error,
        payload=payload,
        headers=headers,
    )


def reasons(reason: ArchiveReason | str | None) -> tuple[ArchiveReason, ...]:
    """The one that is named, or all."""
    if reason is None:
        return tuple(ArchiveReason)
    try:
        return (ArchiveReason(reason),)
    except ValueError:
        known = ", ".join(ArchiveReason)
        raise InvalidArgument("reason", f"expected one of {known}, got {reason!r}") from None


def _check(name: str, value: Any) -> None:
    try:
        _canonical(value)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(name, f"not JSON: {exc}") from None


def _fits(wanted: Any, found: Any) -> bool:
    """Equal; of an object, every member that is named."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and _canonical(found[name]) == _canonical(value)
            for name, value in wanted.items()
        )
    return _canonical(wanted) == _canonical(found)


def _canonical(value: Any) -> str:
    # As text, since 1, 1.0 and True are equal in Python and are not in JSON.
    return json.dumps(value, sort_keys=True, allow_nan=False)
