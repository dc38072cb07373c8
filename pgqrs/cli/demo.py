"""`pgqrs demo`: the first minute.

One process produces messages, two others consume them. One message makes its first holder hang,
renewing its lease as a busy worker does. That holder, whichever of the two it is, is killed for
real. Nobody renews the lease any more, so it lapses, and the message comes back to the other
consumer. At the end the archive tells what was completed, and whether anything was lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from uuid import uuid4

import click
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pgqrs import (
    Admin,
    ArchivedMessage,
    Consumer,
    LeaseLost,
    Message,
    MessageId,
    MessageNotFound,
    Store,
    WorkerStopped,
)
from pgqrs.cli.output import make_console, print_table
from pgqrs.cli.target import Target, name_of

MESSAGES = 500
HANGS = 200
"""Which message makes its first holder hang: late enough to see both consumers at work before."""
LEASE = 2.0
"""Seconds that a claim lasts. Consumers learn it from the queue."""
WORK = 0.02
"""Seconds of pretended work for a message."""
BATCH = 10
POLL = 0.1
TIMEOUT = 180.0
"""Seconds after which everything ends, come what may."""
NAMES = ("consumer-1", "consumer-2")

T = TypeVar("T")


@click.command()
@click.pass_context
def demo(context: click.Context) -> None:
    """See it work: two consumers, one killed half-way, nothing lost.

    Takes about 10 seconds. Uses a throwaway SQLite file, or the database of an explicit --dsn:
    there it works in a queue of its own, and deletes it afterwards.
    """
    with chosen_target(context) as target, target.open(upgrade=True) as store:
        if store.config.url.database == ":memory:":
            raise click.UsageError("other processes cannot see a database in memory; name a file")
        store.admin().install()
        with Screen() as screen:
            screen.say(f"Installed the tables in {name_of(store)}")
            outcome = perform(store, target, screen)
        show(outcome)
    if outcome.lost or outcome.duplicates:
        context.exit(1)


@contextmanager
def chosen_target(context: click.Context) -> Iterator[Target]:
    """The database that was named on the command line, else a throwaway.

    One that only the environment names is left alone: it is what an application here works with.
    """
    source = context.find_root().get_parameter_source("dsn")
    if source is ParameterSource.COMMANDLINE:
        yield context.obj
        return
    with tempfile.TemporaryDirectory(prefix="pgqrs-demo-", ignore_cleanup_errors=True) as directory:
        yield Target(f"sqlite:///{Path(directory) / 'demo.db'}")


@dataclass(frozen=True)
class Outcome:
    """What the archive says at the end."""

    produced: int
    completed: int
    redelivered: int
    lost: int
    duplicates: int


@dataclass
class Scene:
    """A queue, the processes that consume it, and the message that makes one of them hang."""

    admin: Admin
    queue: str
    screen: Screen
    ids: list[MessageId]
    consumers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ends_at: float = field(default_factory=lambda: time.monotonic() + TIMEOUT)

    @property
    def hanging_id(self) -> int:
        return self.ids[HANGS]


def perform(store: Store, target: Target, screen: Screen) -> Outcome:
    """The whole story, and its outcome."""
    admin, queue = store.admin(), f"demo-{uuid4().hex[:8]}"
    admin.create_queue(queue, lease=LEASE)
    screen.say(f"Created queue {queue!r}: a claim on a message lasts {LEASE:g} s")
    try:
        scene = Scene(admin, queue, screen, produce(store, queue))
        screen.say(f"Produced {MESSAGES} messages")
        try:
            consume_with_a_casualty(scene, target)
            stop(scene)
        finally:
            for process in scene.consumers.values():
                process.kill()
                process.wait()
        return count(scene)
    finally:
        admin.delete_queue(queue, force=True)


def produce(store: Store, queue: str) -> list[MessageId]:
    with store.producer(queue) as producer:
        return producer.enqueue_many({"n": n, "hangs": n == HANGS} for n in range(MESSAGES))


def consume_with_a_casualty(scene: Scene, target: Target) -> None:
    for name in NAMES:
        scene.consumers[name] = start_consumer(scene.queue, name, target)
    started = ", ".join(f"{name} (pid {p.pid})" for name, p in scene.consumers.items())
    scene.screen.say(f"Started two consumer processes: {started}")

    held = watch(scene, find_hanging)
    victim = worker_name(scene, held.consumer_worker_id)
    scene.screen.say(f"{victim} hangs on message {held.id} and keeps renewing its lease")
    kill(scene, victim)
    show_lease_of_the_dead(scene, victim)

    read_ct, holder = watch(scene, find_redelivered)
    scene.screen.say(
        f"Message {held.id} came back: same id, read_ct {read_ct}, now with {holder}",
        style="bold green",
    )
    watch(scene, all_archived)


def watch(scene: Scene, look: Callable[[Scene], T | None]) -> T:
    """Look until there is something to see, with the progress bar moving meanwhile."""
    while True:
        scene.screen.show_acked(acked(scene))
        found = look(scene)
        if found is not None:
            return found
        check(scene)
        time.sleep(POLL)


def check(scene: Scene) -> None:
    """Fail rather than wait for what cannot happen any more."""
    for name, process in scene.consumers.items():
        if process.poll() is not None:
            raise click.ClickException(f"{name} ended by itself, with code {process.returncode}")
    if time.monotonic() > scene.ends_at:
        raise click.ClickException(f"not done after {TIMEOUT:g} s; is the database very slow?")


def acked(scene: Scene) -> int:
    return sum(scene.admin.queue_stats(scene.queue).archived.values())


def all_archived(scene: Scene) -> bool | None:
    return True if acked(scene) == MESSAGES else None


def find_hanging(scene: Scene) -> Message | None:
    """The message that makes its holder hang, once its holder has nothing else left to do."""
    claimed = [m for m in scene.admin.peek(scene.queue, MESSAGES) if m.consumer_worker_id]
    for message in claimed:
        if message.id == scene.hanging_id:
            held = [m for m in claimed if m.consumer_worker_id == message.consumer_worker_id]
            return message if held == [message] else None
    return None


def show_lease_of_the_dead(scene: Scene, victim: str) -> None:
    left = find_now(scene)
    if isinstance(left, Message) and left.read_ct == 1:  # else this process slept through it
        scene.screen.say(
            f"Message {left.id} is still leased by the dead {victim} (read_ct 1);"
            f" the lease ends at {left.vt:%H:%M:%S}. Waiting for that..."
        )


def find_redelivered(scene: Scene) -> tuple[int, str] | None:
    """The read_ct and the holder of the same message, once it was claimed again."""
    found = find_now(scene)
    if found.read_ct == 1:
        return None
    return found.read_ct, worker_name(scene, found.consumer_worker_id)


def find_now(scene: Scene) -> Message | ArchivedMessage:
    """The message that made its holder hang, wherever it is by now."""
    try:
        return scene.admin.get_message(scene.hanging_id)
    except MessageNotFound:
        return scene.admin.get_archived(scene.hanging_id)


def worker_name(scene: Scene, id: int | None) -> str:
    """Consumers register with their name as hostname: a pid may be that of a launcher."""
    names = {worker.id: worker.hostname for worker in scene.admin.list_workers()}
    return names.get(id or 0, f"worker {id}")


def kill(scene: Scene, name: str) -> None:
    """SIGKILL, or on Windows TerminateProcess: the consumer cannot do a thing about it."""
    process = scene.consumers.pop(name)
    process.kill()
    code = process.wait()
    scene.screen.say(f"Killed {name} (pid {process.pid}): it ended with code {code}", style="red")


def stop(scene: Scene) -> None:
    """Tell the consumers to leave, and give them the time to."""
    for worker in scene.admin.list_workers():
        if worker.queue == scene.queue:
            scene.admin.stop_worker(worker.id)
    for process in scene.consumers.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LEASE)


def count(scene: Scene) -> Outcome:
    """Compare what was produced with what the archive holds."""
    archived = scene.admin.list_archive(scene.queue, reason="completed", n=2 * MESSAGES)
    completed = {message.original_message_id for message in archived}
    return Outcome(
        produced=len(scene.ids),
        completed=len(completed),
        redelivered=sum(message.read_ct > 1 for message in archived),
        lost=len(set(scene.ids) - completed),
        duplicates=len(archived) - len(completed),
    )


def show(outcome: Outcome) -> None:
    print_table(
        ["messages", "count"],
        [
            ("produced", outcome.produced),
            ("completed", outcome.completed),
            ("redelivered", outcome.redelivered),
            ("lost", outcome.lost),
            ("duplicates acked", outcome.duplicates),
        ],
        empty="",
    )
    click.echo("Read next: the quickstart in the README, `pgqrs --help`, and docs/guarantees.md.")


class Screen:
    """Lines that tell the story, above a progress bar. In a log, just lines."""

    def __init__(self) -> None:
        self._console = make_console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_interactive,
        )
        self._task = self._progress.add_task("Acked", total=MESSAGES)
        self._started = time.monotonic()
        self._logged = 0

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line of the story."""
        elapsed = time.monotonic() - self._started
        self._console.print(f"{elapsed:5.1f} s  {text}", style=style, soft_wrap=True)

    def show_acked(self, count: int) -> None:
        """Move the bar; in a log, a line for every hundred."""
        self._progress.update(self._task, completed=count)
        if self._progress.disable and count - count % 100 > self._logged:
            self._logged = count - count % 100
            self.say(f"Acked {count} of {MESSAGES}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


# The consumer processes


def start_consumer(queue: str, name: str, target: Target) -> subprocess.Popen[bytes]:
    # Not as an argument: every user of the host can see those, and the password among them.
    environment = {k: v for k, v in os.environ.items() if k not in ("PGQRS_DSN", "PGQRS_SCHEMA")}
    environment["PGQRS_DSN"] = target.dsn or ""
    if target.schema is not None:
        environment["PGQRS_SCHEMA"] = target.schema
    return subprocess.Popen(
        [sys.executable, "-m", "pgqrs.cli", demo_consumer.name or "", queue, name],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the demo, which then ends its consumers
    )


@click.command("demo-consumer", hidden=True)
@click.argument("queue")
@click.argument("name")
@click.pass_obj
def demo_consumer(target: Target, queue: str, name: str) -> None:
    """Consume the messages of a demo until told to stop."""
    ends_at = time.monotonic() + TIMEOUT
    with (
        target.open() as store,
        store.consumer(queue, hostname=name) as consumer,
        suppress(WorkerStopped),
    ):
        while time.monotonic() < ends_at:
            consume(consumer)


def consume(consumer: Consumer) -> None:
    batch = consumer.dequeue(BATCH)
    if not batch:
        time.sleep(POLL)
        return
    hanging = [m for m in batch if m.payload["hangs"] and m.read_ct == 1]
    done = [m for m in batch if m not in hanging]
    time.sleep(WORK * len(done))
    with suppress(LeaseLost):  # too late: they come back, to be acked by whoever gets them then
        consumer.ack_many(done)
    for message in hanging:
        hang(consumer, message)


def hang(consumer: Consumer, message: Message) -> None:
    """Busy with this message, and alive to say so. The demo kills this process."""
    assert message.dequeued_at is not None
    lease = message.vt - message.dequeued_at
    ends_at = time.monotonic() + TIMEOUT
    while time.monotonic() < ends_at:
        consumer.extend(message, lease)
        time.sleep(LEASE / 4)
