"""What a run has done, and which of it the workflow asks for now.

A step is identified by its name and by how often that name was asked for before: `fetch`, `fetch#2`.
It gets its identity when it is called, not when it is done, so steps that run at the same time are
told apart in the same way each time. Code that runs in a task of its own (`asyncio.gather` of
coroutines that call several steps) is a *branch*, and counts for itself: `1/fetch`, `2/fetch`,
`1.1/fetch`.

Within a branch calls come one after the other. The position of each is recorded, and so a workflow
that was changed is found out: it asks for one step where its history has another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pgqrs.errors import ReplayMismatch
from pgqrs.types import StepInfo, StepStatus
from pgqrs.workflows.interrupts import Doom

PATCH = "pgqrs.patched:"


@dataclass(frozen=True, slots=True)
class Call:
    """One durable call of a workflow: who it is, and what is on record."""

    step_id: str
    position: int
    record: StepInfo | None


class Branch:
    """The calls of one line of execution."""

    def __init__(self, path: str = "", owner: object = None) -> None:
        self.path = path
        self.owner = owner
        self.position = 0
        self._names: Counter[str] = Counter()
        self._branches = 0

    def fork(self, owner: object) -> Branch:
        """A line of execution that began in this one."""
        self._branches += 1
        prefix = f"{self.path}." if self.path else ""
        return Branch(f"{prefix}{self._branches}", owner)

    def id_of(self, name: str) -> str:
        """Who the next call of this name is."""
        count = self._names[name] + 1
        which = name if count == 1 else f"{name}#{count}"
        return f"{self.path}/{which}" if self.path else which

    def step_over(self, name: str) -> int:
        """This call was made. Returns its position."""
        self._names[name] += 1
        self.position += 1
        return self.position


class History:
    """The records of a run."""

    def __init__(self, records: Iterable[StepInfo] = ()) -> None:
        self._by_id = {record.step_id: record for record in records}
        self._by_place = {_place(record): record for record in self._by_id.values()}
        self._asked: set[str] = set()

    def take(self, branch: Branch, name: str) -> Call:
        """The workflow calls this. A history that says otherwise is the end of the run."""
        self._skip_patches(branch, name)
        step_id = branch.id_of(name)
        here = self._by_place.get((branch.path, branch.position + 1))
        if here is not None and here.step_id != step_id:
            raise Doom(ReplayMismatch(f"step {step_id}", f"step {here.step_id}"))
        position = branch.step_over(name)
        record = self._by_id.get(step_id)
        if record is not None and record.position != position:
            raise Doom(
                ReplayMismatch(
                    f"step {step_id} as call {position}",
                    f"step {step_id} as call {record.position}",
                )
            )
        self._asked.add(step_id)
        return Call(step_id, position, record)

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
            if unasked and record.status is StepStatus.COMPLETED and not _is_patch(record):
                raise Doom(ReplayMismatch("its end", f"step {record.step_id}"))

    def _skip_patches(self, branch: Branch, name: str) -> None:
        """A patch that the code no longer asks for has served its purpose."""
        while (
            here := self._by_place.get((branch.path, branch.position + 1))
        ) is not None and _is_patch(here):
            if here.step_id == branch.id_of(name):
                return
            branch.step_over(_COUNT.sub("", _split(here.step_id)[1]))


_PATH = re.compile(r"(\d+(?:\.\d+)*)/")
_COUNT = re.compile(r"#\d+$")


def _split(step_id: str) -> tuple[str, str]:
    """The branch of a step, and its name there."""
    found = _PATH.match(step_id)
    return (found[1], step_id[found.end() :]) if found else ("", step_id)


def _place(record: StepInfo) -> tuple[str, int]:
    return _split(record.step_id)[0], record.position


def _is_patch(record: StepInfo) -> bool:
    return _split(record.step_id)[1].startswith(PATCH)
