"""An event loop in which nothing happens by chance.

Its time is that of a `ManualClock`, and passes only when nothing else can happen. Whoever asks to
`pass_` waits until nothing else can go on; then the schedule chooses who goes first. So the order in
which steps end is the schedule's, and the same schedule makes the same run once more.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from random import Random
from typing import Any

from pgqrs.testing import ManualClock

EPOCH = ManualClock().now()


class Schedule:
    """Chooses who goes next. This one takes turns, and lets the database answer at once."""

    delays_answers = False

    def choose(self, number: int) -> int:
        return 0


class Shuffled(Schedule):
    """Chooses by chance, also when the database is reached and when it answers."""

    delays_answers = True

    def __init__(self, seed: object) -> None:
        self._dice = Random(str(seed))

    def choose(self, number: int) -> int:
        return self._dice.randrange(number)


class Ordered(Schedule):
    """Chooses as told, and takes turns after that. `following` is the next of all orders."""

    def __init__(self, told: tuple[int, ...] = ()) -> None:
        self._told = told
        self._made: list[tuple[int, int]] = []

    def choose(self, number: int) -> int:
        place = len(self._made)
        chosen = min(self._told[place], number - 1) if place < len(self._told) else 0
        self._made.append((chosen, number))
        return chosen

    def following(self) -> Ordered | None:
        made = list(self._made)
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return None
        *before, (last, _) = made
        return Ordered((*(chosen for chosen, _ in before), last + 1))


class Stuck(AssertionError):
    """Nothing can happen any more."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Asks the loop what is to happen where it would wait."""

    idle: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.idle(timeout)
        found: list[Any] = super().select(0)
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, clock: ManualClock, schedule: Schedule) -> None:
        selector = _Selector()
        selector.idle = self._idle
        self._clock = clock
        self._schedule = schedule
        self._gates: list[asyncio.Future[None]] = []
        super().__init__(selector)
        self.set_exception_handler(lambda loop, context: None)  # of tasks that died in a crash

    def time(self) -> float:
        return (self._clock.now() - EPOCH).total_seconds()

    def _idle(self, timeout: float | None) -> None:
        self._gates = [gate for gate in self._gates if not gate.done()]
        if self._gates:
            chosen = self._schedule.choose(len(self._gates)) if len(self._gates) > 1 else 0
            self._gates.pop(chosen).set_result(None)
        elif timeout is None:
            raise Stuck("no task can go on, and none waits for a time")
        else:
            self._clock.advance(timeout + 1e-6)  # the clock knows no less, and must not stand still

    async def pass_(self) -> None:
        """Wait for the schedule."""
        gate: asyncio.Future[None] = self.create_future()
        self._gates.append(gate)
        await gate

    async def offload(self, call: Callable[[], Any]) -> Any:
        """Call the database."""
        if self._schedule.delays_answers:
            await self.pass_()
        try:
            return call()
        finally:
            if self._schedule.delays_answers:
                await self.pass_()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once: threads would bring chance back."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as exc:
            future.set_exception(exc)
        return future
