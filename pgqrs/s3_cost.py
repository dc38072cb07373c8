"""What a store in S3 costs: from what was measured, or from what is planned.

A month has 30 days. Prices are those of the caller; the defaults are Amazon's for S3 Standard in
Frankfurt and Virginia, rounded. Reading and writing within the region of the bucket is free there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqrs.errors import InvalidArgument
from pgqrs.types import S3Stats

MONTH = 30 * 86400
GIGABYTE = 10**9
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class S3Prices:
    """Dollars for requests, for what is kept, and for what leaves the region."""

    thousand_puts: float = 0.005
    thousand_gets: float = 0.0004
    gigabyte_month: float = 0.023
    gigabyte_out: float = 0.0


@dataclass(frozen=True, kw_only=True)
class S3Cost:
    """Requests and bytes of a month, and the dollars for them."""

    puts: float
    gets: float
    uploaded_bytes: float
    downloaded_bytes: float
    stored_bytes: int
    put_dollars: float
    get_dollars: float
    storage_dollars: float
    transfer_dollars: float

    @property
    def dollars(self) -> float:
        """All of it together."""
        return self.put_dollars + self.get_dollars + self.storage_dollars + self.transfer_dollars


@dataclass(frozen=True, kw_only=True)
class S3Load:
    """What a store is planned to do.

    `writes` are the operations of all processes in a second; those that come during one PUT, which
    takes `put_seconds`, share the next. `processes` are those that write or wait: each looks once a
    second, and fetches what others uploaded. The load is spread evenly over the `shards`.
    """

    writes: float
    object_bytes: int
    processes: int = 1
    put_seconds: float = 0.06
    hours_per_day: float = 24.0
    shards: int = 1


def measured(stats: S3Stats, prices: S3Prices | None = None) -> S3Cost:
    """What a month costs that goes on as the time since the store was opened."""
    if not stats.seconds > 0:
        raise InvalidArgument("stats", "they cover no time")
    months = stats.seconds / MONTH
    return _cost(
        prices or S3Prices(),
        puts=stats.puts / months,
        gets=stats.gets / months,
        uploaded=stats.uploaded_bytes / months,
        downloaded=stats.downloaded_bytes / months,
        stored=stats.pages * PAGE_BYTES,
    )


def predicted(load: S3Load, prices: S3Prices | None = None) -> S3Cost:
    """What a month of this load costs."""
    for name in ("writes", "object_bytes", "hours_per_day"):
        if getattr(load, name) < 0:
            raise InvalidArgument(name, "expected 0 or more")
    for name in ("processes", "shards", "put_seconds"):
        if not getattr(load, name) > 0:
            raise InvalidArgument(name, "expected more than 0")
    busy = MONTH * load.hours_per_day / 24
    uploads = min(load.writes, load.shards / load.put_seconds) * busy
    one_object = load.object_bytes / load.shards
    looks = load.processes * load.shards * busy
    fetched = uploads * (load.processes - 1)
    return _cost(
        prices or S3Prices(),
        puts=uploads,
        gets=looks + uploads + fetched,
        uploaded=uploads * one_object,
        downloaded=fetched * one_object,
        stored=load.object_bytes,
    )


def _cost(
    prices: S3Prices, *, puts: float, gets: float, uploaded: float, downloaded: float, stored: int
) -> S3Cost:
    return S3Cost(
        puts=puts,
        gets=gets,
        uploaded_bytes=uploaded,
        downloaded_bytes=downloaded,
        stored_bytes=stored,
        put_dollars=puts / 1000 * prices.thousand_puts,
        get_dollars=gets / 1000 * prices.thousand_gets,
        storage_dollars=stored / GIGABYTE * prices.gigabyte_month,
        transfer_dollars=downloaded / GIGABYTE * prices.gigabyte_out,
    )
