"""A judge of what processes did with queues. It imports nothing of pgqrs.

Each process writes what it asked and what it was answered, with the time before and after: one JSON
object a line. All times are seconds of the host's monotonic clock, which the processes of one host
share. From these lines, from the limits of the queues, and from what the tables hold at the end,
`check` finds what must not have happened, and says so in words.

Whatever is not known for certain is counted in favour of the library:

- A message that `dequeue` returned was claimed between the call and its return. So it was certainly
  held from the return until the call plus the lease, or until the holder asked to end it, whichever
  came first.
- A message was certainly unfinished from the return of its `enqueue` until somebody first asked to
  end it, or it may have expired.
- What a process was not answered, because it was killed or got an error, may or may not have
  happened.

When the clock of the database is set forward, leases and times to live end earlier by as much; rates
are not judged across a change of the clock.

The lines, each with `do` and `process`:

| do | other keys |
|---|---|
| `enqueue` | `call`, `t`, `queue`, `messages`: each `name`, `key`, `unique`, `group`, `ttl` |
| `enqueued` | `call`, `t`, `ids`, `created` |
| `dequeue` | `call`, `t`, `queue`, `lease` |
| `dequeued` | `call`, `t`, `messages`: each `id`, `name`, `read_ct`, `key`, `group` |
| `taken` | `t0`, `t`, `until`, `queue`, `message`: one that a buffer handed out |
| `end` | `call`, `t`, `how`, `messages`: each `id`, `read_ct`; `lease`, if `how` is extend |
| `ended` | `call`, `t`, `lost`: ids |
| `refused` | `call`, `t`, `error`, `foreign`: not one of the library's own errors |
| `jump` | `t0`, `t`, `by`: somebody set the clock of the database |
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = float("inf")
OVER = {"ack": "completed", "dead": "failed"}
"""Ways to end a message for good, and the reason that the archive gives. The others are `fail` (deliver
it again, there are attempts enough), `release` and `extend`.
"""


@dataclass(frozen=True)
class Limits:
    """What a queue was told to keep to."""

    max_in_flight: int | None = None
    max_in_flight_per_key: int | None = None
    rate: tuple[int, float] | None = None


@dataclass
class Sent:
    """A message, as its producer knows it."""

    name: str
    queue: str
    key: str | None
    unique: bool
    group: str | None
    ttl: float | None
    asked: float
    place: int
    process: str
    answered: float | None = None
    id: int | None = None
    created: bool = False


@dataclass
class Claim:
    """One delivery of a message, and when it was certainly held."""

    process: str
    queue: str
    id: int
    name: str
    read_ct: int
    key: str | None
    group: str | None
    asked: float
    """The earliest time it may have been claimed at; for a buffer, when it was asked for one."""
    answered: float
    counts_for_rate: bool
    held: list[tuple[float, float]]

    def __str__(self) -> str:
        return f"claim {self.read_ct} by {self.process} at {self.answered:.3f}"


@dataclass
class Ending:
    """Somebody asked to end a claim, or to extend it."""

    process: str
    how: str
    id: int
    read_ct: int
    asked: float
    lease: float | None
    answered: float | None = None
    lost: bool = False

    @property
    def done(self) -> bool:
        return self.answered is not None and not self.lost


@dataclass
class History:
    """All lines, put together."""

    sent: list[Sent] = field(default_factory=list)
    claims: dict[int, list[Claim]] = field(default_factory=lambda: defaultdict(list))
    endings: dict[int, list[Ending]] = field(default_factory=lambda: defaultdict(list))
    jumps: list[tuple[float, float, float]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the lines of all processes. What a killed process wrote half is left out."""
    lines = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1].splitlines()
        lines += [{"process": path.stem} | json.loads(line) for line in whole]
    return lines


def check(
    lines: Iterable[dict[str, Any]], limits: dict[str, Limits], final: dict[str, Any]
) -> list[str]:
    """Returns what must not have happened. `final` is what the tables hold at the end:

    `messages` and `archive`, each a list of `id`, `queue`, `name`; the archive with `reason`.
    """
    history = _assembled(lines)
    return [
        *history.foreign,
        *_lost_or_doubled(history, final),
        *_wrongly_ended(history, final),
        *_stuck(final),
        *_two_holders(history),
        *_claimed_after_the_end(history),
        *_ended_by_who_lost_it(history),
        *_delivered_after_expiry(history),
        *_limits_exceeded(history, limits),
        *_rates_exceeded(history, limits),
        *_groups_out_of_order(history),
        *_keys_doubled(history),
    ]


