"""What workflows do to others: messages and runs, from the body and from steps.

In the body an effect is recorded in the transaction that does it. In a step it is a plain call, on the
run's store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

import pgqrs
from pgqrs import NotDurable, QueueNotFound, RunEnded, RunFailed, RunStatus
from pgqrs.testing.clock import ManualClock
from pgqrs.testing.conformance.harness import BESIDE, QUEUE, Crash, Drain, Harness, worker
from pgqrs.testing.portal import Synced

seen: list[Any] = []
crashes: list[str] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()
    crashes.clear()


def crash(where: str) -> None:
    """Die here, if the test wants that: once."""
    if where in crashes:
        crashes.remove(where)
        raise Crash


def payloads(store: Any, queue: str = QUEUE) -> list[Any]:
    return [message.payload for message in store.admin().peek(queue)]


def steps(run: Any) -> list[str]:
    return [step.step_id for step in run.steps()]


@pgqrs.task(queue=QUEUE)
def mail(to: str) -> str:
    return to


@pgqrs.workflow
def sub(n: int) -> int:
    return n + int(pgqrs.wait_for_event("go", timeout=3600, default=0))


# Tasks


@pgqrs.workflow
def mailing() -> list[int]:
    first = mail.enqueue("ada").id
    crash("after the first")
    ids = [first, mail.options(delay=60, priority=3, headers={"a": 1}).enqueue("bob").id]
    seen.append(ids)
    return ids


@pgqrs.workflow
async def mailing_async() -> list[int]:
    first = (await mail.aenqueue("ada")).id
    crash("after the first")
    sent = await mail.options(delay=60, priority=3, headers={"a": 1}).aenqueue("bob")
    seen.append([first, sent.id])
    return [first, sent.id]


@pytest.mark.parametrize("body", [mailing, mailing_async], ids=["sync", "async"])
def test_a_task_is_enqueued_once(
    store: Any, admin: Any, drain: Drain, crash_once: Drain, body: Any
) -> None:
    run = body.start(store=store)
    crashes.append("after the first")
    crash_once(body)
    assert [message.payload["args"] for message in admin.peek(QUEUE)] == [["ada"]]
    drain(body)
    first, second = sorted(admin.peek(QUEUE), key=lambda message: message.id)
    assert run.result(timeout=0) == [first.id, second.id]
    assert (second.priority, second.headers) == (3, {"a": 1})
    assert second.vt > second.enqueued_at
    assert steps(run) == ["pgqrs.enqueue:tasks", "pgqrs.enqueue:tasks#2"]


@pgqrs.workflow
def keyed() -> list[Any]:
    sent: list[Any] = [mail.options(key="one", group="g").enqueue("ada").id for _ in range(2)]
    crash("keyed")
    seen.append([id.created for id in sent])
    return sent


def test_keys_and_groups_are_those_of_the_first_life(
    store: Any, admin: Any, drain: Drain, crash_once: Drain
) -> None:
    run = keyed.start(store=store)
    crashes.append("keyed")
    crash_once(keyed)
    (message,) = admin.peek(QUEUE)
    assert (message.key, message.group) == ("one", "g")
    drain(keyed)
    assert run.result(timeout=0) == [message.id, message.id]
    assert seen == [[True, False]]


def test_a_task_that_is_enqueued_is_run(store: Any, admin: Any) -> None:
    @pgqrs.workflow
    def body() -> str:
        sent = mail.enqueue("ada")
        pgqrs.sleep(0)
        assert mail.enqueue("bob").id > sent.id
        return type(sent).__name__

    with worker(store, queues=[QUEUE], tasks=[mail], workflows=[body]):
        run = body.start(store=store)
        assert run.result(timeout=60) == "Handle"
    worker(store, queues=[QUEUE], tasks=[mail]).run(until_empty=True, signals=False)
    done = admin.list_archive(QUEUE)
    assert sorted(ended.result for ended in done) == ["ada", "bob"]


# Producers


def producing(store: Any, use: Any) -> Any:
    """A workflow that uses a producer of the store, sync or async as the store is."""
    if isinstance(store, Synced):
        producer = store._wrapped.producer(QUEUE)

        @pgqrs.workflow(name="producing")
        async def produce() -> Any:
            found = await use(producer)
            crash("produced")
            seen.append(found)
            return found

        return produce
    plain = store.producer(QUEUE)

    @pgqrs.workflow(name="producing")
    def produce_sync() -> Any:
        found = use(plain)
        crash("produced")
        seen.append(found)
        return found

    return produce_sync


def test_a_producer_enqueues_once(store: Any, admin: Any, drain: Drain, crash_once: Drain) -> None:
    eta = datetime(2126, 1, 1, tzinfo=UTC)
    body = producing(store, lambda producer: producer.enqueue({"n": 1}, eta=eta, key="k"))
    run = body.start(store=store)
    crashes.append("produced")
    crash_once(body)
    drain(body)
    (message,) = admin.peek(QUEUE)
    assert (message.vt, message.key, run.result(timeout=0)) == (eta, "k", message.id)
    assert isinstance(seen[0], pgqrs.MessageId)
    assert seen[0].created


def test_a_producer_enqueues_once_in_a_worker(store: Any, admin: Any) -> None:
    body = producing(store, lambda producer: producer.enqueue(1))
    with worker(store, workflows=[body]):  # which may have connections of its own
        run = body.start(store=store)
        id = run.result(timeout=60)
    assert [message.id for message in admin.peek(QUEUE)] == [id]
    assert steps(run) == ["pgqrs.enqueue:tasks"]


def test_a_producer_of_an_equal_store_enqueues_once(
    harness: Harness, store: Any, admin: Any, drain: Drain
) -> None:
    again = harness.open(clock=harness.clock)
    body = producing(again, lambda producer: producer.enqueue(1))
    run = body.start(store=store)
    drain(body)
    assert payloads(store) == [1]
    assert steps(run) == ["pgqrs.enqueue:tasks"]


def test_many_messages_are_enqueued_once_and_together(
    store: Any, admin: Any, drain: Drain, crash_once: Drain
) -> None:
    def use(producer: Any) -> Any:
        return producer.enqueue_many([1, "two", None], keys=["a", None, "a"], unique=60)

    body = producing(store, use)
    run = body.start(store=store)
    crashes.append("produced")
    crash_once(body)
    drain(body)
    assert payloads(store) == [1, "two"]
    ids = run.result(timeout=0)
    assert ids[0] == ids[2]
    assert [id.created for id in seen[0]] == [True, True, False]
    assert steps(run) == ["pgqrs.enqueue:tasks"]


def test_a_large_batch_is_one_call(store: Any, admin: Any, drain: Drain) -> None:
    body = producing(store, lambda producer: producer.enqueue_many(range(2000)))
    run = body.start(store=store)
    drain(body)
    assert len(run.result(timeout=0)) == admin.queue_stats(QUEUE).ready == 2000


def test_no_messages_are_no_call(store: Any, admin: Any, drain: Drain) -> None:
    body = producing(store, lambda producer: producer.enqueue_many([]))
    run = body.start(store=store)
    drain(body)
    assert (run.result(timeout=0), steps(run)) == ([], [])


def test_calls_that_are_swapped_are_noticed(store: Any, admin: Any, drain: Drain) -> None:
    order = ["ada", "bob"]

    @pgqrs.workflow
    def body() -> None:
        for name in order:
            mail.enqueue(name)
        pgqrs.wait_for_event("go")

    run = body.start(store=store)
    drain(body)
    order.reverse()
    run.signal("go")
    drain(body)
    assert run.status() is RunStatus.PAUSED
    assert "pgqrs.enqueue:tasks" in str(run.refresh().error)
    assert len(payloads(store)) == 2


def test_branches_enqueue_beside_each_other(
    store: Any, admin: Any, drain: Drain, crash_once: Drain
) -> None:
    @pgqrs.workflow
    async def body() -> list[int]:
        async def send(name: str) -> int:
            return (await mail.aenqueue(name)).id

        async def last_one(name: str) -> int:
            await asyncio.sleep(0)
            return await send(name)

        *sent, last = await asyncio.gather(*map(send, "abc"), last_one("d"))
        crash("sent")
        return [*sent, last]

    run = body.start(store=store)
    crashes.append("sent")
    crash_once(body)
    drain(body)
    found = {message.payload["args"][0]: message.id for message in admin.peek(QUEUE)}
    assert run.result(timeout=0) == [found[name] for name in "abcd"]
    assert len(found) == 4


def sending_nowhere(store: Any, *, waits: bool) -> Any:
    """A workflow that uses a producer of a queue that does not exist."""
    face = store._wrapped if isinstance(store, Synced) else store
    producer = face.producer("nowhere")

    @pgqrs.workflow(name="lost")
    def body() -> Any:
        try:
            return producer.enqueue(1)
        except QueueNotFound as error:
            if not waits:
                raise
            pgqrs.wait_for_event("go")
            return error.name

    @pgqrs.workflow(name="lost")
    async def body_async() -> Any:
        try:
            return await producer.enqueue(1)
        except QueueNotFound as error:
            if not waits:
                raise
            await pgqrs.wait_for_event("go")
            return error.name

    return body_async if isinstance(store, Synced) else body


def test_a_queue_that_does_not_exist_is_the_workflows_to_deal_with(
    store: Any, admin: Any, drain: Drain
) -> None:
    body = sending_nowhere(store, waits=True)
    run = body.start(store=store)
    drain(body)
    admin.create_queue("nowhere")  # too late for this run
    run.signal("go")
    drain(body)
    assert run.result(timeout=0) == "nowhere"
    assert payloads(store, "nowhere") == []


def test_a_run_that_a_missing_queue_failed_is_retried(store: Any, admin: Any, drain: Drain) -> None:
    body = sending_nowhere(store, waits=False)
    run = body.start(store=store)
    drain(body)
    with pytest.raises(RunFailed, match="nowhere"):
        run.result(timeout=0)
    admin.create_queue("nowhere")
    run.retry()
    drain(body)
    (message,) = admin.peek("nowhere")
    assert run.result(timeout=0) == message.id


def test_the_queue_of_a_task_is_created(store: Any, admin: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def body() -> Any:
        return mail.options(queue=BESIDE).enqueue("ada").id

    run = body.start(store=store)
    drain(body)
    assert [message.id for message in admin.peek(BESIDE)] == [run.result(timeout=0)]


@pgqrs.workflow
def mailing_many() -> list[Any]:
    sent = [h.id for h in mail.enqueue_many([("ada",), {"to": "bob"}], keys=["a", None])]
    crash("sent")
    return [*sent, *(child.id for child in sub.start_many([(1,), (2,)]))]


@pgqrs.workflow
async def mailing_many_async() -> list[Any]:
    many = await mail.aenqueue_many([("ada",), {"to": "bob"}], keys=["a", None])
    crash("sent")
    return [*(h.id for h in many), *(child.id for child in await sub.start_many([(1,), (2,)]))]


@pytest.mark.parametrize("body", [mailing_many, mailing_many_async], ids=["sync", "async"])
def test_many_tasks_and_children_at_once(
    store: Any, admin: Any, drain: Drain, crash_once: Drain, body: Any
) -> None:
    run = body.start(store=store)
    crashes.append("sent")
    crash_once(body)
    drain(body, sub)
    *sent, first, second = run.result(timeout=0)
    assert [message.id for message in admin.peek(QUEUE)] == sent
    children = store.workflows.list_runs(name="sub", parent_id=run.id)
    assert {child.id for child in children} == {first, second}
    assert steps(run)[0] == "pgqrs.enqueue:tasks"


def test_what_cannot_be_sent_is_refused_at_once(store: Any, admin: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def body() -> str:
        try:
            mail.options(priority=10**9).enqueue("ada")
        except pgqrs.InvalidArgument as error:
            return str(error)
        return "sent"

    run = body.start(store=store)
    drain(body)
    assert "priority" in run.result(timeout=0)
    assert steps(run) == []


# What is refused


def error_of(store: Any, drain: Drain, body: Any) -> str:
    """The error by which a run failed."""
    run = body.start(store=store)
    drain(body)
    assert run.status() is RunStatus.FAILED
    return str(run.refresh().error)


def test_an_async_workflow_awaits_what_it_enqueues(store: Any, admin: Any, drain: Drain) -> None:
    @pgqrs.workflow
    async def body() -> None:
        mail.enqueue("ada")

    error = error_of(store, drain, body)
    assert "NotDurable" in error
    assert "await task.aenqueue" in error
    assert payloads(store) == []


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pgqrs.Store]:
    """Another store: one for all tests, since making it takes long."""
    path = tmp_path_factory.mktemp("other") / "other.db"
    with pgqrs.Store(f"sqlite:///{path}", upgrade=True) as other:
        other.admin().create_queue(QUEUE)
        yield other


def test_another_store_is_refused(store: Any, admin: Any, drain: Drain, other: pgqrs.Store) -> None:
    @pgqrs.workflow
    def body() -> None:
        mail.options(store=other).enqueue("ada")

    @pgqrs.workflow
    def body_producer() -> None:
        other.producer(QUEUE).enqueue(1)

    @pgqrs.workflow
    def body_start() -> None:
        sub.start(1, store=other)

    @pgqrs.workflow
    async def body_async() -> None:
        await mail.options(store=other).aenqueue("ada")

    @pgqrs.workflow
    async def body_async_start() -> None:
        await sub.start(1, store=other)

    for each in (body, body_producer, body_start, body_async, body_async_start):
        assert "another store" in error_of(store, drain, each)
    assert other.admin().queue_stats(QUEUE).ready == 0
    assert other.workflows.list_runs() == []
    assert payloads(store) == []


def test_the_store_of_the_run_may_be_named(store: Any, admin: Any, drain: Drain) -> None:
    named = store._wrapped if isinstance(store, Synced) else store

    @pgqrs.workflow
    def body() -> list[int]:
        return [mail.options(store=named).enqueue("ada").id, sub.start(1, store=named).id]

    @pgqrs.workflow
    async def body_async() -> list[int]:
        sent = await mail.options(store=named).aenqueue("ada")
        return [sent.id, (await sub.start(1, store=named)).id]

    for each in (body, body_async):
        run: Any = each.start(store=store)
        drain(each, sub)
        assert steps(run) == ["pgqrs.enqueue:tasks", "pgqrs.start:sub"]


def test_a_transaction_of_ones_own_is_refused(
    harness: Harness, store: Any, admin: Any, drain: Drain
) -> None:
    using: list[Any] = []

    @pgqrs.workflow(name="outbox")
    def body() -> list[str]:
        return [
            refused(lambda: using[0].enqueue(QUEUE, 1)),
            refused(lambda: mail.options(store=using[0]).enqueue("ada")),
            refused(lambda: sub.start(1, store=using[0])),
            refused(lambda: using[0].workflows.start(sub, (1,))),
        ]

    @pgqrs.workflow(name="outbox")
    async def body_async() -> list[str]:
        return [
            await refused_async(lambda: using[0].enqueue(QUEUE, 1)),
            await refused_async(lambda: mail.options(store=using[0]).aenqueue("ada")),
            await refused_async(lambda: sub.start(1, store=using[0])),
            await refused_async(lambda: using[0].workflows.start(sub, (1,))),
        ]

    which: Any = body_async if isinstance(store, Synced) else body
    run = which.start(store=store)
    with harness.transaction(store) as transaction:
        given = transaction.using
        using.append(given._wrapped if isinstance(given, Synced) else given)
    drain(which)  # only now: a database in memory has one connection
    assert all("transactional" in answer for answer in run.result(timeout=0))
    assert payloads(store) == []


def refused(call: Any) -> str:
    try:
        call()
    except NotDurable as error:
        return str(error)
    return "done"


async def refused_async(call: Any) -> str:
    try:
        await call()
    except NotDurable as error:
        return str(error)
    return "done"


def test_run_inline_of_another_workflow_is_refused(store: Any, drain: Drain) -> None:
    @pgqrs.workflow
    def body() -> None:
        sub.run_inline(1)

    @pgqrs.workflow
    async def body_async() -> None:
        await sub.run_inline(1)  # type: ignore[misc]

    for each in (body, body_async):
        assert "start(…)" in error_of(store, drain, each)
    assert store.workflows.list_runs(name="sub") == []


@pgqrs.step
def note(what: Any) -> Any:
    seen.append(what)
    return what


def in_thread(call: Any) -> Any:
    answers: list[Any] = []

    def answer() -> None:
        try:
            answers.append(call())
        except NotDurable as error:
            answers.append(str(error))

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    return answers[0]


def in_pool(call: Any) -> Any:
    try:
        return pool.submit(call).result()
    except NotDurable as error:
        return str(error)


def in_copy(call: Any) -> Any:
    return in_thread(lambda: copy_context().run(call))


pool = ThreadPoolExecutor(1)
CALLS: list[Any] = [
    lambda: note(1),
    lambda: mail.enqueue("ada"),
    lambda: sub.start(1),
    lambda: pgqrs.sleep(0),
    lambda: pgqrs.map(note, [1]),
]


@pytest.mark.parametrize("how", [in_thread, in_pool, in_copy])
def test_durable_calls_from_threads_are_refused(
    store: Any, admin: Any, drain: Drain, how: Any
) -> None:
    @pgqrs.workflow
    def body() -> list[Any]:
        return [how(call) for call in CALLS]

    @pgqrs.workflow
    async def body_async() -> list[Any]:
        return [how(call) for call in CALLS] + [await to_thread(call) for call in CALLS]

    async def to_thread(call: Any) -> Any:
        try:
            return await asyncio.to_thread(call)
        except NotDurable as error:
            return str(error)

    assert in_pool(lambda: 1) == 1  # its thread is there before the run
    for each in (body, body_async):
        run: Any = each.start(store=store)
        drain(each)
        answers = run.result(timeout=0)
        assert all("thread" in str(answer) for answer in answers), answers
        assert steps(run) == []
    assert seen == payloads(store) == []
    assert in_pool(lambda: note(3)) == 3  # a pool works for others, too


def test_threads_of_steps_are_theirs(store: Any, admin: Any, drain: Drain) -> None:
    @pgqrs.step
    def outer() -> list[Any]:
        return [in_thread(lambda: note(1)), in_pool(lambda: note(2)), note(3)]

    @pgqrs.workflow
    def body() -> list[Any]:
        return [outer(), *pgqrs.map(note, [4, 5])]

    run = body.start(store=store)
    drain(body)
    assert run.result(timeout=0) == [[1, 2, 3], 4, 5]


def test_calls_after_the_end_are_refused(store: Any, admin: Any, drain: Drain) -> None:
    left: list[Any] = []

    @pgqrs.workflow
    def body() -> None:
        left.append(copy_context())

    @pgqrs.workflow
    async def body_async() -> None:
        left.append(copy_context())

    for each in (body, body_async):
        each.start(store=store)
        drain(each)
        for call in CALLS:
            with pytest.raises(NotDurable):
                left[-1].run(call)
    assert seen == payloads(store) == []


def test_tasks_that_a_run_leaves_behind_are_cancelled(store: Any, admin: Any, drain: Drain) -> None:
    @pgqrs.workflow
    async def body(fails: bool) -> None:
        async def later() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                seen.append("cancelled")
            await mail.aenqueue("too late")

        task = asyncio.create_task(later())
        await mail.aenqueue("ada")
        kept.append(task)
        if fails:
            raise ValueError("no")

    kept: list[Any] = []
    for fails in (False, True):
        body.start(fails, store=store)
    drain(body)
    assert seen == ["cancelled"] * 2
    assert all(task.cancelled() for task in kept)
    assert [payload["args"] for payload in payloads(store)] == [["ada"]] * 2


# In steps


@pgqrs.step
def send_in_step() -> list[int]:
    return [mail.enqueue("ada").id, sub.start(1).id]


@pgqrs.step(timeout=60)
def send_in_time() -> list[int]:
    return [mail.enqueue("ada").id, sub.start(1).id]


@pgqrs.step
def send_one(_: int) -> list[int]:
    return [mail.enqueue("ada").id, sub.start(1).id]


@pgqrs.step
async def send_async() -> list[int]:
    return [(await mail.aenqueue("ada")).id, (await sub.start(1)).id]


@pgqrs.step(transactional=True)
def send_in_transaction(connection: Connection) -> list[int]:
    return [mail.enqueue("ada").id, sub.start(1).id]


SENDING: list[Any] = [send_in_step, send_in_time, send_in_transaction]


@pgqrs.workflow
def sending() -> Any:
    return [step() for step in SENDING] + pgqrs.map(send_one, [1])


@pgqrs.workflow
async def sending_async() -> Any:
    found = [await step() for step in (*SENDING, send_async)]
    return found + await pgqrs.map(send_one, [1])


@pytest.mark.parametrize("body", [sending, sending_async], ids=["sync", "async"])
def test_steps_use_the_store_of_their_run(store: Any, admin: Any, drain: Drain, body: Any) -> None:
    run = body.start(store=store)
    drain(body, sub)
    messages, children = zip(*run.result(timeout=0), strict=True)
    assert sorted(found.id for found in admin.peek(QUEUE)) == sorted(messages)
    found = store.workflows.list_runs(name="sub")
    assert {child.id for child in found} == set(children)
    assert {child.parent_id for child in found} == {None}


def test_steps_of_workers_use_their_store(store: Any, admin: Any) -> None:
    @pgqrs.workflow
    def body() -> Any:
        return [send_in_step()[0], send_in_transaction()[0]]

    @pgqrs.workflow
    async def body_async() -> Any:
        return [(await send_async())[0], (await send_in_step())[0]]  # type: ignore[misc]

    with worker(store, workflows=[body, body_async]):
        ids = [
            id for each in (body, body_async) for id in each.start(store=store).result(timeout=60)
        ]
    assert sorted(found.id for found in admin.peek(QUEUE)) == sorted(ids)


def test_what_a_transactional_step_sends_is_undone_with_it(
    store: Any, admin: Any, drain: Drain
) -> None:
    @pgqrs.step(transactional=True)
    def fails(connection: Connection) -> None:
        SENDING[2]._function(connection)
        raise ValueError("no")

    @pgqrs.workflow
    def body() -> str:
        try:
            fails()
        except pgqrs.StepFailed:
            return "failed"
        return "sent"

    run = body.start(store=store)
    drain(body)
    assert run.result(timeout=0) == "failed"
    assert payloads(store) == []
    assert store.workflows.list_runs(name="sub") == []


def test_tasks_start_workflows_on_their_store(store: Any, admin: Any) -> None:
    @pgqrs.task(queue=QUEUE, name="starts")
    def starts() -> int:
        return sub.start(1).id

    @pgqrs.task(queue=QUEUE, name="starts_async")
    async def starts_async() -> int:
        return (await sub.start(2)).id

    for task in (starts, starts_async):
        store.producer(QUEUE).enqueue(task.payload())
    worker(store, queues=[QUEUE], tasks=[starts, starts_async]).run(until_empty=True, signals=False)
    found = store.workflows.list_runs(name="sub")
    assert {run.id for run in found} == {ended.result for ended in admin.list_archive(QUEUE)}


# Children


@pgqrs.workflow
def telling() -> list[Any]:
    child = sub.start(1)
    before = child.status()
    child.signal("go", 5)
    crash("told")
    result = child.result()
    try:
        child.signal("go", 6)
    except RunEnded as ended:
        error = RunStatus(ended.status)
        return [before.value, result, child.status().value, error.value, child.cancel().value]
    return []


@pgqrs.workflow
async def telling_async() -> list[Any]:
    child = await sub.start(1)
    before = await child.status()
    await child.signal("go", 5)
    crash("told")
    result = await child.result()
    try:
        await child.signal("go", 6)
    except RunEnded as ended:
        error = RunStatus(ended.status)
        after, cancelled = await child.status(), await child.cancel()
        return [before.value, result, after.value, error.value, cancelled.value]
    return []


@pytest.mark.parametrize("body", [telling, telling_async], ids=["sync", "async"])
def test_children_are_told_once(store: Any, drain: Drain, crash_once: Drain, body: Any) -> None:
    run = body.start(store=store)
    crashes.append("told")
    crash_once(body)
    drain(body, sub)
    assert run.result(timeout=0) == ["pending", 6, "completed", "completed", "completed"]
    assert steps(run) == [
        "pgqrs.start:sub",
        "pgqrs.status:sub",
        "pgqrs.signal:go",
        "pgqrs.result:sub",
        "pgqrs.signal:go#2",
        "pgqrs.status:sub#2",
        "pgqrs.cancel:sub",
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_children_are_cancelled(store: Any, drain: Drain, is_async: bool) -> None:
    @pgqrs.workflow(name="cancelling")
    def body() -> list[Any]:
        child = sub.start(1)
        pgqrs.wait_for_event("on")
        return [child.cancel().value, child.status().value]

    @pgqrs.workflow(name="cancelling")
    async def body_async() -> list[Any]:
        child = await sub.start(1)
        await pgqrs.wait_for_event("on")
        return [(await child.cancel()).value, (await child.status()).value]

    which: Any = body_async if is_async else body
    run = which.start(store=store)
    drain(which, sub)
    run.signal("on")
    drain(which, sub)
    assert run.result(timeout=0) == ["cancelled", "cancelled"]


def test_handles_of_children_are_for_their_workflow(store: Any, drain: Drain) -> None:
    children: list[Any] = []

    @pgqrs.step
    def ask() -> str:
        try:
            children[0].status()
        except NotDurable as error:
            return str(error)
        return "asked"

    @pgqrs.workflow
    def body() -> str:
        children.append(sub.start(1))
        return ask()

    run = body.start(store=store)
    drain(body, sub)
    assert "store.workflows.handle" in run.result(timeout=0)


def test_other_runs_are_signalled_once(
    store: Any, clock: ManualClock, drain: Drain, crash_once: Drain
) -> None:
    wrapped = store._wrapped if isinstance(store, Synced) else store

    @pgqrs.workflow(name="signalling")
    def body(id: int) -> None:
        wrapped.workflows.signal(id, "go", 1)
        crash("told")

    @pgqrs.workflow(name="signalling")
    async def body_async(id: int) -> None:
        await wrapped.workflows.handle(id).signal("go", 1)
        crash("told")

    which: Any = body_async if isinstance(store, Synced) else body

    @pgqrs.workflow
    def twice() -> list[Any]:
        return [pgqrs.wait_for_event("go", timeout=timedelta(hours=1), default=None) for _ in "ab"]

    other = twice.start(store=store)
    drain(twice)
    run = which.start(other.id, store=store)
    crashes.append("told")
    crash_once(which)
    drain(which, twice)
    clock.advance(3601)
    drain(twice)
    assert other.result(timeout=0) == [1, None]
    assert steps(run) == ["pgqrs.signal:go"]
