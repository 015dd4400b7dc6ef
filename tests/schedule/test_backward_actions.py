"""The actions of a backward, event by event, as values: what is executed, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flatfsdp.engine.features.halfway import HalfwaySchedule
from flatfsdp.engine.schedule.actions import Action
from flatfsdp.engine.schedule.backward_schedule import BackwardSchedule, UnitFacts, UnitRules
from flatfsdp.engine.schedule.forward_schedule import ForwardRecord

pytestmark = pytest.mark.unit

Step = Callable[[BackwardSchedule[str]], list[Action[str]]]
LETTERS = {"gather": "+", "ahead": ">", "free": "-", "participate": "0", "complete": "!", "reduce": "*"}


def recorded(program: str, reentrant: str = "") -> ForwardRecord[str]:
    """`a(b)`: `b` runs inside of `a`. Those in `reentrant` run under a reentrant checkpoint of their own."""
    record, running = ForwardRecord[str](), list[str]()
    record.begin()
    for letter in program:
        if letter == ")":
            unit = running.pop()
            (record.leave_without_graph if unit in reentrant else record.leave)(unit)
        elif letter != "(":
            running.append(letter)
            if letter in reentrant:
                record.enter_without_graph(letter, checkpoint=letter)
            else:
                record.enter(letter)
    return record


class Halfway(HalfwaySchedule[str]):
    """Of units with two gradients of one element, which are freed after their forward."""

    @staticmethod
    def elements(unit: str) -> int:
        return 2

    @staticmethod
    def is_gathered_again(unit: str) -> bool:
        return True


class Units:
    """Their state, as a driver has it: it executes all actions of an event, in letters."""

    def __init__(self, record: ForwardRecord[str], rules: UnitRules[str]) -> None:
        self.unsharded: set[str] = set()
        self.schedule = (Halfway if rules.prefetch == "halfway" else BackwardSchedule[str])(
            record,
            dict.fromkeys(record.begun, rules),
            UnitFacts(
                has_gradients=lambda unit: unit in self.schedule.completed,
                is_used_once=lambda unit: True,
                is_unsharded=self.unsharded.__contains__,
                is_trained=lambda unit: True,
                awaits_gradients=lambda unit: False,
                will_recompute=lambda checkpoint: True,
            ),
            coalesce=lambda units: zip(units),
            together={},
        )
        self.schedule.brings = True
        for unit in record.anchored:
            self.schedule.expect(unit)
        self.schedule.expect_recomputed()

    def play(self, events: str) -> str:
        """`a`: the backward reaches `a`; `a.`: all gradients of it have come; `a~`: a checkpoint runs it again; `a/`:
        half of its gradients have come; `;`: the backward ends."""
        return " | ".join(self.do(self._event(event)) for event in events.split())

    def _event(self, event: str) -> list[Action[str]]:
        schedule = self.schedule
        if event == ";":
            return schedule.ended()
        unit, kind = event[0], event[1:]
        if kind == ".":
            return schedule.completes(unit, in_use=False)
        if kind == "/":
            assert isinstance(schedule, Halfway)
            return schedule.progressed(unit, 1)
        if kind == "~":
            region = schedule.clock.running(lambda checkpoint: checkpoint == unit)
            return schedule.recomputed(unit, inner=False, region=region)
        schedule.expecting.add(unit)
        return schedule.reached(unit, inner=False)

    def do(self, actions: Sequence[Action[str]]) -> str:
        for verb, units in actions:
            if verb in ("gather", "ahead"):
                self.unsharded.update(units)
            elif verb in ("free", "close"):
                self.unsharded.difference_update(units)
        return " ".join(LETTERS[verb] + "".join(units) for verb, units in actions if verb in LETTERS)


@pytest.mark.parametrize(
    ("program", "reentrant", "prefetch", "events", "expected"),
    [
        ("a()b()c()", "", "before", "c c. b b. a a. ;", "+c >b | -c *c | >a | -b *b |  | -a *a | "),
        ("a()b()c()", "", "halfway", "c c/ c. b b/ b. ;", "+c | >b | -c *c |  | >a | -b *b | 0a !a *a -a"),
        ("a()b()c()", "", "after", "c c. b b. ;", "+c | -c >b *c |  | -b >a *b | 0a !a *a -a"),
        ("a()b()c()", "", None, "c c. a a. ;", "+c | -c *c | +b 0b !b *b -b +a | -a *a | "),
        # A unit around others is reduced after them.
        ("a(b()c())", "", "before", "a c c. b b. a. ;", "+a >c | >b | -c *c |  | -b *b | -a *a | "),
        ("a(b())", "", None, "a a. b b. ;", "+a | -a | +b | -b *b *a | "),
        # Those under reentrant checkpoints have their turns among the others.
        ("a()b()c()", "b", "before", "c c. b~ b b. a a. ;", "+c >b | -c *c | +b >a |  | -b *b | -b | -a *a | "),
        (
            "a()b()c()",
            "abc",
            "before",
            "c~ c c. b~ b b. a~ a a. ;",
            "+c >b |  | -c *c | -c +b >a |  | -b *b | -b +a |  | -a *a | -a",
        ),
    ],
)
def test_actions(program: str, reentrant: str, prefetch: str | None, events: str, expected: str) -> None:
    units = Units(recorded(program, reentrant), UnitRules(prefetch))  # type: ignore[arg-type]
    assert units.play(events) == expected
    assert not units.unsharded
