"""What a run has done, and which of it the workflow asks for now.

A step is identified by its name and by how often that name was asked for before: `fetch`, `fetch#2`.
It gets its identity when it is called, not when it is done, so steps that run at the same time are
told apart in the same way each time. Code that runs in a task of its own (`asyncio.gather` of
coroutines that call several steps) is a *branch*, and counts for itself: `1/fetch`, `2/fetch`,
`1.1/fetch`.

Within a branch calls come one after the other. The position of each is recorded, and so a workflow
that was changed is found out: it asks for one step where its history has another. So is one that calls
the same step several times, in another order than before: by the digests of the arguments. A step that
occurs once may get other arguments than before, as after a change of its code.

Branches go on beside each other, and what one of them does may depend on which of two calls ended
first. So the order in which the run got to know how its calls ended is on record too (`ends`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pgqrs.errors import RecordUnreadable, ReplayMismatch
from pgqrs.sqltypes import Undecodable
from pgqrs.types import StepInfo, StepStatus
from pgqrs.workflows.digests import digest
from pgqrs.workflows.interrupts import Mismatch

PATCH = "pgqrs.patched:"
EXPIRED = ":expired"
"""Behind the id of a timeout: that it came to its end."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SHOWN = 200
"""Characters of the arguments of a call in an error."""


class Call(NamedTuple):
    """One durable call of a workflow: who it is, and what is on record."""

    step_id: str
    position: int
    record: StepInfo | None
    digest: int | None = None
    """Of its arguments."""


class Branch:
    """The calls of one line of execution."""

    def __init__(self, path: str = "", owner: object = None) -> None:
        self.path = path
        self.owner = owner
        self.position = 0
        self._names: dict[str, int] = {}
        self._branches = 0

    def fork(self, owner: object) -> Branch:
        """A line of execution that began in this one."""
        self._branches += 1
        prefix = f"{self.path}." if self.path else ""
        return Branch(f"{prefix}{self._branches}", owner)

    def id_of(self, name: str) -> str:
        """Who the next call of this name is."""
        count = self._names.get(name, 0) + 1
        which = name if count == 1 else f"{name}#{count}"
        return f"{self.path}/{which}" if self.path else which

    def first_call(self, name: str, digest: int | None) -> Call:
        """The next call of this name, which is made now and not on record."""
        count = self._names[name] = self._names.get(name, 0) + 1
        self.position += 1
        which = name if count == 1 else f"{name}#{count}"
        return Call(f"{self.path}/{which}" if self.path else which, self.position, None, digest)

    def step_over(self, name: str) -> int:
        """This call was made. Returns its position."""
        self._names[name] = self._names.get(name, 0) + 1
        self.position += 1
        return self.position


class History:
    """The records of a run."""

    def __init__(self, records: Iterable[StepInfo] = ()) -> None:
        self._by_id = {record.step_id: record for record in records}
        self._by_place = {_place(record): record for record in self._by_id.values()}
        self._asked: set[str] = set()
        self._recorded: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        for step_id in self._by_id:
            name = _name(step_id)
            self._recorded[name] = self._recorded.get(name, 0) + 1
        self._other_arguments: dict[str, Mismatch] = {}
        """Steps that were called once so far, with other arguments than those on record."""

    def take(self, branch: Branch, name: str, arguments: Arguments | None = None) -> Call:
        """The workflow calls this. `Mismatch` if its history says otherwise."""
        found = None if arguments is None else digest(*arguments)
        if not self._by_id:  # a run in its first life
            return branch.first_call(name, found)
        self._skip_patches(branch, name)
        step_id = branch.id_of(name)
        here = self._by_place.get((branch.path, branch.position + 1))
        if here is not None and here.step_id != step_id:
            raise Mismatch(ReplayMismatch(f"step {step_id}", f"step {here.step_id}"))
        position = branch.step_over(name)
        record = self._by_id.get(step_id)
        if record is not None and record.position != position:
            raise Mismatch(
                ReplayMismatch(
                    f"step {step_id} as call {position}",
                    f"step {step_id} as call {record.position}",
                )
            )
        if record is not None and type(record.output) is Undecodable:
            raise Mismatch(RecordUnreadable(f"the result of {step_id}", "it is not JSON"))
        self._asked.add(step_id)
        self._compare(name, step_id, record, arguments, found)
        return Call(step_id, position, record, found)

    def take_end(self, call: Call) -> Call:
        """The end of a timeout, which is no call of its branch."""
        step_id = call.step_id + EXPIRED
        self._asked.add(step_id)
        return Call(step_id, -call.position, self._by_id.get(step_id))

    def _compare(
        self,
        name: str,
        step_id: str,
        record: StepInfo | None,
        arguments: Arguments | None,
        found: int | None,
    ) -> None:
        """Where a step occurs more than once, its arguments tell which call is which."""
        self._taken[name] = self._taken.get(name, 0) + 1
        if record is not None and None not in (record.digest, found) and record.digest != found:
            assert arguments is not None
            self._other_arguments[name] = Mismatch(
                ReplayMismatch(
                    f"step {step_id}{_shown(arguments)}",
                    f"step {step_id} with other arguments{self._whose(name, found)}",
                )
            )
        if (
            max(self._recorded.get(name, 0), self._taken[name]) > 1
            and name in self._other_arguments
        ):
            raise self._other_arguments[name]

    def _whose(self, name: str, found: int | None) -> str:
        for step_id, record in self._by_id.items():
            if record.digest == found and _name(step_id) == name:
                return f", and these for step {step_id}"
        return ""

    def ends(self, now: datetime) -> list[StepInfo]:
        """What the run got to know of its calls, in that order."""
        known = [record for record in self._by_id.values() if is_final(record, now)]
        return sorted(known, key=_order)

    @property
    def last_seq(self) -> int:
        """The last place in that order."""
        return max((record.seq or 0 for record in self._by_id.values()), default=0)

    def is_behind(self, branch: Branch) -> bool:
        """Whether the branch has done more than the workflow has asked for yet."""
        return any(
            path == branch.path and position > branch.position for path, position in self._by_place
        )

    def has_patch(self, branch: Branch, name: str) -> bool:
        """Whether the next call on record is this patch."""
        here = self._by_place.get((branch.path, branch.position + 1))
        return here is not None and here.step_id == branch.id_of(PATCH + name)

    def check_end(self) -> None:
        """The workflow is done: its main line has asked for all that is on record."""
        for (path, _), record in self._by_place.items():
            unasked = not path and record.step_id not in self._asked
            if unasked and record.status is StepStatus.COMPLETED and not is_patch(record):
                raise Mismatch(ReplayMismatch("its end", f"step {record.step_id}"))

    def _skip_patches(self, branch: Branch, name: str) -> None:
        """A patch that the code no longer asks for has served its purpose."""
        while (
            here := self._by_place.get((branch.path, branch.position + 1))
        ) is not None and is_patch(here):
            if here.step_id == branch.id_of(name):
                return
            branch.step_over(_name(here.step_id))


