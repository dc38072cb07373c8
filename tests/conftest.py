"""What all tests share: one PostgreSQL server for the whole run, a fresh database for who asks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from pgqrs.testing.postgres import postgres_dsn, postgres_source
from pgqrs.testing.s3 import ENVIRONMENT, client, moto_server, seaweedfs_server

pytest.register_assert_rewrite("pgqrs.testing.conformance")
pytest_plugins = ["pgqrs.testing.conformance.harness"]

_numbers = count(1)
_created: list[str] = []


MARKED = {"acceptance": pytest.mark.processes, "spark": pytest.mark.spark}
"""What every test below these directories is."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if (mark := MARKED.get(item.path.relative_to(here).parts[0])) is not None:
            item.add_marker(mark)


def pytest_report_header() -> str:
    return f"PostgreSQL: {postgres_source()}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server that is there for the whole run."""
    with postgres_dsn() as dsn:
        yield dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name in _created:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def create_database(server: str) -> str:
    """The URL of a new, empty database on the server."""
    name = f"pgqrs_test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    _created.append(name)
    url = make_url(server).set(database=name)
    return url.render_as_string(hide_password=False)


@pytest.fixture
def postgres_database(postgres: str) -> str:
    """The URL of an empty PostgreSQL database."""
    return create_database(postgres)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of an S3 server that is there for the whole run, with a bucket called `bucket`."""
    with s3_environment(), moto_server() as url:
        s3_client(url).create_bucket(Bucket="bucket")
        yield url


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[str]:
    """The same of another make."""
    with s3_environment(), seaweedfs_server() as url:
        s3_client(url).create_bucket(Bucket="bucket")
        yield url


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> str:
    """The server that `PGQRS_TEST_S3` names, or moto."""
    url: str = request.getfixturevalue(os.environ.get("PGQRS_TEST_S3", "moto"))
    return url


s3_client = cache(client)
"""The tests' own client; making one takes a while."""


def prepare_bucket(server: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty bucket, as examples call it, and settings that lead there."""
    client, bucket = s3_client(server), {"Bucket": "my-pgqrs-bucket"}
    client.create_bucket(**bucket)
    for found in client.list_objects_v2(**bucket).get("Contents", []):
        client.delete_object(**bucket, Key=found["Key"])
    monkeypatch.setenv("PGQRS_S3_ENDPOINT_URL", server)
    monkeypatch.setenv("PGQRS_S3_CACHE", str(directory / "cache"))


@contextmanager
def s3_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def sqlite_database(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of either kind."""
    url: str = request.getfixturevalue(f"{request.param}_database")
    return url


@pytest.fixture
def dice() -> random.Random:
    """Chance for one test. Its seed is printed when the test fails; `PGQRS_TEST_SEED` sets it."""
    seed = int(os.environ.get("PGQRS_TEST_SEED", random.randrange(2**32)))
    print(f"PGQRS_TEST_SEED={seed}")
    return random.Random(seed)
