"""Stores of several objects: queues are spread over them, and ids say where their rows are."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from pgqrs import errors
from pgqrs.stores.placement import RANGE_BITS, Place, above
from pgqrs.testing import ManualClock
from tests.s3.conftest import Object
from tests.s3.proxy import answered, served

SHARDS = 3
QUEUES = ("tasks", "workflows", "a")
"""One on each of three shards."""
Open = Callable[..., pgqrs.Store]


def place(queue: str, *, by_group: bool = False, count: int = SHARDS) -> int:
    return Place(0, count, by_group).number_of_queue(queue)


def sharded(object: Object, shards: int = SHARDS, **settings: Any) -> pgqrs.Store:
    return object.open(by_hand=False, s3_shards=shards, **settings)


def completed(store: pgqrs.Store, queue: str) -> int:
    return store.admin().queue_stats(queue).archived[pgqrs.ArchiveReason.COMPLETED]


@pytest.fixture(scope="session")
def made(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The objects of a store of three shards, with a queue on each."""
    with ExitStack() as cleanup:
        object = Object(s3_server, tmp_path_factory.mktemp("made"), cleanup)
        opened = sharded(object, upgrade=True)
        for queue in QUEUES:
            opened.admin().create_queue(queue)
        return [object.body(f"/{number:03}.sqlite") for number in range(SHARDS)]


@pytest.fixture
def store(empty: Object, made: list[bytes]) -> pgqrs.Store:
    """A store of three shards, with a queue on each."""
    for number, body in enumerate(made):
        empty.put(body, f"/{number:03}.sqlite")
    return sharded(empty)


def test_the_queues_of_these_tests_are_on_different_shards() -> None:
    assert {place(queue) for queue in QUEUES} == set(range(SHARDS))
    assert place("tasks.small", by_group=True) == place("tasks.large", by_group=True)


def test_a_place_is_packed_into_one_number() -> None:
    for found in (Place(0, 1, False), Place(255, 256, True), Place(7, 8, False, 8000)):
        assert Place.unpacked(found.packed) == found
        assert 0 < found.packed < 2**31


def test_ids_from_elsewhere_leave_room_below_2_to_the_53() -> None:
    assert above(Place(1, 8, False), 5).first_range == 1
    assert above(Place(1, 8, False), 5 << RANGE_BITS).first_range == 6
    with pytest.raises(errors.InvalidConfig, match="no room"):
        above(Place(1, 8, False), (1 << 53) - 1)


def test_admin_sees_all_queues_and_each_is_in_one_object(store: pgqrs.Store, empty: Object) -> None:
    admin = store.admin()
    assert [queue.queue_name for queue in admin.list_queues()] == sorted(QUEUES)
    for queue in QUEUES:
        store.producer(queue).enqueue(queue)
    assert [(each.queue, each.ready) for each in admin.stats()] == [(q, 1) for q in sorted(QUEUES)]
    for queue in QUEUES:
        part = store.shard(queue).admin()
        assert [each.queue_name for each in part.list_queues()] == [queue]
    listed = empty.client.list_objects_v2(Bucket="bucket", Prefix=f"{empty.key}/")["Contents"]
    assert len(listed) == SHARDS


def test_an_enqueue_uploads_one_object(store: pgqrs.Store) -> None:
    before = [shard.stats().puts for shard in store._database.shards]  # type: ignore[attr-defined]
    store.producer("tasks").enqueue(1)
    after = [shard.stats().puts for shard in store._database.shards]  # type: ignore[attr-defined]
    uploaded = [now - then for now, then in zip(after, before, strict=True)]
    assert uploaded == [int(number == place("tasks")) for number in range(SHARDS)]
    assert store.admin().s3_stats().puts == sum(after)


def test_an_id_is_that_of_one_message(store: pgqrs.Store) -> None:
    admin = store.admin()
    ids = {queue: store.producer(queue).enqueue_many([queue] * 3) for queue in QUEUES}
    assert len({id for some in ids.values() for id in some}) == 9
    for queue, some in ids.items():
        assert [admin.get_message(id).queue for id in some] == [queue] * 3
        with store.consumer(queue) as consumer:
            consumer.ack_many(message.id for message in consumer.dequeue(2))
        assert admin.get_archived(some[0]).payload == queue
        assert admin.cancel(some[2])
        (again,) = admin.replay(some[0])
        assert admin.get_message(again).queue == queue
    with pytest.raises(errors.SeveralShards, match="one queue at a time"):
        admin.replay([some[1] for some in ids.values()])
    with pytest.raises(errors.MessageNotFound):
        admin.get_message(17)


