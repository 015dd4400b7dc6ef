"""W ranks that train one model, without torch: their schedules for forward and backward, and the waits between them.

A *program* is the forward of all ranks, drawn at random: calls of units inside each other, some repeated, some under
checkpoints, some depending on a rank's data. Each rank draws the part that its backward reaches, the gradients that
this yields, and the parameters that are used in recomputed parts of units, so that their gradients come late.
`SimulatedRank` is a double of autograd and of the units: it reports events to a `ForwardSchedule` and to a
`BackwardSchedule`, executes their actions, and records the issued operations and the waits of its host and its device.
Decisions of ranks do not depend on received values, so `deadlock` replays the records afterwards.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

from flatfsdp.engine.schedule.backward_driver import UnitFacts, UnitRules
from flatfsdp.engine.schedule.backward_schedule import BackwardSchedule
from flatfsdp.engine.schedule.forward_record import ForwardRecord
from flatfsdp.engine.schedule.forward_schedule import ForwardFacts, ForwardSchedule
from flatfsdp.engine.schedule.issue_order import coalesce

PARAMETERS = 2  # per unit
Leaf = tuple[str, int]


class Listed(tuple[str, ...]):
    """Units that another one prefetches in a forward."""

    def units(self) -> Iterable[str]:
        return self


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
    """One forward of a unit: `body` has inner calls, and the used parameters, in order."""

    unit: str
    body: list[Call | Leaf | Plain]
    region: Region | None = None
    began: int | None = None

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
    listed: dict[str, Listed] = field(default_factory=dict)
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
        listed={name: Listed(rng.choices(names, k=rng.choice((1, 2)))) for name in names if rng.random() < listing},
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


class Problem(AssertionError):
    """A failure that a user's program would notice."""


class SimulatedForwards(ForwardSchedule[str]):
    """The schedule of one rank's forwards; the rank executes its actions."""

    def __init__(self, rank: SimulatedRank) -> None:
        program = rank.program
        users = {
            name: [user for user, rules in program.rules.items() if name in rules.owners] for name in program.units
        }

        def coalesced(unit: str, following: Iterable[str]) -> Sequence[str]:
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
                is_unsharded=rank.is_unsharded,
                gathers_next=program.gathers_next.__contains__,
                listed=lambda unit: program.listed.get(unit, Listed()),
                coalesced=coalesced,
                reshards=program.frees.__contains__,
                stays=lambda unit: False,
                retains=lambda unit: (),
                lacks=lambda unit, ran: False,
            )
        )
        self._rank = rank

    def gather(self, units: Sequence[str], *, ahead: bool) -> None:
        self._rank.gather(units, ahead=ahead)

    def free(self, unit: str, *, retains: bool) -> None:
        self._rank.reshard(unit)

    def leave_unsharded(self, unit: str) -> None:
        if unit not in self._rank.program.frees and not self._rank.is_unsharded(unit):
            raise Problem(f"{unit} is to be left unsharded, and is not gathered")


