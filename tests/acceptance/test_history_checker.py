"""The judge of the chaos test finds each kind of violation, and none where there is none."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import history
from tests.acceptance.history import Limits, check, read

LEASE = 10.0
Line = dict[str, Any]


class Story:
    """Lines of processes that did nothing wrong, and then whatever a test adds."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.lines: list[Line] = []
        self.final: dict[str, list[Line]] = {"messages": [], "archive": []}
        self.limits = {"q": limits or Limits()}
        self._calls = 0

    def found(self) -> list[str]:
        return check(self.lines, self.limits, self.final)

    def add(self, do: str, process: str = "p", **facts: Any) -> None:
        self.lines.append({"do": do, "process": process, **facts})

    def call(self) -> int:
        self._calls += 1
        return self._calls

    def enqueue(
        self, id: int, t: float, *, until: float | None = None, created: bool = True, **labels: Any
    ) -> None:
        """Message `id`, called `m<id>`; asked at `t`, answered at `until`."""
        message = {"name": f"m{id}", "key": None, "unique": False, "group": None, "ttl": None}
        call = self.call()
        self.add("enqueue", call=call, t=t, queue="q", messages=[message | labels])
        self.add(
            "enqueued", call=call, t=t if until is None else until, ids=[id], created=[created]
        )

    def claim(
        self, id: int, t: float, *, by: str = "c", until: float | None = None, read_ct: int = 1,
        key: str | None = None, group: str | None = None,
    ) -> None:  # fmt: skip
        call = self.call()
        self.add("dequeue", by, call=call, t=t, queue="q", lease=LEASE)
        message = {"id": id, "name": f"m{id}", "read_ct": read_ct, "key": key, "group": group}
        answered = t if until is None else until
        self.add("dequeued", by, call=call, t=answered, messages=[message])

    def take(self, id: int, t: float, *, until: float, by: str = "b", read_ct: int = 1) -> None:
        message = {"id": id, "name": f"m{id}", "read_ct": read_ct, "key": None, "group": None}
        self.add("taken", by, t0=t, t=t, until=until, queue="q", message=message)

    def end(
        self, id: int, t: float, *, how: str = "ack", by: str = "c", read_ct: int = 1,
        until: float | None = None, lost: bool = False, answered: bool = True,
    ) -> None:  # fmt: skip
        call = self.call()
        said = [{"id": id, "read_ct": read_ct}]
        self.add("end", by, call=call, t=t, how=how, messages=said, lease=LEASE)
        if answered:
            at = t if until is None else until
            self.add("ended", by, call=call, t=at, lost=[id] if lost else [])

    def archive(self, id: int, reason: str = "completed") -> None:
        self.final["archive"].append({"id": id, "queue": "q", "name": f"m{id}", "reason": reason})

    def whole_life(self, id: int, t: float, **labels: Any) -> None:
        """Enqueued at `t`, claimed a second later, acked after another one."""
        self.enqueue(id, t, **labels)
        self.claim(id, t + 1, key=labels.get("key"), group=labels.get("group"))
        self.end(id, t + 2)
        self.archive(id)


def test_it_imports_nothing_of_the_library() -> None:
    tree = ast.parse(Path(history.__file__).read_text(encoding="utf-8"))
    imported = {
        n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.startswith(("pgqrs", "tests"))}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    story = Story(Limits(max_in_flight=1, max_in_flight_per_key=1, rate=(1, 3.0)))
    for number in range(1, 6):
        story.whole_life(number, number * 4.0, key="a", group="g")
    assert story.found() == []


def test_what_a_killed_process_wrote_half_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "c-1.log").write_text('{"do": "open", "t": 1}\n{"do": "deq')
    assert read([tmp_path / "c-1.log"]) == [{"process": "c-1", "do": "open", "t": 1}]


# Nothing lost, nothing doubled


def test_a_lost_message_is_found() -> None:
    story = Story()
    story.enqueue(1, 0)
    assert story.found() == ["q: message m1 (1) was acknowledged, and is lost"]


def test_what_was_not_acknowledged_may_be_lost_or_not() -> None:
    for is_there in (False, True):
        story = Story()
        story.enqueue(1, 0)
        del story.lines[-1]
        if is_there:
            story.claim(1, 1)
            story.end(1, 2)
            story.archive(1)
        assert story.found() == []


def test_a_message_that_is_there_twice_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.archive(1)
    assert story.found() == ["q: message m1 is there 2 times"]


def test_a_message_of_nobody_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    del story.lines[:2]
    assert story.found() == ["q: message m1 was enqueued by nobody"]


def test_a_message_under_another_id_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.final["archive"][0]["id"] = 2
    assert any("has another id" in said for said in story.found())
    assert any("under the id of another" in said for said in story.found())


