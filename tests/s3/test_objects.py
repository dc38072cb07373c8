"""The bucket itself, on two servers that have nothing in common."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pgqrs
from pgqrs.config import Config, S3Settings
from pgqrs.stores.objects import Lost, RemoteObject, Unreachable
from pgqrs.testing.postgres import free_port


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


def settings(server: str, **changes: Any) -> S3Settings:
    dsn = f"s3://bucket/{uuid.uuid4().hex}"
    return S3Settings.of(Config(dsn=dsn, s3_endpoint_url=server, s3_timeout=100.0, **changes))


@pytest.fixture
def remote(server: str) -> RemoteObject:
    return RemoteObject(settings(server))


def test_what_is_put_is_got(remote: RemoteObject) -> None:
    missing = remote.get(unless=None)
    assert missing is not None
    assert missing.etag is None
    etag = remote.put(b"one", replacing=None, label={"pgqrs-writer": "me"})
    found = remote.get(unless=None)
    assert found is not None
    assert (found.etag, found.data, found.label) == (etag, b"one", {"pgqrs-writer": "me"})
    assert remote.get(unless=etag) is None
    other = remote.put(b"two", replacing=etag, label={})
    assert remote.get(unless=other) is None
    assert remote.get(unless=etag) is not None
    assert (remote.traffic.puts, remote.traffic.uploaded_bytes) == (2, 6)


def test_only_what_was_expected_is_replaced(remote: RemoteObject) -> None:
    with pytest.raises(Lost):
        remote.put(b"x", replacing='"0123456789abcdef0123456789abcdef"', label={})
    first = remote.put(b"one", replacing=None, label={})
    with pytest.raises(Lost):
        remote.put(b"created twice", replacing=None, label={})
    remote.put(b"two", replacing=first, label={})
    with pytest.raises(Lost):
        remote.put(b"late", replacing=first, label={})
    found = remote.get(unless=None)
    assert found is not None
    assert found.data == b"two"


def test_of_two_that_race_one_wins(remote: RemoteObject) -> None:
    etag: str | None = None
    with ThreadPoolExecutor(2) as threads:
        for number in range(20):

            def attempt(name: str, number: int = number, etag: str | None = etag) -> str | None:
                try:
                    return remote.put(f"{number} {name}".encode(), replacing=etag, label={})
                except (Lost, Unreachable):
                    return None

            won = [new for new in threads.map(attempt, "ab") if new is not None]
            assert len(won) == 1
            etag = won[0]


def test_a_server_that_is_not_there_is_unreachable() -> None:
    remote = RemoteObject(settings(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(Unreachable):
        remote.get(unless=None)
    with pytest.raises(Unreachable):
        remote.put(b"x", replacing=None, label={})


def test_a_bucket_that_is_not_there_is_an_error(server: str) -> None:
    config = Config(dsn="s3://no-such-bucket-here/key", s3_endpoint_url=server)
    with pytest.raises(pgqrs.InvalidConfig, match="NoSuchBucket"):
        RemoteObject(S3Settings.of(config)).get(unless=None)