def test_messages_of_several_shards_are_ended_together(store: pgqrs.Store) -> None:
    consumers = [store.consumer(queue) for queue in QUEUES]
    for queue in QUEUES:
        store.producer(queue).enqueue(queue)
    messages = [message for consumer in consumers for message in consumer.dequeue()]
    consumers[0].extend_many(messages, 60)
    consumers[0].ack_many(messages)
    assert [completed(store, queue) for queue in QUEUES] == [1, 1, 1]
    with pytest.raises(errors.LeaseLost) as lost:
        consumers[1].extend_many(messages, 60)
    assert sorted(lost.value.ids) == sorted(message.id for message in messages)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"s3_shards": 2}, "shards=3&shard_by=name"),
        ({"s3_shards": 4}, "shards=3&shard_by=name"),
        ({"s3_shards": 3, "s3_shard_by": "group"}, "shards=3&shard_by=name"),
        ({}, "store of several shards"),
    ],
)
def test_a_store_is_opened_as_it_was_made(
    store: pgqrs.Store, empty: Object, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidConfig, match=said):
        empty.open(by_hand=False, **settings)


def test_a_shard_is_not_a_store(store: pgqrs.Store, empty: Object) -> None:
    empty.key += "/001.sqlite"
    with pytest.raises(errors.InvalidConfig, match=r"shard 1 of a store.*shards=3"):
        empty.open(by_hand=False)


def test_one_object_is_not_opened_as_several(object: Object) -> None:
    with pytest.raises(errors.InvalidConfig, match="one object"):
        sharded(object)


@pytest.mark.parametrize("settings", [{"s3_shards": 0}, {"s3_shards": 257}, {"s3_shard_by": "x"}])
def test_wrong_settings_are_refused(empty: Object, settings: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidConfig, match="s3_shard"):
        empty.open(**settings)


def test_an_install_that_was_cut_short_goes_on(empty: Object) -> None:
    opened = sharded(empty)
    empty.proxy.script("PUT", served, answered(403, "AccessDenied"))
    with pytest.raises(errors.InvalidConfig):
        opened.admin().install()
    again = sharded(empty)
    with pytest.raises(errors.SchemaNotInstalled):
        again.admin().list_queues()
    again.admin().install()
    again.admin().verify()
    assert len({shard.store_id for shard in again._database.shards}) == 1


# Workflows


@pgqrs.workflow(queue="tasks")
def on_tasks() -> int:
    return 1


@pgqrs.workflow(queue="tasks")
def listening() -> Any:
    return pgqrs.wait_for_event("go")


def test_runs_are_found_by_their_ids(store: pgqrs.Store) -> None:
    here, there = on_tasks.start(store=store), store.workflows.create("by hand", queue=None)
    assert store.workflows.get(here.id).queue == "tasks"
    assert store.workflows.get(there.id).name == "by hand"
    assert store.workflows.create("by hand", key="one").id == (
        store.workflows.create("by hand", key="one").id
    )
    listed = store.workflows.list_runs()
    assert [run.id for run in listed] == sorted((run.id for run in listed), reverse=True)
    assert {here.id, there.id} <= {run.id for run in listed}
    page = store.workflows.list_runs(n=1)
    rest = store.workflows.list_runs(before=page[0].id)
    assert [run.id for run in page + rest] == [run.id for run in listed]
    assert on_tasks.run_inline(store=store) == 1
    with pytest.raises(errors.RunNotFound):
        store.workflows.get(17)


def effect(store: pgqrs.Store, what: str, run_id: int) -> int:
    """What a run does to another shard."""
    if what == "enqueue":
        return store.producer("tasks").enqueue(1, key="once")
    if what == "start":
        return on_tasks.start(store=store).id
    store.workflows.handle(run_id).signal("go", 1)
    return run_id


