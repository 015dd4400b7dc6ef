"""No order that ranks find from what their own backwards reach lets one wait for another: by simulation.

On each communicator all ranks issue beginnings of one sequence, and nobody waits for what a waiting rank has not
issued, where hosts wait (gloo) and where streams do (NCCL, with the limiter's waits for memory). What is used is
gathered. Schedules that break one of the rules of [Note: one clock] are found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flatfsdp.engine.schedule.backward_driver import UnitRules
from flatfsdp.engine.schedule.backward_schedule import BackwardSchedule
from flatfsdp.engine.schedule.forward_record import ForwardRecord
from tests.harness.simulation import Call, Program, Region, call, problem_of, problem_of_program, program_of
from tests.harness.thorough import seeds

AT_ONCE = 50  # programs of a test
Schedule = BackwardSchedule[str]


@pytest.mark.parametrize("block", seeds(6, 400))
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
    rules = {
        name: UnitRules("halfway", targets=("a",) if name == "f" else (), is_conditional=name in "ab")
        for name in "abcdef"
    }
    return program_of(steps, rules, joined="ef", together="ab")


def recomputed_and_listed() -> Program:
    """`c` and `d` are recomputed together, and ranks reach one, both or none: `c` lists what comes next after both."""
    together = Region(reentrant=True)
    steps = [call("x"), call("a"), call("b", checkpoint=Region(True)), call("c", call("d"), checkpoint=together)]
    return program_of(steps, {name: UnitRules(targets=("a",) if name == "c" else ()) for name in "xabcd"})


def sharing(unit: str, owner: str, *inside: Call) -> Call:
    """A call of a unit that uses a parameter of its `owner`, too."""
    made = call(unit, *inside)
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


@pytest.mark.parametrize(
    "program",
    [
        *(passed_over_before_what_is_listed, conditional_listed_and_next),
        *(recomputed_and_listed, owner_is_over_before_a_user, owners_of_owners),
    ],
)
def test_ranks_gather_alike_whatever_they_pass_over(program: Callable[[], Program]) -> None:
    found = {seed: problem for seed in range(100) if (problem := problem_of_program(program(), seed))}
    assert not found, found


# -- schedules that are wrong ------------------------------------------------------------------------------------------


class ReducesWhatIsReady(Schedule):
    """Reductions go as soon as their gradients are there, whatever began later."""

    def ready(self, unit: str) -> None:
        if self.reductions.expects(unit):
            self.reductions.ready(unit)
            self._reduce([group for group in self.reductions.due(rest=True) if unit in group] or [(unit,)])


class GathersWhatIsReached(Schedule):
    """Gathers go without those whose turn comes before."""

    def gather_in_turn(self, unit: str) -> None:
        self._gather([(unit,)])


class PassesOverNothing(Schedule):
    """What this rank's backward does not reach is reduced at the end (rule 1)."""

    def _pass(self, tick: float) -> None:
        return


class ReducesBeforeGathers(Schedule):
    """A reduction is issued before gathers that are due before it (rule 2)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clock.due_before = lambda group: ()  # type: ignore[method-assign]


class PrefetchesWhenFreedInEveryModel(Schedule):
    """What is freed brings the next group also where checkpoints gather outside of the plan."""

    def released(self, unit: str) -> None:
        if self._rules[unit].prefetch == "after":
            self._gather(self.gathers.ahead(unit), ahead=True)


class FreesAtOnce(Schedule):
    """A unit that is called again, or recomputed, is freed when its gradients have come."""

    def reaches_again(self, unit: str) -> bool:
        return False


class LeavesRecomputedUnits(Schedule):
    """What a checkpoint ran again and got no gradients on this rank is completed at the end only."""

    def _complete_recomputed(self, *, but: str | None = None) -> None:
        return


class RecomputesWithoutGathers(Schedule):
    """What ended later is not gathered before what a reentrant checkpoint runs again."""

    def _gather_passed(self, unit: str, with_graph: bool) -> None:
        return


class FreesOwners(Schedule):
    """An owner of tied parameters is freed when its gradients have come."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lent.may_be_used = lambda owner: False  # type: ignore[method-assign]


class RecomputesWithoutReductions(Schedule):
    """What began later is not reduced before a checkpoint runs again."""

    def _complete_before(self, unit: str, with_graph: bool) -> None:
        return


class GathersRepeatedUnitsAsTheyRun(Schedule):
    """What a checkpoint without reentrance runs again before a reentrant one inside has no turn."""

    def __init__(self, record: ForwardRecord[str], *args: Any, **options: Any) -> None:
        record.repeated = dict  # type: ignore[method-assign, assignment]
        super().__init__(record, *args, **options)


class ReducesBeforeItRunsAgain(Schedule):
    """A reduction is issued before gathers that are due before it, where these cannot be issued ahead (rule 2)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reductions.awaited = ()


class AwaitsGradientsOfThePlan(Schedule):
    """Where all gradients come in reentrant checkpoints, nothing is passed over before."""

    recomputes_trained = property(lambda self: False, lambda self, found: None)  # type: ignore[assignment]


class ReadsAheadOfHalf(Schedule):
    """A gather outside of the plan goes before one that awaits half of a unit's gradients."""

    def gather_in_turn(self, unit: str) -> None:
        self._gather(self.gathers.until(unit))


class EndsWithoutTheRest(Schedule):
    """What no gradient came to takes no part."""

    def ended(self) -> None:
        return


WRONG: Sequence[type[Schedule]] = (
    *(ReducesWhatIsReady, GathersWhatIsReached, PassesOverNothing, ReducesBeforeGathers, FreesAtOnce),
    *(PrefetchesWhenFreedInEveryModel, LeavesRecomputedUnits, RecomputesWithoutGathers, RecomputesWithoutReductions),
    *(ReadsAheadOfHalf, EndsWithoutTheRest, FreesOwners, GathersRepeatedUnitsAsTheyRun),
    *(ReducesBeforeItRunsAgain, AwaitsGradientsOfThePlan),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_schedule_is_found_out(wrong: type[Schedule]) -> None:
    assert any(problem_of(seed, schedule_class=wrong) for seed in range(5000))
