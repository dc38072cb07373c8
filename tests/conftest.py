"""What all tests share: one PostgreSQL server for the whole run, a fresh database for who asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from pgqrs.testing.postgres import postgres_dsn

pytest.register_assert_rewrite("pgqrs.testing.conformance")
pytest_plugins = ["pgqrs.testing.conformance.harness"]

_numbers = count(1)
_created: list[str] = []


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


@pytest.fixture
def sqlite_database(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of either kind."""
    url: str = request.getfixturevalue(f"{request.param}_database")
    return url