class SimulatedRank:
    """One rank's forward and backward.

    Attributes:
        gathers, reductions: the issued groups.
        operations: the operations of its host, in order.
        running: units in their forward, the innermost last.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        *,
        double: bool = False,
        schedule_class: type[BackwardSchedule[str]] = BackwardSchedule,
        forwards_class: type[SimulatedForwards] = SimulatedForwards,
    ) -> None:
        self.program, self.rng = program, random.Random(seed)
        self.double = double
        self.gradient_has_arrived = False
        self.gathers: list[tuple[str, ...]] = []
        self.reductions: list[tuple[str, ...]] = []
        self.operations: list[tuple[str, Any]] = []
        self._schedule_class = schedule_class
        self._record: ForwardRecord[str] = ForwardRecord(knows_late=random.Random(f"late {seed}").random() < 0.8)
        self._segments: dict[Region, Any] = {}
        self._checkpointed: dict[Region, list[Call]] = {}  # by reentrant checkpoint, its outermost calls
        self._unsharded: dict[str, int] = {}  # by unit, the number of its gather
        self._waited: set[str] = set()
        self.running: list[str] = []
        self._ahead: set[str] = set()  # gathered before their turn in a forward
        self._forwards = forwards_class(self)
        self._running: int | None = None  # the reentrant checkpoint whose backward runs, the outermost
        self._tasks: list[set[Leaf]] = []  # gradients computed by the running graph tasks
        self._expecting: set[str] = set()
        self._completed: set[str] = set()
        self._over: set[str] = set()
        self._kept: set[str] = set()
        self._arrived: set[Leaf] = set()
        self._late: dict[str, int] = {}  # by unit, the number of gradients that arrive again
        self._task_of: dict[str, set[Leaf]] = {}  # by unit, the graph task in which it began to take part
        self._arrived_inside: dict[str, set[int]] = {}  # by unit, gradients that arrived in inner tasks
        self._missing: dict[str, set[int]] = {}
        self._open: dict[str, list[Call]] = {}
        self._in_flight: list[int] = []
        self._participates: set[str] = set()
        self._recomputed_regions: set[Region] = set()
        self._begun: set[Call] = set()  # calls that the backward has reached
        more = random.Random(f"parts {seed}")
        self._parting = more.choice((0.0, 0.0, 0.3))  # the share of parameters used in plain parts
        self._drawn_parts = more
        self._used_once = {unit for unit in program.units if more.random() < 0.7}  # as seen in earlier steps
        self.lacks = False

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the forward, and draw the part that the backward will reach."""
        self._steps: list[Call] = []
        if self.program.is_known:
            self._learn()
        self._covered: list[Call] = []  # of the passes that the backward reaches
        self._alive = []  # kept like by graphs
        for number in range(self.program.passes):
            self._record.begin()
            self._forwards.order.begin()
            steps = [*self._run_pass(copy.deepcopy(self.program.steps))]
            self._alive.append(self._record.running)
            self._record.end()
            self._forwards.order.end()
            self._check_freed()
            self._steps += steps
            if number in self.program.covered:
                self._covered += steps
        covered = {call for step in self._covered for call in step.calls()}
        self._reached = {call for call in self._calls() if call in covered and self.rng.random() < 0.8}
        self._recomputing = {id(call.reentrant[0]) for call in covered if call.reentrant}
        # These calls pass their inputs on, and save nothing for them.
        share = self.rng.choice((0.0, 0.2))
        self._passing = {call for call in self._calls() if self.rng.random() < share}
        share = self.rng.choice((0.0, 0.3))
        self._left_out = {(call, leaf) for call in self._calls() for leaf in call.body if self.rng.random() < share}
        uses = {leaf for call in self._calls() for each in call.body for leaf in _leaves_in(each)}
        self._used = {leaf for leaf in sorted(uses) if leaf not in self.program.frozen and self.rng.random() < 0.8}

    def _check_freed(self) -> None:
        """After a forward: all units to be freed are freed, except units prefetched for a later run."""
        if left := self._unsharded.keys() & self.program.frees - self._ahead:
            raise Problem(f"{left} are unsharded after a forward that frees them")

    def is_unsharded(self, unit: str) -> bool:
        """Whether it is gathered, or being gathered."""
        return unit in self._unsharded

    def _learn(self) -> None:
        """Learn from a complete earlier forward."""
        self._forwards.order.begin()
        for step in self.program.steps:
            for unit in step if isinstance(step, list) else [each.unit for each in step.calls()]:
                self._forwards.order.enter(unit)
        self._forwards.order.end()

    def _gather_in_turn(self, unit: str) -> None:
        self._forwards.order.enter(unit)
        self._forwards.enters(unit)
        self._ahead.difference_update((unit, *self.program.rules[unit].owners))

    def _finish(self, unit: str, *, reached: bool) -> None:
        self._forwards.finished(self._record, unit, training=True, reached=reached)

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
                self._finish(unit, reached=True)

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
        self._finish(call.unit, reached=not reentrant)
        ran = Call(call.unit, body, call.region, None if reentrant else began)
        entered = [*_outwards(around.region)] if around is not None else []
        for region in reentrant:
            if region not in entered:
                self._checkpointed.setdefault(region, []).append(ran)
        return ran

    def _used_in_forward(self, each: Leaf | Plain) -> Leaf | Plain:
        for unit, _ in _leaves_in(each):
            if unit not in self._waited:
                raise Problem(f"{unit} is used in a forward, and nobody waited for its gather")
        return self._parted(each)

    def _parted(self, each: Leaf | Plain) -> Leaf | Plain:
        return Plain([each]) if not isinstance(each, Plain) and self._drawn_parts.random() < self._parting else each

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

    def has_gradients(self) -> bool:
        """Whether the backward computes any gradients."""
        return bool(self.brought(self._calls()))

    def backward(self) -> None:
        """Run the backward."""
        record, program = self._record, self.program
        if record.empty:
            return
        self._tasks = [self.brought(call for call in self._calls() if not call.is_reentrant)]
        self.schedule = self._schedule_class(
            record,
            program.rules,
            self.facts(),
            self,
            coalesce=program.cut,
            together=program.together,
            conditional=program.together,
        )
        for unit in record.anchored:
            if self._leaves(unit):
                self.schedule.expect(unit)
        self.schedule.reductions.coalesce(program.cut)
        self.schedule.expect_recomputed()
        for step in reversed(self._covered):
            self._through(step)
        self.schedule.ended()
        while self._in_flight:
            self.operations.append(("await", ("reduce", self._in_flight.pop(0))))
        self.lacks = any((unit, i) not in self._arrived for unit in program.units for i in self._leaves(unit))

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
            with_graph = not any(each.reentrant for each in regions[: regions.index(inside)])
            further = regions[: regions.index(inside)]
            self.schedule.recomputed(call.unit, again=not all(each.reentrant for each in further))
            needed = (*self.program.rules[call.unit].owners, call.unit)
            for each in needed:
                self._wait(each)
        for inner in call.body:
            if isinstance(inner, Call):
                self._run_again(inner, inside=inside)
        if again and with_graph:
            for each in (call.unit, *self.program.rules[call.unit].owners):
                self.schedule.has_graph(each)

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
                    self._tasks.append(self._used.intersection(each.leaves))
                for leaf in reversed(_leaves_in(each)):
                    if leaf[0] not in self._waited:
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
            isinstance(each, Call) or each not in self.program.frozen for each in before
        )

    def _is_last_use(self, call: Call, leaf: Leaf) -> bool:
        """Whether no earlier call, which the backward has yet to reach, uses the parameter, too."""
        uses = (user for step in self._steps for user, used in step.uses() if used == leaf and self._uses(user, leaf))
        own = call.reentrant[-1:]  # gradients accumulate separately in each graph task
        return call is next(user for user in uses if user.reentrant[-1:] == own)

    def _before_backward(self, call: Call) -> None:
        unit = call.unit
        needed = [*self.program.rules[unit].owners, unit]
        reads = self.in_inner_task() or self.schedule.tied_owners.awaits_own_call(unit)
        done = unit in self._over or (not reads and all(map(self._has_its_gradients, needed)))
        if unit in self._completed and done:
            return
        if self.in_inner_task() or (unit in self._completed and self._is_elsewhere(unit)):
            for each in needed:
                again = range(PARAMETERS) if each in self._completed else [i for u, i in self._arrived if u == each]
                self._late[each] = sum(self._comes(each, i) for i in again)
        if self._is_given_gradients(call):
            self._open.setdefault(unit, []).append(call)
        else:
            around, frozen = len([*call.calls()]) > 1, len(self._leaves(unit)) < PARAMETERS
            tied = unit in self.program.tied()
            if (around and (self.schedule.clock.recomputes or frozen or tied)) or (len(needed) > 1 and frozen):
                self._kept.add(unit)  # no event marks the end of its backward
        begun = unit in self._expecting and unit not in self._completed and unit in self._unsharded
        if begun and unit not in self.program.tied():
            return
        self.schedule.reached(unit)
        for each in needed:
            if each in self._unsharded:
                self._wait(each)
        if unit not in self._completed and unit not in self._expecting:
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
        if unit not in self._expecting:
            self.participate(unit)
        if not self.gradient_has_arrived:
            self.gradient_arrived(watched=False)
        inside = self._arrived_inside.setdefault(unit, set())
        again = (unit, index) in self._arrived or unit in self._completed
        if again:
            self._late[unit] = self._late.get(unit, 0) - 1
        if not self._is_elsewhere(unit):
            inside.discard(index)
        elif not again:
            inside.add(index)
        self._arrived.add((unit, index))
        self._missing[unit].discard(index)
        if unit in self._completed:
            self._participates.add(unit)
            self.schedule.expect(unit)
        if (unit in self._completed or not self._missing[unit]) and not self._open.get(unit):
            self._advance(unit)
        self.schedule.progressed(unit, 1)

    def _inputs_ready(self, call: Call) -> None:
        unit = call.unit
        self._open[unit].remove(call)
        if call.began is not None and call.began == self.schedule.clock.began.get(unit):
            self._over.add(unit)
        if unit in self._expecting:
            if not (self._open[unit] or unit in self._completed or self.in_inner_task()) and self.brings_gradients():
                self._missing[unit] = {i for i in self._missing[unit] if self._comes(unit, i)}
            self._advance(unit)

    def _advance(self, unit: str) -> None:
        if self._open.get(unit) or self._late.get(unit, 0) > 0:
            return
        if self._leaves(unit) and unit not in self._completed and not self._missing[unit]:
            if self._arrived_inside.get(unit) and self._awaits_more(unit):
                return
            self._completed.add(unit)
            self._release(unit)
            self.schedule.ready(unit)
        elif unit in self._completed or not self._leaves(unit) or not self.brings_gradients():
            self._release(unit)
        for owner in self.program.rules[unit].owners:
            if owner in self._expecting:
                self._advance(owner)

    def _awaits_more(self, unit: str) -> bool:
        """Whether another part is pending for gradients that arrived in inner tasks."""
        if self._is_elsewhere(unit):
            return True
        self._missing[unit].update(i for i in self._arrived_inside[unit] if self._comes(unit, i))
        self._arrived_inside[unit].clear()
        return bool(self._missing[unit])

    def _release(self, unit: str) -> None:
        in_use = any(unit in rules.owners and self._open.get(user) for user, rules in self.program.rules.items())
        if (
            not in_use
            and unit not in self._kept
            and not self.schedule.keeps_unsharded(unit)
            and not self.schedule.reaches_again(unit)
        ):
            self.reshard(unit)
            self.schedule.released(unit)

    # -- facts -------------------------------------------------------------------------------------------------------

    def facts(self) -> UnitFacts[str]:
        """The facts about a unit that the schedule may read."""
        return UnitFacts(
            completed=self._completed.__contains__,
            expects_gradients=lambda unit: unit in self._expecting or unit in self._completed,
            has_gradients=lambda unit: any((unit, index) in self._arrived for index in range(PARAMETERS)),
            is_over=self._over.__contains__,
            is_used_once=self._used_once.__contains__,
            is_unsharded=self._unsharded.__contains__,
            is_trained=lambda unit: bool(self._leaves(unit)),
            elements=lambda unit: len(self._leaves(unit)),
            participates=self._participates.__contains__,
            awaits_gradients=self._awaits,
        )

    def may_bring_more(self, unit: str) -> bool:
        """Whether another call of the unit is pending."""
        to_come = self._reached - self._begun
        return any(unit == each.unit or unit in self.program.rules[each.unit].owners for each in to_come)

    def _leaves(self, unit: str) -> list[int]:
        return [index for index in range(PARAMETERS) if (unit, index) not in self.program.frozen]

    def _comes(self, unit: str, index: int) -> bool:
        return (unit, index) in self._tasks[-1]

    def _awaits(self, unit: str) -> bool:
        left = self._missing[unit] if unit in self._expecting else self._leaves(unit)
        return any(self._comes(unit, index) for index in left)

    def in_inner_task(self) -> bool:
        return len(self._tasks) > 1

    def is_running(self, checkpoint: object) -> bool:
        return self._running == checkpoint

    def will_recompute(self, checkpoint: object) -> bool:
        return checkpoint in self._recomputing

    def brings_gradients(self) -> bool:
        return (
            self.gradient_has_arrived
            or self.schedule.recomputes_trained
            or any(unit in self.schedule.clock.planned for unit, _ in self._tasks[-1])
        )

    # -- actions -----------------------------------------------------------------------------------------------------

    def gather(self, units: Sequence[str], *, ahead: bool) -> None:
        sharded = tuple(unit for unit in units if unit not in self._unsharded)
        self._ahead.update(sharded if ahead else sharded[1:])
        if sharded:
            number = len(self.gathers)
            self.gathers.append(sharded)
            self.operations.append(("issue", ("gather", number)))
            self._unsharded.update(dict.fromkeys(sharded, number))

    def _wait(self, unit: str) -> None:
        if unit not in self._unsharded:
            raise Problem(f"{unit} is to be used, and nobody gathered it")
        if unit not in self._waited:
            self._waited.add(unit)
            self.operations.append(("await", ("gather", self._unsharded[unit])))

    def reshard(self, unit: str) -> None:
        if unit in self._unsharded:
            self._wait(unit)
            self._waited.discard(unit)
            del self._unsharded[unit]
            self.operations.append(("free", unit))

    def gradient_arrived(self, *, watched: bool) -> None:
        self.gradient_has_arrived = True

    def release_inputs(self) -> None:
        while self._in_flight:
            self.operations.append(("await", ("reduce", self._in_flight.pop(0))))

    def participate(self, unit: str) -> None:
        leaves = self._leaves(unit)
        self._expecting.add(unit)
        self._task_of[unit] = self._tasks[0 if unit in self.schedule.clock.planned else -1]
        self._arrived_inside.pop(unit, None)
        self._missing[unit] = {index for index in leaves if (unit, index) not in self._arrived}
        if leaves:
            self._participates.add(unit)
            self.schedule.expect(unit)

    def complete(self, unit: str) -> None:
        self._completed.add(unit)

    def reduce(self, units: Sequence[str]) -> None:
        while len(self._in_flight) > 1:
            self.operations.append(("await", ("reduce", self._in_flight.pop(0))))
        number = len(self.reductions)
        self.reductions.append(tuple(units))
        self.operations.append(("issue", ("reduce", number)))
        self._in_flight.append(number)
        self._participates.difference_update(units)

    def end_turn(self) -> None:
        if self.rng.random() < 0.2:  # where memory is highest
            self.release_inputs()

    def report_no_gradients(self) -> None:
        """In these programs, if one rank has no gradients, no rank has."""


