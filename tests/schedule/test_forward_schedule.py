"""What a forward gathers, frees and leaves unsharded, without torch; and forwards that are wrong, by simulation.

That ranks whose forwards and backwards are right never wait in a circle is shown in `test_backward_schedule.py`, whose
programs play both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest

from flatfsdp.engine.schedule.actions import Action
from flatfsdp.engine.schedule.forward_schedule import ForwardFacts, ForwardRecord, ForwardSchedule
from tests.harness.simulation import SimulatedForwards, SimulatedRank, problem_of

pytestmark = pytest.mark.unit


@dataclass
class Units:
    """Units by letter; a capital one is small, and gathered with small ones that follow."""

    owners: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, int] = field(default_factory=dict)
    stay: str = ""
    next: str = ""
    listed: Mapping[str, str] = field(default_factory=dict)
    post_forward: str = ""
    summoned: str = ""
    unsharded: set[str] = field(default_factory=set)
    running: list[str] = field(default_factory=list)


class Played(ForwardSchedule[str]):
    """Its actions in letters: `+ab` a gather, `>ab` one ahead, `-a` freed, `~a` freed with a post-forward shard, `=a`
    left unsharded."""

    def __init__(self, units: Units) -> None:
        def coalesced(unit: str, following: Iterable[str]) -> Sequence[str]:
            small = takewhile(lambda each: each.isupper() and each not in units.unsharded, following)
            return (unit, *small) if unit.isupper() and unit not in units.unsharded else (unit,)

        super().__init__(
            ForwardFacts(
                owners=lambda unit: units.owners.get(unit, ""),
                users=lambda unit: (user for user, owners in units.owners.items() if unit in owners),
                has_users=lambda unit: any(unit in owners for owners in units.owners.values()),
                runs=units.running.__contains__,
                is_requested=units.summoned.__contains__,
                joins=str.isupper,
                gathers_next=units.next.__contains__,
                lists=units.listed.get,
                listed=units.listed.__getitem__,
                coalesced=coalesced,
                reshards=lambda unit: unit not in units.stay,
                stays=lambda unit: False,
                retains=units.post_forward.__contains__,
                lacks=lambda unit, ran: len(ran) < units.entries[unit],
            )
        )
        self.units, self.record, self.actions = units, ForwardRecord[str](), ""

    def do(self, actions: Iterable[Action[str]]) -> None:
        for verb, units in actions:
            if verb in ("gather", "ahead"):
                if new := [unit for unit in units if unit not in self.units.unsharded]:
                    self.actions += {"gather": " +", "ahead": " >"}[verb] + "".join(new)
                    self.units.unsharded.update(new)
            else:
                self.actions += {"free": " -", "retain": " ~", "leave": " ="}[verb] + "".join(units)
                self.units.unsharded.difference_update(units if verb != "leave" else ())

    def forward(self, program: str) -> str:
        """`a(b)`: `b` runs inside of `a`, which runs."""
        self.order.begin()
        self.record.begin()
        self.actions = ""
        for letter in program:
            if letter == ")":
                unit = self.units.running.pop()
                self.do(self.finished(self.record, unit, training=True, reached=True))
            elif letter != "(":
                self.record.enter(letter)
                self.units.running.append(letter)
                self.do(self.enters(letter))
        self.record.end()
        self.order.end()
        self.do(self.ended(self.record, ""))
        return self.actions.strip()


@pytest.mark.parametrize(
    ("units", "program", "first", "then"),
    [
        (Units(), "a(b())", "+a +b -b -a", "+a +b -b -a"),
        (Units(stay="a"), "a(b())", "+a +b -b =a", "+b -b =a"),
        (Units(next="ab"), "a()b()c()", "+a -a +b -b +c -c", "+a >b -a >c -b -c"),
        (Units(listed={"a": "cb"}), "a()b()c()", "+a >c >b -a -b -c", "+a >c >b -a -b -c"),
        (Units(listed={"a": "c"}, next="a"), "a()b()c()", "+a >c -a +b -b -c", "+a >c -a +b -b -c"),
        # Small ones together, once it is known what follows; not with a large one between.
        (Units(), "A()B()c()D()", "+A -A +B -B +c -c +D -D", "+AB -A -B +c -c +D -D"),
        (Units(next="c"), "c()A()B()", "+c -c +A -A +B -B", "+c >AB -c -A -B"),
        # Owners first; freed where nobody else uses them, and not while they run.
        (Units(owners={"b": "a"}), "b()c()", "+a +b -b -a +c -c", "+a +b -b -a +c -c"),
        (Units(owners={"b": "a"}), "a(b())", "+a +b -b -a", "+a +b -b -a"),
        (Units(owners={"b": "a", "c": "a"}), "b(c())", "+a +b +c -c -b -a", "+a +b +c -c -b -a"),
        (Units(owners={"b": "a"}), "b(a())", "+a +b =a -b -a", "+a +b =a -b -a"),
        (Units(owners={"b": "a"}, stay="a"), "b()", "+a +b -b =a", "+b -b =a"),
        (Units(owners={"b": "a"}, summoned="a"), "b()", "+b -b", "+b -b"),
        # The post-forward axis keeps what a backward reads.
        (Units(post_forward="a", owners={"b": "a"}), "a()b()", "+a ~a +a +b -b ~a", "+a ~a +a +b -b ~a"),
    ],
)
def test_actions(units: Units, program: str, first: str, then: str) -> None:
    played = Played(units)
    assert played.forward(program) == first
    assert played.forward(program) == then


def test_a_unit_of_several_entries_is_kept_until_all_have_run() -> None:
    played = Played(Units(entries={"a": 2}))
    played.order.begin()
    for entry, last in ((1, "="), (2, "-")):
        played.do(played.enters("a"))
        played.entry_ran("a", entry)
        played.do(played.finished(played.record, "a", training=True, reached=True))
        assert played.actions.endswith(f"{last}a")
    assert played.actions == " +a =a -a"


def test_what_lacks_entries_is_freed_at_the_end_but_for_the_outermost_that_ran() -> None:
    for outermost, freed in (("b", " -a"), ("a", "")):
        played = Played(Units(entries={"a": 2}))
        played.do(played.enters("a"))
        played.entry_ran("a", 1)
        played.do(played.finished(played.record, "a", training=True, reached=True))
        played.actions = ""
        played.do(played.ended(played.record, outermost))
        assert played.actions == freed and not played.lacking


# -- forwards that are wrong -------------------------------------------------------------------------------------------


class FreesWhatIsInUse(SimulatedForwards):
    """A unit is freed while one that uses its parameters runs."""

    def _in_use(self, unit: str) -> bool:
        return False


class GathersNoOwners(SimulatedForwards):
    """What a unit uses of others is not gathered with it."""

    def enters(self, unit: str, *, in_order: bool = True) -> list[Action[str]]:
        owners, self._facts = self._facts.owners, _with(self._facts, owners=lambda each: ())
        actions = super().enters(unit, in_order=in_order)
        self._facts = _with(self._facts, owners=owners)
        return actions


class LeavesOwners(SimulatedForwards):
    """Owners of tied parameters are not freed after the part of those that use them."""

    def finished(self, record: ForwardRecord[str], unit: str, **how: Any) -> list[Action[str]]:
        owners, self._facts = self._facts.owners, _with(self._facts, owners=lambda each: ())
        actions = super().finished(record, unit, **how)
        self._facts = _with(self._facts, owners=owners)
        return actions


class GathersAheadByItself(SimulatedForwards):
    """Each rank gathers ahead where it likes."""

    def __init__(self, rank: SimulatedRank) -> None:
        super().__init__(rank)
        rng = random.Random(rank.rng.getstate()[1][5])
        self._facts = _with(self._facts, gathers_next=lambda unit: rng.random() < 0.5)


class JoinsWhatItLikes(SimulatedForwards):
    """Each rank has groups of its own."""

    def __init__(self, rank: SimulatedRank) -> None:
        super().__init__(rank)
        rng, coalesced = random.Random(rank.rng.getstate()[1][5]), self._facts.coalesced
        self._facts = _with(
            self._facts, coalesced=lambda unit, following: coalesced(unit, following if rng.random() < 0.5 else ())
        )


def _with(facts: ForwardFacts[str], **changed: Callable[..., Any]) -> ForwardFacts[str]:
    fields = {name: getattr(facts, name) for name in ForwardFacts.__slots__}
    return ForwardFacts(**(fields | changed))


@pytest.mark.parametrize(
    "wrong", [FreesWhatIsInUse, GathersNoOwners, LeavesOwners, GathersAheadByItself, JoinsWhatItLikes]
)
def test_a_wrong_forward_is_found_out(wrong: type[SimulatedForwards]) -> None:
    assert any(problem_of(seed, forwards_class=wrong) for seed in range(500))
