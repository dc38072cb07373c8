"""A store of several objects, its shards: each is a database of its own, with uploads of its own.

`ShardedDatabase` is the database of such a store. It says where things are (see `placement`), and does
what is done to all: opening, installing, closing. It runs no work itself: a work is one transaction, and
no transaction covers two objects. So whoever has a work asks for its shard first (`of_queue`, `of_run`,
…), or runs the work on each of the `shards`. What cannot be done like that raises `SeveralShards`.

All shards have one `store_id`: a message that was claimed from one of them is one of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import quote, urlencode

from sqlalchemy import URL, Connection, Engine

from pgqrs.clock import Clock
from pgqrs.config import Config, S3Settings
from pgqrs.errors import InvalidConfig, SeveralShards
from pgqrs.repositories import moving, places
from pgqrs.stores import placement
from pgqrs.stores.base import Database, T, Work
from pgqrs.stores.placement import Place
from pgqrs.stores.s3 import S3Database, exists, shard_key
from pgqrs.stores.wakeups import Wakeups
from pgqrs.types import ConcurrencyModel, S3State, S3Stats, S3Version


class Shard(S3Database):
    """One of the databases of a store."""

    def __init__(
        self, whole: ShardedDatabase, place: Place, config: Config, **options: Any
    ) -> None:
        self._whole = whole
        self.place = place
        self._made_at: datetime | None = None
        super().__init__(config, **options)

    is_sharded = True

    @property
    def whole(self) -> Database:
        return self._whole

    def of_queue(self, name: str) -> Database:
        return self._whole.of_queue(name)

    def of_run(self, id: int) -> Database:
        return self._whole.of_run(id)

    def of_message(self, id: int) -> Database:
        return self._whole.of_message(id)

    def of_worker(self, id: int) -> Database:
        return self._whole.of_worker(id)

    def is_of_another_shard(self, id: int) -> bool:
        others = (shard for shard in self._whole.shards if shard is not self)
        return any(shard.place.has_given(id) for shard in others)

    def move_above(self, id: int) -> None:
        """Give only ids above this one, which rows that come from elsewhere have."""
        place = placement.above(self.place, id)
        self.write(lambda connection: placement.record(connection, place), repeatable=True)
        self.place = place

    def install(self) -> None:
        self._whole.install()  # all of them: they are one store

    def install_as(self, made_at: datetime | None) -> None:
        """Install this shard, of the store that was made at this time; None: that is made with it."""
        self._made_at = made_at
        super().install()

    def _install(self, connection: Connection) -> None:
        found = placement.recorded(connection)
        if found is not None:
            self._adopt(found)
        super()._install(connection)
        placement.record(connection, self.place)
        if self._made_at is not None and moving.made_at(connection) != self._made_at:
            moving.take_over(connection, self._made_at)

    def _check_schema(self, connection: Connection) -> None:
        found = placement.recorded(connection)
        if found is not None:
            self._adopt(found)
        Database._check_schema(self, connection)
        if found is None:
            raise InvalidConfig(f"{self.address} is not a shard, but a store of its own")

    def _adopt(self, found: Place) -> None:
        if not self.place.fits(found):
            by = "group" if found.by_group else "name"
            raise InvalidConfig(
                f"{self.address} is shard {found.number} of {found.count}, by {by}: open the store "
                f"with ?shards={found.count}&shard_by={by}; to change that, copy it to a new store"
            )
        self.place = found

    def _check_layout(self) -> None:
        return  # the whole looks


class _WakeupsOfAll(Wakeups):
    """Rings in every shard: consumers and waits for results listen to the shard of their queue."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self._shards = shards

    def ring(self, queue: str | None) -> None:
        for shard in self._shards:
            shard.wakeups.ring(queue)


