"""Which unit comes next: the gathers of a backward, and what a forward gathers ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from flatfsdp.engine.features.coalescing import coalesce
from flatfsdp.engine.schedule.backward_clock import BackwardClock
from flatfsdp.engine.schedule.forward_schedule import ForwardOrder, ForwardRecord
from flatfsdp.engine.schedule.issue_order import GatherOrder, ReduceOrder

pytestmark = pytest.mark.unit


def test_gathers_go_backwards_whatever_is_requested_first() -> None:
    plan = GatherOrder(("a", "b", "c"))
    assert plan.until("b") == (("c",), ("b",))
    assert plan.until("c") == (("c",),)  # again, after it was resharded
    assert plan.until("elsewhere") == (("elsewhere",),)
    assert plan.ahead("c") == () and plan.ahead("b") == (("a",),) and plan.ahead("a") == ()


@pytest.mark.parametrize("first", ["d", "c", "b", "a"])
def test_listed_units_have_one_place_in_the_order(first: str) -> None:
    """Wherever a rank's backward begins, it gathers a beginning of the same sequence."""
    plan = GatherOrder(("a", "b", "c", "d"), {"d": ["b", "unused"], "c": ["b", "a"]})
    sequence = (("d",), ("b",), ("c",), ("a",))
    found = plan.until(first)
    assert found == sequence[: sequence.index((first,)) + 1]
    assert plan.through(["a", "unused"]) == sequence[len(found) :]
    assert plan.through(["b"]) == ()


def follow(order: ForwardOrder[str], units: str) -> str:
    """What is expected after each of `units`, in a forward of them."""
    order.begin()
    found = ""
    for unit in units:
        order.enter(unit)
        found += next(order.upcoming(), "-")
    order.end()
    return found


def test_a_unit_that_runs_twice_has_two_followers() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    assert follow(order, "abac") == "----"
    assert follow(order, "abac") == "bac-"
    assert follow(order, "aab") == "bca"
    assert follow(order, "aab") == "-b-"  # a unit is never its own follower


def test_a_forward_that_fails_teaches_nothing() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    follow(order, "ab")
    order.begin()
    order.enter("b")
    assert follow(order, "ab") == "b-"


def test_only_the_first_unit_of_a_forward_is_the_first() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    for _ in range(2):
        order.begin()
        assert order.now is None
        order.enter("a")
        order.enter("a")
        assert order.now == ("a", 2)


SIZES = {"a": 3, "b": 3, "c": 4, "d": 9, "e": 2, "f": 9, "g": 11, "h": 1}


@pytest.mark.parametrize(
    ("sequence", "groups"),
    [
        ("abc", "abc"),  # as many as have room
        ("abcd", "abc d"),
        ("abec", "abe c"),  # in order: nothing overtakes
        ("eGe", "e G e"),  # what stays alone parts its neighbours
        ("aBb", "a B b"),  # as does another kind
        ("gh", "g h"),  # larger than a group
        ("", ""),
    ],
)
def test_units_that_follow_each_other_are_joined_up_to_a_size(sequence: str, groups: str) -> None:
    def key(unit: str) -> tuple[int, object] | None:
        return None if unit == "G" else (SIZES[unit.lower()], unit.isupper())

    assert ["".join(group) for group in coalesce(sequence, key, most=10)] == groups.split()


def test_the_first_group_reads_one_unit_beyond_itself() -> None:
    read = []

    def reading() -> Iterator[str]:
        for unit in "abcde":
            read.append(unit)
            yield unit

    assert next(coalesce(reading(), lambda unit: (SIZES[unit], None), most=6)) == ("a", "b")
    assert read == ["a", "b", "c"]


def pairs(units: Iterable[str]) -> Iterator[tuple[str, ...]]:
    return coalesce(units, lambda unit: (1, None), most=2)


def test_a_record_knows_when_units_without_a_graph_ran() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    for unit, has_graph in (("a", True), ("b", False), ("c", True)):
        (record.enter if has_graph else record.enter_without_graph)(unit)
        (record.leave if has_graph else record.leave_without_graph)(unit)
    assert record.entered == record.anchored == ("a", "c") and record.may_recompute
    assert record.positions("abc") == [1, 3, 5]
    assert not record.begun_again
    record.enter_without_graph("b")
    record.leave_without_graph("b")
    assert record.begun_again == {"b"} and record.positions("b") == [3]


def test_what_a_reentrant_checkpoint_recomputes_is_over_with_the_last_of_it() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    for unit, checkpoint in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        record.enter_without_graph(unit, checkpoint=checkpoint)
        record.leave_without_graph(unit)
    clock = BackwardClock(record)
    assert clock.gathers == ("c", "a", "b")  # each has its turn
    assert clock.due == {"a": 4, "b": 4, "c": 6}
    assert [(lifetime.unit, lifetime.over) for lifetime in clock.lifetimes] == [("a", 1), ("b", 1), ("c", 5)]


def test_what_has_run_without_a_graph_is_over_with_that_run() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    record.begin()
    record.enter_without_graph("a", checkpoint=1)
    record.leave_without_graph("a")
    for unit in "b", "a":
        record.enter(unit)
        record.leave(unit)
    assert list(BackwardClock(record).began.items()) == [("a", 1), ("b", 3)]
    clock = BackwardClock(record)
    assert clock.called_again == {"a"} and clock.due["a"] == 6


