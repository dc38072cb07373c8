"""Processes that produce and consume: `python -m tests.s3.children URL ENDPOINT CACHE`.

For each path on standard input this forks a process that writes there what it was told, and says
its number. Forking, from a process that has imported everything and opened nothing, is quicker than
starting anew.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pgqrs
from pgqrs.stores import database_class

CLEAR = (
    pgqrs.ConflictError,
    pgqrs.StoreUnavailable,
    pgqrs.CommitUncertain,
    pgqrs.LeaseLost,
)
"""How a call may end besides well."""
_saying = threading.Lock()


def say(*answer: Any) -> None:
    with _saying:
        print(json.dumps(answer), flush=True)


def produce(store: pgqrs.Store, name: str) -> None:
    for number in itertools.count():
        payload = f"{name}-{number}"
        try:
            say("enqueued", payload, store.producer("tasks").enqueue(payload))
        except CLEAR as exc:
            say("error", type(exc).__name__, payload)
        time.sleep(0.01)


def consume(store: pgqrs.Store) -> None:
    while True:
        try:
            with store.consumer("tasks", lease=3) as consumer:
                while True:
                    for message in consumer.dequeue(5, wait=1):
                        consumer.ack(message)
                        say("acked", message.payload, message.id)
        except CLEAR as exc:
            say("error", type(exc).__name__, None)


def guarded(function: Any, *arguments: Any) -> None:
    try:
        function(*arguments)
    except BaseException as exc:
        say("unexpected", repr(exc), None)
        raise


def work(url: str, endpoint: str, cache: str, name: str) -> None:
    settings: dict[str, Any] = {"s3_timeout": 30.0, "retry_for": 10.0}
    store = pgqrs.Store(url, s3_endpoint_url=endpoint, s3_cache=cache, **settings)
    jobs = [(produce, store, f"{name}-a"), (produce, store, f"{name}-b"), (consume, store)]
    threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(url: str, endpoint: str, cache: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be buried
    for line in sys.stdin:
        path = Path(line.strip())
        if pid := os.fork():
            print(pid, flush=True)
            continue
        with path.open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
        work(url, endpoint, cache, path.stem)


if __name__ == "__main__":
    database_class("s3")
    main(*sys.argv[1:])
