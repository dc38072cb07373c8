"""What the processes of the chaos test do.

Each writes what it asks and what it is answered to a file of its own, line by line, for
`tests.acceptance.history`. A line is one write to the file, so a killed process leaves whole lines, and
nothing that it was answered goes missing unless it was killed before it could tell.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pgqrs

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
PAUSE = 0.02
BREAK = 0.6
EFFORT = 0.06
"""Seconds that a message takes at most, usually."""


class SharedClock:
    """The time of a SQLite database: one for all processes, which the test sets forward and back."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def offset(self) -> float:
        (offset,) = struct.unpack("d", self._map[:8])
        return float(offset)

    @offset.setter
    def offset(self, offset: float) -> None:
        self._map[:8] = struct.pack("d", offset)

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=time.monotonic() + self.offset)

    def monotonic(self, at: datetime) -> float:
        """Returns the monotonic time at which this clock shows a time, if nobody sets it."""
        return (at - EPOCH).total_seconds() - self.offset


class HostClock:
    """The time of a PostgreSQL server on this host."""

    def monotonic(self, at: datetime) -> float:
        return at.timestamp() - (time.time() - time.monotonic())


class Log:
    """The file of one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._calls = 0

    def write(self, do: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"do": do, **facts}) + "\n").encode())

    def asks(self, do: str, **facts: Any) -> int:
        self._calls += 1
        self.write(do, call=self._calls, t=time.monotonic(), **facts)
        return self._calls

    def answered(self, do: str, call: int, **facts: Any) -> None:
        self.write(do, call=call, t=time.monotonic(), **facts)

    @contextmanager
    def refusals(self, call: int) -> Iterator[None]:
        """An error is an answer, too, and the process goes on."""
        try:
            yield
        except Exception as exc:
            foreign = not isinstance(exc, pgqrs.PgqrsError)
            error = f"{type(exc).__name__}: {exc}"
            self.answered("refused", call, error=error, foreign=foreign)


class Process:
    """What producers and consumers share."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.dice = random.Random(settings["seed"])
        self.queues: dict[str, dict[str, Any]] = settings["queues"]
        self.name: str = settings["name"]
        self.lease: float = settings["lease"]
        self.directory = Path(settings["directory"])
        self.log = Log(self.directory / f"{self.name}.log")
        clock = settings["clock"]
        self.clock: Any = SharedClock(Path(clock)) if clock else HostClock()
        self.store = pgqrs.Store(
            settings["url"], **({"clock": self.clock} if clock else {}), retry_for=60
        )

    def is_over(self) -> bool:
        return (self.directory / "over").exists()


# Producers


def produce(process: Process, number: int) -> None:
    """Enqueue so many messages, one by one and in batches."""
    sent = 0
    while sent < number:
        queue = process.dice.choice(list(process.queues))
        size = min(number - sent, process.dice.choice((1, 1, 1, 2, 5)))
        messages = [_message(process, queue, sent + n) for n in range(size)]
        _enqueue(process, queue, messages)
        sent += size
        if process.dice.random() < 0.1:  # in bursts: a backlog is what limits and groups are for
            time.sleep(process.dice.random() * BREAK)


def _message(process: Process, queue: str, number: int) -> dict[str, Any]:
    labels, dice = process.queues[queue], process.dice
    return {
        "name": f"{process.name}-{number}",
        "key": f"key {dice.randrange(labels['keys'])}" if labels["keys"] else None,
        "unique": labels["unique"],
        "group": f"group {dice.randrange(labels['groups'])}" if labels["groups"] else None,
        "ttl": dice.choice((0.3, 1.0, 5.0)) if dice.random() < labels["expiring"] else None,
    }


def _enqueue(process: Process, queue: str, messages: list[dict[str, Any]]) -> None:
    producer, dice = process.store.producer(queue), process.dice
    # A batch has one time to live, and often one key: then all but a few wait for their turn.
    same = ("ttl",) if messages[0]["unique"] or dice.random() < 0.4 else ("ttl", "key")
    messages = [message | {label: messages[0][label] for label in same} for message in messages]
    options: dict[str, Any] = {
        "ttl": messages[0]["ttl"],
        "unique": "unfinished" if messages[0]["unique"] else None,
        "priority": dice.choice((0, 0, 0, 5)),
        "delay": dice.choice((None, None, None, 0.2)),
    }
    call = process.log.asks("enqueue", queue=queue, messages=messages)
    with process.log.refusals(call):
        if len(messages) == 1:
            (one,) = messages
            ids = [producer.enqueue(one["name"], key=one["key"], group=one["group"], **options)]
        else:
            ids = producer.enqueue_many(
                [one["name"] for one in messages],
                keys=[one["key"] for one in messages],
                groups=[one["group"] for one in messages],
                **options,
            )
        created = [id.created for id in ids]
        process.log.answered("enqueued", call, ids=[int(id) for id in ids], created=created)


# Consumers


def consume(process: Process) -> None:
    """Claim from one queue after the other, with and without a buffer, until all is over."""
    ways: list[Callable[[Process, pgqrs.Consumer], None]] = [_by_hand, _by_hand, _with_a_buffer]
    while not process.is_over():
        queue = process.dice.choice(list(process.queues))
        way = process.dice.choice(ways)
        call = process.log.asks("open", queue=queue, way=way.__name__)
        with process.log.refusals(call), process.store.consumer(queue) as consumer:
            way(process, consumer)


