"""When half of a unit's gradients have come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flatfsdp.engine.features.halfway import HalfwayTrigger
from flatfsdp.engine.schedule.issue_order import GatherOrder

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("gradients", "half_at"),
    [([1, 1, 1, 1], 1), ([1, 1, 1], 1), ([10, 1, 1], 0), ([1, 1, 10], 2), ([6, 36, 6, 36], 1), ([7], 0)],
)
def test_half_is_counted_in_elements_and_comes_once(gradients: Sequence[int], half_at: int) -> None:
    trigger: HalfwayTrigger[str] = HalfwayTrigger()
    trigger.begin("a", sum(gradients), ["next"])
    assert [trigger.gradient_elements_arrived("a", elements) for elements in gradients].index(["next"]) == half_at
    assert not trigger.gradient_elements_arrived("a", 1) and not trigger.end("a")


def test_a_unit_without_gradients_is_half_way_when_it_begins() -> None:
    trigger: HalfwayTrigger[str] = HalfwayTrigger()
    trigger.begin("a", 0, ["next"])
    assert trigger.gradient_elements_arrived("a", 0) == ["next"]
    assert not trigger.gradient_elements_arrived("elsewhere", 1)


def test_what_ends_before_is_half_way_no_more() -> None:
    trigger: HalfwayTrigger[str] = HalfwayTrigger()
    for unit, following in ("a", "wx"), ("b", "y"), ("c", ""), ("d", "z"):
        trigger.begin(unit, 2, following)
    assert trigger.end("b") == "y" and not trigger.end("b") and not trigger.gradient_elements_arrived("b", 2)
    assert trigger.end_all() == ["w", "x", "z"] and trigger.end_all() == []
    trigger.begin("a", 2, "w")  # its backward begins again
    assert trigger.gradient_elements_arrived("a", 2) == "w"


def test_a_plan_reports_what_it_would_hand_out() -> None:
    plan = GatherOrder(("a", "b", "c"), coalesce=lambda units: (("c",), ("b", "a")))
    assert [plan.has_turn(unit) for unit in ("c", "b", "elsewhere")] == [True, True, False]
    plan.until("c")
    assert [*plan.following("c")] == ["b", "a"] == [*plan.following("c")]
    assert plan.ahead("c") == (("b", "a"),)
    assert [*plan.following("c"), *plan.following("a"), *plan.ahead("a")] == []
    assert not plan.has_turn("c") and not plan.has_turn("a")