def escaped(name: str) -> str:
    """A name of the user's own as part of a step's name, where # tells occurrences apart."""
    return name.replace("%", "%25").replace("#", "%23")


_PATH = re.compile(r"(\d+(?:\.\d+)*)/")
_COUNT = re.compile(r"#\d+$")


def _split(step_id: str) -> tuple[str, str]:
    """The branch of a step, and its name there."""
    found = _PATH.match(step_id)
    return (found[1], step_id[found.end() :]) if found else ("", step_id)


def _place(record: StepInfo) -> tuple[str, int]:
    return _split(record.step_id)[0], record.position


def _name(step_id: str) -> str:
    return _COUNT.sub("", _split(step_id)[1])


def is_patch(record: StepInfo) -> bool:
    """Whether this is the mark of a `patched` place."""
    return _split(record.step_id)[1].startswith(PATCH)


def is_final(record: StepInfo, now: datetime) -> bool:
    """Whether the workflow may know how this call ended. A sleep may be on record before it ends."""
    if record.status is StepStatus.COMPLETED:
        return record.completed_at is None or record.completed_at <= now
    return record.status in (StepStatus.FAILED, StepStatus.CANCELLED)


CUT_SHORT = "cut short by the workflow"
_BY_TIMEOUT = re.compile(re.escape(CUT_SHORT) + r": asyncio\.timeout (\d+)")


def cut_short(level: int | None) -> str:
    """What is recorded as the error of a call that the workflow cut short: by itself, or by the
    `asyncio.timeout` of this level.
    """
    return CUT_SHORT if level is None else f"{CUT_SHORT}: asyncio.timeout {level}"


def is_cut_short(record: StepInfo) -> bool:
    """Whether the workflow did not wait for the end of this call."""
    return record.status is StepStatus.CANCELLED or (
        record.status is StepStatus.COMPLETED and (record.error or "").startswith(CUT_SHORT)
    )


def level_of(record: StepInfo) -> int | None:
    """Which `asyncio.timeout` it was, counted from the outermost."""
    found = _BY_TIMEOUT.fullmatch(record.error or "")
    return int(found[1]) if found else None


_BEFORE = datetime(1, 1, 1, tzinfo=UTC)


def _order(record: StepInfo) -> tuple[int, datetime, int]:
    """Records from before their order was recorded come first, as they were completed."""
    if record.seq is not None:
        return record.seq, _BEFORE, 0
    return 0, record.completed_at or _BEFORE, record.position


def _shown(arguments: Arguments) -> str:
    args, kwargs = arguments
    parts = [*(repr(value) for value in args), *(f"{k}={v!r}" for k, v in kwargs.items())]
    text = ", ".join(parts)
    return f"({text if len(text) <= SHOWN else text[:SHOWN] + '…'})"