class ShardedDatabase(Database):
    """The database of a store of several objects."""

    backend_name = "s3"
    concurrency_model = ConcurrencyModel.MULTI_PROCESS
    uploads_every_write = True
    bridge_threads = S3Database.bridge_threads

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        write_lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(config, clock=clock, sleep=sleep, write_lock=write_lock)
        self._settings = settings = S3Settings.of(config)
        count, by_group = settings.shards or 1, settings.shard_by == "group"
        self._url = URL.create("s3", host=settings.bucket, database=settings.key)
        self._shards: list[Shard] = []
        for number in range(count):
            shard = Shard(
                self,
                Place(number, count, by_group),
                _config_of_shard(config, number),
                **{"engine": engine, "clock": clock, "sleep": sleep, "write_lock": write_lock},
            )
            shard.limited = self.limited
            self._shards.append(shard)
        self.wakeups = _WakeupsOfAll(self._shards)

    # Where things are

    is_sharded = True

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    def of_queue(self, name: str) -> Shard:
        return self._shards[self._shards[0].place.number_of_queue(name)]

    def of_run(self, id: int) -> Database:
        return self._of_id(id, lambda c: places.has_run(c, id))

    def of_message(self, id: int) -> Database:
        return self._of_id(id, lambda c: places.has_message(c, id))

    def of_worker(self, id: int) -> Database:
        return self._of_id(id, lambda c: places.has_worker(c, id))

    def _of_id(self, id: int, look: Work[bool]) -> Database:
        """The shard that has given this id; if none has, the one that has a row of it."""
        for shard in self._shards:
            if shard.place.has_given(id):
                return shard
        return self.where(look)

    def of_connection(self, connection: Connection) -> Database:
        for shard in self._shards:
            if shard.is_reached_by(connection):
                return shard
        self._refuse_to("using", "open the transaction on store.shard(queue).engine")

    # What is done to all

    def open(self) -> None:
        self._everywhere(lambda shard: shard.open())
        if not self._shards[0]._schema_is_there:
            self._check_layout()

    def install(self) -> None:
        first, *others = self._shards
        if not first._schema_is_there:
            first._remotely(self._check_layout)
        first.install_as(None)
        made_at = first.read(moving.made_at)
        for shard in others:
            shard.install_as(made_at)

    def _check_layout(self) -> None:
        """Refuse to begin a store beside one that is a single object, or of other shards."""
        if exists(self._settings):
            raise InvalidConfig(
                f"{self.address} is a store of one object: open it without ?shards=; to spread it, "
                "copy it to a new store"
            )

    def verify(self) -> None:
        self._everywhere(lambda shard: shard.verify())

    def close(self) -> None:
        self.closed = True
        self.wakeups.close()
        self._everywhere(lambda shard: shard.close())

    def _everywhere(self, call: Callable[[Shard], T]) -> list[T]:
        return [call(shard) for shard in self._shards]

    # What is of the queue's shard

    def ring(self, queue: str, *, elsewhere: bool = True) -> None:
        self.of_queue(queue).ring(queue, elsewhere=elsewhere)

    def ring_of_results(self, queue: str) -> None:
        self.of_queue(queue).ring_of_results(queue)

    def tolerating(self, seconds: float) -> AbstractContextManager[None]:
        return self._shards[0].tolerating(seconds)

    def now(self) -> datetime:
        return self._shards[0].now()

    @property
    def store_id(self) -> str:
        return self._shards[0].store_id

    def forget_store_id(self) -> None:
        self._everywhere(lambda shard: shard.forget_store_id())

    @property
    def url(self) -> URL:
        return self._url

    @property
    def address(self) -> str:
        return f"s3://{self._settings.bucket}/{self._settings.key}"

    def is_transient(self, error: BaseException) -> bool:
        return self._shards[0].is_transient(error)

    # What is of one shard only

    @property
    def engine(self) -> Engine:
        self._refuse_to("engine", "use store.shard(queue).engine")

    @property
    def async_engine(self) -> NoReturn:
        """Refused, as `engine` is."""
        self._refuse_to("async_engine", "use store.shard(queue).async_engine")

    def _check(self, needs_schema: bool) -> None:
        super()._check(needs_schema=False)

    def _read(self, work: Work[T]) -> T:
        self._refuse_to("read", "use store.shard(queue).read(…)")

    def _write(self, work: Work[T], single: bool) -> T:
        self._refuse_to("write", "use store.shard(queue).write(…)")

    @staticmethod
    def _refuse_to(operation: str, instead: str) -> NoReturn:
        raise SeveralShards(operation, instead)

    # What is special about objects in a bucket

    @property
    def remote(self) -> Self:
        return self

    def pull(self) -> bool:
        return any(self._everywhere(lambda shard: shard.pull()))

    def submit(self, operations: Iterable[Work[Any]]) -> int:
        self._refuse_to("batch_operations", "use store.shard(queue).admin().batch_operations(…)")

    def flush(self) -> list[Any]:
        return [done for shard in self._shards for done in shard.flush()]

    def state(self) -> S3State:
        """The one state of all; else what is true of any of them."""
        found = set(self._everywhere(lambda shard: shard.state()))
        if len(found) == 1:
            return found.pop()
        if S3State.MISSING in found:
            return S3State.MISSING
        found.discard(S3State.IN_SYNC)
        return found.pop() if len(found) == 1 else S3State.BOTH_CHANGED

    def stats(self) -> S3Stats:
        """The sums over all shards; of the races lost in a row, and of the time, the most."""
        every = self._everywhere(lambda shard: shard.stats())
        largest = ("losses_in_a_row", "seconds")
        summed = {
            field.name: (max if field.name in largest else _sum)(
                [getattr(each, field.name) for each in every]
            )
            for field in fields(S3Stats)
        }
        return S3Stats(**summed)

    def snapshot(self, path: Path) -> None:
        self._refuse_to("snapshot", "use store.shard(queue).admin().snapshot(…)")

    def versions(self, limit: int) -> list[S3Version]:
        self._refuse_to("s3_versions", "use store.shard(queue).admin().s3_versions(…)")

    def restore(self, version: str) -> None:
        self._refuse_to("restore_s3", "use store.shard(queue).admin().restore_s3(…)")


def _sum(values: list[Any]) -> Any:
    return sum(values[1:], values[0])


def _config_of_shard(config: Config, number: int) -> Config:
    url = config.url
    key = shard_key(str(url.database), number)
    query = {name: value for name, value in url.query.items() if not name.startswith("shard")}
    parameters = f"?{urlencode(query)}" if query else ""
    return config.with_(dsn=f"s3://{url.host}/{quote(key)}{parameters}", s3_shards=None)