# Putting lines together


def _assembled(lines: Iterable[dict[str, Any]]) -> History:
    history = History()
    calls: dict[tuple[str, int], dict[str, Any]] = {}
    every = list(lines)
    history.jumps = sorted((x["t0"], x["t"], x["by"]) for x in every if x["do"] == "jump")
    sent: dict[tuple[str, int], list[Sent]] = {}
    ends: dict[tuple[str, int], list[Ending]] = {}
    for line in every:
        call = (line["process"], line.get("call", -1))
        match line["do"]:
            case "enqueue":
                calls[call] = line
                sent[call] = [
                    Sent(
                        **message,
                        queue=line["queue"],
                        asked=line["t"],
                        place=place,
                        process=call[0],
                    )
                    for place, message in enumerate(line["messages"])
                ]
                history.sent += sent[call]
            case "enqueued":
                for one, id, created in zip(sent[call], line["ids"], line["created"], strict=True):
                    one.answered, one.id, one.created = line["t"], id, created
            case "dequeue":
                calls[call] = line
            case "dequeued":
                asked = calls[call]
                end = _shortened(history, asked["t"], asked["t"] + asked["lease"])
                for message in line["messages"]:
                    _claimed(history, line, asked["queue"], message, asked["t"], end, rated=True)
            case "taken":
                end = _shortened(history, line["t0"], line["until"])
                _claimed(
                    history, line, line["queue"], line["message"], line["t0"], end, rated=False
                )
            case "end":
                ends[call] = [
                    Ending(
                        call[0], line["how"], m["id"], m["read_ct"], line["t"], line.get("lease")
                    )
                    for m in line["messages"]
                ]
                for ending in ends[call]:
                    history.endings[ending.id].append(ending)
            case "ended":
                for ending in ends[call]:
                    ending.answered, ending.lost = line["t"], ending.id in line["lost"]
            case "refused":
                if line["foreign"]:
                    history.foreign.append(
                        f"{line['process']}: an error that is not the library's own: {line['error']}"
                    )
    for id, claims in history.claims.items():
        for claim in claims:
            claim.held = list(_certainly_held(history, claim, history.endings[id]))
    return history


def _claimed(
    history: History,
    line: dict[str, Any],
    queue: str,
    message: dict[str, Any],
    asked: float,
    end: float,
    *,
    rated: bool,
) -> None:
    held = [(line["t"], end)]
    claim = Claim(line["process"], queue, **message, asked=asked, answered=line["t"],
                  counts_for_rate=rated, held=held)  # fmt: skip
    history.claims[claim.id].append(claim)


def _shortened(history: History, since: float, end: float) -> float:
    """Returns when something that ends by the database's clock certainly still lasts."""
    for begun, done, by in history.jumps:
        if by > 0 and done >= since and begun < end:
            end = max(begun, end - by)
    return end


def _certainly_held(
    history: History, claim: Claim, endings: Iterable[Ending]
) -> Iterator[tuple[float, float]]:
    mine = [e for e in endings if e.process == claim.process and e.read_ct == claim.read_ct]
    over = min((e.asked for e in mine if e.how != "extend"), default=NEVER)
    extensions = [e for e in mine if e.how == "extend" and e.lease is not None]
    extended = [
        (e.answered, _shortened(history, e.asked, e.asked + e.lease), e.asked)
        for e in extensions
        if e.done and e.lease is not None and e.answered is not None
    ]
    spans = []
    for begin, end, since in [(*span, span[0]) for span in claim.held] + extended:
        # An extension says until when from now on: it may be sooner than before.
        later = [
            _shortened(history, e.asked, e.asked + e.lease)
            for e in extensions
            if e.asked > since and e.lease is not None
        ]
        spans.append((begin, min([end, *later])))
    for begin, end in spans:
        if begin < min(end, over):
            yield begin, min(end, over)


# What must hold


def _lost_or_doubled(history: History, final: dict[str, Any]) -> Iterator[str]:
    there = [(row["queue"], row["name"]) for row in (*final["messages"], *final["archive"])]
    counts = Counter(there)
    names = {(one.queue, one.name): one for one in history.sent}
    for (queue, name), number in counts.items():
        if number > 1:
            yield f"{queue}: message {name} is there {number} times"
        if (queue, name) not in names:
            yield f"{queue}: message {name} was enqueued by nobody"
    for one in history.sent:
        if one.created and (one.queue, one.name) not in counts:
            yield f"{one.queue}: message {one.name} ({one.id}) was acknowledged, and is lost"
        if one.id is not None and not one.created and (one.queue, one.name) in counts:
            yield f"{one.queue}: message {one.name} was refused as a duplicate, and is there"
    ids = {
        (row["queue"], row["name"]): row["id"] for row in (*final["messages"], *final["archive"])
    }
    for one in history.sent:
        if one.created and ids.get((one.queue, one.name), one.id) != one.id:
            yield f"{one.queue}: message {one.name} has another id than its producer was told"
    for claims in history.claims.values():
        for claim in claims:
            if ids.get((claim.queue, claim.name), claim.id) != claim.id:
                yield f"{claim.queue}: {claim.name} was delivered under the id of another message"