def test_a_stuck_message_is_found() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.final["messages"].append({"id": 1, "queue": "q", "name": "m1"})
    assert story.found() == ["q: 1 messages are stuck, such as m1"]


def test_an_acknowledged_ack_that_is_not_in_the_archive_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.final["archive"][0]["reason"] = "expired"
    assert story.found() == [
        "q: message m1 is archived as expired, and was to live for ever",
        "message 1: ack by c was acknowledged; it is expired",
    ]


@pytest.mark.parametrize(("reason", "said"), [("completed", "acked"), ("failed", "failed")])
def test_a_message_that_nobody_ended_is_found(reason: str, said: str) -> None:
    story = Story()
    story.enqueue(1, 0)
    story.archive(1, reason)
    assert story.found() == [f"q: message m1 is archived as {reason}, and nobody {said} it"]


# One holder


def test_two_holders_are_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.lines = [line for line in story.lines if line["do"] not in ("end", "ended")]
    story.claim(1, 5, by="other", read_ct=2)
    story.end(1, 6, by="other", read_ct=2)
    assert story.found() == [
        "q: m1 has two holders: claim 1 by c at 1.000 holds it until 11.000, "
        "claim 2 by other at 5.000 from 5.000"
    ]


def test_a_lease_that_lapsed_is_held_no_more() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1)
    story.claim(1, 11.5, by="other", read_ct=2)
    story.end(1, 12, by="other", read_ct=2)
    story.archive(1)
    assert story.found() == []


def test_a_claim_counts_from_when_it_was_asked_for() -> None:
    """Whether it was made at 1 or at 9, nobody can tell: so it may lapse at 11."""
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1, until=9)
    story.claim(1, 11.5, by="other", read_ct=2)
    story.end(1, 12, by="other", read_ct=2)
    story.archive(1)
    assert story.found() == []


def test_two_holders_are_found_after_an_extension() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1)
    story.end(1, 8, how="extend")
    story.claim(1, 15, by="other", read_ct=2)
    story.end(1, 16, by="other", read_ct=2)
    story.archive(1)
    (said,) = story.found()
    assert "two holders" in said


def test_an_extension_may_end_a_lease_earlier() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1)
    story.end(1, 2, how="extend")
    story.lines[-2]["lease"] = 3.0
    story.claim(1, 5.5, by="other", read_ct=2)
    story.end(1, 6, by="other", read_ct=2)
    story.archive(1)
    assert story.found() == []


def test_a_holder_beside_a_buffer_is_found() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.take(1, 2, until=9)
    story.claim(1, 5, read_ct=2)
    story.end(1, 6, read_ct=2)
    story.archive(1)
    (said,) = story.found()
    assert "two holders" in said


def test_the_same_claim_twice_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.claim(1, 20, by="other")
    assert any("are the same" in said for said in story.found())


def test_a_delivery_after_the_ack_is_found() -> None:
    story = Story()
    story.whole_life(1, 0)
    story.claim(1, 20, by="other", read_ct=2)
    assert story.found() == ["q: m1: claim 2 by other at 20.000, after ack had returned"]


def test_an_extension_to_a_sooner_end_is_shortened_by_a_jump_too() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.take(1, 1, until=30, by="c")
    story.end(1, 2, how="extend")  # until 12, by the clock of the database
    story.claim(1, 8, by="other", read_ct=2)
    story.end(1, 9, by="other", read_ct=2)
    story.archive(1)
    assert len(story.found()) == 1
    story.add("jump", t0=3.0, t=3.0, by=5.0)
    assert story.found() == []


@pytest.mark.parametrize("how", ["ack", "release", "extend", "fail"])
def test_an_ending_by_who_lost_the_lease_is_found(how: str) -> None:
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1)
    story.claim(1, 12, by="other", read_ct=2)
    story.end(1, 23, how=how)
    story.end(1, 13, by="other", read_ct=2, answered=False)
    story.archive(1)
    assert story.found() == [
        f"q: m1: {how} of claim 1 by c was accepted after claim 2 by other at 12.000"
    ]
    story.lines = [line | ({"lost": [1]} if line["do"] == "ended" else {}) for line in story.lines]
    assert story.found() == []


# Expiry


def test_a_delivery_after_expiry_is_found() -> None:
    story = Story()
    story.whole_life(1, 0, ttl=0.5)
    assert story.found() == ["q: m1: claim 1 by c at 1.000, 0.500 s after it expired"]
    story.add("jump", t0=0.1, t=0.1, by=-3.0)
    assert story.found() == []


# Limits


def overlapping(number: int, limits: Limits, **labels: Any) -> Story:
    """So many messages that are held at the same time."""
    story = Story(limits)
    for id in range(1, number + 1):
        story.enqueue(id, 0, **labels)
        story.claim(id, 1 + id / 100, by=f"c{id}", key=labels.get("key"))
        story.end(id, 5, by=f"c{id}")
        story.archive(id)
    return story


