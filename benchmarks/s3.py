"""`python -m benchmarks.s3`: what group commit gains when one PUT takes 60 ms.

Everything runs against a moto server whose PUTs are made that slow; each line ends with its target.
Rows: one producer, bursts, 64 and 256 producers; four equal nodes and one that is four times slower than
another; eight nodes on one object and on eight shards; an object of 200 MB.
`python -m benchmarks.s3 turns nodes shards large` chooses among them.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pgqrs
from pgqrs.stores.placement import Place
from pgqrs.testing.s3 import ENVIRONMENT, client, moto_server

PUT_TAKES = 0.06
QUEUE = "bench"
SECONDS = 5.0
NODES_SECONDS = 15.0


def main(*rows: str) -> None:
    os.environ.update(ENVIRONMENT)
    for name in rows or ROWS:
        ROWS[name]()


def turns() -> None:
    """How full the turns of one node are."""
    with moto_server(put_takes=PUT_TAKES) as url:
        client(url).create_bucket(Bucket="bucket")
        put = raw_put(url)
        print(f"one PUT of a database: {put * 1000:.0f} ms")
        report("one durable enqueue, in PUTs", single(url) / put, at_most=1.25)
        report("PUTs for 200 enqueues in threads", burst(url), at_most=5)
        report("PUTs for 200 enqueues in coroutines", asyncio.run(async_burst(url)), at_most=5)
        alone, _ = throughput(url, 1)
        for producers, target in ((64, 600), (256, 1800)):
            together, per_put = throughput(url, producers)
            report(f"{producers} producers, enqueues a second", together, at_least=target)
            report(f"{producers} producers, in producers", together / alone, at_least=30)
            if producers == 64:
                report("64 producers, enqueues per PUT", per_put, at_least=60)


def nodes() -> None:
    """How nodes that write all the time share one object."""
    equal = share({f"node {n}": 0.03 for n in range(4)})
    report("four equal nodes, slowest in fastest", min(equal) / max(equal), at_least=0.5)
    fast, slow = share({"fast": 0.03, "slow": 0.12})
    report("four times slower, in equal shares", 2 * slow / (fast + slow), at_least=0.25)
    *others, slow = share({"a": 0.03, "b": 0.03, "c": 0.03, "slow": 0.12})
    report(
        "four times slower than three, in equal shares",
        4 * slow / (sum(others) + slow),
        at_least=0.25,
    )


def share(delays: dict[str, float]) -> list[int]:
    """How many enqueues each node gets done; each request takes so many seconds longer."""
    with moto_server() as server, ExitStack() as cleanup:
        client(server).create_bucket(Bucket="bucket")
        with opened(server, "shared"):
            pass
        done, longest = dict.fromkeys(delays, 0), dict.fromkeys(delays, 0.0)
        stores = {}
        for name, delay in delays.items():
            proxy = Distance(server, delay)
            cleanup.callback(proxy.close)
            options: dict[str, Any] = {"s3_endpoint_url": proxy.url, "s3_cache": ":memory:"}
            stores[name] = cleanup.enter_context(
                pgqrs.Store("s3://bucket/shared", s3_retry_conflicts=True, **options)
            )
        end = time.monotonic() + NODES_SECONDS

        def produce(name: str) -> None:
            producer = stores[name].producer(QUEUE)
            while time.monotonic() < end:
                begun = time.monotonic()
                producer.enqueue(name)
                done[name] += 1
                longest[name] = max(longest[name], time.monotonic() - begun)

        with ThreadPoolExecutor(len(delays)) as threads:
            list(threads.map(produce, delays))
        print("; ".join(f"{n}: {done[n]} enqueues, longest {longest[n]:.1f} s" for n in delays))
        return list(done.values())


SHARDS = 8
SHARD_SECONDS = 10.0


def shards() -> None:
    """What eight nodes that write all the time, each to a queue of its own, reach with and without
    shards. Rounds take turns, and the best of each counts: other work on the machine only slows them.
    """
    queues = queues_apart()
    with moto_server(put_takes=PUT_TAKES) as url:
        client(url).create_bucket(Bucket="bucket")
        for key, options in SPREAD.items():
            with pgqrs.Store(f"s3://bucket/{key}", upgrade=True, **at(url), **options) as store:
                for queue in queues:
                    store.admin().create_queue(queue)
        best = dict.fromkeys(SPREAD, 0.0)
        for _ in range(3):
            for key, options in SPREAD.items():
                best[key] = max(best[key], together(url, key, options, queues))
    print("; ".join(f"{key}: {rate:.0f} enqueues a second" for key, rate in best.items()))
    report("eight shards, in one object", best["eight"] / best["one"], at_least=5)


SPREAD: dict[str, dict[str, Any]] = {"one": {}, "eight": {"s3_shards": SHARDS}}


def queues_apart() -> list[str]:
    """Names of queues, one for each shard."""
    place, found = Place(0, SHARDS, False), dict[int, str]()
    for number in count():
        found.setdefault(place.number_of_queue(f"queue-{number}"), f"queue-{number}")
        if len(found) == SHARDS:
            return list(found.values())
    raise AssertionError("numbers do not end")


def at(url: str) -> dict[str, Any]:
    return {"s3_endpoint_url": url, "s3_cache": ":memory:", "s3_retry_conflicts": True}


def together(url: str, key: str, options: dict[str, Any], queues: list[str]) -> float:
    """Enqueues a second of nodes that begin and end together."""
    with ExitStack() as cleanup:
        nodes = [
            cleanup.enter_context(pgqrs.Store(f"s3://bucket/{key}", **at(url), **options))
            for _ in queues
        ]
        end = time.monotonic() + SHARD_SECONDS

        def produce(node: pgqrs.Store, queue: str) -> int:
            producer, done = node.producer(queue), 0
            while time.monotonic() < end:
                producer.enqueue(done)
                done += 1
            return done

        with ThreadPoolExecutor(len(queues)) as threads:
            return sum(threads.map(produce, nodes, queues)) / SHARD_SECONDS


class Distance:
    """A proxy that makes a server look farther away."""

    def __init__(self, server: str, delay: float) -> None:
        target = server.removeprefix("http://")

        class Exchange(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.command == "PUT":
                    time.sleep(delay)
                with closing(HTTPConnection(target, timeout=60)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    data = answer.read()
                if self.command != "PUT":
                    time.sleep(delay)
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_DELETE = forward  # noqa: N815

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


LARGE = """
import statistics, sys, time
import pgqrs

