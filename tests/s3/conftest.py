"""A bucket with faults, and stores on it that are stepped by hand."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from tests.conftest import s3_client
from tests.s3.proxy import S3Proxy

QUEUE = "tasks"


class Object:
    """One key of a bucket, and the stores on it."""

    def __init__(self, server: str, directory: Path, cleanup: ExitStack) -> None:
        self.client = s3_client(server)
        self.key = f"{uuid.uuid4().hex}.sqlite"
        self.server = server
        self.proxy = S3Proxy(server)
        cleanup.callback(self.proxy.close)
        self._directory = directory
        self._cleanup = cleanup

    def open(self, mode: str = "durable", *, by_hand: bool = True, **settings: Any) -> pgqrs.Store:
        """A store that talks through the proxy; nothing is uploaded but by `step`."""
        return self._cleanup.enter_context(
            pgqrs.Store(self.url(mode), **self.settings(by_hand=by_hand) | settings)
        )

    def other(self, **settings: Any) -> pgqrs.Store:
        """A store of somebody else: durable, with no faults, and with a thread of its own."""
        return self.open(by_hand=False, s3_endpoint_url=self.server, **settings)

    def url(self, mode: str = "durable") -> str:
        return f"s3://bucket/{self.key}?mode={mode}"

    def settings(self, *, by_hand: bool = True, name: str | None = None) -> dict[str, Any]:
        cache = self._directory / (name or uuid.uuid4().hex)
        return {
            "s3_endpoint_url": self.proxy.url,
            "s3_cache": str(cache),
            "s3_timeout": 120.0,  # longer than a test holds a request up
            "retry_for": 120.0,
            **({"s3_sync_interval": float("inf")} if by_hand else {}),
        }

    def body(self, suffix: str = "") -> bytes:
        key = self.key + suffix
        data: bytes = self.client.get_object(Bucket="bucket", Key=key)["Body"].read()
        return data

    def put(self, data: bytes, suffix: str = "") -> None:
        self.client.put_object(Bucket="bucket", Key=self.key + suffix, Body=data)

    def delete(self) -> None:
        self.client.delete_object(Bucket="bucket", Key=self.key)

    def payloads(self) -> list[str]:
        """What the messages in the bucket are, looked at without pgqrs."""
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(self.body())
            rows = connection.execute("SELECT payload FROM pgqrs_messages ORDER BY id").fetchall()
        return [payload for (payload,) in rows]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with the schema and one queue."""
    path = tmp_path_factory.mktemp("installed") / "template.db"
    with pgqrs.Store(f"sqlite:///{path}", sqlite_journal_mode="delete") as store:
        store.admin().install()
        store.admin().create_queue(QUEUE)
    return path.read_bytes()


@pytest.fixture
def empty(s3_server: str, tmp_path: Path) -> Iterator[Object]:
    """A key where nothing is yet."""
    with ExitStack() as cleanup:
        yield Object(s3_server, tmp_path, cleanup)


@pytest.fixture
def object(empty: Object, installed: bytes) -> Object:
    """A database in a bucket."""
    empty.put(installed)
    return empty


class Call:
    """A call in another thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as exc:
            self.error = exc

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> Any:
        self._thread.join(100)
        assert self.done, "it still waits"
        if self.error is not None:
            raise self.error
        return self.result


def replica_of(store: pgqrs.Store) -> Any:
    return store._database.replica  # type: ignore[attr-defined]


def step(store: pgqrs.Store) -> None:
    replica_of(store).task.step()


def until(condition: Callable[[], Any], *, limit: float = 100) -> None:
    """Wait until this is true. The limit, in seconds, ends nothing but a hang."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def enqueue(store: pgqrs.Store, *payloads: Any) -> list[Call]:
    """Enqueues that wait for their upload, in this order."""
    calls = []
    for payload in payloads:
        before = waiting(store)
        calls.append(Call(lambda p=payload: store.producer(QUEUE).enqueue(p)))
        until(lambda n=before: waiting(store) > n or calls[-1].done)
    return calls


def waiting(store: pgqrs.Store) -> int:
    replica = replica_of(store)
    return len(replica._waiting) + len(replica._first)
