"""The broker of the documentation: one process leads, and the other takes over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pgqrs
from tests.s3.conftest import Object, until

ROOT = Path(__file__).parents[2]
RUN = """
import broker, sys
from pgqrs import Consumer
dequeue = Consumer.dequeue
def impatient(self, *arguments, wait=0, **options):
    return dequeue(self, *arguments, wait=min(wait, 0.3), **options)
Consumer.dequeue = impatient
broker.LEASE = 10.0
broker.main(sys.argv[1])
"""
"""With a lease that a leader on a busy machine does not lose while it lives, and so that whoever stands
by finds nothing many times before the leader is gone.
"""


class Broker:
    def __init__(self, object: Object, directory: Path, name: str) -> None:
        self._said = directory / f"{name}.txt"
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, object.url()],
                cwd=ROOT / "docs/examples",
                env=os.environ
                | {
                    "PGQRS_S3_ENDPOINT_URL": object.server,
                    "PGQRS_S3_CACHE": str(directory / "cache"),
                },
                stdin=subprocess.PIPE,
                stdout=file,
                text=True,
            )

    def ask(self, *requests: str) -> None:
        assert self.process.stdin
        self.process.stdin.write("".join(f"{request}\n" for request in requests))
        self.process.stdin.flush()

    def said(self) -> list[str]:
        return self._said.read_text().splitlines()

    def leads(self) -> bool:
        return "leading" in self.said()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def brokers(object: Object, directory: Path) -> Iterator[list[Broker]]:
    started = [Broker(object, directory, name) for name in ("one", "two")]
    try:
        yield started
    finally:
        for broker in started:
            broker.kill()


def test_one_leads_and_the_other_takes_over(empty: Object, tmp_path: Path) -> None:
    with brokers(empty, tmp_path) as both:
        until(lambda: any(broker.leads() for broker in both))
        leader, follower = sorted(both, key=lambda broker: not broker.leads())
        leader.ask(*(f"first-{n}" for n in range(20)))
        until(lambda: len(leader.said()) == 21)
        assert not follower.leads()
        leader.kill()
        follower.ask("second")
        until(lambda: len(follower.said()) == 2)
        assert follower.said()[0] == "leading"
    with pgqrs.Store(empty.url(), s3_endpoint_url=empty.server, s3_cache=":memory:") as store:
        payloads = [message.payload for message in store.admin().peek("jobs", 100)]
    assert payloads == [*(f"first-{n}" for n in range(20)), "second"]