@pytest.mark.parametrize("what", ["enqueue", "start", "signal"])
def test_a_run_is_refused_effects_on_another_shard(store: pgqrs.Store, what: str) -> None:
    told = listening.start(store=store)
    before = store.admin().queue_stats("tasks").ready

    @pgqrs.workflow(name=f"refused {what}", queue="workflows")
    def refused() -> int:
        return effect(store, what, told.id)

    with pytest.raises(errors.RunFailed, match="another shard"):
        refused.run_inline(store=store)
    assert store.admin().queue_stats("tasks").ready == before


@pytest.mark.parametrize("what", ["enqueue", "start", "signal"])
def test_a_step_has_effects_on_another_shard(store: pgqrs.Store, what: str) -> None:
    told = listening.start(store=store)

    @pgqrs.step
    def done() -> int:
        return effect(store, what, told.id)

    @pgqrs.workflow(name=f"in a step: {what}", queue="workflows")
    def allowed() -> int:
        return done()

    id = allowed.run_inline(store=store)
    assert id == told.id or store.admin().queue_stats("tasks").ready == 2


def test_a_task_that_a_run_enqueues_is_refused_on_another_shard(store: pgqrs.Store) -> None:
    @pgqrs.task(queue="tasks")
    def elsewhere() -> None: ...

    @pgqrs.workflow(queue="workflows", name="enqueues a task")
    def enqueues() -> None:
        elsewhere.enqueue()

    with pytest.raises(errors.RunFailed, match="'tasks' is on another shard"):
        enqueues.run_inline(store=store)


@pytest.mark.parametrize("what", ["enqueue", "start", "signal"])
def test_queues_of_a_group_are_together(empty: Object, what: str) -> None:
    store = sharded(empty, s3_shard_by="group", create_queues=True)
    store.admin().install()
    assert place("orders.in", by_group=True) != place("other.in", by_group=True)

    @pgqrs.workflow(queue="orders.in", name=f"child {what}")
    def child() -> Any:
        return pgqrs.wait_for_event("go") if what == "signal" else 1

    told = child.start(store=store)

    @pgqrs.workflow(queue="orders.out", name=f"of a group: {what}")
    def of_a_group() -> None:
        if what == "enqueue":
            store.producer("orders.in").enqueue(1)
        elif what == "start":
            child.start()
        else:
            store.workflows.handle(told.id).signal("go", 1)

    of_a_group.run_inline(store=store)
    with pgqrs.Worker(store, workflows=[child]):
        if what == "signal":
            assert told.result(timeout=60) == 1


# Transactions of the application's own


def test_a_transaction_is_on_one_shard(store: pgqrs.Store) -> None:
    for call in (
        lambda: store.engine,
        lambda: store.read(lambda connection: None),
        lambda: store.write(lambda connection: None),
    ):
        with pytest.raises(errors.SeveralShards, match=r"store\.shard\(queue\)"):
            call()
    with store.shard("tasks").engine.begin() as connection:
        store.using(connection).enqueue("tasks", 1)
        store.using(connection).workflows.start(on_tasks)
        with pytest.raises(errors.SeveralShards, match=r"store\.shard\('a'\)"):
            store.using(connection).enqueue("a", 1)
    ready = {each.queue: each.ready for each in store.admin().stats()}
    assert (ready["tasks"], ready["a"]) == (2, 0)
    one = store.shard("tasks")
    assert one.write(lambda connection: one.using(connection).enqueue("tasks", 2))


def test_a_connection_of_another_store_is_refused(store: pgqrs.Store) -> None:
    with (
        pgqrs.Store("sqlite::memory:") as other,
        other.engine.connect() as connection,
        pytest.raises(errors.SeveralShards, match="engine"),
    ):
        store.using(connection)


# Workers, schedules, results


def test_a_worker_works_on_all_shards(store: pgqrs.Store) -> None:
    handled: list[str] = []

    def handle(message: pgqrs.Message) -> None:
        handled.append(message.payload)

    handles = [store.producer(queue).enqueue(queue) for queue in QUEUES]

    @pgqrs.task(queue="a")
    def told() -> str:
        # A handler reaches all of the store, not only the shard of its queue.
        store.producer("workflows").enqueue("more")
        return "result"

    worker = pgqrs.Worker(
        store, tasks=[told], handlers=dict.fromkeys(("tasks", "workflows"), handle)
    )
    store.admin().cancel(handles[2])
    with worker:
        assert told.options(store=store).enqueue().result(timeout=60) == "result"
        workers = store.admin().list_workers()
        assert {each.queue for each in workers} == set(QUEUES)
        store.admin().stop_worker(workers[-1].id)
        assert len({each.id for each in workers}) == SHARDS
    pgqrs.Worker(store, handlers={"workflows": handle}).run(until_empty=True)
    assert sorted(handled) == ["more", "tasks", "workflows"]
    assert store.admin().list_workers() == []


