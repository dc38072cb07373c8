"""What the processes of the acceptance tests do. `python -m tests.acceptance.children NAME URL`.

They talk in lines: the parent writes commands, the child answers with JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

from sqlalchemy import Engine, create_engine, event

import pgqrs
from pgqrs import moving
from pgqrs.config import parse_dsn
from tests.acceptance import misbehaving


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def drain(url: str) -> None:
    """For each queue named on stdin: take all there is. Answers with the ids it got."""
    with pgqrs.Store(url) as store:
        say("ready")
        for line in sys.stdin:
            queue = line.strip()
            mine: list[int] = []
            with store.consumer(queue, lease=60) as consumer:
                while claimed := consumer.dequeue(random.randint(1, 7)):
                    mine += [message.id for message in claimed]
                    consumer.ack_many(claimed)
                    time.sleep(0.002)  # or the first would be done before the last has begun
            say(mine)


def hold(url: str) -> None:
    """Claim one message for a second, and then do as told."""
    with pgqrs.Store(url) as store:
        consumer = store.consumer("tasks", lease=1)
        (message,) = consumer.dequeue()
        say([message.id, message.read_ct])
        for line in sys.stdin:
            try:
                getattr(consumer, line.strip())(message)
                say("done")
            except pgqrs.LeaseLost as exc:
                say(["lost", exc.id])


def enqueue_forever(url: str) -> None:
    """Say the id of each message, once its enqueue has returned."""
    with pgqrs.Store(url) as store:
        producer = store.producer("tasks")
        while True:
            say(producer.enqueue({"at": time.time()}))
            say(producer.enqueue_many([1, 2, 3])[-1])


def buffer(url: str) -> None:
    """Say the id of each message just before it is acked through a buffer."""
    with pgqrs.Store(url) as store, store.consumer("tasks", lease=1) as consumer:
        buffer = consumer.buffer(20, ack_every=0.02)
        for message in buffer:
            say(message.id)
            buffer.ack(message)
            time.sleep(0.001)


def copy(urls: str) -> None:
    """Copy from one to the other in small pages. Say how far it is."""
    moving.PAGE = 10
    source, target = urls.split()
    with pgqrs.Store(source) as here, pgqrs.Store(target, upgrade=True) as there:
        here.admin().copy_to(there, progress=lambda progress: say(progress.done))
    say("done")


def enqueue_keys(url: str) -> None:
    """For each queue named on stdin: enqueue messages whose keys others use too."""
    keys = [f"key {n}" for n in range(20)]
    with pgqrs.Store(url) as store:
        say("ready")
        for line in sys.stdin:
            producer = store.producer(line.strip())
            random.shuffle(keys)
            ids = dict(zip(keys, producer.enqueue_many(keys[:10], keys=keys[:10]), strict=False))
            ids |= {key: producer.enqueue(key, key=key) for key in keys[10:]}
            say({key: [id, id.created] for key, id in ids.items()})


def drain_and_log(url: str) -> None:
    """For each `queue:number` on stdin: take part until so many are done, and say what was done when.

    A message ends in the log before it is acked, and begins after it was claimed: what overlaps in
    the log overlapped.
    """
    with pgqrs.Store(url) as store:
        say("ready")
        for line in sys.stdin:
            queue, _, number = line.strip().partition(":")
            say(_work_and_log(store, queue, int(number)))


def _work_and_log(store: pgqrs.Store, queue: str, number: int) -> list[Any]:
    log: list[Any] = []
    with store.consumer(queue, lease=600) as consumer:
        while store.admin().queue_stats(queue).archived["completed"] < number:
            claimed = consumer.dequeue(random.randint(1, 4))
            log += [[time.monotonic(), "begin", *m.payload, m.key] for m in claimed]
            time.sleep(random.random() / 500)
            log += [[time.monotonic(), "end", *m.payload, m.key] for m in claimed]
            consumer.ack_many(claimed)
    return log


def claim_forever(url: str) -> None:
    """Claim from `tasks` and ack, as quickly as can be."""
    with pgqrs.Store(url) as store, store.consumer("tasks") as consumer:
        say("ready")
        while True:
            try:
                consumer.ack_many(consumer.dequeue(3))
            except pgqrs.LeaseLost:  # it was stopped for longer than that
                continue


def freeze_on_engine(url: str) -> None:
    """The same with an engine of the application's own."""
    freeze(create_engine(parse_dsn(url)))


def freeze(url: str | Engine) -> None:
    """Claim from `tasks`, and stand still after as many statements as the parent says."""
    with pgqrs.Store(url) as store, store.consumer("tasks") as consumer:
        consumer.dequeue()  # it knows now that the queue has limits
        say("ready")
        remaining = int(sys.stdin.readline())

        def count(*_: Any) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                say("frozen")
                os.kill(os.getpid(), signal.SIGSTOP)

        event.listen(Engine, "after_cursor_execute", count)
        consumer.dequeue(5)
        say("done")
        sys.stdin.readline()


EFFECT = "INSERT INTO effects (message_id, attempt) VALUES ({}, {})"


def work(url: str) -> None:
    """Be a worker: every message leaves a row of its effect, in a transaction of its own."""
    with pgqrs.Store(url) as store:

        def handle(message: pgqrs.Message) -> int:
            effect = EFFECT.format(message.id, message.read_ct)
            store.write(lambda connection: connection.exec_driver_sql(effect).close())
            return 2 * int(message.payload)

        say("ready")
        pgqrs.Worker(
            store,
            handlers={
                "tasks": handle,
                misbehaving.TICKS: lambda message: None,
                **misbehaving.HANDLERS,
            },
            workflows=misbehaving.WORKFLOWS,
            tasks=misbehaving.TASKS,
            concurrency=8,
            lease=misbehaving.LEASE,
            grace=1,
        ).run()


if __name__ == "__main__":
    {
        "buffer": buffer,
        "claim_forever": claim_forever,
        "copy": copy,
        "drain": drain,
        "drain_and_log": drain_and_log,
        "enqueue_keys": enqueue_keys,
        "freeze": freeze,
        "freeze_on_engine": freeze_on_engine,
        "hold": hold,
        "enqueue_forever": enqueue_forever,
        "work": work,
    }[sys.argv[1]](sys.argv[2])
