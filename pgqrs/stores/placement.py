"""Where things are in a store of several objects, its *shards*: queues by name, ids by number.

Each queue is on one shard, with its messages, its archive, its schedules and the runs of its workflows.
Which shard that is follows from its name alone, or from its *group*: the name up to the first dot.

Ids are cut into *ranges* of 2^40. Each shard numbers its rows in a range of its own, so no id is given
twice in a store, and an id says on which shard its row is. Rows that were copied from another store keep
their ids, which are below all ranges: those are looked for.

Each object records its `Place`, where a SQLite file has room for numbers of the application's own: so a
store cannot be opened as if it had more shards, or fewer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from pgqrs.errors import InvalidConfig
from pgqrs.repositories import moving

RANGE_BITS = 40
MOST_RANGES = 1 << (53 - RANGE_BITS)
"""Ids stay below 2^53, which every reader of JSON takes as they are."""
APPLICATION_ID = 0x70677173  # "pgqs": the file is a shard, and `user_version` is its place


@dataclass(frozen=True, slots=True)
class Place:
    """Which shard of how many an object is, and how queues are spread over them."""

    number: int
    count: int
    by_group: bool
    first_range: int = 1
    """The range of the first shard; the others have the ranges that follow."""

    @property
    def base(self) -> int:
        """All ids of this shard are greater than this."""
        return (self.first_range + self.number) << RANGE_BITS

    def number_of_queue(self, name: str) -> int:
        """The shard that a queue is on."""
        placed = name.partition(".")[0] if self.by_group else name
        digest = hashlib.blake2b(placed.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) % self.count

    def has_given(self, id: int) -> bool:
        """True if this shard has given this id, or will."""
        return id >> RANGE_BITS == self.first_range + self.number

    def fits(self, other: Place) -> bool:
        """True if the other is the same place, whatever its range."""
        return replace(self, first_range=0) == replace(other, first_range=0)

    @property
    def packed(self) -> int:
        """The place as one number of 31 bits."""
        return (
            (self.first_range << 17) | (self.by_group << 16) | (self.number << 8) | self.count - 1
        )

    @classmethod
    def unpacked(cls, packed: int) -> Place:
        """The place that this number stands for."""
        return cls(
            number=(packed >> 8) & 0xFF,
            count=(packed & 0xFF) + 1,
            by_group=bool(packed >> 16 & 1),
            first_range=packed >> 17,
        )


def recorded(connection: Connection) -> Place | None:
    """The place that a database records; None if it is not a shard."""
    if _pragma(connection, "application_id") != APPLICATION_ID:
        return None
    return Place.unpacked(_pragma(connection, "user_version"))


def record(connection: Connection, place: Place) -> None:
    """Let this database be that shard: its rows are numbered in the range of the shard."""
    if recorded(connection) == place:
        return
    for table in moving.counted_tables():
        if moving.counter(connection, table) < place.base:
            moving.set_counter(connection, table, place.base)
    connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version = {place.packed}")


def above(place: Place, id: int) -> Place:
    """The place with its range above this id, which rows from elsewhere have."""
    first = max(place.first_range, (id >> RANGE_BITS) + 1)
    if first + place.count > MOST_RANGES:
        raise InvalidConfig("the ids of the other store leave no room for those of the shards")
    return replace(place, first_range=first)


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
