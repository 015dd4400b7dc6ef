"""W ranks that train one model, without tensors: schedules of each for forward and backward, and what they compare.

A *program* is what all ranks run forward, drawn at random: calls of units inside of each other, some again, some under
checkpoints, some as a rank's data will have it. A *job* is a program for several steps, in each of which every rank has
a *batch*: it draws what its backward reaches of the program, which gradients that brings, and which parameters it uses
in parts of units that are recomputed, so that their gradients come late. A rank may also bring none at all, have
parameters frozen, or leave out a call.

`SimulatedRank` is a double of autograd and of the units: it reports events to a `ForwardSchedule`, a `BackwardSchedule`
and an `Agreement`, carries out their actions, and writes down what it issues, what it compares with other ranks, and
where its host or its device waits. What ranks decide in a step depends on nothing that they receive in it, so
`simulated_waits` plays what was written down afterwards.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

from flatfsdp.engine.base.peers import BackwardPlan, bits_of
from flatfsdp.engine.features.coalescing import coalesce
from flatfsdp.engine.features.halfway import HalfwaySchedule
from flatfsdp.engine.schedule.actions import Action
from flatfsdp.engine.schedule.backward_schedule import UnitFacts, UnitRules
from flatfsdp.engine.schedule.forward_schedule import ForwardFacts, ForwardRecord, ForwardSchedule
from tests.harness.simulated_agreement import SimulatedAgreement
from tests.harness.simulated_waits import GATHERS, REDUCTIONS, Play, Problem, Stream, on_device, on_host

PARAMETERS = 2  # per unit
Leaf = tuple[str, int]


@dataclass(eq=False)
class Region:
    """A checkpoint around some calls; it may be inside another one, `around`."""

    reentrant: bool
    around: Region | None = None


@dataclass(eq=False)
class Plain:
    """Modules inside a unit that are not units, under a reentrant checkpoint: the parameters that they use."""

    leaves: list[Leaf]


@dataclass(eq=False)
class Call:
    """One forward of a unit: `body` has inner calls, and the used parameters, in order. An outermost one may be
    `beside` the chain of the others: their gradients do not flow on to it, nor its own to them."""

    unit: str
    body: list[Call | Leaf | Plain]
    region: Region | None = None
    began: int | None = None
    beside: bool = False

    @property
    def reentrant(self) -> list[Region]:
        """The reentrant checkpoints around it, the outermost first: each makes graphs in a separate task."""
        return [each for each in _outwards(self.region) if each.reentrant][::-1]

    @property
    def is_reentrant(self) -> bool:
        """Whether a checkpoint around it is reentrant, so that it has no graph at first."""
        return any(each.reentrant for each in _outwards(self.region))

    def calls(self) -> Iterator[Call]:
        """This call and all inner ones, in the order of the forward."""
        yield self
        for each in self.body:
            if isinstance(each, Call):
                yield from each.calls()

    def uses(self) -> Iterator[tuple[Call, Leaf]]:
        """Pairs of a call and a parameter that it uses, in the order of the forward."""
        for each in self.body:
            if isinstance(each, Call):
                yield from each.uses()
            elif not isinstance(each, Plain):
                yield self, each


@dataclass
class Program:
    """The common program of all ranks.

    Attributes:
        steps: outermost calls; a list: units of a conditional part, some of which each rank runs.
        sizes: of units, for coalescing; 0: never coalesced.
        passes: the number of forwards before the backward; covered: those that the backward reaches.
        frees: units that are freed between forward and backward.
        gathers_next: units that prefetch the next one of the last forward; listed: chosen units to prefetch instead.
        is_known: whether there was a complete forward before.
    """

    units: list[str]
    steps: list[Call | list[str]]
    rules: dict[str, UnitRules[str]]
    frozen: set[Leaf]
    sizes: dict[str, int]
    most: int
    together: dict[str, tuple[str, ...]]
    has_inputs: bool
    passes: int = 1
    covered: tuple[int, ...] = (0,)
    frees: frozenset[str] = frozenset()
    gathers_next: frozenset[str] = frozenset()
    listed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_known: bool = True

    def tied(self) -> set[str]:
        """Units that use parameters of others, and those others."""
        users = {unit for unit, rules in self.rules.items() if rules.owners}
        return users.union(*(self.rules[unit].owners for unit in users))

    def cut(self, units: Iterable[str]) -> Iterable[tuple[str, ...]]:
        """Groups of units that share a collective."""
        return coalesce(units, lambda unit: (self.sizes[unit], None) if self.sizes[unit] else None, most=self.most)


def _outwards(region: Region | None) -> Iterator[Region]:
    while region is not None:
        yield region
        region = region.around


def _made_anew(steps: Sequence[Call | list[str]]) -> list[Call | list[str]]:
    """The same steps, of calls, checkpoints and parts of their own."""
    regions: dict[Region, Region] = {}

    def region_of(region: Region | None) -> Region | None:
        if region is None:
            return None
        if region not in regions:
            regions[region] = Region(region.reentrant, region_of(region.around))
        return regions[region]

    def call_of(made: Call) -> Call:
        body = [
            call_of(each) if isinstance(each, Call) else Plain(each.leaves) if isinstance(each, Plain) else each
            for each in made.body
        ]
        return Call(made.unit, body, region_of(made.region), beside=made.beside)

    return [call_of(step) if isinstance(step, Call) else step for step in steps]


def _leaves_in(each: Call | Leaf | Plain) -> list[Leaf]:
    """The parameters that this item of a body uses directly."""
    return [] if isinstance(each, Call) else each.leaves if isinstance(each, Plain) else [each]


def _own(unit: str) -> list[Leaf]:
    return [(unit, index) for index in range(PARAMETERS)]


def drawn_program(seed: int) -> Program:
    """The random program for a seed."""
    rng = random.Random(seed)
    names = [f"u{index}" for index in range(rng.randint(2, 7))]
    waiting, called = list(names), [""]

    def draw(depth: int) -> Call:
        again = [name for name in called[1:] if rng.random() < 0.5]
        name = waiting.pop(0) if waiting else (again or called[-1:])[0]
        called.append(name)
        body: list[Call | Leaf | Plain] = [*_own(name)]
        for _ in range(rng.choice((0, 0, 1, 2)) if depth < 2 else 0):
            if waiting:
                body.insert(rng.randint(0, len(body)), draw(depth + 1))
        return Call(name, body)

    steps: list[Call | list[str]] = []
    together: dict[str, tuple[str, ...]] = {}
    while waiting:
        if len(waiting) > 2 and not together and rng.random() < 0.2:
            part = [waiting.pop(0) for _ in range(2)]
            together = dict.fromkeys(part, tuple(part))
            steps.append(part)
        else:
            steps.append(draw(0))
    once = [step for step in steps if isinstance(step, Call)]
    inner_names = {each.unit for step in once for each in [*step.calls()][1:]}
    for step in once:
        if rng.random() < 0.15 and step.unit not in inner_names:  # called again later
            steps.append(Call(step.unit, [*_own(step.unit)]))
    owners = _draw_tied(rng, steps) if rng.random() < 0.3 else {}
    _draw_checkpoints(random.Random(f"tied {seed}") if owners else rng, steps)
    _draw_reentrant(random.Random(f"reentrant {seed}"), steps)
    _draw_nested(random.Random(f"nested {seed}"), steps)
    _draw_plain(random.Random(f"plain {seed}"), steps)
    _draw_beside(random.Random(f"beside {seed}"), steps)
    _leave_tied_out(steps, {*owners, *chain.from_iterable(owners.values())})
    kinds: list[Any] = [rng.choice(("before", "halfway", "after", None))]
    if rng.random() < 0.2:
        kinds = ["before", "halfway", "after", None]
    targeting = rng.choice((0.05, 0.05, 0.05, 0.4))
    listed = [each.unit for step in steps if isinstance(step, Call) for each in step.calls() if not each.is_reentrant]
    listed = listed if listed and rng.random() < 0.5 else names  # the former follow the plan
    rules = {
        name: UnitRules(
            prefetch=rng.choice(kinds),
            targets=tuple(rng.choices(listed, k=rng.choice((1, 1, 2)))) if rng.random() < targeting else (),
            reduces=rng.random() < 0.97,
            stays_unsharded=rng.random() < 0.05,
        )
        for name in names
    }
    for user in owners:
        rules[user] = replace(rules[user], owners=tuple(owners[user]))
    tied = {*owners, *chain.from_iterable(owners.values())}
    frozen = {(name, index) for name in names for index in range(PARAMETERS) if rng.random() < 0.1}
    whole = random.Random(f"frozen {seed}")
    if whole.random() < 0.15:
        frozen |= {leaf for name in names if whole.random() < 0.4 for leaf in _own(name)}
    sizes = {name: rng.choice((0, 1, 1)) if name not in together and name not in tied else 0 for name in names}
    made = Program(names, steps, rules, frozen, sizes, rng.choice((1, 1, 2, 3)), together, rng.random() < 0.7)
    rng = random.Random(f"passes {seed}")
    if rng.random() < 0.15:
        made = replace(made, passes=2, covered=rng.choice(((0, 1), (0,), (1,))))
    rng = random.Random(f"forward {seed}")
    frees, ahead, listing = rng.choice((1.0, 0.9, 0.5, 0.0)), rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.3))
    return replace(
        made,
        frees=frozenset(name for name in names if rng.random() < frees),
        gathers_next=frozenset(name for name in names if rng.random() < ahead),
        listed={name: tuple(rng.choices(names, k=rng.choice((1, 2)))) for name in names if rng.random() < listing},
        is_known=rng.random() < 0.8,
    )


def program_of(
    steps: Sequence[Call | list[str]],
    rules: dict[str, UnitRules[str]],
    *,
    joined: Sequence[str] = (),
    together: Sequence[str] = (),
) -> Program:
    """A given program: every unit is trained, and only the `joined` ones share a collective with others."""
    return Program(
        units=list(rules),
        steps=list(steps),
        rules=rules,
        frozen=set(),
        sizes={name: int(name in joined) for name in rules},
        most=len(joined),
        together=dict.fromkeys(together, tuple(together)),
        has_inputs=True,
        frees=frozenset(rules),
    )


def call(unit: str, *inside: Call, checkpoint: Region | None = None) -> Call:
    """A call with inner calls, before the unit's own parameters are used; `checkpoint`: around this call only."""
    made = Call(unit, [*inside, *_own(unit)], checkpoint)
    if checkpoint is not None:
        for each in made.calls():
            each.region = checkpoint
    return made