class _Segment:
    """A non-reentrant checkpoint in the record, by its identity."""


# -- waits between ranks -----------------------------------------------------------------------------------------------


Stream = list[tuple[str, Any]]


def on_host(rank: SimulatedRank) -> list[Stream]:
    """The host itself waits, as with gloo; at the end, ranks without some gradients wait for notes of all ranks."""
    notes: Stream = [("issue", ("note", 0))]
    if rank.lacks:
        notes.append(("await", ("note", 0)))
    return [[each for each in rank.operations if each[0] != "free"] + notes]


def on_device(rank: SimulatedRank) -> list[Stream]:
    """Streams wait; a gather also waits for the memory of all units freed when the host issued it."""
    compute: Stream = []
    unshard: Stream = []
    reduce: Stream = []
    marks = 0
    for kind, what in rank.operations:
        if kind == "free":
            marks += 1
            compute.append(("mark", marks))
            unshard.append(("after", marks))
        elif kind == "await":
            compute.append((kind, what))
        else:
            stream = unshard if what[0] == "gather" else reduce
            if what[0] == "reduce":
                marks += 1
                compute.append(("mark", marks))
                reduce.append(("after", marks))
            stream += [("issue", what), ("await", what)]
    return [compute, unshard, reduce]


def _may_go_on(kind: str, what: Any, marked: set[int], issued: dict[Any, set[int]], world: int) -> bool:
    return what in marked if kind == "after" else len(issued.get(what, ())) == world


