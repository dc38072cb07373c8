"""What the body of a workflow does to others: messages that it adds.

Each is recorded as a step, in the transaction that does it: it is done once, and a run that is resumed
gets the same ids. What could not be part of such a transaction (another store, a transaction of the
application's own) is refused, since it would be done again with every replay. A step may do it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from pgqrs.errors import NotDurable, QueueNotFound
from pgqrs.producer import NewMessages
from pgqrs.stores import Database
from pgqrs.stores.base import BorrowedConnection
from pgqrs.types import MessageId, StepStatus
from pgqrs.workflows.async_context import AsyncContext
from pgqrs.workflows.context import Context, Flow, persist
from pgqrs.workflows.flows import is_done, write_down
from pgqrs.workflows.history import Arguments, Call, escaped
from pgqrs.workflows.journal import RecordedBefore, StepError

AsyncCall = Callable[[Callable[[], Any]], Awaitable[Any]]
"""How async code reaches a database."""


def enqueue(context: Context, database: Database | None, new: NewMessages) -> list[MessageId]:
    """Add messages from the body of a sync workflow."""
    context.check_place("enqueue")
    check_store(context, database, "enqueue")
    if context.is_async:
        raise NotDurable(
            "enqueue",
            "an async workflow awaits what it enqueues: use `await task.aenqueue(…)` or the producer "
            "of an AsyncStore, or do it in a step",
        )
    if not new.batch.size:
        return []
    ids: list[MessageId] = context.perform(*_enqueue(context, new))
    return ids


async def enqueue_async(
    context: Context,
    database: Database | None,
    new: NewMessages,
    *,
    call: AsyncCall | None,
    sender: Callable[[], int | None] | None,
) -> list[MessageId]:
    """Add messages from the body of an async workflow."""
    if not isinstance(context, AsyncContext):
        raise NotDurable(
            "enqueue",
            "a sync workflow has nothing to await it with: use `task.enqueue(…)` or the producer of a "
            "Store, or do it in a step",
        )
    context.check_place("enqueue")
    context.branch()  # that of this task, which has its number before anything is awaited
    await check_store_async(context, database, "enqueue", call)
    if sender is not None and call is not None:
        new.options["producer"] = await call(sender)
    if not new.batch.size:
        return []
    ids: list[MessageId] = await context.perform(*_enqueue(context, new))
    return ids


def _enqueue(context: Context, new: NewMessages) -> tuple[Flow[list[MessageId]], Call]:
    call = context.take(f"pgqrs.enqueue:{escaped(new.queue)}", _arguments(new))
    return _enqueue_once(context, call, new), call


def _arguments(new: NewMessages) -> Arguments | None:
    """What tells two calls apart. Pickled bytes are not the same in every process."""
    if new.options["codec"] is not None:
        return None
    batch, labels = new.batch, new.labels
    labelled = {} if labels is None else {"keys": list(labels.keys), "groups": list(labels.groups)}
    return (tuple(batch.texts) if batch.whole is None else (batch.whole,)), labelled


def _enqueue_once(context: Context, call: Call, new: NewMessages) -> Flow[list[MessageId]]:
    found, journal = call.record, context.journal
    if found is not None and is_done(call):
        if found.status is StepStatus.FAILED:
            raise context.blame(QueueNotFound(new.queue), call)
        return _ids(found.output)
    check_queue(context, call, new.queue, "enqueue")
    add = partial(journal.enqueue, context.id, new, again=found is not None)
    try:
        ids, recorded = yield from persist(partial(add, context.step(call, StepStatus.COMPLETED)))
    except RecordedBefore:
        found = yield from persist(partial(journal.get_step, context.id, call.step_id))
        return _ids(found.output)
    except StepError as exc:
        # On record, since the workflow may deal with it, and the queue may be there the next time.
        failed = context.step(call, StepStatus.FAILED, error=str(exc.error))
        yield from write_down(context, failed, again=found is not None)
        raise context.blame(QueueNotFound(new.queue), call) from exc
    context.check(recorded)
    return ids


def _ids(found: Any) -> list[MessageId]:
    existing = set(found["existing"])
    return [
        MessageId.existing(id) if place in existing else MessageId(id)
        for place, id in enumerate(found["ids"])
    ]


# Which store


def check_store(context: Context, database: Database | None, what: str) -> None:
    """Refuse another store than the run's."""
    same = _is_same(context, database, what)
    if same is None:
        assert database is not None
        ours = context.journal.database
        same = database.store_id == context.reach(lambda: ours.store_id)
    if not same:
        _refuse(context, what)


async def check_store_async(
    context: AsyncContext, database: Database | None, what: str, call: AsyncCall | None
) -> None:
    """The same where the databases are to be awaited."""
    same = _is_same(context, database, what)
    if same is None:
        assert database is not None
        ours, offload = context.journal.database, context.offload
        theirs = await (call or offload)(lambda: database.store_id)
        same = theirs == await offload(lambda: ours.store_id)
    if not same:
        _refuse(context, what)


def check_queue(context: Context, call: Call, queue: str, what: str) -> None:
    """Refuse a queue on another shard than the run's: no transaction covers both."""
    ours = context.journal.database
    if ours.of_queue(queue) is not ours:
        raise context.blame(_on_another_shard(context, what, f"queue {queue!r}"), call)


def check_run(context: Context, call: Call, run_id: int, what: str) -> None:
    """Refuse another run that is known to be on another shard."""
    if context.journal.database.is_of_another_shard(run_id):
        raise context.blame(_on_another_shard(context, what, f"run {run_id}"), call)


def _on_another_shard(context: Context, what: str, other: str) -> NotDurable:
    return NotDurable(
        what,
        f"{other} is on another shard than run {context.id}, and no transaction covers both; do it in "
        "a step, or place their queues together, with shard_by=group",
    )


def _is_same(context: Context, database: Database | None, what: str) -> bool | None:
    if database is None:
        return True
    if isinstance(database, BorrowedConnection):
        raise _of_a_transaction(what)
    return database.is_same_store(context.journal.database)


def refuse_transaction(store: Any, what: str) -> None:
    """Refuse a `store.using(…)` where the body of a workflow names a store."""
    if hasattr(store, "_within") or isinstance(
        getattr(store, "_database", None), BorrowedConnection
    ):
        raise _of_a_transaction(what)


def _of_a_transaction(what: str) -> NotDurable:
    return NotDurable(
        what,
        "the body of a workflow is run again whenever its run is resumed, and a transaction of your "
        "own with it; use a step, best a transactional one",
    )


def _refuse(context: Context, what: str) -> NoReturn:
    raise NotDurable(
        what,
        f"it is on another store than run {context.id}, and so would be done again whenever the run "
        "is resumed; do it in a step",
    )
