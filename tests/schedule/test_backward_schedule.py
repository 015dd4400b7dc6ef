"""No order that ranks find from what their own forwards and backwards reach lets one wait for another: by simulation.

On each communicator all ranks issue beginnings of one sequence, and nobody waits for what a waiting rank has not
issued, where hosts wait (gloo) and where streams do (NCCL, with the limiter's waits for memory). What is used is
gathered. Schedules that break one of the rules of [Note: one clock] are found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flatfsdp.engine.features.halfway import HalfwaySchedule
from flatfsdp.engine.schedule.actions import Action
from flatfsdp.engine.schedule.backward_schedule import UnitRules
from flatfsdp.engine.schedule.forward_schedule import ForwardRecord
from flatfsdp.engine.schedule.issue_order import GatherOrder
from tests.harness.simulation import (
    Call,
    Plain,
    Program,
    Region,
    call,
    drawn_program,
    problem_of,
    problem_of_program,
    program_of,
    shows,
)
from tests.harness.thorough import seeds

pytestmark = pytest.mark.unit

AT_ONCE = 50  # programs of a test
Schedule = HalfwaySchedule[str]  # the decisions of the plain one, and those half-way


@pytest.mark.parametrize("block", seeds(8, 400))
def test_ranks_issue_one_sequence_and_nobody_waits_in_a_circle(block: int) -> None:
    found = {seed: problem for seed in range(block * AT_ONCE, (block + 1) * AT_ONCE) if (problem := problem_of(seed))}
    assert not found, found


def passed_over_before_what_is_listed() -> Program:
    """`d` is reached before `c`, which is gathered before it, being listed by the second `a`."""
    steps = [call("x"), call("a"), call("b", checkpoint=Region(reentrant=True)), call("c"), call("d"), call("a")]
    rules = {name: UnitRules(targets=("c",) if name == "a" else ()) for name in "xabcd"}
    return program_of(steps, rules)


def conditional_listed_and_next() -> Program:
    """`e`, gathered with `f`, gathers half-way what `f` lists: one of two units, of which ranks run any."""
    steps = [["a", "b"], call("c"), call("d", checkpoint=Region(reentrant=True)), call("e", call("f"))]
    rules = {name: UnitRules("halfway", targets=("a",) if name == "f" else ()) for name in "abcdef"}
    return program_of(steps, rules, joined="ef", together="ab")


def recomputed_and_listed() -> Program:
    """`c` and `d` are recomputed together, and ranks reach one, both or none: `c` lists what comes next after both."""
    together = Region(reentrant=True)
    steps = [call("x"), call("a"), call("b", checkpoint=Region(True)), call("c", call("d"), checkpoint=together)]
    return program_of(steps, {name: UnitRules(targets=("a",) if name == "c" else ()) for name in "xabcd"})


def sharing(unit: str, owner: str, *inside: Call, checkpoint: Region | None = None) -> Call:
    """A call of a unit that uses a parameter of its `owner`, too."""
    made = call(unit, *inside, checkpoint=checkpoint)
    made.body.insert(len(inside) + 1, (owner, 0))
    return made


def owner_is_over_before_a_user() -> Program:
    """All that `a` uses itself comes before the backward of `b`, which is inside of it and uses a parameter of `a`."""
    rules: dict[str, UnitRules[str]] = {"a": UnitRules(None), "b": UnitRules(None, owners=("a",))}
    return replace(program_of([call("a", sharing("b", "a"))], rules), has_inputs=False)


def owners_of_owners() -> Program:
    """`d` uses a parameter of `b`, which uses one of `a`; what is between may be passed over."""
    steps = [call("a"), call("x"), sharing("b", "a"), call("y"), sharing("d", "b")]
    owners = {"b": ("a",), "d": ("b",)}
    return program_of(steps, {name: UnitRules(None, owners=owners.get(name, ())) for name in "axbyd"})


def recomputed_with_an_owner() -> Program:
    """`b` and `c` are recomputed together, and `a` has used a parameter of `b` before: `c` may be passed over."""
    together = Region(reentrant=False)
    steps = [sharing("a", "b"), call("b", checkpoint=together), call("c", checkpoint=together)]
    return program_of(steps, {name: UnitRules(None, owners=("b",) if name == "a" else ()) for name in "abc"})


def plain(made: Call) -> Call:
    """The same, with its first parameter used under a reentrant checkpoint."""
    made.body[-2] = Plain([(made.unit, 0)])
    return made


def called_again_with_plain_parts() -> Program:
    """Ranks know of gradients that `a` recomputes in its first call when they have come."""
    return program_of([call("x"), plain(call("a")), plain(call("a"))], {name: UnitRules(None) for name in "xa"})


def frozen_inside() -> Program:
    """`b`, which has no parameters to train, is recomputed inside of `a`, all gradients of which come before."""
    steps = [call("a", call("b", checkpoint=Region(True))), call("x")]
    return replace(
        program_of(steps, {n: UnitRules(None) for n in "abx"}), frozen={("b", 0), ("b", 1)}, has_inputs=False
    )


def frozen_and_recomputed_inside() -> Program:
    """`b` has no parameters to train, and is run again beside `a` where that is reached, after `b` itself."""
    inner = call("a", call("b"), checkpoint=Region(False, around=Region(True)))
    inner.body.reverse()
    return replace(program_of([call("x"), inner], {n: UnitRules(None) for n in "xab"}), frozen={("b", 0), ("b", 1)})


@pytest.mark.parametrize(
    "program",
    [
        *(passed_over_before_what_is_listed, conditional_listed_and_next),
        *(recomputed_and_listed, owner_is_over_before_a_user, owners_of_owners),
        *(recomputed_with_an_owner, called_again_with_plain_parts, frozen_inside, frozen_and_recomputed_inside),
    ],
)
def test_ranks_gather_alike_whatever_they_pass_over(program: Callable[[], Program]) -> None:
    found = {seed: problem for seed in seeds(40, 100) if (problem := problem_of_program(program(), seed))}
    assert not found, found


# -- schedules that are wrong ------------------------------------------------------------------------------------------


class ReducesWhatIsReady(Schedule):
    """Reductions go as soon as their gradients are there, whatever began later."""

    def _ready_to_reduce(self, unit: str) -> None:
        if unit in self.reductions.expected:
            self.reductions.ready(unit)
            self._reduce([group for group in self.reductions.due(flush=True) if unit in group] or [(unit,)])


class GathersWhatIsReached(Schedule):
    """Gathers go without those whose turn comes before."""

    def _gather_in_turn(self, unit: str) -> None:
        self._gather([(unit,)])


class PassesOverNothing(Schedule):
    """What this rank's backward does not reach is reduced at the end (rule 1)."""

    def _pass(self, tick: float, *, inner: bool, awaits: bool = True) -> None:
        while not awaits and self.clock.begun:
            self._complete_last()