def test_too_many_in_flight_are_found() -> None:
    assert overlapping(3, Limits(max_in_flight=3)).found() == []
    assert overlapping(3, Limits(max_in_flight=2)).found() == [
        "q: max_in_flight is 2, and 3 messages were held at 1.030"
    ]


def test_too_many_of_a_key_are_found() -> None:
    assert overlapping(2, Limits(max_in_flight_per_key=2), key="a").found() == []
    assert overlapping(2, Limits(max_in_flight_per_key=1)).found() == []
    assert overlapping(2, Limits(max_in_flight_per_key=1), key="a").found() == [
        "q: max_in_flight_per_key of a is 1, and 2 messages were held at 1.020"
    ]


def test_too_high_a_rate_is_found() -> None:
    assert overlapping(3, Limits(rate=(3, 1.0))).found() == []
    story = overlapping(3, Limits(rate=(2, 1.0)))
    assert story.found() == ["q: the rate is 2 in 1 s, and 3 started after 1.010"]
    story.add("jump", t0=1.5, t=1.5, by=1.0)
    assert story.found() == []


def test_a_claim_that_took_long_may_have_started_at_any_time() -> None:
    story = overlapping(2, Limits(rate=(2, 1.0)))
    story.enqueue(9, 0)
    story.claim(9, 1, until=3)
    story.end(9, 5)
    story.archive(9)
    assert story.found() == []


# Groups


def test_a_group_with_two_in_flight_is_found() -> None:
    story = overlapping(2, Limits(), group="g")
    assert any("group g has two in flight: m1" in said for said in story.found())


def test_a_group_out_of_order_is_found() -> None:
    story = Story()
    story.enqueue(1, 0, group="g")
    story.enqueue(2, 1, group="g")
    for id, t in ((2, 2), (1, 4)):
        story.claim(id, t, group="g")
        story.end(id, t + 1)
        story.archive(id)
    assert story.found() == ["q: group g: m2 was delivered at 2.000, before m1 had ended"]


def test_a_group_whose_first_was_only_given_back_is_found() -> None:
    story = Story()
    story.enqueue(1, 0, group="g")
    story.claim(1, 1, group="g")
    story.end(1, 2, how="release")
    story.whole_life(2, 2.5, group="g")
    story.claim(1, 6, group="g", read_ct=2)
    story.end(1, 7, read_ct=2)
    story.archive(1)
    assert story.found() == ["q: group g: m2 was delivered at 3.500, before m1 had ended"]


def test_who_is_enqueued_at_the_same_time_may_come_in_any_order() -> None:
    story = Story()
    story.enqueue(1, 0, until=3, group="g")
    story.enqueue(2, 1, until=2, group="g")
    for id, t in ((2, 4), (1, 6)):
        story.claim(id, t, group="g")
        story.end(id, t + 1)
        story.archive(id)
    assert story.found() == []


def test_a_group_may_go_on_when_its_first_has_expired() -> None:
    story = Story()
    story.enqueue(1, 0, group="g", ttl=1.0)
    story.archive(1, "expired")
    story.whole_life(2, 0.5, group="g")
    assert story.found() == []


# Keys


def test_a_key_that_was_given_twice_is_found() -> None:
    story = Story()
    story.enqueue(1, 0, key="a", unique=True)
    story.whole_life(2, 1, key="a", unique=True)
    story.claim(1, 5, key="a")
    story.end(1, 6)
    story.archive(1)
    assert story.found() == ["q: key a is held by m1, unfinished, and m2 was added"]


def test_a_key_may_be_given_again_when_it_is_free() -> None:
    story = Story()
    story.whole_life(1, 0, key="a", unique=True)
    story.whole_life(2, 3, key="a", unique=True)
    assert story.found() == []


def test_a_duplicate_of_nothing_is_found() -> None:
    story = Story()
    story.enqueue(7, 0, key="a", unique=True, created=False)
    assert story.found() == ["q: key a: m7 got the id of nobody, 7"]


# The clock


def test_a_lease_ends_earlier_when_the_clock_is_set_forward() -> None:
    story = Story()
    story.enqueue(1, 0)
    story.claim(1, 1)
    story.claim(1, 5, by="other", read_ct=2)
    story.end(1, 6, by="other", read_ct=2)
    story.archive(1)
    assert len(story.found()) == 1
    story.add("jump", t0=3.0, t=3.0, by=5.0)
    assert len(story.found()) == 1
    story.add("jump", t0=3.5, t=3.5, by=5.0)
    assert story.found() == []


def test_an_error_of_others_is_found() -> None:
    story = Story()
    story.add("refused", call=1, t=1, error="OperationalError: gone", foreign=True)
    story.add("refused", call=2, t=1, error="StoreUnavailable: gone", foreign=False)
    assert story.found() == ["p: an error that is not the library's own: OperationalError: gone"]