def _draw_checkpoints(rng: random.Random, steps: Sequence[Call | list[str]]) -> None:
    reentrant, region = rng.random() < 0.3, None
    plain = rng.choice((0.3, 0.6))
    for step in steps:
        if not isinstance(step, Call) or rng.random() < plain:
            region = None
            continue
        if region is None or reentrant or rng.random() < 0.5:
            region = Region(reentrant)
        for each in step.calls():
            each.region = region


def _draw_reentrant(rng: random.Random, steps: Sequence[Call | list[str]]) -> None:
    """Reentrant checkpoints around single calls, also inside units, inside each other, and inside other checkpoints."""
    share = rng.choice((0.0, 0.3, 0.6))
    nesting = rng.random() < 0.5

    def draw(call: Call) -> None:
        if call.is_reentrant and not nesting:
            return
        if rng.random() < share:
            region = Region(True, around=call.region)
            for each in call.calls():
                each.region = region
            return
        for each in call.body:
            if isinstance(each, Call):
                draw(each)

    for step in steps:
        if isinstance(step, Call):
            draw(step)


def _draw_nested(rng: random.Random, steps: Sequence[Call | list[str]]) -> None:
    """Checkpoints of both kinds around single calls inside other calls."""
    share = rng.choice((0.0, 0.0, 0.3))
    for step in steps:
        for outer in step.calls() if isinstance(step, Call) else ():
            around = outer.region
            if around is None or rng.random() > share:
                continue
            region = Region(rng.random() < 0.5, around=around)
            for each in outer.calls():
                if each.region is around:
                    each.region = region
                for inner in _outwards(each.region):
                    if inner.around is around and inner is not region:
                        inner.around = region


