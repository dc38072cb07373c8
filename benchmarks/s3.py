"""`python -m benchmarks.s3`: what group commit gains when one PUT takes 60 ms.

Everything runs against a moto server whose PUTs are made that slow. Targets: 200 concurrent durable
enqueues need at most 5 PUTs; 64 producers reach 30 times the throughput of one; one durable enqueue
takes at most 1.3 times as long as the PUT alone.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pgqrs
from pgqrs.testing.s3 import ENVIRONMENT, client, moto_server

PUT_TAKES = 0.06
QUEUE = "bench"
SECONDS = 5.0


def main() -> None:
    os.environ.update(ENVIRONMENT)
    with moto_server(put_takes=PUT_TAKES) as url:
        client(url).create_bucket(Bucket="bucket")
        put = raw_put(url)
        print(f"one PUT of a database: {put * 1000:.0f} ms")
        report("one durable enqueue, in PUTs", single(url) / put, at_most=1.3)
        report("PUTs for 200 enqueues in threads", burst(url), at_most=5)
        report("PUTs for 200 enqueues in coroutines", asyncio.run(async_burst(url)), at_most=5)
        alone, together = throughput(url, 1), throughput(url, 64)
        print(f"enqueues per second: {alone:.1f} alone, {together:.0f} with 64 producers")
        report("64 producers, in producers", together / alone, at_least=30)


def report(
    name: str, value: float, *, at_most: float | None = None, at_least: float | None = None
) -> None:
    met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    wanted = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
    print(f"{name}: {value:.2f} ({wanted}: {'met' if met else 'MISSED'})")


@contextmanager
def opened(url: str, key: str) -> Iterator[pgqrs.Store]:
    settings: dict[str, Any] = {"s3_endpoint_url": url, "s3_cache": ":memory:"}
    with pgqrs.Store(f"s3://bucket/{key}", upgrade=True, **settings) as store:
        store.admin().create_queue(QUEUE, if_not_exists=True)
        yield store


def raw_put(url: str) -> float:
    """Seconds for a PUT by the bare client, of what an enqueue uploads."""
    with opened(url, "raw") as store:
        size = store.admin().s3_stats().last_upload_bytes
    bucket, data = client(url), os.urandom(size)
    return median(lambda: bucket.put_object(Bucket="bucket", Key="bare", Body=data))


def single(url: str) -> float:
    with opened(url, "single") as store:
        producer = store.producer(QUEUE)
        return median(lambda: producer.enqueue({"n": 1}))


def median(call: Callable[[], object], times: int = 30) -> float:
    taken = []
    for _ in range(times):
        time.sleep(0.06)  # as from a client that does something in between
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def burst(url: str) -> int:
    with opened(url, "burst") as store, ThreadPoolExecutor(200) as threads:
        before = store.admin().s3_stats().puts
        ids = list(threads.map(store.producer(QUEUE).enqueue, range(200)))
        assert len(set(ids)) == 200
        return store.admin().s3_stats().puts - before


async def async_burst(url: str) -> int:
    with opened(url, "async-burst"):
        pass
    store = await pgqrs.S3Store.create("bucket", "async-burst", endpoint_url=url, cache=":memory:")
    producer = await store.producer(QUEUE)
    before = (await store.stats()).puts
    await asyncio.gather(*(producer.enqueue(n) for n in range(200)))
    puts = (await store.stats()).puts - before
    await store.close()
    return puts


def throughput(url: str, producers: int) -> float:
    """Enqueues per second of so many threads."""
    with opened(url, f"throughput-{producers}") as store:
        done = [0] * producers
        deadline = time.monotonic() + SECONDS

        def produce(number: int) -> None:
            producer = store.producer(QUEUE)
            while time.monotonic() < deadline:
                producer.enqueue({"n": number})
                done[number] += 1

        threads = [threading.Thread(target=produce, args=(n,)) for n in range(producers)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.monotonic() - begun)


if __name__ == "__main__":
    main()
