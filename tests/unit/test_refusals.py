"""What is given in the wrong place is refused by its name, with a hint where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import pgqrs
from pgqrs import AsyncStore, AsyncWorker, InvalidArgument, InvalidConfig, Store, Worker


@pgqrs.task(name="app:send")
def send() -> None: ...


@pgqrs.workflow
def ingest() -> None: ...


@pgqrs.step
def fetch() -> None: ...


def plain() -> None: ...


@pytest.fixture
def store() -> Iterator[Store]:
    with Store("sqlite::memory:", upgrade=True) as store:
        yield store


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tasks": [ingest]}, r"<workflow ingest> is no task; give it as workflows="),
        ({"tasks": [fetch]}, r"<step fetch> is no task; a workflow calls it"),
        ({"tasks": [lambda: None]}, r"<lambda>.*no name by which a worker could find it"),
        ({"tasks": send}, r"expected a list, got <task app:send>"),
        ({"tasks": "app:send"}, r"expected a list, got 'app:send'"),
        ({"workflows": [send]}, r"<task app:send> is no workflow; give it as tasks="),
        ({"workflows": [plain]}, r"function plain .* is no workflow; decorate it with @workflow"),
        ({"workflows": [fetch]}, r"<step fetch> is no workflow"),
        ({"workflows": ingest}, r"expected a list, got <workflow ingest>"),
    ],
)
def test_workers_name_what_they_refuse(store: Store, options: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        Worker(store, **options)
    with pytest.raises(InvalidArgument, match=match):
        AsyncWorker(AsyncStore("sqlite::memory:"), **options)


def test_a_message_is_executed_with_workflows_alone(store: Store) -> None:
    ingest.start(store=store)
    with store.consumer("workflows") as consumer:
        (message,) = consumer.dequeue()
        with pytest.raises(InvalidArgument, match="<task app:send> is no workflow"):
            store.workflows.execute(message, [send])  # type: ignore[list-item]


def test_workers_name_the_store_they_need(store: Store) -> None:
    with pytest.raises(InvalidArgument, match=r"expected a Store, got AsyncStore.*AsyncWorker"):
        Worker(AsyncStore("sqlite::memory:"), queues=["q"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"expected an AsyncStore, got Store.* has a Worker"):
        AsyncWorker(store, queues=["q"])  # type: ignore[arg-type]


def test_stores_name_the_engine_they_need() -> None:
    plain, asynchronous = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(InvalidConfig, match=r"cannot use an AsyncEngine; pgqrs\.AsyncStore can"):
        Store(asynchronous)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"cannot use a plain Engine; pgqrs\.Store can"):
        AsyncStore(plain)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"got Session; .*store\.using"):
        Store(Session(plain))  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"got int$"):
        AsyncStore(7)  # type: ignore[arg-type]