def _draw_plain(rng: random.Random, steps: Sequence[Call | list[str]]) -> None:
    """Reentrant checkpoints around parts of units."""
    share = rng.choice((0.0, 0.0, 0.2))
    for step in steps:
        for each in step.calls() if isinstance(step, Call) else ():
            each.body = [
                Plain([item]) if not isinstance(item, Call) and rng.random() < share else item for item in each.body
            ]


def _leave_tied_out(steps: Sequence[Call | list[str]], tied: set[str]) -> None:
    """Let no reentrant checkpoint run a `tied` unit or a part of it, which are refused."""
    for step in steps:
        for each in step.calls() if isinstance(step, Call) else ():
            if each.unit in tied:
                for region in _outwards(each.region):
                    region.reentrant = False
            each.body = [
                item.leaves[0] if isinstance(item, Plain) and item.leaves[0][0] in tied else item for item in each.body
            ]


def _draw_beside(rng: random.Random, steps: Sequence[Call | list[str]]) -> None:
    if rng.random() < 0.3:
        for step in steps:
            if isinstance(step, Call):
                step.beside = rng.random() < 0.4


def _draw_tied(rng: random.Random, steps: Sequence[Call | list[str]]) -> dict[str, list[str]]:
    """Let units use parameters of other units. Returned: these owners, by user."""
    calls = [each for step in steps if isinstance(step, Call) for each in step.calls()]
    names = [*dict.fromkeys(each.unit for each in calls)]
    owners: dict[str, list[str]] = {}
    if len(names) < 2:
        return owners
    if rng.random() < 0.5:
        rng.shuffle(names)  # wrapped in this order: the first holder of a parameter owns it
    for _ in range(rng.choice((1, 1, 2, 3))):
        owner, user = sorted(rng.sample(names, 2), key=names.index)
        if owner not in owners.setdefault(user, []):
            owners[user].append(owner)
            for each in calls:
                if each.unit == user:
                    each.body.insert(rng.randint(0, len(each.body)), (owner, 0))
    return owners


class Refused(Exception):
    """A part of a unit that ran in several passes was recomputed after its reduction."""


class SimulatedForwards(ForwardSchedule[str]):
    """The schedule of one rank's forwards."""

    def __init__(self, rank: SimulatedRank) -> None:
        program = rank.program
        users = {
            name: [user for user, rules in program.rules.items() if name in rules.owners] for name in program.units
        }

        def coalesced(unit: str, following: Iterable[str]) -> Sequence[str]:
            if rank.is_unsharded(unit):
                return (unit,)
            return next(
                iter(program.cut(chain([unit], takewhile(lambda each: not rank.is_unsharded(each), following))))
            )

        super().__init__(
            ForwardFacts(
                owners=lambda unit: program.rules[unit].owners,
                users=lambda unit: iter(users[unit]),
                has_users=users.__getitem__,
                runs=lambda unit: unit in rank.running,
                is_requested=lambda unit: False,
                joins=program.sizes.__getitem__,
                gathers_next=program.gathers_next.__contains__,
                lists=program.listed.get,
                listed=lambda unit: program.listed[unit],
                coalesced=coalesced,
                reshards=program.frees.__contains__,
                stays=lambda unit: False,
                retains=lambda unit: (),
                lacks=lambda unit, ran: False,
            )
        )


