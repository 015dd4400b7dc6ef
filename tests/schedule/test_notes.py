"""What ranks compare beside what they communicate, played with it: by simulation.

Steps follow each other, in which ranks learn what to expect, and in which a rank may bring no gradients, have frozen
parameters of its own, or leave out a unit. Where all ranks do the same, or differ in what they may, nobody waits in a
circle and nobody gets an error; where they differ in what they may not, all get one before collectives meet that are
not the same. What no rank brought gradients to all of them find alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flatfsdp.engine.schedule.backward_schedule import UnitRules
from tests.harness.simulated_agreement import SimulatedAgreement
from tests.harness.simulated_waits import BITMAPS
from tests.harness.simulation import (
    Batch,
    Job,
    Program,
    Region,
    SimulatedRank,
    call,
    drawn_program,
    problem_of,
    problem_of_program,
    program_of,
    shows,
)
from tests.harness.thorough import seeds, some, spread

pytestmark = pytest.mark.unit

AT_ONCE = 50  # programs of a test
Change = Callable[[Batch], Batch]


@pytest.mark.parametrize(("world", "block"), spread([2, 3, 5, 8], seeds(4, 100)))
def test_ranks_of_several_steps_agree_or_all_learn_that_they_do_not(block: int, world: int) -> None:
    first = 10**6 * world + block * AT_ONCE
    found = {seed: problem for seed in range(first, first + AT_ONCE) if (problem := problem_of(seed, world=world))}
    assert not found, found


def drawn(seed: int, steps: str, *changes: Change) -> Job:
    """Steps of two kinds, which ranks draw; in those of kind B they change what they have drawn."""
    batches = {kind: [Batch(100 * seed + 10 * (kind == "B") + rank) for rank in range(len(changes))] for kind in "AB"}
    batches["B"] = [change(batch) for change, batch in zip(changes, batches["B"], strict=True)]
    return Job([batches[kind] for kind in steps])


def same(batch: Batch) -> Batch:
    return batch


def without_gradients(batch: Batch) -> Batch:
    return replace(batch, brings_gradients=False)


def with_a_frozen_unit(batch: Batch) -> Batch:
    return replace(batch, frozen=frozenset({("b", 0), ("b", 1)}))


def without_a_unit(batch: Batch) -> Batch:
    return replace(batch, left_out=1)


def plain() -> Program:
    return program_of([call(unit) for unit in "abcd"], {unit: UnitRules() for unit in "abcd"})


@pytest.mark.parametrize("change", [with_a_frozen_unit, without_a_unit])
@pytest.mark.parametrize("steps", ["B", "AB", "AAB", "ABAB"])
def test_models_that_are_not_the_same_are_an_error_for_all(change: Change, steps: str) -> None:
    """And models of all ranks that are others than in the step before are none."""
    for seed in seeds(8, 20):
        for changes in ((change, same), (same, same, change), (change, change, change)):
            job = drawn(seed, steps, *changes)
            assert job.is_alike(plain()) == (same not in changes)
            assert not problem_of_program(plain(), seed, job=job)


def conditional() -> Program:
    """Ranks run `a` and `b` or not, and nothing gathers ahead."""
    rules: dict[str, UnitRules[str]] = {name: UnitRules("after") for name in "abcd"}
    return program_of([["a", "b"], call("c", call("d"))], rules, together="ab")


def conditional_that_stays() -> Program:
    """The same, and `b` stays unsharded."""
    program = conditional()
    return replace(program, rules=program.rules | {"b": replace(program.rules["b"], stays_unsharded=True)})


def problems(program: Program, seed: int, steps: str, **wrong: type) -> Iterator[str]:
    """Where in some steps gradients come to some ranks, or to none."""
    for changes in ((without_gradients, same), (same, without_gradients, same), (without_gradients,) * 3):
        if problem := problem_of_program(program, seed, job=drawn(seed, steps, *changes), **wrong):
            yield f"{seed} {[change.__name__ for change in changes]}: {problem}"


def reduces_nothing() -> Program:
    """`a` is frozen, and gradients of `b` are added up unsharded."""
    rules: dict[str, UnitRules[str]] = {"a": UnitRules(), "b": UnitRules(reduces=False)}
    return replace(program_of([call("a", call("b"))], rules), frozen={("a", 0), ("a", 1)})


def beside_a_checkpoint() -> Program:
    """Gradients that pass `c` and `d` over come to frozen units, of which one is recomputed when the other is over."""
    rules: dict[str, UnitRules[str]] = {name: UnitRules("after") for name in "abcd"}
    recomputed = call("a", checkpoint=Region(reentrant=True))
    recomputed.beside = True
    program = program_of([recomputed, call("b"), call("c"), call("d")], rules)
    return replace(program, frozen={(name, index) for name in "ab" for index in range(2)})


PROGRAMS = plain, conditional, conditional_that_stays, reduces_nothing, beside_a_checkpoint
STEPS = "B", "BB", "AB", "BAB", "ABB"


def freed_and_gathered_again() -> Program:
    """One of these ranks frees what the forward has left, and passes over it, before it knows of no gradients."""
    return drawn_program(25569)


@pytest.mark.parametrize(
    ("program", "steps"),
    some([*product((*PROGRAMS, freed_and_gathered_again), STEPS)], 2),  # of each, three with each
)
def test_gradients_come_to_some_ranks_or_to_none(program: Callable[[], Program], steps: str) -> None:
    found = [each for seed in seeds(12, 30) for each in problems(program(), seed, steps)]
    assert not found, found


# -- notes that are wrong ----------------------------------------------------------------------------------------------


class ComparesAfterGathering(SimulatedRank):
    """Which unit a forward has come to is compared when it has been gathered."""

    def compare(self, unit: str) -> None:
        return

    def finish(self, unit: str, *, reached: bool) -> None:
        super().compare(unit)
        super().finish(unit, reached=reached)


class WaitsForWhatOthersLack(SimulatedRank):
    """A rank learns what others lack before it reduces what it lacks itself."""

    def reduce(self, units: Sequence[str]) -> None:
        if any(map(self._lacking_in, units)):
            self.agreement.trace.append("await", (BITMAPS, self.agreement.trace.counts[BITMAPS]))
        super().reduce(units)


class ForeseesGradients(SimulatedRank):
    """Whether gradients come is not compared: ranks take part as if some did."""

    def may_bring(self) -> bool:
        self.brought_by_itself = super().may_bring()
        return True

    def compare_plan(self) -> None:
        super().compare_plan()
        self.schedule.brings = self.brought_by_itself


class ComparesNoParameters(SimulatedAgreement):
    """Which parameters require gradients is not compared."""

    def begin_forward(self, trained: Callable[[], tuple[bool, ...]], **how: Any) -> None:
        super().begin_forward(tuple, **how)

    def check_backward(self, plan: Any, describe: Callable[[], Any], **how: Any) -> None:
        made = describe()._replace(trained=0, flats=[])
        super().check_backward(str(made), lambda: made, **how)


# Each with a seed whose program shows it.
WRONG: Sequence[tuple[dict[str, type], int]] = (
    *(({"rank_class": each}, seed) for each, seed in ((ComparesAfterGathering, 34), (WaitsForWhatOthersLack, 0))),
    ({"rank_class": ForeseesGradients}, 123),
    ({"agreement_class": ComparesNoParameters}, 12),
)


def name_of(value: object) -> str:
    return next(iter(value.values())).__name__ if isinstance(value, dict) else ""


@pytest.mark.parametrize(("wrong", "first"), WRONG, ids=name_of)
def test_a_wrong_note_is_found_out(wrong: dict[str, type], first: int) -> None:
    assert shows(first, 2000, **wrong)
