"""Random workflow programs: trees of nodes, which can be made, made smaller, and run.

`make(seed)` is always the same program. `smaller(node)` yields programs with one thing less, from which
the smallest that still fails is looked for. `Body` runs a program inside of a workflow, sync or async;
what each node is to do stands in the method of its name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import pgqrs

LONG = 20_000
"""Seconds: longer than all waits of a program, and all leases that lapse in it, take together."""
LEAVES = (
    *(
        "step",
        "step",
        "step",
        "transaction",
        "transaction",
        "undone",
        "fail",
        "retried",
        "gives_up",
    ),
    *("sleep", "signal", "silence", "event", "unique", "now", "mapped", "sync_step", "enqueue"),
)
NODES = ("sequence", "sequence", "branch", "chance", "caught", "limited", "expired", "child")
NODES = (*NODES, "two_children", "failed_child", "left_child")
ASYNC_NODES = ("gather", "gather", "group", "pool", "pool", "fed_pool", "completed", "completed")
ASYNC_NODES = (*ASYNC_NODES, "cut", "failing_group", "locked", "limited_here", "expired_here")
ASYNC_NODES = (*ASYNC_NODES, "waited_for", "waited")
RACES = ("chance", "cut", "failing_group")
"""Nodes whose parts may, or may not, be done to the end: it depends on chance, or on who is first."""
CHILDREN = ("child", "two_children", "failed_child", "left_child")


@dataclass(frozen=True)
class Node:
    """A part of a program. `number` is a choice of its own."""

    kind: str
    parts: tuple[Node, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.parts))
        return f"{self.kind}{self.number or ''}" + (f"({inner})" if inner else "")

    def long(self) -> int:
        """Seconds: longer than its parts take."""
        return 8 * max((part.long() for part in self.parts), default=LONG)


@dataclass(frozen=True)
class Program:
    """What a workflow does."""

    is_async: bool
    root: Node

    def __str__(self) -> str:
        return f"{'async' if self.is_async else 'sync'} {self.root}"

    def named(self, *kinds: str) -> Iterator[tuple[str, Node]]:
        """The nodes of these kinds, with their names."""
        todo = [("p", self.root)]
        while todo:
            name, node = todo.pop()
            if node.kind in kinds:
                yield name, node
            todo += [(f"{name}.{n}", part) for n, part in enumerate(node.parts)]

    def of_child(self, name: str) -> tuple[Node, str]:
        """What the child of this name does, and the name of that."""
        place, _, which = name.partition("|")
        node = self.root
        for number in place.split(".")[1:]:
            node = node.parts[int(number)]
        if which == "second":
            return Node("sequence", (Node("step"), Node("sleep"))), f"{place}.second"
        ends = (Node("raises"),) if which == "fails" else ()
        return Node("sequence", node.parts + ends), place


# Making them


def make(seed: int) -> Program:
    """The program of this seed."""
    dice = Random(seed)
    is_async = dice.random() < 0.7
    kinds = (*NODES, *ASYNC_NODES, *ASYNC_NODES) if is_async else NODES
    size = dice.choice((4, 6, 8, 10))
    left = size

    def node(depth: int, in_child: bool) -> Node:
        nonlocal left
        left -= 1
        number = dice.randrange(2)
        if depth == 0 or left <= 0:
            kind = dice.choice([kind for kind in LEAVES if not (in_child and kind == "signal")])
            return Node(kind, (), number)
        kind = dice.choice([kind for kind in kinds if not (in_child and kind in CHILDREN)])
        inside = in_child or kind in CHILDREN
        return Node(kind, tuple(node(depth - 1, inside) for _ in range(dice.randint(1, 3))), number)

    top = tuple(node(dice.choice((0, 1, 2)), False) for _ in range(dice.randint(1, 3)))
    ends = (Node("raises"),) if dice.random() < 0.05 else ()
    return Program(is_async, Node("sequence", top + ends))


def smaller(program: Program) -> Iterator[Program]:
    """Programs that have less to them."""
    for root in _smaller(program.root):
        yield replace(program, root=root)


def _smaller(node: Node) -> Iterator[Node]:
    yield from node.parts
    if node.parts or node.kind != "step":
        yield Node("step")
    for n, part in enumerate(node.parts):
        if len(node.parts) > 1:
            yield replace(node, parts=node.parts[:n] + node.parts[n + 1 :])
        for less in _smaller(part):
            yield replace(node, parts=(*node.parts[:n], less, *node.parts[n + 1 :]))
    if node.number:
        yield replace(node, number=0)


# Running them


class World(Protocol):
    """Where a program runs: what its steps are, and who is told what it sees."""

    steps: Any
    flows: Any

    def see(self, run: str, what: str) -> None:
        """The workflow got to know this."""


class Body:
    """One run of a program. What it returns depends on nothing but the program: where the order or
    chance decides, that is seen, and not returned.
    """

    def __init__(self, world: World, program: Program, run: str) -> None:
        self._world = world
        self._program = program
        self._run = run
        self._is_async = program.is_async
        self._steps = world.steps[program.is_async]

    async def run(self, node: Node, name: str) -> Any:
        return await getattr(self, f"_{node.kind}")(node, name)

    def _see(self, what: Any) -> Any:
        self._world.see(self._run, str(what))
        return what

    @staticmethod
    async def _got(value: Any) -> Any:
        """What a durable call returned; in a sync workflow it is here already."""
        return await value if inspect.isawaitable(value) else value

    # Steps

    async def _step(self, node: Node, name: str) -> Any:
        return self._see(await self._got(self._steps.work(name)))

    async def _sync_step(self, node: Node, name: str) -> Any:
        return self._see(await self._got(self._steps.sync_work(name)))

    async def _transaction(self, node: Node, name: str) -> Any:
        return self._see(await self._got(self._steps.transaction(name)))

    async def _undone(self, node: Node, name: str) -> Any:
        try:
            await self._got(self._steps.undone(name))
        except pgqrs.StepFailed as error:
            return self._see(f"undone: {error.message}")

    async def _fail(self, node: Node, name: str) -> Any:
        try:
            await self._got(self._steps.fail(name))
        except pgqrs.StepFailed as error:
            return self._see(f"failed: {error.message}")

    async def _retried(self, node: Node, name: str) -> Any:
        return self._see(await self._got(self._steps.retried(name)))

    async def _gives_up(self, node: Node, name: str) -> Any:
        try:
            await self._got(self._steps.gives_up(name))
        except pgqrs.StepFailed as error:
            return self._see(f"gave up: {error.message}")

    async def _mapped(self, node: Node, name: str) -> Any:
        items = [f"{name}.{n}" for n in range(3)]
        return self._see(await self._got(pgqrs.map(self._steps.work, items, concurrency=2)))

    # What pgqrs brings along

    async def _sleep(self, node: Node, name: str) -> Any:
        await self._got(pgqrs.sleep((7, 13)[node.number]))
        return self._see(f"{name} slept")

    async def _signal(self, node: Node, name: str) -> Any:
        return self._see(await self._got(pgqrs.wait_for_event(name)))

    async def _silence(self, node: Node, name: str) -> Any:
        return self._see(await self._got(pgqrs.wait_for_event(name, 11, default=f"{name}: none")))

    async def _event(self, node: Node, name: str) -> Any:
        await self._got(pgqrs.set_event(name, name))
        return self._see(f"{name} told")

    async def _unique(self, node: Node, name: str) -> Any:
        self._see(await self._got(pgqrs.uuid() if node.number else pgqrs.random()))

    async def _now(self, node: Node, name: str) -> Any:
        self._see(await self._got(pgqrs.now()))

    async def _enqueue(self, node: Node, name: str) -> Any:
        task = self._steps.task
        handle = await task.aenqueue(name) if self._is_async else task.enqueue(name)
        self._see(f"{name} is message {handle.id}")
        return f"{name} enqueued"

    # One after the other

    async def _sequence(self, node: Node, name: str) -> Any:
        return [await self.run(part, f"{name}.{n}") for n, part in enumerate(node.parts)]

    async def _branch(self, node: Node, name: str) -> Any:
        found = await self._got(self._steps.work(name))
        which = (len(found) + node.number) % len(node.parts)
        return await self.run(node.parts[which], f"{name}.{which}")

    async def _chance(self, node: Node, name: str) -> Any:
        which = int(await self._got(pgqrs.random()) * len(node.parts))
        self._see(f"{name} takes {which}")
        await self.run(node.parts[which], f"{name}.{which}")

    async def _caught(self, node: Node, name: str) -> Any:
        try:
            await self._sequence(node, name)
            await self._got(self._steps.fail(name))
        except pgqrs.StepFailed:
            return self._see(await self._got(self._steps.transaction(f"{name}.mended")))

    async def _raises(self, node: Node, name: str) -> Any:
        await self._got(self._steps.fail(name))

    async def _limited(self, node: Node, name: str) -> Any:
        async with self._timeout(node.long()):
            return await self._sequence(node, name)

    async def _expired(self, node: Node, name: str) -> Any:
        try:
            async with self._timeout(node.long()):
                await self._sequence(node, name)
                await self._got(pgqrs.sleep(8 * node.long()))
        except TimeoutError:
            return self._see(f"{name} is over")

    def _timeout(self, duration: float) -> Any:
        limit = pgqrs.timeout(duration)
        return limit if self._is_async else _Awaited(limit)

    # Children

    async def _child(self, node: Node, name: str) -> Any:
        child = await self._started(name)
        return self._see(await self._got(child.result()))

    async def _two_children(self, node: Node, name: str) -> Any:
        first = await self._started(name)
        second = await self._started(f"{name}|second")
        self._see(await self._got(self._steps.work(f"{name}.between")))
        if self._is_async and node.number:
            return self._see(await asyncio.gather(second.result(), first.result()))
        return [
            self._see(await self._got(second.result())),
            self._see(await self._got(first.result())),
        ]

    async def _failed_child(self, node: Node, name: str) -> Any:
        child = await self._started(f"{name}|fails")
        try:
            await self._got(child.result())
        except pgqrs.RunFailed:
            return self._see(f"child {name} failed")

    async def _left_child(self, node: Node, name: str) -> Any:
        await self._started(name)
        return self._see(f"child {name} left")

    async def _started(self, name: str) -> Any:
        return await self._got(self._world.flows[self._is_async].start(name, key=None))

    # Beside each other

    async def _gather(self, node: Node, name: str) -> Any:
        parts = (self.run(part, f"{name}.{n}") for n, part in enumerate(node.parts))
        return self._see(await asyncio.gather(*parts))

    async def _group(self, node: Node, name: str) -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.run(part, f"{name}.{n}"))
                for n, part in enumerate(node.parts)
            ]
        return self._see([task.result() for task in tasks])

    async def _pool(self, node: Node, name: str) -> Any:
        queue: asyncio.Queue[tuple[int, Node]] = asyncio.Queue()
        for item in enumerate([*node.parts, Node("step"), Node("transaction"), Node("step")]):
            queue.put_nowait(item)
        results: dict[int, Any] = {}

        async def worker(which: int) -> None:
            while not queue.empty():
                number, part = queue.get_nowait()
                self._see(f"{name}: {which} takes {number}")
                results[number] = await self.run(part, f"{name}.{number}")

        await asyncio.gather(worker(1), worker(2))
        return sorted(results.items())

    async def _fed_pool(self, node: Node, name: str) -> Any:
        """Each part puts its result into a queue, from which workers take it."""
        queue: asyncio.Queue[Any] = asyncio.Queue(1)
        results: list[Any] = []

        async def producer(number: int, part: Node) -> None:
            await self.run(part, f"{name}.{number}")
            await queue.put(number)

        async def worker(which: int) -> None:
            while (number := await queue.get()) is not None:
                self._see(f"{name}: {which} takes {number}")
                results.append(await self._got(self._steps.work(f"{name}.{number}.after")))

        async def feed() -> None:
            await asyncio.gather(*(producer(n, part) for n, part in enumerate(node.parts)))
            await queue.put(None)
            await queue.put(None)

        await asyncio.gather(worker(1), feed(), worker(2))
        return sorted(results)

    async def _completed(self, node: Node, name: str) -> Any:
        async def numbered(number: int, part: Node) -> tuple[int, Any]:
            return number, await self.run(part, f"{name}.{number}")

        parts = [numbered(n, part) for n, part in enumerate(node.parts)]
        results = []
        for ended in asyncio.as_completed(parts):
            number, result = await ended
            self._see(f"{name}: {number} ended")
            await self._got(self._steps.work(f"{name}.{number}.after"))
            results.append((number, result))
        return sorted(results, key=lambda found: found[0])

    async def _cut(self, node: Node, name: str) -> Any:
        """The first to end cuts the others short."""
        tasks = [
            asyncio.create_task(self.run(part, f"{name}.{n}"))
            for n, part in enumerate([*node.parts, Node("step")])
        ]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self._see(f"{name}: first {sorted(tasks.index(task) for task in done)}")
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _failing_group(self, node: Node, name: str) -> Any:
        """The one that fails cuts the others short."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, part in enumerate(node.parts):
                    group.create_task(self.run(part, f"{name}.{number}"))
                group.create_task(self._got(self._steps.fail(name)))
        except* pgqrs.StepFailed as errors:
            self._see(f"{name}: {len(errors.exceptions)} failed")

    async def _locked(self, node: Node, name: str) -> Any:
        lock, order = asyncio.Semaphore(1 + node.number), []

        async def one(number: int, part: Node) -> Any:
            async with lock:
                order.append(number)
                self._see(f"{name}: {order}")
                return await self.run(part, f"{name}.{number}")

        return await asyncio.gather(*(one(n, part) for n, part in enumerate(node.parts)))

    async def _limited_here(self, node: Node, name: str) -> Any:
        async with asyncio.timeout(20):
            return self._see(await self._steps.work(name))

    async def _expired_here(self, node: Node, name: str) -> Any:
        try:
            async with asyncio.timeout(20):
                self._see(await self._steps.work(name))
                await pgqrs.sleep(LONG)
        except TimeoutError:
            self._see(f"{name} is over")
        return await self._sequence(node, name)

    async def _waited_for(self, node: Node, name: str) -> Any:
        self._see(await asyncio.wait_for(self._steps.work(name), 20))
        try:
            await asyncio.wait_for(pgqrs.sleep(LONG), 20)
        except TimeoutError:
            self._see(f"{name} is over")
        return await self._sequence(node, name)

    async def _waited(self, node: Node, name: str) -> Any:
        """What is not done in time is left alone, and goes on. That it was not done is no record: so it
        is not seen, either, before something else is.
        """
        quick = asyncio.create_task(self._steps.work(name))
        slow = asyncio.create_task(self._slow(name))
        await asyncio.wait([quick, slow], timeout=20)
        self._see(await self._steps.work(f"{name}.then"))
        result = await self._sequence(node, name)
        if node.number:
            slow.cancel()
            await asyncio.wait([slow])
            return result
        return result, await slow

    async def _slow(self, name: str) -> Any:
        await pgqrs.sleep(40)
        return self._see(await self._steps.work(f"{name}.slow"))


class _Awaited:
    """The timeout of a sync workflow, entered by `async with`."""

    def __init__(self, limit: Any) -> None:
        self._limit = limit

    async def __aenter__(self) -> Any:
        return self._limit.__enter__()

    async def __aexit__(self, *error: Any) -> Any:
        return self._limit.__exit__(*error)