def test_schedules_tick_on_all_shards(empty: Object) -> None:
    clock = ManualClock()
    store = empty.open(by_hand=False, s3_shards=SHARDS, clock=clock, upgrade=True)
    for queue in QUEUES:
        store.admin().create_queue(queue)
        store.schedules.create(f"of {queue}", every=60, queue=queue, payload=queue)
    assert [each.queue for each in store.schedules.list_schedules()] == sorted(QUEUES)
    clock.advance(61)
    assert store.schedules.tick() == 3
    assert [each.ready for each in store.admin().stats()] == [1, 1, 1]
    store.schedules.pause("of a")
    assert store.schedules.get("of a").paused
    assert 0 < store.schedules.next_in() <= 60
    store.schedules.trigger("of tasks")
    with pytest.raises(errors.SeveralShards, match="another queue"):
        store.schedules.create("of a", every=60, queue="tasks", payload=1, replace=True)
    store.schedules.delete("of a")
    store.schedules.create("of a", every=60, queue="tasks", payload=1)
    with pytest.raises(errors.ScheduleNotFound):
        store.schedules.get("none")


# The objects in the bucket


def test_what_is_done_to_the_bucket_is_done_to_all_objects(empty: Object) -> None:
    store = empty.open("local", s3_shards=SHARDS, upgrade=True)
    for queue in QUEUES:
        store.admin().create_queue(queue)
        store.producer(queue).enqueue(queue)
    admin = store.admin()
    assert admin.s3_state() in (pgqrs.S3State.LOCAL_CHANGED, pgqrs.S3State.MISSING)
    admin.flush_to_s3()
    assert admin.s3_state() is pgqrs.S3State.IN_SYNC
    other = sharded(empty)
    assert [each.ready for each in other.admin().stats()] == [1, 1, 1]
    other.producer("a").enqueue("b")
    assert admin.s3_state() is pgqrs.S3State.REMOTE_CHANGED
    assert admin.pull_from_s3()
    assert not admin.pull_from_s3()


def test_the_broker_functions_are_of_a_shard(store: pgqrs.Store, tmp_path: Path) -> None:
    admin = store.admin()
    refused: list[Callable[[], object]] = [
        lambda: admin.batch_operations([]),
        lambda: admin.snapshot(tmp_path / "copy.sqlite"),
        lambda: admin.s3_versions(),
        lambda: admin.restore_s3("1"),
    ]
    for call in refused:
        with pytest.raises(errors.SeveralShards, match=r"store\.shard\(queue\)\.admin"):
            call()
    part = store.shard("a")
    part.admin().batch_operations([lambda c: store.using(c).enqueue("a", 1)])
    (id,) = part.admin().flush_to_s3()
    assert admin.get_message(id).queue == "a"
    part.admin().snapshot(tmp_path / "copy.sqlite")


# Copying


def filled(store: pgqrs.Store) -> dict[str, int]:
    """Something of everything; the ids of what can be asked for."""
    admin, ids = store.admin(), dict[str, int]()
    for queue in QUEUES:
        admin.create_queue(queue, if_not_exists=True)
        ids[queue], ended = store.producer(queue).enqueue_many([queue, "done"], keys=["k", None])
        with store.consumer(queue) as consumer:
            consumer.ack(consumer.dequeue(2)[1])
        ids[f"{queue} ended"] = ended
        store.schedules.create(f"of {queue}", every=60, queue=queue, payload=queue)
    ids["run"] = listening.start(store=store, key="one").id
    store.workflows.signal(ids["run"], "go", 2)
    ids["by hand"] = store.workflows.create("by hand").id
    return ids


