"""When half of a unit's gradients have come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flatfsdp.engine.schedule.issue_order import GatherOrder
from flatfsdp.engine.schedule.mid_backward import HalfwayTrigger


@pytest.mark.parametrize(
    ("gradients", "half_at"),
    [([1, 1, 1, 1], 1), ([1, 1, 1], 1), ([10, 1, 1], 0), ([1, 1, 10], 2), ([6, 36, 6, 36], 1), ([7], 0)],
)
def test_half_is_counted_in_elements_and_comes_once(gradients: Sequence[int], half_at: int) -> None:
    midway: HalfwayTrigger[str] = HalfwayTrigger()
    midway.begin("a", sum(gradients), ["next"])
    assert [midway.gradient_elements_arrived("a", elements) for elements in gradients].index(["next"]) == half_at
    assert not midway.gradient_elements_arrived("a", 1) and not midway.end("a")


def test_a_unit_without_gradients_is_half_way_when_it_begins() -> None:
    midway: HalfwayTrigger[str] = HalfwayTrigger()
    midway.begin("a", 0, ["next"])
    assert midway.gradient_elements_arrived("a", 0) == ["next"]
    assert not midway.gradient_elements_arrived("elsewhere", 1)


def test_what_ends_before_is_half_way_no_more() -> None:
    midway: HalfwayTrigger[str] = HalfwayTrigger()
    for unit, following in ("a", "wx"), ("b", "y"), ("c", ""), ("d", "z"):
        midway.begin(unit, 2, following)
    assert midway.end("b") == "y" and not midway.end("b") and not midway.gradient_elements_arrived("b", 2)
    assert midway.end_all() == ["w", "x", "z"] and midway.end_all() == []
    midway.begin("a", 2, "w")  # its backward begins again
    assert midway.gradient_elements_arrived("a", 2) == "w"


def test_a_plan_says_what_it_would_hand_out() -> None:
    plan = GatherOrder(("a", "b", "c"), coalesce=lambda units: (("c",), ("b", "a")))
    assert [plan.has_turn(unit) for unit in ("c", "b", "elsewhere")] == [True, True, False]
    plan.until("c")
    assert [*plan.following("c")] == ["b", "a"] == [*plan.following("c")]
    assert plan.ahead("c") == (("b", "a"),)
    assert [*plan.following("c"), *plan.following("a"), *plan.ahead("a")] == []
    assert not plan.has_turn("c") and not plan.has_turn("a")