def test_a_segment_is_over_when_its_units_are_though_others_use_their_parameters() -> None:
    class Segment: ...

    record, segment = ForwardRecord[str](), Segment()
    record.begin()
    record.enter("a", segment=segment, segments=lambda: [segment])
    record.leave("a")
    record.enter("b")
    record.enter_sharing("a")
    record.leave("b")
    record.leave("a", itself=False)
    clock = BackwardClock(record)
    assert clock.due == {"a": 6, "b": 5}
    assert clock.ended["a"] == 6


def test_what_a_user_runs_without_a_graph_brings_nothing_later() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    record.begin()
    for unit in "ab":
        record.enter_without_graph(unit)
        record.leave_without_graph(unit)
    for unit in "ab":
        record.enter(unit)
        record.leave(unit)
    assert list(BackwardClock(record).began.items()) == [("a", 5), ("b", 7)] and not BackwardClock(record).several


def test_joined_gathers_are_handed_out_as_one() -> None:
    plan = GatherOrder(("a", "b", "c", "d", "e"), coalesce=pairs)
    assert plan.until("e") == (("e", "d"),)
    assert plan.until("d") == (("d",),)  # again
    assert plan.ahead("d") == (("c", "b"),)
    assert plan.ahead("d") == ()  # one is ahead already
    assert plan.until("a") == (("a",),)


def record_of(units: str) -> ForwardRecord[str]:
    record: ForwardRecord[str] = ForwardRecord()
    for unit in units:
        record.enter(unit)
    return record


def test_joined_reductions_wait_for_all_of_them() -> None:
    plan = ReduceOrder(record_of("abcde"))
    for unit in "bcde":
        plan.expect(unit)
    plan.coalesce(pairs)
    plan.expect("a")
    plan.ready("d")
    plan.ready("c")
    assert plan.due() == []
    plan.ready("e")
    assert plan.due() == [("e", "d")]
    plan.ready("e")  # a gradient that came late: on its own
    assert plan.due() == [("e",)]
    plan.ready("a")
    assert plan.due() == [] and [*plan.expected] == ["b", "c", "a"]
    assert plan.due(flush=True) == [("c", "b"), ("a",)] and plan.due(flush=True) == []


def test_upcoming_units_are_those_of_the_forward_before() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    follow(order, "abcad")
    order.begin()
    order.enter("a")
    assert "".join(order.upcoming()) == "bc"
    order.enter("b")
    assert "".join(order.upcoming()) == "cad"
    order.enter("a")  # its second visit, earlier than it was
    assert "".join(order.upcoming()) == "d"


def test_a_span_is_of_the_passes_whose_graphs_live() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    graphs = []
    for units in "ab", "ba":
        record.begin()
        graphs.append(record.running)
        for unit in units:
            record.enter(unit)
            record.leave(unit)
        record.end()
    assert BackwardClock(record).several == {"a", "b"}
    assert BackwardClock(record).began == {"a": 1, "b": 3} and BackwardClock(record).ended == {"b": 6, "a": 8}
    del graphs[0]
    assert BackwardClock(record).began == {"b": 5, "a": 7} and list(BackwardClock(record).began) == ["b", "a"]
    assert BackwardClock(record).ended == {"b": 6, "a": 8} and not BackwardClock(record).several


def test_an_owner_begins_with_the_first_that_uses_its_parameters() -> None:
    record: ForwardRecord[str] = ForwardRecord()
    record.begin()
    for unit in "ab":
        record.enter(unit)
        if unit == "a":
            record.enter_sharing("b")
    assert record.entered == ("a", "b") and BackwardClock(record).began == {"a": 1, "b": 2}


def test_units_that_are_gathered_together_are_so_when_one_of_them_is_needed() -> None:
    """Also one that was handed out ahead, alone: whoever waits for it has issued the others' gathers."""
    branch = ("b", "c", "d")
    together = dict.fromkeys(branch, branch)
    plan = GatherOrder(("a", *branch, "e"), together=together)
    assert plan.until("e") == (("e",),)
    assert plan.ahead("e") == (("d",),)
    assert not plan.is_past("d")
    assert plan.until("d") == (("c",), ("b",), ("d",))
    assert plan.is_past("d") and plan.is_past("b") and not plan.is_past("a")
    assert plan.until("c") == (("c",),)
    plan = GatherOrder(("a", *branch, "e"), together=together)
    assert plan.until("c") == (("e",), ("d",), ("c",), ("b",))


def test_gathers_of_units_that_are_recomputed_together_are_due_when_the_last_of_them_ended() -> None:
    class Checkpoint:
        pass

    outer, inner = Checkpoint(), Checkpoint()
    record: ForwardRecord[str] = ForwardRecord()
    record.begin()
    for unit, segment in {"a": None, "b": outer, "c": inner, "d": inner, "e": outer, "f": None}.items():
        around = [each for each in (inner, outer) if each is segment or segment is inner]
        record.enter(unit, segment=segment, segments=around.copy)
        record.leave(unit)
    ended = BackwardClock(record).ended
    assert BackwardClock(record).due == ended | dict.fromkeys("bcd", ended["e"])
    del outer, segment, around  # as where nothing was saved in it, which other ranks may have done
    assert BackwardClock(record).due == ended | dict.fromkeys("bcd", ended["e"])