class SimulatedRank:
    """One rank's forward and backward.

    Attributes:
        agreement: with the other ranks, whose trace has what this one did in all of its steps.
        gathered, reduced: units whose collectives it issued in its backward, in order.
        has_backward: whether it comes to any unit.
        brings: whether gradients come to it, or may; foresaw: what it took for known of this when it began.
        lacking, absent: the parameters that it, and that no rank, brought gradients to, a bit each.
        running: units that are in their forward, the innermost last.
        forwards: decides them, with what it has learned in the steps before.
        unsharded: by unit, the number of its gather; waited: those of which it is there.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        agreement: SimulatedAgreement,
        *,
        before: SimulatedRank | None = None,
        double: bool = False,
        schedule_class: type[HalfwaySchedule[str]] = HalfwaySchedule,
        forwards_class: type[SimulatedForwards] = SimulatedForwards,
    ) -> None:
        """`before`: the step before this one."""
        seed = batch.seed
        self.program, self.batch, self.rng = program, batch, random.Random(seed)
        self.frozen = program.frozen | batch.frozen
        self.double = double
        self.foresaw = False
        self.agreement = agreement
        self._trace = agreement.trace
        self._place = {unit: place for place, unit in enumerate(program.units)}
        self.gathered: list[str] = []
        self.reduced: list[str] = []
        self._complete: set[str] = set()  # units whose gradients are complete; `completed` is what the schedule says
        self.lacking, self.absent = 0, -1
        self.has_backward = False
        self._schedule_class = schedule_class
        self._record: ForwardRecord[str] = ForwardRecord()
        self._segments: dict[Region, Any] = {}
        self._checkpointed: dict[Region, list[Call]] = {}  # the outermost calls in each reentrant checkpoint
        self.unsharded: dict[str, int] = {}  # by unit, the number of its gather
        self.waited: set[str] = set()
        self.running: list[str] = []
        self._ahead: set[str] = set()  # gathered before their turn in a forward
        self.forwards = forwards_class(self)
        if before is not None:
            self.forwards.order = before.forwards.order
            self.unsharded, self.waited = before.unsharded, before.waited
        self._kept_before = set(self.unsharded)  # which this forward has not come to
        self._running: int | None = None  # the reentrant checkpoint whose backward runs, the outermost
        self._tasks: list[set[Leaf]] = []  # gradients computed by the running graph tasks
        self._kept: set[str] = set()
        self._arrived: set[Leaf] = set()
        self._late: dict[str, int] = {}  # by unit, the number of gradients that arrive again
        self._task_of: dict[str, set[Leaf]] = {}  # by unit, the graph task in which it began to take part
        self._arrived_inside: dict[str, set[int]] = {}  # by unit, gradients that arrived in inner tasks
        self._missing: dict[str, set[int]] = {}
        self._open: dict[str, list[Call]] = {}
        self._in_flight: list[int] = []
        self._recomputed_regions: set[Region] = set()
        self._recomputed: set[Plain] = set()
        self._begun: set[Call] = set()  # to which the backward has come
        more = random.Random(f"parts {seed}")
        self._parting = more.choice((0.0, 0.0, 0.3))  # the share of parameters used in plain parts
        self._drawn_parts = more
        self._used_once = {unit for unit in program.units if more.random() < 0.7}  # as steps before have shown

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the forward, and draw the part that the backward will reach."""
        self._steps: list[Call] = []
        steps = self.batch.without(self.program.steps)
        self._covered: list[Call] = []  # of the passes to which the backward comes
        self._alive = []  # as graphs would hold them
        for number in range(self.program.passes):
            self.agreement.begin_forward(self._flags, training=True, device_type="cpu")
            self._record.begin()
            self.forwards.order.begin()
            self._trace.append("follow")
            ran = [*self._run_pass(_made_anew(steps))]
            self._alive.append(self._record.running)
            self._record.end()
            self.agreement.end_forward()
            self.forwards.order.end()
            self._free_unused()
            self._steps += ran
            if number in self.program.covered:
                self._covered += ran
        covered = {call for step in self._covered for call in step.calls()}
        self._reached = {call for call in self._calls() if call in covered and self.rng.random() < 0.8}
        self._recomputing = {id(call.reentrant[0]) for call in covered if call.reentrant}
        # These calls pass their inputs on, and save nothing for them.
        share = self.rng.choice((0.0, 0.2))
        self._passing = {call for call in self._calls() if self.rng.random() < share}
        share = self.rng.choice((0.0, 0.3))
        self._left_out = {(call, leaf) for call in self._calls() for leaf in call.body if self.rng.random() < share}
        uses = {leaf for call in self._calls() for each in call.body for leaf in _leaves_in(each)}
        self._used = {leaf for leaf in sorted(uses) if leaf not in self.frozen and self.rng.random() < 0.8}
        if not self.batch.brings_gradients:
            self._used.clear()

    def _flags(self) -> tuple[bool, ...]:
        """Which parameters require a gradient."""
        return tuple((unit, i) not in self.frozen for unit in self.program.units for i in range(PARAMETERS))

    def _free_unused(self) -> None:
        """A forward has ended: free what was gathered ahead and did not run."""
        for unit in [unit for unit in self.unsharded if unit in self._ahead and unit not in self.waited]:
            self.reshard(unit)
        if left := self.unsharded.keys() & self.program.frees - self._kept_before:
            raise Problem(f"{left} are unsharded after a forward that frees them")

    def is_unsharded(self, unit: str) -> bool:
        """Whether it is gathered, or on its way."""
        return unit in self.unsharded

    def learn(self) -> None:
        """A forward before this one was complete."""
        self.forwards.order.begin()
        for step in self.program.steps:
            for unit in step if isinstance(step, list) else [each.unit for each in step.calls()]:
                self.forwards.order.enter(unit)
        self.forwards.order.end()

    def _gather_in_turn(self, unit: str) -> None:
        self.compare(unit)
        self._do(self.forwards.enters(unit))
        self._kept_before.difference_update((unit, *self.program.rules[unit].owners))
        self._ahead.difference_update((unit, *self.program.rules[unit].owners))

    def compare(self, unit: str) -> None:
        """A forward has come to this unit: so have those of all ranks?"""
        self.agreement.check_order(self._place[unit], schedule="")

    def finish(self, unit: str, *, reached: bool) -> None:
        self._do(self.forwards.finished(self._record, unit, training=True, reached=reached))

    def _do(self, actions: Iterable[Action[str]]) -> None:
        for verb, units in actions:
            if verb in ("gather", "ahead"):
                self.gather(units, ahead=verb == "ahead")
            elif verb == "leave":
                if units[0] not in self.program.frees and not self.is_unsharded(units[0]):
                    raise Problem(f"{units[0]} is to be left unsharded, and is not gathered")
            else:
                self.reshard(units[0])

    def _run_pass(self, steps: Sequence[Call | list[str]]) -> Iterator[Call]:
        for step in steps:
            if isinstance(step, Call):
                yield self._run(step)
                continue
            for unit in step:
                self._record.enter(unit)
                self._gather_in_turn(unit)
            chosen = [unit for unit in step * 2 if self.rng.random() < 0.4]
            for unit in sorted({unit for unit in chosen if chosen.count(unit) > 1}):
                self._record.repeat(unit)
            yield from (Call(unit, [*_own(unit)]) for unit in chosen)
            for unit in step:
                self._wait(unit)
                self.finish(unit, reached=True)

    def _calls(self) -> Iterator[Call]:
        for step in self._steps:
            yield from step.calls()

    def _run(self, call: Call, around: Call | None = None) -> Call:
        record, reentrant, owners = self._record, call.reentrant, self.program.rules[call.unit].owners
        # Without a graph, as in the outermost reentrant one, non-reentrant checkpoints have no effect.
        saving = _outwards(reentrant[0].around if reentrant else call.region)
        segments = [self._segments.setdefault(each, _Segment()) for each in saving]
        segment = segments[0] if segments else None
        if reentrant:
            record.enter_without_graph(
                call.unit, checkpoint=id(reentrant[0]), segment=segment, segments=lambda: segments
            )
        else:
            record.enter(call.unit, segment=segment, segments=lambda: segments)
        began = record.entered_at
        for owner in owners:
            (record.enter_sharing_without_graph if reentrant else record.enter_sharing)(owner)
        self.running.append(call.unit)
        self._gather_in_turn(call.unit)
        for each in (*owners, call.unit):
            self._wait(each)
        body = [self._run(each, call) if isinstance(each, Call) else self._used_in_forward(each) for each in call.body]
        self.running.pop()
        self.finish(call.unit, reached=not reentrant)
        ran = Call(call.unit, body, call.region, None if reentrant else began, call.beside)
        entered = [*_outwards(around.region)] if around is not None else []
        for region in reentrant:
            if region not in entered:
                self._checkpointed.setdefault(region, []).append(ran)
        return ran

    def _used_in_forward(self, each: Leaf | Plain) -> Leaf | Plain:
        for unit, _ in _leaves_in(each):
            if unit not in self.waited:
                raise Problem(f"{unit} is used in a forward, and nobody waited for its gather")
        return self._parted(each)

    def _parted(self, each: Leaf | Plain) -> Leaf | Plain:
        parted = not isinstance(each, Plain) and self._drawn_parts.random() < self._parting
        return Plain([each]) if parted and _leaves_in(each)[0][0] not in self.program.tied() else each

    def run_without_graph(self, unit: str) -> None:
        """Run a forward like under `no_grad()`."""
        self._record.enter_without_graph(unit)
        self._record.leave_without_graph(unit)

    # -- backward ----------------------------------------------------------------------------------------------------

    def brought(self, calls: Iterable[Call]) -> set[Leaf]:
        """The gradients computed by a graph task through these calls."""
        return {leaf for call in calls for leaf in call.body if leaf in self._used and self._uses(call, leaf)}

    def _uses(self, call: Call, leaf: Leaf | Plain) -> bool:
        """Whether the backward through `call` reads the parameters, and computes gradients of trained ones."""
        return call in self._reached and call not in self._passing and (call, leaf) not in self._left_out

    def backward(self) -> None:
        """Play it, up to where this rank may wait for what others lack."""
        record, program, agreement = self._record, self.program, self.agreement
        covered = [call for step in self._covered for call in step.calls()]
        if record.empty or not any(call in self._reached or call.is_reentrant for call in covered):
            return
        self.has_backward = True
        self._tasks = [self.brought(call for call in self._calls() if not call.is_reentrant)]
        self.schedule = self._schedule_class(
            record,
            program.rules,
            self.facts(),
            coalesce=program.cut,
            together=program.together,
        )
        self.schedule.elements = lambda unit: len(self._leaves(unit))  # type: ignore[method-assign]
        self.schedule.is_gathered_again = program.frees.__contains__  # type: ignore[method-assign]
        self.schedule.double = self.double
        self.schedule.brings = self.foresaw = self.may_bring()
        self.compare_plan()
        for unit in record.anchored:
            if self._leaves(unit):
                self.schedule.expect(unit)
        self._join_reductions()
        for step in reversed(self._covered):
            self._through(step)
        self._execute(self.schedule.ended())
        if self.brings:
            self._await_reductions()
        elif any(unit in self.program.frees for unit in self.schedule.clock.sequence):
            agreement.check_gathered()
        if self._reduces and self.reduced:
            self.lacking = functools.reduce(operator.or_, map(self._lacking_in, self.reduced))

    @property
    def _reduces(self) -> bool:
        return any(rules.reduces for rules in self.program.rules.values())

    def compare_plan(self) -> None:
        """A backward begins: is it the same on all ranks?"""
        record, flags = self._record, self._flags()
        trained = [unit for unit in record.anchored if self._leaves(unit)]
        plan = BackwardPlan(
            sync=True,
            brings=self.brings,
            begun=self._numbers(record.entered),
            ended=self._numbers(record.anchored),
            flats=[(self._place[unit], 0) for unit in trained],
            trained=bits_of(flags),
            post_forward=[],
            schedule="",
        )
        self.agreement.check_backward(str(plan), lambda: plan, reduces=self._reduces and self.brings)

    def _numbers(self, units: Iterable[str]) -> list[int]:
        return [self._place[unit] for unit in units]

    def _join_reductions(self) -> None:
        self.schedule.reductions.coalesce(self.program.cut)
        self.schedule.expect_recomputed()

    def _lacking_in(self, unit: str) -> int:
        """The parameters of `unit` that this rank brought no gradients to, a bit each."""
        lacking = ((unit, i) not in self._arrived and (unit, i) not in self.frozen for i in range(PARAMETERS))
        return bits_of(lacking) << PARAMETERS * self._place[unit]

    def end(self) -> None:
        """The backward is over, or there was none: nothing stays unsharded but what is to."""
        if self._reduces and self.reduced:
            self.agreement.check_issued(self.lacking)
        else:
            self.agreement.issued.carry_over()
        for unit in [*self.unsharded]:
            if self.double or not (self.has_backward and self.program.rules[unit].stays_unsharded):
                self.reshard(unit)
        self.agreement.rest()

    def find_absent(self, job: Sequence[SimulatedAgreement]) -> None:
        """All ranks of the job have ended this backward."""
        self.absent = self.agreement.lacked_by_all(self.lacking, job)

    def end_job(self) -> None:
        """What all ranks do after their last step."""
        with self.agreement.collective_call("the end of the job"):
            pass

    def _await_reductions(self) -> None:
        while self._in_flight:
            self._trace.append("await", (REDUCTIONS, self._in_flight.pop(0)))

    def _reentrant(self, region: Region) -> None:
        if region in self._recomputed_regions:
            return
        self._recomputed_regions.add(region)
        outer = self._running
        if not self.in_inner_task():
            self._running = id(region)
        if region.around is not None and not region.around.reentrant:  # it saved the inputs of this one
            self._recompute(region.around)
        calls = self._checkpointed[region]
        for call in calls:
            self._run_again(call, inside=region)
        self._tasks.append(
            self.brought(each for call in calls for each in call.calls() if each.reentrant[-1] is region)
        )
        for call in reversed(calls):
            self._through(call, inside=region)
        self._tasks.pop()
        self._running = outer

    def _recompute(self, region: Region) -> None:
        """The recomputation of a non-reentrant checkpoint when the first of its tensors is needed."""
        if region in self._recomputed_regions:
            return
        self._recomputed_regions.add(region)
        if region.around is not None and not region.around.reentrant:
            self._recompute(region.around)
        for step in self._steps:
            self._run_again(step, inside=region)

    def _run_again(self, call: Call, *, inside: Region) -> None:
        """Run the calls `inside` a checkpoint: with a graph, unless there is an inner reentrant one."""
        regions = [*_outwards(call.region)]
        again = inside in regions
        if again:
            inner = self.in_inner_task()
            region = None if inner else self.schedule.clock.running(lambda each: each == self._running)
            self._execute(self.schedule.recomputed(call.unit, inner=inner, region=region))
            needed = (*self.program.rules[call.unit].owners, call.unit)
            for each in needed:
                self._wait(each)
        for inner in call.body:
            if isinstance(inner, Call):
                self._run_again(inner, inside=inside)

    def _through(self, call: Call, *, inside: Region | None = None) -> None:
        """The backward of one call: its end, its inner calls, its begin. `inside`: the reentrant checkpoint whose graph
        task runs."""
        further = call.reentrant[call.reentrant.index(inside) + 1 :] if inside is not None else call.reentrant
        if further:
            self._reentrant(further[0])
            return
        reached = call in self._reached
        if reached:
            self._begun.add(call)
            self._before_backward(call)
        for at, each in reversed([*enumerate(call.body)]):
            if isinstance(each, Call):
                self._through(each, inside=inside)
            elif self._uses(call, each) and self._flows_on(call, at):
                if call.region is not None and not call.region.reentrant:
                    self._recompute(call.region)
                if isinstance(each, Plain):
                    self._recomputed.add(each)
                    self._tasks.append(self._used.intersection(each.leaves))
                for leaf in reversed(_leaves_in(each)):
                    if leaf[0] not in self.waited:
                        raise Problem(f"{leaf[0]} is used, and nobody waited for its gather")
                    if leaf in self._tasks[-1] and (isinstance(each, Plain) or self._is_last_use(call, leaf)):
                        self._leaf_ready(*leaf)
                if isinstance(each, Plain):
                    self._tasks.pop()
        if reached and call in self._open.get(call.unit, ()):
            self._inputs_ready(call)

    def _flows_on(self, call: Call, at: int) -> bool:
        """Whether a gradient is computed at this place of the body of `call`, or before."""
        # A reentrant checkpoint has no graph if none of its inputs has one.
        before = (each for each in call.body[: at + 1] if not isinstance(each, Plain))
        return self._is_given_gradients(call) or any(
            isinstance(each, Call) or each not in self.frozen for each in before
        )

    def _is_last_use(self, call: Call, leaf: Leaf) -> bool:
        """Whether no earlier call, which the backward has yet to reach, uses the parameter, too."""
        uses = (user for step in self._steps for user, used in step.uses() if used == leaf and self._uses(user, leaf))
        own = call.reentrant[-1:]  # gradients accumulate separately in each graph task
        return call is next(user for user in uses if user.reentrant[-1:] == own)

    def _before_backward(self, call: Call) -> None:
        unit = call.unit
        needed = [*self.program.rules[unit].owners, unit]
        reads = self.in_inner_task() or self.schedule.awaits_own_call(unit)
        done = unit in self.schedule.finished or (not reads and all(map(self._has_its_gradients, needed)))
        if unit in self.completed and done:
            return
        if self.in_inner_task() or (unit in self.completed and self._is_elsewhere(unit)):
            for each in needed:
                again = range(PARAMETERS) if each in self.completed else [i for u, i in self._arrived if u == each]
                self._late[each] = sum(self._comes(each, i) for i in again)
        if self._is_given_gradients(call):
            self._open.setdefault(unit, []).append(call)
        else:
            around, frozen = len([*call.calls()]) > 1, len(self._leaves(unit)) < PARAMETERS
            tied = unit in self.program.tied()
            if (around and (self.schedule.clock.recomputes or frozen or tied)) or (len(needed) > 1 and frozen):
                self._kept.add(unit)  # nothing tells when its backward is over
        begun = unit in self.schedule.expecting and unit not in self.completed and unit in self.unsharded
        if begun and unit not in self.program.tied():
            return
        self._execute(self.schedule.reached(unit, inner=self.in_inner_task()))
        if unit not in self.completed and unit not in self.schedule.expecting:
            self.participate(unit)

    def _is_given_gradients(self, call: Call) -> bool:
        """Whether gradients flow on through the inputs of `call`: not if it is the first to run, or if it runs in the
        first one before a parameter is used."""
        first: Call | Leaf | Plain = self._steps[0]
        while first is not call and isinstance(first, Call):
            first = first.body[0]
        return self.program.has_inputs or call.is_reentrant or first is not call

    def _is_elsewhere(self, unit: str) -> bool:
        """Whether the running graph task is not the one in which `unit` began to participate."""
        return self._task_of.get(unit) is not self._tasks[-1]

    def _has_its_gradients(self, unit: str) -> bool:
        if self._late.get(unit, 0) > 0 or len(self._leaves(unit)) < PARAMETERS:
            return False
        come = () if self._is_elsewhere(unit) else self._arrived
        return all((unit, i) in come or not self._comes(unit, i) for i in self._leaves(unit))

    def _leaf_ready(self, unit: str, index: int) -> None:
        if unit not in self.schedule.expecting:
            self.participate(unit)
        if not self.brings:
            self.schedule.brings = True
            self.agreement.check_unforeseen()
        inside = self._arrived_inside.setdefault(unit, set())
        again = (unit, index) in self._arrived or unit in self.completed
        if again and self.in_inner_task() and unit in self.reduced and unit in self.schedule.clock.in_passes:
            raise Refused(unit)
        if again:
            self._late[unit] = self._late.get(unit, 0) - 1
        if not self._is_elsewhere(unit):
            inside.discard(index)
        elif not again:
            inside.add(index)
        self._arrived.add((unit, index))
        self._missing[unit].discard(index)
        if unit in self.completed:
            self.schedule.expect(unit)
        if (unit in self.completed or not self._missing[unit]) and not self._open.get(unit):
            self._advance(unit)
        self._execute(self.schedule.progressed(unit, 1))

    def _inputs_ready(self, call: Call) -> None:
        unit = call.unit
        self._open[unit].remove(call)
        if call.began is not None and call.began == self.schedule.clock.began.get(unit):
            self.schedule.finished.add(unit)
        if unit in self.schedule.expecting:
            if not (self._open[unit] or unit in self.completed or self.in_inner_task()) and self.brings:
                self._missing[unit] = {i for i in self._missing[unit] if self._comes(unit, i)}
            self._advance(unit)

    def _advance(self, unit: str) -> None:
        if self._open.get(unit) or self._late.get(unit, 0) > 0:
            return
        if self._leaves(unit) and unit not in self.completed and not self._missing[unit]:
            if self._arrived_inside.get(unit) and self._awaits_more(unit):
                return
            self._complete.add(unit)
            self._execute(self.schedule.completes(unit, in_use=self._is_in_use(unit)))
        elif not self._is_in_use(unit) and (unit in self.completed or not self._leaves(unit) or not self.brings):
            self._execute(self.schedule.left(unit))
        for owner in self.program.rules[unit].owners:
            if owner in self.schedule.expecting:
                self._advance(owner)

    def _awaits_more(self, unit: str) -> bool:
        """Whether another part is pending for gradients that arrived in inner tasks."""
        if self._is_elsewhere(unit):
            return True
        self._missing[unit].update(i for i in self._arrived_inside[unit] if self._comes(unit, i))
        self._arrived_inside[unit].clear()
        return bool(self._missing[unit])

    def _is_in_use(self, unit: str) -> bool:
        return unit in self._kept or any(
            unit in rules.owners and self._open.get(user) for user, rules in self.program.rules.items()
        )

    def _execute(self, actions: Iterable[Action[str]]) -> None:
        """Those of the schedule of the backward."""
        for verb, units in actions:
            if verb in ("gather", "ahead"):
                self.gather(units, ahead=verb == "ahead")
            elif verb == "free":
                self.reshard(units[0])
            elif verb == "wait":
                for unit in units:
                    self._wait(unit)
            elif verb == "participate":
                self._await_gradients(units[0])
            elif verb == "complete":
                if units[0] in self._complete:
                    raise Problem(f"{units[0]} is completed with zeros, and its gradients were complete")
                self._complete.add(units[0])
            elif verb == "reduce":
                self.reduce(units)
            elif verb == "release inputs" or (verb == "end turn" and self.rng.random() < 0.2):  # memory is highest then
                self._await_reductions()

    # -- facts -------------------------------------------------------------------------------------------------------

    def facts(self) -> UnitFacts[str]:
        """The facts about a unit that the schedule may read."""
        return UnitFacts(
            has_gradients=lambda unit: any((unit, index) in self._arrived for index in range(PARAMETERS)),
            is_used_once=self._used_once.__contains__,
            is_unsharded=self.unsharded.__contains__,
            is_trained=lambda unit: bool(self._leaves(unit)),
            awaits_gradients=self._awaits,
            will_recompute=self._recomputing.__contains__,
        )

    def _leaves(self, unit: str) -> list[int]:
        return [index for index in range(PARAMETERS) if (unit, index) not in self.frozen]

    def _comes(self, unit: str, index: int) -> bool:
        return (unit, index) in self._tasks[-1]

    def _awaits(self, unit: str) -> bool:
        left = self._missing[unit] if unit in self.schedule.expecting else self._leaves(unit)
        return any(self._comes(unit, index) for index in left)

    def in_inner_task(self) -> bool:
        return len(self._tasks) > 1

    def may_bring(self) -> bool:
        """Whether its graph task shows gradients, or does not show all."""
        sequence = self.schedule.clock.sequence
        return (
            bool(self._tasks[-1])
            or self.schedule.recomputes_trained
            or any(unit in self.program.together for unit in sequence)
            or self._may_come_from_checkpoints()
        )

    # -- actions -----------------------------------------------------------------------------------------------------

    def gather(self, units: Sequence[str], *, ahead: bool) -> None:
        sharded = tuple(unit for unit in units if unit not in self.unsharded)
        self._ahead.update(sharded if ahead else sharded[1:])
        if sharded:
            self.unsharded.update(dict.fromkeys(sharded, self._trace.issue(GATHERS, *sharded)))
            if self.has_backward:
                self.gathered += sharded
                self.agreement.issued.gathered += self._numbers(sharded)

    def _wait(self, unit: str) -> None:
        if unit not in self.unsharded:
            raise Problem(f"{unit} is to be used, and nobody gathered it")
        if unit not in self.waited:
            self.waited.add(unit)
            self._trace.append("await", (GATHERS, self.unsharded[unit]))

    def reshard(self, unit: str) -> None:
        if unit in self.unsharded:
            self._wait(unit)
            self.waited.discard(unit)
            del self.unsharded[unit]
            self._trace.append("free", unit)

    @property
    def completed(self) -> set[str]:
        """Units of which all gradients have come that are awaited."""
        return self.schedule.completed

    @property
    def brings(self) -> bool:
        """Whether it brings gradients, as far as ranks have agreed."""
        return self.has_backward and self.schedule.brings

    def participate(self, unit: str) -> None:
        self.schedule.expecting.add(unit)
        if self._await_gradients(unit):
            self.schedule.expect(unit)

    def _await_gradients(self, unit: str) -> bool:
        leaves = self._leaves(unit)
        self._task_of[unit] = self._tasks[0 if unit in self.schedule.clock.planned else -1]
        self._arrived_inside.pop(unit, None)
        self._missing[unit] = {index for index in leaves if (unit, index) not in self._arrived}
        return bool(leaves)

    def reduce(self, units: Sequence[str]) -> None:
        if early := [unit for unit in units if unit not in self._complete]:
            raise Problem(f"{early} are reduced, and their gradients are not complete")
        while len(self._in_flight) > 1:
            self._trace.append("await", (REDUCTIONS, self._in_flight.pop(0)))
        self._in_flight.append(self._trace.issue(REDUCTIONS, *units))
        self.reduced += units
        self.agreement.issued.reduced += self._numbers(units)

    def _may_come_from_checkpoints(self) -> bool:
        """Whether gradients flow on to a reentrant checkpoint, of which nothing is known before."""
        return any(
            call.reentrant or (call in self._reached and any(isinstance(each, Plain) for each in call.body))
            for step in self._covered
            if not step.beside
            for call in step.calls()
        )


