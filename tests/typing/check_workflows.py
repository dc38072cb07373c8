"""Checked by mypy and pyright, never run: what the types of workflows promise to a user's code.

A line with `type: ignore` must be an error: both checkers say so if it is none.
"""

from collections.abc import Awaitable
from typing import Any, assert_type

from sqlalchemy import Connection

import pgqrs


@pgqrs.step
def double(n: int) -> int:
    return 2 * n


@pgqrs.step(retry=pgqrs.Retry(max_attempts=5), timeout=10)
async def fetch(url: str, *, tries: int = 1) -> list[str]:
    return [url] * tries


@pgqrs.step(transactional=True)
def save(connection: Connection, n: int, *, name: str = "") -> int:
    return n


@pgqrs.step
def log() -> None: ...


@pgqrs.workflow
def price(order: int, currency: str = "EUR") -> float:
    doubled = [double(order) for _ in range(3)]
    total: list[int] = doubled
    log()
    return double(total[0]) + save(order, name=currency) / 2


@pgqrs.workflow(queue="slow", timeout=3600)
async def ingest(url: str) -> int:
    rows = await fetch(url, tries=2)
    assert_type(rows, list[str])
    return len(rows) + await double.acall(3) + await save.acall(3)


def steps() -> None:
    assert_type(double(1), int)
    assert_type(save(1), int)
    double("1")  # type: ignore[arg-type]
    double()  # type: ignore[call-arg]
    save("1")  # type: ignore[arg-type]
    save(1, nome="")  # type: ignore[call-arg]
    text: str = double(1)  # type: ignore[assignment]
    print(text)


@pgqrs.step(transactional=True)  # type: ignore[arg-type]
def takes_no_connection(n: int) -> int:
    return n


async def awaited_steps() -> None:
    assert_type(await fetch("x"), list[str])
    assert_type(await fetch.acall("x"), list[str])
    assert_type(await double.acall(1), int)
    await double.acall("1")  # type: ignore[arg-type]
    await fetch(1)  # type: ignore[arg-type]


def runs(store: pgqrs.Store) -> None:
    run: pgqrs.Run[float] = price.start(1, "EUR")
    assert_type(run.result(timeout=10), float)
    assert_type(run.fork(), pgqrs.Run[float])
    assert_type(price.start(1, currency="EUR").result(), float)
    assert_type(price.start(1, key="order-1").result(), float)
    assert_type(price.start(1, store=store).result(), float)
    assert_type(price.start(1, key="order-1", store=store).result(), float)
    assert_type(price.options(key="order-1", store=store).start(1).result(), float)
    assert_type(price.run_inline(1, "EUR"), float)
    assert_type(price.run_inline(1, key="order-1", store=store), float)
    assert_type(price(1), float)
    assert_type(ingest.start("x").result(), int)
    assert_type(store.workflows.start(price, (1,)), pgqrs.Run[float])
    assert_type(store.workflows.run_inline(price, (1,)), float)
    assert_type(store.workflows.run_inline(ingest, ("x",)), int)
    assert_type(store.workflows.handle(1).result(), Any)
    price.start("1")  # type: ignore[call-overload]
    price.start()  # type: ignore[call-overload]
    price.start(1, "EUR", "USD")  # type: ignore[call-overload]
    price.options(key="order-1").start("1")  # type: ignore[call-overload]
    price.run_inline("1")  # type: ignore[call-overload]
    ingest.start(1)  # type: ignore[call-overload]
    price(1, currencies="EUR")  # type: ignore[call-arg]
    text: str = price.start(1).result()  # type: ignore[assignment]
    print(text)


async def runs_with_asyncio(store: pgqrs.AsyncStore) -> None:
    run = await price.start(1, store=store)
    assert_type(run, pgqrs.AsyncRun[float])
    assert_type(await run.result(timeout=10), float)
    assert_type(await run.fork(), pgqrs.AsyncRun[float])
    assert_type(await (await ingest.start("x")).result(), int)
    assert_type(await ingest("x"), int)
    assert_type(await store.workflows.run_inline(price, (1,)), float)
    assert_type(await store.workflows.run_inline(ingest, ("x",)), int)
    assert_type(await store.workflows.start(ingest, ("x",)), pgqrs.AsyncRun[int])
    count: int = await ingest.run_inline("x")
    ingest.run_inline(count)  # type: ignore[call-overload]


@pgqrs.workflow
def many(orders: list[int]) -> list[float]:
    doubled = pgqrs.map(double, orders, concurrency=4)
    plain: list[int] = doubled
    children = [price.start(order) for order in plain]
    pgqrs.map(double, ["1"])  # type: ignore[arg-type]
    return [child.result() for child in children]


@pgqrs.workflow
async def many_at_once(urls: list[str]) -> list[int]:
    assert_type(await pgqrs.map(fetch, urls), list[list[str]])
    assert_type(await pgqrs.map(double, [1, 2]), list[int])
    children = [await ingest.start(url) for url in urls]
    return [await child.result() for child in children]


def workers(store: pgqrs.Store) -> None:
    known: list[pgqrs.Workflow[..., Any]] = [price, ingest, many, many_at_once]
    pgqrs.Worker(store, workflows=known).run()
    pgqrs.Worker(store, workflows=[price, ingest]).run()


def awaitable() -> Awaitable[list[str]]:
    return fetch("x")
