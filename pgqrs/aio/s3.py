"""A store in S3 for asyncio, with what only such a store can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from sqlalchemy.ext.asyncio import AsyncEngine

from pgqrs.aio.store import AsyncStore
from pgqrs.clock import Clock
from pgqrs.config import S3_KEY
from pgqrs.errors import InvalidConfig
from pgqrs.types import S3State, S3Stats


class S3Store(AsyncStore):
    """A store that is one SQLite database as one object in a bucket."""

    @classmethod
    async def create(
        cls,
        bucket: str,
        key: str = S3_KEY,
        *,
        mode: str | None = None,
        cache: str | Path | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        sync_interval: float | None = None,
        max_staleness: float | None = None,
        timeout: float | None = None,
        shards: int | None = None,
        shard_by: str | None = None,
        upgrade: bool = True,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Self:
        """Open the store at this key, which need not exist yet.

        In `durable` mode, the default, a write returns once it is in the bucket; in `local` mode it is
        uploaded afterwards. `cache` is the directory for local copies, or `:memory:`. What is not given
        is what the environment says. With `shards` the store is so many objects below the key, and each
        queue is in one of them, by its `name` or by its `group` (`shard_by`). Further settings are the
        fields of `Config`.

        With `upgrade`, the default here, tables are created or migrated when the store is opened, and
        queues are created by their first producer.
        """
        given = {
            "mode": mode,
            "cache": None if cache is None else str(cache),
            "endpoint_url": endpoint_url,
            "region": region,
            "sync_interval": sync_interval,
            "max_staleness": max_staleness,
            "timeout": timeout,
            "shards": shards,
            "shard_by": shard_by,
        }
        named = {f"s3_{name}": value for name, value in given.items() if value is not None}
        for name in named.keys() & settings.keys():
            raise InvalidConfig(f"{name.removeprefix('s3_')} is given twice, also as {name}")
        settings = {"create_queues": upgrade} | settings | named
        return await cls(f"s3://{bucket}/{key}", clock=clock, upgrade=upgrade, **settings)

    @property
    def async_engine(self) -> AsyncEngine:
        """An engine for rows of your own in the same transaction as `using`; needs aiosqlite."""
        engine: AsyncEngine = self._s3.async_engine
        return engine

    async def refresh(self) -> bool:
        """Take over what others uploaded. Returns whether there was anything."""
        return await self.admin().pull_from_s3()

    async def sync(self) -> None:
        """Upload what is to be uploaded, and take over what others uploaded."""
        await self.admin().flush_to_s3()
        await self.admin().pull_from_s3()

    async def state(self) -> S3State:
        """How the local copy and the object differ just now. Changes neither."""
        return await self.admin().s3_state()

    async def stats(self) -> S3Stats:
        """What was sent and fetched since the store was opened."""
        return await self.admin().s3_stats()

    async def snapshot(self, path: str | Path) -> None:
        """Write the database, as reads see it, to a SQLite file of its own."""
        await self.admin().snapshot(path)

    async def close(self) -> None:
        """Upload what is left to upload in local mode, and let go of everything."""
        for shard in self._database.shards:
            if (engine := getattr(shard, "_async_engine", None)) is not None:
                await engine.dispose()
        await super().close()

    @property
    def _s3(self) -> Any:
        return self._database