def check_copy(store: pgqrs.Store, ids: dict[str, int]) -> None:
    admin = store.admin()
    for queue in QUEUES:
        assert admin.get_message(ids[queue]).queue == queue
        assert admin.get_archived(ids[f"{queue} ended"]).payload == "done"
        assert store.producer(queue).enqueue("again", key="k") == ids[queue]
        assert store.schedules.get(f"of {queue}").queue == queue
        fresh = store.producer(queue).enqueue("new")
        assert fresh not in ids.values()
        assert admin.get_message(fresh).queue == queue
        assert admin.cancel(fresh)
    assert store.workflows.get(ids["by hand"]).name == "by hand"
    assert listening.start(store=store, key="one").id == ids["run"]
    with pgqrs.Worker(store, workflows=[listening]):
        assert store.workflows.handle(ids["run"]).result(timeout=60) == 2


def test_a_store_is_copied_to_shards_and_back_and_to_others(empty: Object, tmp_path: Path) -> None:
    ids = {}
    with pgqrs.Store(f"sqlite:///{tmp_path / 'one.db'}", upgrade=True) as plain:
        ids = filled(plain)
        three = sharded(empty, upgrade=True)
        copied = plain.admin().copy_to(three)
        assert plain.admin().copy_to(three) == copied  # once more: nothing is left to do
    empty.key += "-two"
    two = sharded(empty, 2, upgrade=True)
    more = filled_more(three)
    three.admin().copy_to(two)
    with pgqrs.Store(f"sqlite:///{tmp_path / 'two.db'}", upgrade=True) as again:
        two.admin().copy_to(again)
        check_copy(again, ids)
        assert again.admin().get_message(more).payload == "more"
    check_copy(two, ids)
    assert two.admin().get_message(more).payload == "more"
    check_copy(three, ids)


def filled_more(store: pgqrs.Store) -> int:
    """A message with an id of the shards' own."""
    id: int = store.producer("a").enqueue("more")
    assert id >> RANGE_BITS
    return id


def test_a_message_is_ended_after_its_store_was_copied(empty: Object, tmp_path: Path) -> None:
    with pgqrs.Store(f"sqlite:///{tmp_path / 'one.db'}", upgrade=True) as plain:
        plain.admin().create_queue("a")
        plain.producer("a").enqueue(1)
        (held,) = plain.consumer("a").dequeue(lease=3600)
        spread = sharded(empty, upgrade=True)
        plain.admin().copy_to(spread)
        spread.consumer("a").ack(held)
    assert completed(spread, "a") == 1


def test_runs_that_belong_together_are_not_torn_apart(empty: Object, tmp_path: Path) -> None:
    @pgqrs.workflow(queue="workflows", name="parent of another queue")
    def parent() -> int:
        return on_tasks.start().result()  # type: ignore[no-any-return]

    with pgqrs.Store(f"sqlite:///{tmp_path / 'one.db'}", upgrade=True) as plain:
        parent.start(store=plain)
        pgqrs.Worker(plain, workflows=[parent]).run(until_empty=True)
        spread = sharded(empty, upgrade=True)
        with pytest.raises(errors.SeveralShards, match=r"'tasks'|'workflows'"):
            plain.admin().copy_to(spread)


# Async


def test_async_stores_have_shards_too(s3_server: str, tmp_path: Path) -> None:
    asyncio.run(use_async_store(s3_server, tmp_path))


async def use_async_store(s3_server: str, tmp_path: Path) -> None:
    store = await pgqrs.S3Store.create(
        "bucket", uuid.uuid4().hex, shards=SHARDS, endpoint_url=s3_server, cache=tmp_path
    )
    async with store:
        ids = [await store.producer(queue).enqueue(queue) for queue in QUEUES]
        admin = store.admin()
        assert [(await admin.get_message(id)).queue for id in ids] == list(QUEUES)
        part = store.shard("a")
        async with part.async_engine.begin() as connection:
            await store.using(connection).enqueue("a", "b")
            with pytest.raises(errors.SeveralShards):
                await store.using(connection).enqueue("tasks", 1)
        assert [each.ready for each in await admin.stats()] == [2, 1, 1]
        run = await on_tasks.start(store=store)
        async with pgqrs.AsyncWorker(store, workflows=[on_tasks]):
            assert await run.result(timeout=60) == 1
        with pytest.raises(errors.SeveralShards, match="async_engine"):
            _ = store.async_engine
        plain = await pgqrs.connect(f"sqlite:///{tmp_path / 'one.db'}", upgrade=True)
        async with plain:
            await admin.copy_to(plain)
            assert (await plain.admin().get_message(ids[0])).queue == QUEUES[0]
