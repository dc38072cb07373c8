"""Messages of a queue for a whole run: claimed at its beginning, acknowledged at its end.

What a run claims is a stream of its own (see `pgqrs.streams`). It does not come back by time, and is the
same whenever it is asked for: whoever resumes the run works on these messages, and nobody else does.
A run that never gets to its end keeps them, until it is resumed or retried, or until somebody gives
them back with `admin.release_stream(...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgqrs.errors import StreamNotFound
from pgqrs.repositories import tails
from pgqrs.repositories.streams import ANY
from pgqrs.spark.frames import Frame
from pgqrs.spark.pipelines import database_options
from pgqrs.spark.session import current_session
from pgqrs.spark.steps import current_attempt, spark_step, written_by
from pgqrs.stores import Database
from pgqrs.streams import LARGEST, Stream, batches, end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Claim:
    """What a run has claimed."""

    queue: str
    stream: str
    rows: int

    def df(self, spark: SparkSession | None = None) -> DataFrame:
        """The messages, for a Spark step of the run."""
        session = spark or current_session()
        options = database_options(current_attempt().store, session)
        options |= {"mode": "claim", "queue": self.queue, "stream": self.stream}
        return session.read.format("pgqrs").options(**options).load()


@spark_step(name="claim")
def claim(queue: str, limit: int | None = None) -> Claim:
    """Claim what is in a queue now, or no more than so many of it. A step of its own. Of a group all
    messages are claimed, not only the first. What is delayed, or held by others, is left.
    """
    attempt = current_attempt()
    database = attempt.store._database
    stream = Stream(database, f"run-{attempt.run_id}-{attempt.step_id}", queue)
    try:
        # An attempt that did not live to record it may have claimed some.
        rows = _held(database, stream.name)
        through = database.read(tails.greatest_id)
        found = attempt.store.admin().queue_stats(queue)
        wanted = rows + found.ready + found.blocked if limit is None else limit
        while rows < wanted and stream.add_batch(
            limit=min(wanted - rows, LARGEST), through=through
        ):
            # Counted anew: a claim whose answer was lost is repeated, and both count.
            rows = _held(database, stream.name)
    finally:
        stream.close()
    return Claim(queue, stream.name, rows)


def _held(database: Database, stream: str) -> int:
    held = batches(database, stream, after=0, through=ANY)
    return sum(len(batch.holds.tokens) for batch in held)


@spark_step(name="acknowledge")
def acknowledge(claimed: Claim, frames: Sequence[Frame] | None = None) -> int:
    """Acknowledge what the run has claimed. A step of its own. Returns how many messages that were;
    fewer than were claimed, if somebody has released or deleted some meanwhile.

    Raises `FrameLost`, and acknowledges nothing, if the files of one of the `frames` are gone: by
    default of all that steps of the run have written.
    """
    attempt = current_attempt()
    for frame in written_by(attempt) if frames is None else frames:
        frame.check()
    try:
        return end(attempt.store._database, claimed.stream)
    except StreamNotFound:  # an attempt has done so, and did not live to record it
        return claimed.rows