class ReducesBeforeGathers(Schedule):
    """A reduction is issued before gathers that are due before it (rule 2)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gathers.due_before = lambda tick: ()  # type: ignore[method-assign]


class FreesAtOnce(Schedule):
    """A unit that is called again, or recomputed, is freed when its gradients have come."""

    def _reaches_again(self, unit: str) -> bool:
        return False


class RecomputesWithoutReductions(Schedule):
    """What began later is not reduced before a checkpoint runs again (rule 1)."""

    def recomputed(self, unit: str, **how: Any) -> list[Action[str]]:
        self._pass = lambda tick, **options: None  # type: ignore[method-assign]
        actions = super().recomputed(unit, **how)
        del self._pass
        return actions


class GathersRecomputedUnitsAsTheyRun(Schedule):
    """What a reentrant checkpoint runs again has no turn among the others."""

    def __init__(self, record: ForwardRecord[str], *args: Any, **options: Any) -> None:
        super().__init__(record, *args, **options)
        self.gathers = GatherOrder(record.anchored)


class FreesOwners(Schedule):
    """An owner of tied parameters is freed when its gradients have come."""

    def _may_be_used(self, owner: str) -> bool:
        return False


class AwaitsGradientsOfThePlan(Schedule):
    """Where all gradients come in reentrant checkpoints, nothing is passed over before."""

    recomputes_trained = property(lambda self: False, lambda self, found: None)  # type: ignore[assignment]


class EndsWithoutTheRest(Schedule):
    """What no gradient came to takes no part."""

    def ended(self) -> list[Action[str]]:
        return []


class ReducesBeforeTheFirstCall(Schedule):
    """A unit that is called again is reduced when its gradients have come, as far as this rank knows."""

    def _ready_to_reduce(self, unit: str) -> None:
        if self._rules[unit].reduces:
            self.reductions.ready(unit)
            self._reduce(self.reductions.due())


class GathersAsUnitsBegan(Schedule):
    """What is recomputed together is freed when it is over itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for lifetime in self.clock.lifetimes:
            lifetime.over = self.clock.began[lifetime.unit]
            lifetime.until_over = lifetime.until_over and lifetime.unit in self.clock.recomputed
        self.clock.lifetimes.sort(key=lambda lifetime: lifetime.over)


# Each with a seed whose program shows it.
WRONG: Sequence[tuple[type[Schedule], int]] = (
    *((ReducesWhatIsReady, 0), (GathersWhatIsReached, 0), (PassesOverNothing, 0), (ReducesBeforeGathers, 38)),
    *((FreesAtOnce, 10), (GathersRecomputedUnitsAsTheyRun, 13), (GathersAsUnitsBegan, 21)),
    *((RecomputesWithoutReductions, 13), (EndsWithoutTheRest, 0)),
    *((AwaitsGradientsOfThePlan, 0), (ReducesBeforeTheFirstCall, 7)),
)


@pytest.mark.parametrize(("wrong", "first"), WRONG)
def test_a_wrong_schedule_is_found_out(wrong: type[Schedule], first: int) -> None:
    assert shows(first, 5000, schedule_class=wrong)


@pytest.mark.parametrize(("wrong", "program"), [(FreesOwners, lambda: drawn_program(269))])
def test_so_is_one_that_few_programs_show(wrong: type[Schedule], program: Callable[[], Program]) -> None:
    assert any(problem_of_program(program(), seed, schedule_class=wrong) for seed in range(100))
