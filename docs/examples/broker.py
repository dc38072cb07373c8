"""A broker in a few lines: it collects requests, uploads them in batches, and then answers.

    python broker.py s3://bucket/queues.sqlite

Requests are lines on standard input, answers are lines on standard output. Start it twice: one
process leads, the other one stands by, and takes over when the leader is gone. Who leads is a
message in a queue of its own. Who holds its lease is the leader; a leader that dies does not renew
it, so it lapses, and somebody else gets the message. That only one can hold it is what
compare-and-swap in the bucket is for.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

import pgqrs

LEASE = 3.0
BATCH = 1000
EVERY = 0.05


def prepare(store: pgqrs.Store) -> None:
    """The queues, and the one message that makes its holder the leader."""
    admin = store.admin()
    admin.install()
    admin.create_queue("jobs", if_not_exists=True)
    try:
        admin.create_queue("leader", lease=LEASE, max_read_ct=2**31 - 1)
    except pgqrs.QueueExists:
        return
    store.producer("leader").enqueue("whoever holds this leads")


def lead(store: pgqrs.Store, requests: Callable[[], list[str]]) -> None:
    """Serve for as long as the lease can be renewed."""
    with store.consumer("leader") as candidate:
        crown = next(iter(candidate))  # stands by for as long as another one leads
        print("leading", flush=True)
        renewed = time.monotonic()
        while True:
            if time.monotonic() - renewed > LEASE / 3:
                candidate.extend(crown, LEASE)  # LeaseLost ends the reign
                renewed = time.monotonic()
            serve(store, requests())


def serve(store: pgqrs.Store, batch: list[str]) -> None:
    """One upload for all requests of a batch; the answers after it."""
    admin = store.admin()
    admin.batch_operations(
        [
            lambda connection, payload=payload: store.using(connection).enqueue("jobs", payload)
            for payload in batch
        ]
    )
    for payload, outcome in zip(batch, admin.flush_to_s3(), strict=True):
        print(f"{payload} {outcome}", flush=True)


def main(url: str) -> None:
    inbox: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            inbox.put(line.strip())

    def requests() -> list[str]:
        try:
            batch = [inbox.get(timeout=EVERY)]
        except queue.Empty:
            return []
        while len(batch) < BATCH and not inbox.empty():
            batch.append(inbox.get())
        return batch

    threading.Thread(target=read, daemon=True).start()
    with pgqrs.Store(url, s3_retry_conflicts=True) as store:
        prepare(store)
        while True:
            try:
                lead(store, requests)
            except pgqrs.LeaseLost:
                print("no longer leading", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