class _Segment:
    """A non-reentrant checkpoint in the record, by its identity."""


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What one rank computes in a step, and how its model is then.

    Attributes:
        seed: draws what the backward reaches.
        brings_gradients: whether it comes to any parameter.
        frozen: parameters that require none, beside those of the program.
        left_out: an outermost call that the forward does without, by its number.
    """

    seed: int
    brings_gradients: bool = True
    frozen: frozenset[Leaf] = frozenset()
    left_out: int | None = None

    def without(self, steps: Sequence[Call | list[str]]) -> list[Call | list[str]]:
        """All `steps` but what is left out."""
        return [step for number, step in enumerate(steps) if number != self.left_out]

    def model(self, program: Program) -> tuple[object, ...]:
        """What all ranks have in common."""
        return frozenset(program.frozen | self.frozen), self.left_out


@dataclass
class Job:
    """What ranks do, step by step: for each step the batches of all ranks."""

    steps: Sequence[Sequence[Batch]]
    double: bool = False

    def is_alike(self, program: Program) -> bool:
        """Whether ranks have the same models, and run the same forwards."""
        return all(len({batch.model(program) for batch in batches}) == 1 for batches in self.steps)


PATTERNS = ("A", "A", "A", "AA", "AB", "AAA", "ABA", "AAB", "ABAB", "AAAB", "ABBA")


def drawn_job(program: Program, seed: int, *, world: int = 0) -> Job:
    """Batches of two kinds, in an order that may show what comes next."""
    rng = random.Random(f"ranks {seed}")
    double = rng.random() < 0.1
    world = world or rng.choice((2, 2, 3, 4))
    usual = [rng.randrange(2**30) for _ in range(world)]
    more = random.Random(f"job {seed}")
    others = [more.randrange(2**30) for _ in range(world)]
    kinds = {kind: [Batch(each) for each in seeds] for kind, seeds in (("A", usual), ("B", others))}
    for batches in kinds.values():
        one = more.randrange(world)
        change = more.choice((*("",) * 12, "none", "none here", "frozen", "frozen here", "left out", "left out here"))
        there = [one] if change.endswith("here") else range(world)
        calls = [number for number, step in enumerate(program.steps) if isinstance(step, Call)]
        left_out, unit = more.choice((*calls, None)), more.choice(program.units)
        for rank in there:
            if change.startswith("none"):
                batches[rank] = replace(batches[rank], brings_gradients=False)
            elif change.startswith("frozen"):
                batches[rank] = replace(batches[rank], frozen=frozenset({(unit, 0), (unit, 1)}))
            elif change.startswith("left") and len(program.steps) > 1:
                batches[rank] = replace(batches[rank], left_out=left_out)
    return Job([kinds[kind] for kind in more.choice(PATTERNS)], double=double)


class PlayedJob:
    """All that ranks do in a job, each for itself, but for what they learn of gradients that others lack."""

    def __init__(
        self,
        program: Program,
        job: Job,
        *,
        schedule_class: type[HalfwaySchedule[str]] = HalfwaySchedule,
        forwards_class: type[SimulatedForwards] = SimulatedForwards,
        rank_class: type[SimulatedRank] = SimulatedRank,
        agreement_class: type[SimulatedAgreement] = SimulatedAgreement,
    ) -> None:
        self._program, self._job = program, job
        world = len(job.steps[0])
        self._agreements = [agreement_class(rank, world, program.units, PARAMETERS) for rank in range(world)]
        self._rank = functools.partial(
            rank_class,
            program,
            double=job.double,
            schedule_class=schedule_class,
            forwards_class=forwards_class,
        )
        self.steps: list[list[SimulatedRank]] = []

    def run(self) -> None:
        """Play all steps.

        Raises:
            Problem: what is used is not there.
        """
        ranks: list[SimulatedRank | None] = [None] * len(self._agreements)
        for batches in self._job.steps:
            each = zip(batches, self._agreements, ranks, strict=True)
            made = [self._rank(batch, agreement, before=before) for batch, agreement, before in each]
            for rank in made if not self.steps and self._program.is_known else ():
                rank.learn()
            self.steps.append(made)
            for rank in made:
                rank.forward()
            for rank in made:
                rank.backward()
            for rank in made:
                rank.end()
            for rank in made:
                rank.find_absent(self._agreements)
            ranks = [*made]
        for rank in made:
            rank.end_job()

    def traces(self) -> list[Stream]:
        """What each rank did."""
        return [agreement.trace.operations for agreement in self._agreements]

    def may_differ(self) -> bool:
        """Whether ranks may get an error that they differ: some bring gradients and others do not, or none do and what
        was gathered for that was not the same."""
        for ranks in self.steps:
            if len({(rank.foresaw, rank.brings) for rank in ranks}) > 1:
                return True
            if len({rank.has_backward for rank in ranks}) > 1:
                return True
            if not ranks[0].brings and len({tuple(rank.gathered) for rank in ranks}) > 1:
                return True
        return False

    def wrong_absence(self) -> str:
        """Where ranks do not know what no rank brought gradients to."""
        for number, ranks in enumerate(self.steps):
            absent = functools.reduce(operator.and_, [rank.lacking for rank in ranks])
            for rank in ranks:
                if rank.reduced and rank.absent != absent:
                    return f"step {number}: no rank brought gradients to {absent:b}, one knows of {rank.absent:b}"
        return ""


def problem_of(seed: int, **how: Any) -> str:
    """Run program `seed` on some ranks; "" or the problem. `how`: arguments of `problem_of_program`."""
    return problem_of_program(drawn_program(seed), seed, **how)


def problem_of_program(program: Program, seed: int, *, world: int = 0, job: Job | None = None, **how: Any) -> str:
    """Play `program` on some ranks, of which `seed` draws what their backwards reach if no `job` has it; "" or what
    went wrong. `how`: as of `PlayedJob`."""
    job = job or drawn_job(program, seed, world=world)
    played = PlayedJob(program, job, **how)
    try:
        played.run()
    except Problem as error:
        return str(error)
    except Refused:
        return ""
    for ways in (on_host, on_device):
        try:
            differ = Play([ways(trace) for trace in played.traces()]).run()
        except Problem as error:
            return f"{ways.__name__}: {error}"
        if differ and job.is_alike(program) and not played.may_differ():
            return f"{ways.__name__}: an error without a reason: {differ}"
        if not (differ or job.is_alike(program)):
            return f"{ways.__name__}: nobody noticed that ranks have different models"
        if not differ and (wrong := played.wrong_absence()):
            return wrong
    return ""


def shows(first: int, many: int, **wrong: Any) -> bool:
    """Whether a program, of `first` and then seeds below `many`, has a problem with what is `wrong`: arguments of
    `problem_of_program`. `first` is one that had when this was written, and the others are for when it has none."""
    return any(problem_of(seed, **wrong) for seed in chain([first], range(many)))