def _wrongly_ended(history: History, final: dict[str, Any]) -> Iterator[str]:
    asked = {id: {e.how for e in endings} for id, endings in history.endings.items()}
    ttl = {(one.queue, one.name): one.ttl for one in history.sent}
    archived = {row["id"]: row["reason"] for row in final["archive"]}
    for row in final["archive"]:
        how, where = asked.get(row["id"], set()), f"{row['queue']}: message {row['name']}"
        if row["reason"] == "completed" and "ack" not in how:
            yield f"{where} is archived as completed, and nobody acked it"
        if row["reason"] == "failed" and "dead" not in how:
            yield f"{where} is archived as failed, and nobody failed it"
        if row["reason"] == "expired" and ttl.get((row["queue"], row["name"])) is None:
            yield f"{where} is archived as expired, and was to live for ever"
    for id, endings in history.endings.items():
        for e in endings:
            if e.done and e.how in OVER and (found := archived.get(id)) != OVER[e.how]:
                yield f"message {id}: {e.how} by {e.process} was acknowledged; it is {found}"


def _stuck(final: dict[str, Any]) -> Iterator[str]:
    left = Counter(row["queue"] for row in final["messages"])
    for queue, number in left.items():
        some = [row["name"] for row in final["messages"] if row["queue"] == queue][:5]
        yield f"{queue}: {number} messages are stuck, such as {', '.join(some)}"


def _two_holders(history: History) -> Iterator[str]:
    for claims in history.claims.values():
        seen: dict[int, Claim] = {}
        for claim in claims:
            if claim.read_ct in seen:
                yield f"{claim.queue}: {claim.name}: {claim} and {seen[claim.read_ct]} are the same"
            seen[claim.read_ct] = claim
        for (one, first), (other, second) in _overlapping(claims):
            if first is not second:
                yield (
                    f"{first.queue}: {first.name} has two holders: {first} holds it until "
                    f"{one[1]:.3f}, {second} from {other[0]:.3f}"
                )


Held = tuple[tuple[float, float], Claim]


def _overlapping(claims: Iterable[Claim]) -> Iterator[tuple[Held, Held]]:
    """Pairs of spans next to each other that overlap; enough to find whether any do."""
    spans = [(span, claim) for claim in claims for span in claim.held]
    latest: Held | None = None
    for span in sorted(spans, key=lambda held: held[0]):
        if latest is not None and span[0][0] < latest[0][1]:
            yield latest, span
        if latest is None or span[0][1] > latest[0][1]:
            latest = span


def _claimed_after_the_end(history: History) -> Iterator[str]:
    for id, claims in history.claims.items():
        for e in history.endings[id]:
            if e.done and e.how in OVER and e.answered is not None:
                for claim in claims:
                    if claim.counts_for_rate and claim.asked > e.answered:
                        yield f"{claim.queue}: {claim.name}: {claim}, after {e.how} had returned"


def _ended_by_who_lost_it(history: History) -> Iterator[str]:
    for id, claims in history.claims.items():
        for e in history.endings[id]:
            for claim in claims:
                if e.done and claim.read_ct > e.read_ct and claim.answered < e.asked:
                    yield (
                        f"{claim.queue}: {claim.name}: {e.how} of claim {e.read_ct} by {e.process} "
                        f"was accepted after {claim}"
                    )


def _delivered_after_expiry(history: History) -> Iterator[str]:
    back = -sum(by for _, _, by in history.jumps if by < 0)
    alive = {one.id: one for one in history.sent if one.created and one.ttl is not None}
    for id, claims in history.claims.items():
        if (one := alive.get(id)) is None or one.answered is None or one.ttl is None:
            continue
        for claim in claims:
            if claim.asked > one.answered + one.ttl + back:
                late = claim.asked - one.answered - one.ttl
                yield f"{claim.queue}: {claim.name}: {claim}, {late:.3f} s after it expired"