url, cache = sys.argv[1:]
store = pgqrs.Store("s3://bucket/large", s3_endpoint_url=url, s3_cache=cache, s3_timeout=120.0)
producer = store.producer("bench")
taken = []
for n in range(4):
    begun = time.perf_counter()
    producer.enqueue(n)
    taken.append(time.perf_counter() - begun)
size = store.admin().s3_stats().last_upload_bytes
# Not ru_maxrss, which begins with what the parent had.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(statistics.median(taken), int(peak) * 1024, size)
"""


def large() -> None:
    """One enqueue into an object of 200 MB, by a process of its own."""
    with moto_server() as url, tempfile.TemporaryDirectory() as cache:
        bucket = client(url)
        bucket.create_bucket(Bucket="bucket")
        with opened(url, "template") as store:
            store.admin().snapshot(Path(cache) / "template.db")
        path = Path(cache) / "template.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE ballast (data BLOB)")
            for _ in range(200):
                connection.execute("INSERT INTO ballast VALUES (?)", (os.urandom(1_000_000),))
            connection.commit()
        data = path.read_bytes()
        put = median(lambda: bucket.put_object(Bucket="bucket", Key="large", Body=data), times=4)
        command = [sys.executable, "-c", LARGE, url, str(Path(cache) / "copies")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        took, rss, size = map(float, said.split())
        print(f"an object of {size / 1e6:.0f} MB: PUT {put:.2f} s, enqueue {took:.2f} s")
        report("one enqueue, in PUTs", took / put, at_most=1.5)
        report("memory of its process, in objects", rss / size, at_most=1.6)


def report(
    name: str, value: float, *, at_most: float | None = None, at_least: float | None = None
) -> None:
    met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    wanted = f"≤ {at_most}" if at_most is not None else f"≥ {at_least}"
    print(f"{name}: {value:.2f} (target: {wanted}, {'met' if met else 'MISSED'})", flush=True)


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


def throughput(url: str, producers: int) -> tuple[float, float]:
    """Enqueues per second of so many threads, and per PUT."""
    with opened(url, f"throughput-{producers}") as store:
        before = store.admin().s3_stats().puts
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
        taken = time.monotonic() - begun
        return sum(done) / taken, sum(done) / (store.admin().s3_stats().puts - before)


ROWS: dict[str, Callable[[], None]] = {
    "turns": turns,
    "nodes": nodes,
    "shards": shards,
    "large": large,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