def deadlock(ranks: Sequence[list[Stream]]) -> str:
    """Replay the streams of all ranks; "" if all finish, otherwise the places where they are stuck."""
    heads = [[0] * len(streams) for streams in ranks]
    issued: dict[Any, set[int]] = {}
    marked: list[set[int]] = [set() for _ in ranks]
    moves = True
    while moves:
        moves = False
        for number, streams in enumerate(ranks):
            for at, stream in enumerate(streams):
                while heads[number][at] < len(stream):
                    kind, what = stream[heads[number][at]]
                    if kind == "issue":
                        issued.setdefault(what, set()).add(number)
                    elif kind == "mark":
                        marked[number].add(what)
                    elif not _may_go_on(kind, what, marked[number], issued, len(ranks)):
                        break
                    heads[number][at] += 1
                    moves = True
    stuck = [
        f"rank {number} at {streams[at][head]}"
        for number, streams in enumerate(ranks)
        for at, head in enumerate(heads[number])
        if head < len(streams[at])
    ]
    return "; ".join(stuck)


def problem_of(seed: int, **how: Any) -> str:
    """Run program `seed` on some ranks; "" or the problem. `how`: arguments of `problem_of_program`."""
    return problem_of_program(drawn_program(seed), seed, **how)


def problem_of_program(
    program: Program,
    seed: int,
    *,
    schedule_class: type[BackwardSchedule[str]] = BackwardSchedule,
    forwards_class: type[SimulatedForwards] = SimulatedForwards,
    world: int = 0,
) -> str:
    """Run `program` on some ranks; `seed` draws the calls that backwards reach. Returned: "" or the problem."""
    rng = random.Random(f"ranks {seed}")
    double = rng.random() < 0.1
    ranks = [
        SimulatedRank(
            program,
            rng.randrange(2**30),
            double=double,
            schedule_class=schedule_class,
            forwards_class=forwards_class,
        )
        for _ in range(world or rng.choice((2, 2, 3, 4)))
    ]
    try:
        for rank in ranks:
            rank.forward()
        if not all(rank.has_gradients() for rank in ranks):
            return ""  # ranks raise because they differ, or none has gradients
        for rank in ranks:
            rank.backward()
    except Problem as error:
        return str(error)
    for name, found in (("gathers", [rank.gathers for rank in ranks]), ("reductions", [r.reductions for r in ranks])):
        longest = max(found, key=len)
        if any(each != longest[: len(each)] for each in found):
            return f"{name} in another order: {found}"
    for place, streams in (("host", on_host), ("device", on_device)):
        if stuck := deadlock([streams(rank) for rank in ranks]):
            return f"deadlock, {place}: {stuck}\n" + "\n".join(f"{rank.gathers} {rank.reductions}" for rank in ranks)
    return ""
