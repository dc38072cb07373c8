"""Draining a queue: a backlog too large for one machine is worked off by the tasks of a Spark job.

Each task is a consumer. It claims thousands of messages at a time, calls a function for each, and ends
them in one transaction: what the function returned goes to the archive with its message, failures are
tried again or dead-lettered as everywhere, and the run is told how many there were. So what the run
counts is what was done, however often tasks, drivers or databases fail on the way.

Claims of a task that died come back when their leases lapse. Then there is another round, until
nothing is left of what was there at first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from pgqrs.config import Config
from pgqrs.consumer import Consumer
from pgqrs.error_texts import error_text
from pgqrs.errors import InvalidConfig, InvalidPayload
from pgqrs.keeper import Lease, keeper_of
from pgqrs.outcomes import Done, Failed, GivenBack, Outcome, as_outcome
from pgqrs.payloads import encode
from pgqrs.repositories import archive, backlog, events, groups, messages, stats, tails
from pgqrs.repositories.dequeue import Claimed
from pgqrs.repositories.expressions import Holds
from pgqrs.retry import Retry
from pgqrs.spark.allowing import allowed_function
from pgqrs.spark.importing import imported
from pgqrs.spark.options import Options, Where
from pgqrs.spark.pipelines import QUEUE, database_options, url_of
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import Attempt, current_attempt, spark_step
from pgqrs.store import Store
from pgqrs.stores import Database
from pgqrs.types import EventKind, Message, seconds, whole
from pgqrs.workflows.calls import sleep
from pgqrs.workflows.decorators import workflow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRAINED = "drained"
"""The event of a run for each batch that was ended."""
FEWEST, MOST = 1000, 10_000
"""Messages of a batch: with fewer, workers are as quick as Spark."""
A_MOMENT = 0.5
TASKS = 8
"""How many, where Spark does not say how many it runs at a time."""


@dataclass(frozen=True)
class Tally:
    """How many messages were completed, failed for good, or are to be tried again."""

    completed: int = 0
    failed: int = 0
    retried: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.completed + other.completed,
            self.failed + other.failed,
            self.retried + other.retried,
        )


@dataclass(frozen=True)
class Duty:
    """What tasks are to do. It is pickled: a store never is."""

    config: Config = field(repr=False)
    run_id: int
    queue: str
    function: str
    through: int
    batch: int
    lease: float
    where: Where | None = None
    """Where tasks learn the URL; None if it is in `config`."""

    def config_here(self) -> Config:
        """The settings, where this is called."""
        return self.config if self.where is None else self.config.with_(dsn=self.where.address())


def load(function: str) -> Callable[[Message], Any]:
    """The function of this name, `module:name`."""
    return imported(function, "function")


# On executors


def work(duty: Duty) -> Iterator[Tally]:
    """Be a consumer until there is nothing to claim. Yields what became of each batch."""
    call = load(duty.function)
    with Store(duty.config_here()) as store, EarlyConsumer(store._database, duty) as consumer:
        while found := _claim(consumer, duty):
            with _renewed(store._database, found, duty.lease):
                outcomes = [_call(call, message, store.config) for message in found]
            yield _end(store._database, duty.run_id, outcomes)
            consumer._tell_of_results(found)


class EarlyConsumer(Consumer):
    """Claims what was there when draining began, and passes over what came later."""

    _claims_in_one_statement = False

    def __init__(self, database: Database, duty: Duty) -> None:
        super().__init__(database, duty.queue, lease=duty.lease)
        self._through = duty.through

    def _claim_unlimited(self, connection: Connection, queue: str, **options: Any) -> Claimed:
        return backlog.claim(connection, queue, through=self._through, **options)


def _claim(consumer: Consumer, duty: Duty) -> list[Message]:
    """Messages that were there when draining began; others are left to others. Where there are limits,
    others have to be claimed to be told apart, and are given back.
    """
    found = consumer.dequeue(duty.batch)
    late = [message for message in found if message.id > duty.through]
    if late:
        consumer.release_many(late)
    return [message for message in found if message.id <= duty.through]


@contextmanager
def _renewed(database: Database, held: Sequence[Message], lease: float) -> Iterator[None]:
    """Hold messages for as long as this takes. Who lost a lease learns it at the end."""
    claimed_at = time.monotonic()
    leases = [Lease(message, lease, claimed_at=claimed_at) for message in held]
    with keeper_of(database).keeping(leases):
        yield


@dataclass(frozen=True)
class Ended:
    """A message and what became of it; the result as text."""

    message: Message
    outcome: Outcome
    text: str | None = None


def _call(call: Callable[[Message], Any], message: Message, limits: Config) -> Ended:
    try:
        outcome = as_outcome(call(message))
        text = None
        if isinstance(outcome, Done) and outcome.result is not None:
            text = encode(
                outcome.result,
                max_bytes=limits.max_payload_bytes,
                max_depth=limits.max_payload_depth,
                name="result",
            )
        return Ended(message, outcome, text)
    except InvalidPayload as exc:
        return Ended(message, Failed(exc, dead=True))  # it would be the same the next time
    except Exception as exc:
        return Ended(message, Failed(exc, retry=Retry()))


def _end(database: Database, run_id: int, ended: Sequence[Ended]) -> Tally:
    """End a batch, and tell the run, in one transaction. Not to be repeated: it would count twice."""

    errors = {
        end.message.id: error_text(end.outcome.error, database.config)
        for end in ended
        if isinstance(end.outcome, Failed)
    }

    def end(connection: Connection) -> Tally:
        now = database.now()
        with groups.ending(connection, [end.message.id for end in ended], now=now):
            tally = _complete(connection, ended, now) + _fail(connection, ended, errors, now)
            _give_back(connection, ended, now)
        events.add(
            connection,
            run_id,
            kind=EventKind.EVENT,
            name=DRAINED,
            payload=json.dumps(asdict(tally)),
            now=now,
        )
        return tally

    return database.write(end)


def _complete(connection: Connection, ended: Sequence[Ended], now: Any) -> Tally:
    done = [end for end in ended if isinstance(end.outcome, Done)]
    texts = {end.message.id: end.text for end in done if end.text is not None}
    completed = 0
    for holds in _holds(done):
        completed += len(archive.ack(connection, holds, now=now, results=texts or None))
    return Tally(completed=completed)


def _fail(
    connection: Connection, ended: Sequence[Ended], errors: dict[int, str | None], now: Any
) -> Tally:
    again: list[bool] = []
    for end in ended:
        if isinstance(end.outcome, Failed):
            (holds,) = _holds([end])
            delays = {end.message.id: _delay(end.outcome, end.message)}
            error = errors[end.message.id]
            again += archive.fail(connection, holds, delays=delays, error=error, now=now).values()
    return Tally(failed=again.count(False), retried=again.count(True))


def _delay(outcome: Failed, message: Message) -> float | None:
    if outcome.dead or outcome.retry is None:
        return None if outcome.dead else 0.0
    error = outcome.error if isinstance(outcome.error, BaseException) else None
    return outcome.retry.next_delay(message.attempt, error)


def _give_back(connection: Connection, ended: Sequence[Ended], now: Any) -> None:
    for end in ended:
        if isinstance(end.outcome, GivenBack):
            (holds,) = _holds([end])
            delay, eta = seconds("delay", end.outcome.delay or 0.0), end.outcome.eta
            archive.release(connection, holds, delay=delay, eta=eta, now=now)


def _holds(ended: Sequence[Ended]) -> list[Holds]:
    tokens: dict[int, dict[int, int | None]] = {}
    for end in ended:
        worker = end.message.consumer_worker_id or 0
        tokens.setdefault(worker, {})[end.message.id] = end.message.read_ct
    return [Holds(*held) for held in tokens.items()]


# On the driver


@spark_step(name="look")
def look(queue: str) -> int:
    """The last message that is there now."""
    store = current_attempt().store
    store.admin().get_queue(queue)
    return store.read(tails.greatest_id)


@spark_step(name="round")
def do_round(
    queue: str, function: str, through: int, batch: int, lease: float, tasks: int | None
) -> float | None:
    """Let tasks work until they find nothing. Returns after how many seconds to look again; None if
    nothing is left.
    """
    attempt, spark = current_attempt(), current_session("pgqrs drain")
    _refuse_speculation(spark)
    where = where_of(attempt.store, spark)
    config = config_of_tasks(attempt.store, where)
    called = allowed_function(function)
    duty = Duty(config, attempt.run_id, queue, called, through, batch, lease, where)
    parts = tasks or _parallelism(spark)
    frame = spark.range(0, parts, 1, parts).mapInArrow(_working(duty), "ended long")
    frame.groupBy().sum().collect()
    return _wait(attempt, queue, through, lease)


def where_of(store: Store, spark: SparkSession) -> Where | None:
    """Where tasks learn the URL, if the session says that they are not to be told."""
    options = database_options(store, spark)
    return None if "url" in options else Options(options, ()).where()


def config_of_tasks(store: Store, where: Where | None = None) -> Config:
    """How tasks open the store. They are in each other's way in a bucket: who loses a race tries again,
    or what it has claimed would wait for its lease to lapse.
    """
    url = url_of(store)
    if where is not None:
        url = url.set(password=None)
    dsn = url.render_as_string(hide_password=False)
    return store.config.with_(dsn=dsn, upgrade=False, s3_retry_conflicts=True)


def _working(duty: Duty) -> Any:
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for _ in batches:
            for tally in work(duty):
                yield pa.RecordBatch.from_pydict({"ended": [tally.completed + tally.failed]})

    return run


def _refuse_speculation(spark: SparkSession) -> None:
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise InvalidConfig(
            "spark.speculation is on: Spark would start tasks twice and end one of them, and what that "
            "one has claimed would wait for its lease to lapse"
        )


def _parallelism(spark: SparkSession) -> int:
    context = getattr(spark, "sparkContext", None)  # Connect has none
    return TASKS if context is None else int(context.defaultParallelism)


def _wait(attempt: Attempt, queue: str, through: int, lease: float) -> float | None:
    store = attempt.store
    left = store.read(
        lambda c: stats.unfinished(
            c, queue, through=through, within=lease, now=store._database.now()
        )
    )
    if not left:
        return None
    due = store.read(lambda c: messages.next_in(c, queue, now=store._database.now()))
    return A_MOMENT if due is None else min(due, lease) + A_MOMENT


@spark_step(name="count")
def count() -> dict[str, int]:
    """What became of the messages, as the tasks said in the transactions that ended them."""
    attempt = current_attempt()
    return asdict(drained(attempt.store, attempt.run_id))


def drained(store: Store, run_id: int) -> Tally:
    """What a run has drained so far."""
    told = store.read(lambda c: events.find(c, run_id, name=DRAINED))
    return sum((Tally(**event.payload) for event in told), Tally())


@workflow(name="spark-drain", queue=QUEUE)
def drain(
    queue: str,
    function: str,
    batch: int = 5000,
    lease: float = 60.0,
    tasks: int | None = None,
) -> dict[str, int]:
    """Work off what is in a queue now: call the function (`module:name`) for each message, as a worker
    would. Returns how many were completed, failed for good, and tried again.

    Each of the `tasks` claims `batch` messages at a time, for `lease` seconds, which are renewed. The
    function must be there to import wherever Spark runs.
    """
    whole("batch", batch, low=FEWEST, high=MOST)
    through = look(queue)
    while True:
        again_in = do_round(queue, function, through, batch, lease, tasks)
        if again_in is None:
            return count()
        sleep(again_in)
