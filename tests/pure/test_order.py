"""Which unit comes next: the gathers of a backward, and what a forward gathers ahead."""

from __future__ import annotations

import pytest

from flatfsdp.policy.order import ForwardOrder, GatherPlan


def test_gathers_go_backwards_whatever_is_asked_for_first() -> None:
    plan = GatherPlan(("a", "b", "c"))
    assert plan.until("b") == ("c", "b")
    assert plan.until("c") == ("c",)  # again, after it was resharded
    assert plan.until("elsewhere") == ("elsewhere",)
    assert plan.ahead() == "a" and plan.ahead() is None


@pytest.mark.parametrize("first", ["d", "c", "b", "a"])
def test_listed_units_have_one_place_in_the_order(first: str) -> None:
    """Wherever a rank's backward begins, it gathers a beginning of the same sequence."""
    plan = GatherPlan(("a", "b", "c", "d"), {"d": ["b", "unused"], "c": ["b", "a"]})
    sequence = ("d", "b", "c", "a")
    found = plan.until(first)
    assert found == sequence[: sequence.index(first) + 1]
    assert plan.through(["a", "unused"]) == sequence[len(found) :]
    assert plan.through(["b"]) == ()


def follow(order: ForwardOrder[str], units: str) -> str:
    """What is expected after each of `units`, in a forward of them."""
    order.begin()
    found = ""
    for unit in units:
        order.enter(unit)
        found += order.following or "-"
    order.end()
    return found


def test_a_unit_that_runs_twice_has_two_followers() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    assert follow(order, "abac") == "----"
    assert follow(order, "abac") == "bac-"
    assert follow(order, "aab") == "bca"
    assert follow(order, "aab") == "ab-"


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
        assert [order.enter(unit) for unit in "aab"] == [True, False, False]