def _by_hand(process: Process, consumer: pgqrs.Consumer) -> None:
    dice, log = process.dice, process.log
    for _ in range(dice.randint(1, 12)):
        lease = process.lease * dice.choice((0.7, 1.0, 1.5))
        claimed: list[pgqrs.Message] = []
        call = log.asks("dequeue", queue=consumer.queue, lease=lease)
        with log.refusals(call):
            wait = dice.choice((None, 0.05, 0.3))
            claimed = consumer.dequeue(dice.randint(1, 4), lease=lease, wait=wait)
            log.answered("dequeued", call, messages=[_said(message) for message in claimed])
        if not claimed:
            if wait is None:
                time.sleep(dice.random() * PAUSE)
            if dice.random() < 0.3 or process.is_over():
                return
        _work(process, consumer, claimed)


def _said(message: pgqrs.Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "name": message.payload,
        "read_ct": message.read_ct,
        "key": message.key,
        "group": message.group,
    }


def _work(process: Process, consumer: pgqrs.Consumer, claimed: list[pgqrs.Message]) -> None:
    dice = process.dice
    if len(claimed) > 1 and dice.random() < 0.5:
        time.sleep(_effort(process))
        _end(process, consumer, "ack", claimed)
        return
    for message in claimed:
        effort = _effort(process)
        time.sleep(effort)
        if dice.random() < (0.6 if effort > process.lease else 0.15):
            _end(process, consumer, "extend", [message])
            time.sleep(_effort(process))
        how = dice.choices(("ack", "release", "fail", "dead"), (80, 9, 6, 5))[0]
        _end(process, consumer, how, [message])


def _effort(process: Process) -> float:
    """Seconds of work; now and then more than the lease allows."""
    if process.dice.random() < 0.04:
        return process.lease * 1.6
    return process.dice.random() * EFFORT


def _end(process: Process, holder: Any, how: str, messages: list[pgqrs.Message]) -> None:
    log, dice = process.log, process.dice
    said = [{"id": message.id, "read_ct": message.read_ct} for message in messages]
    call = log.asks("end", how=how, messages=said, lease=process.lease)
    with log.refusals(call):
        lost: list[int] = []
        try:
            match how:
                case "ack":
                    holder.ack_many(messages)
                case "release":
                    holder.release_many(messages, delay=dice.choice((None, 0.1)))
                case "extend":
                    holder.extend_many(messages, process.lease)
                case "fail":
                    holder.fail_many(messages, "again", delay=dice.choice((0, 0.1)))
                case "dead":
                    holder.fail_many(messages, "never again", dead=True)
        except pgqrs.LeaseLost as exc:
            lost = list(exc.ids)
        log.answered("ended", call, lost=lost)


def _with_a_buffer(process: Process, consumer: pgqrs.Consumer) -> None:
    """A buffer's acks are answered by `flush`, several at a time."""
    dice, log = process.dice, process.log
    buffer = consumer.buffer(
        dice.choice((2, 5, 10)), lease=process.lease, ack_every=0.05, wait=dice.choice((0.1, 0.3))
    )
    noted: dict[int, int] = {}
    lost: set[int] = set()
    with buffer:
        for _ in range(dice.randint(1, 30)):
            if (message := _take(process, buffer, consumer.queue, lost)) is None:
                break
            time.sleep(_effort(process))
            if dice.random() < 0.1:
                _end(process, buffer, dice.choice(("release", "fail", "extend")), [message])
                continue
            said = [{"id": message.id, "read_ct": message.read_ct}]
            noted[log.asks("end", how="ack", messages=said)] = message.id
            buffer.ack(message)
            if dice.random() < 0.1:
                _flush(process, buffer, noted, lost)
        _flush(process, buffer, noted, lost)


def _take(process: Process, buffer: Any, queue: str, lost: set[int]) -> pgqrs.Message | None:
    while True:
        asked = time.monotonic()
        try:
            message: pgqrs.Message | None = next(buffer, None)
        except pgqrs.LeaseLost as exc:
            lost.update(exc.ids)
            continue
        if message is not None:
            until = process.clock.monotonic(message.vt)
            now = time.monotonic()
            process.log.write(
                "taken", t0=asked, t=now, until=until, queue=queue, message=_said(message)
            )
        return message


def _flush(process: Process, buffer: Any, noted: dict[int, int], lost: set[int]) -> None:
    while True:
        try:
            buffer.flush()
            break
        except pgqrs.LeaseLost as exc:
            lost.update(exc.ids)
    for call, id in noted.items():
        process.log.answered("ended", call, lost=[id] if id in lost else [])
    noted.clear()


def main(kind: str, settings: dict[str, Any]) -> None:
    """A process from its beginning to its end."""
    errors = os.open(
        Path(settings["directory"]) / f"{settings['name']}.err", os.O_WRONLY | os.O_CREAT
    )
    os.dup2(errors, sys.stderr.fileno())
    process = Process(settings)
    try:
        produce(process, settings["number"]) if kind == "produce" else consume(process)
    finally:
        process.store.close()