def _limits_exceeded(history: History, limits: dict[str, Limits]) -> Iterator[str]:
    for queue, limit in limits.items():
        claims = [c for found in history.claims.values() for c in found if c.queue == queue]
        if limit.max_in_flight is not None:
            yield from _too_many(claims, limit.max_in_flight, f"{queue}: max_in_flight")
        if limit.max_in_flight_per_key is not None:
            by_key = defaultdict(list)
            for claim in claims:
                if claim.key is not None:
                    by_key[claim.key].append(claim)
            for key, ones in by_key.items():
                yield from _too_many(
                    ones, limit.max_in_flight_per_key, f"{queue}: max_in_flight_per_key of {key}"
                )


def _too_many(claims: Iterable[Claim], limit: int, what: str) -> Iterator[str]:
    """At most one sentence: when most were held at once."""
    changes = sorted(
        change
        for claim in claims
        for begin, end in claim.held
        for change in ((end, 0, claim.id), (begin, 1, claim.id))
    )
    held: Counter[int] = Counter()
    most, when = 0, 0.0
    for at, begins, id in changes:
        held[id] += 1 if begins else -1
        if not held[id]:
            del held[id]
        if len(held) > most:
            most, when = len(held), at
    if most > limit:
        yield f"{what} is {limit}, and {most} messages were held at {when:.3f}"


def _rates_exceeded(history: History, limits: dict[str, Limits]) -> Iterator[str]:
    for queue, limit in limits.items():
        if limit.rate is None:
            continue
        number, period = limit.rate
        claims = [
            (claim.asked, claim.answered)
            for found in history.claims.values()
            for claim in found
            if claim.queue == queue and claim.counts_for_rate
        ]
        most, when = 0, 0.0
        for begin in sorted({asked for asked, _ in claims}):
            end = begin + period
            if any(t1 >= begin and t0 <= end for t0, t1, _ in history.jumps):
                continue
            inside = sum(asked >= begin and answered < end for asked, answered in claims)
            if inside > most:
                most, when = inside, begin
        if most > number:
            yield f"{queue}: the rate is {number} in {period:g} s, and {most} started after {when:.3f}"


def _earliest_end(history: History, one: Sent) -> float:
    """Returns until when a message was certainly unfinished."""
    ends = [e.asked for e in history.endings.get(one.id or -1, ()) if e.how in OVER]
    if one.ttl is not None:
        ends.append(_shortened(history, one.asked, one.asked + one.ttl))
    return min(ends, default=NEVER)


def _groups_out_of_order(history: History) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    for one in history.sent:
        if one.group is not None and one.created:
            groups[one.queue, one.group].append(one)
    for (queue, group), ones in groups.items():
        claims = [claim for one in ones for claim in history.claims.get(one.id or -1, ())]
        for (_, first), (_, second) in _overlapping(claims):
            if first.id != second.id:
                yield (
                    f"{queue}: group {group} has two in flight: {first.name}, {first}, and "
                    f"{second.name}, {second}"
                )
        ended = {one.name: _earliest_end(history, one) for one in ones}
        for later in ones:
            began = min((c.answered for c in history.claims.get(later.id or -1, ())), default=None)
            if began is None:
                continue
            for earlier in ones:
                if _came_before(earlier, later) and began < ended[earlier.name]:
                    yield (
                        f"{queue}: group {group}: {later.name} was delivered at {began:.3f}, before "
                        f"{earlier.name} had ended"
                    )


def _came_before(earlier: Sent, later: Sent) -> bool:
    if earlier.process == later.process and earlier.asked == later.asked:
        return earlier.place < later.place  # of one batch
    return earlier.answered is not None and earlier.answered < later.asked


def _keys_doubled(history: History) -> Iterator[str]:
    keys: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    for one in history.sent:
        if one.key is not None and one.unique:
            keys[one.queue, one.key].append(one)
    for (queue, key), ones in keys.items():
        created = [one for one in ones if one.created]
        known = {one.id for one in created}
        uncertain = any(one.answered is None for one in ones)
        for one in ones:
            if one.id is not None and not one.created and one.id not in known and not uncertain:
                yield f"{queue}: key {key}: {one.name} got the id of nobody, {one.id}"
        for first in created:
            for second in created:
                if first is second or first.answered is None or second.answered is None:
                    continue
                if first.answered < second.asked and second.answered < _earliest_end(
                    history, first
                ):
                    yield (
                        f"{queue}: key {key} is held by {first.name}, unfinished, and "
                        f"{second.name} was added"
                    )
