"""Workers: trivial messages against our own batched drain, and from enqueue to result.

`worker` is a worker of 8 threads whose handler returns a number, which is kept; `worker-tasks` the same
through `@task`; `worker-async` with coroutines. The baseline is one consumer that claims and acks a
hundred at a time on the same table, in the same round. `result` is a worker in another process: the
clock runs from the call of `enqueue` until `handle.result()` returns, with nothing else to do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

from benchmarks.consumers import processes
from benchmarks.driver import LEASE, QUEUE, Backend
from benchmarks.report import Result
from benchmarks.sites import MakeSite, Site
from pgqrs import Message, Store, Worker, task

COLUMNS = ("drain /s", "worker /s")
TARGETS = {"worker": 0.75, "worker-async": 0.6, "worker-tasks": 0.7}
LATENCY = 6_000.0
"""Microseconds, for the median."""


@task(queue=QUEUE)
def double(n: int) -> int:
    return 2 * n


def handle(message: Message) -> int:
    return 42


async def handle_async(message: Message) -> int:
    return 42


def names(backend: Backend) -> list[str]:
    """All benchmarks of this file."""
    return ["worker", "worker-async", "worker-tasks", "result"]


def measure(
    backend: Backend, wanted: list[str], make_site: MakeSite, *, quick: bool
) -> Iterator[Result]:
    """Run benchmarks, one after the other."""
    rounds, amount, samples = (3, 4_000, 30) if quick else (5, 30_000, 200)
    for name in wanted:
        site = make_site(name.replace("-", "_"))
        if name == "result":
            yield from _results(site, samples)
        else:
            yield _throughput(site, name, rounds, amount)


def _throughput(site: Site, name: str, rounds: int, amount: int) -> Result:
    options: dict[str, Any] = {
        "worker": {"handlers": {QUEUE: handle}},
        "worker-async": {"handlers": {QUEUE: handle_async}},
        "worker-tasks": {"tasks": [double]},
    }[name]
    drained: list[float] = []
    worked: list[float] = []
    with Store(site.dsn) as store:
        for number in range(rounds + 1):
            for times, run in ((drained, _drain), (worked, lambda s: _work(s, options))):
                site.empty()
                store.producer(QUEUE).enqueue_many([double.payload(n) for n in range(amount)])
                site.settle()
                rate = amount / _timed(run, store)
                if site.count_archived() != amount:
                    raise RuntimeError("not all messages came out")
                if number:  # the first round warms up
                    times.append(rate)
    return Result(site.backend, name, "per second", drained, worked, TARGETS[name])


def _timed(run: Callable[[Store], None], store: Store) -> float:
    began = time.perf_counter()
    run(store)
    return time.perf_counter() - began


def _drain(store: Store) -> None:
    with store.consumer(QUEUE, lease=LEASE) as consumer:
        while claimed := consumer.dequeue(100):
            consumer.ack_many(claimed)


def _work(store: Store, options: dict[str, Any]) -> None:
    Worker(store, lease=LEASE, **options).run(until_empty=True)


def _results(site: Site, samples: int) -> Iterator[Result]:
    here, there = Pipe()
    worker = processes.Process(target=_be_a_worker, args=(site.dsn, there), daemon=True)
    worker.start()
    here.recv()
    with Store(site.dsn) as store:
        enqueue = double.options(store=store).enqueue
        for _ in range(5):  # to warm up
            enqueue(1).result(60)
        taken = [_sample(enqueue) for _ in range(samples)]
    here.send("stop")
    worker.join(30)
    for label, value, target in (
        ("p50", median(taken), LATENCY),
        ("p95", quantiles(taken, n=20)[-1], None),
    ):
        yield Result(site.backend, f"result {label}", "µs", [], [value], None, at_most=target)


def _sample(enqueue: Callable[[int], Any]) -> float:
    time.sleep(random.uniform(0.03, 0.05))  # until the worker waits again
    began = time.perf_counter()
    enqueue(1).result(60)
    return 1e6 * (time.perf_counter() - began)


def _be_a_worker(dsn: str, there: Connection) -> None:
    with Store(dsn) as store, Worker(store, tasks=[double]):
        there.send("ready")
        there.recv()
