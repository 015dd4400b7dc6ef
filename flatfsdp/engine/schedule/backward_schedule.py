"""The schedule of one backward, which decides what to gather, complete, reduce and free: events in, actions out.

The driver reports events, and `runtime/executor.py` executes what they return, in order ([Note: actions]). What the
schedule must know of units it asks functions that it was given (`UnitFacts`), one of which first collects the gradients
that have arrived. It has one effect elsewhere: in the record units count as having graphs when their gradients are
expected.

[Note: one clock] The record of the forward gives every unit two ticks of one clock, which a backward runs down: its
gather is due at the tick when it last ended, its reduction at the tick when it first began. Two cursors move over the
clock, one for each communicator, and never back. Three rules couple them:

1. When a unit is reached or recomputed, the cursor of reductions moves past all units that began after its end, then
   that of gathers to it. Units without gradients on this rank are *completed*, with zeros ([Note: passed over]).
2. A reduction is issued after all gathers that are due before it: these are issued ahead of their use.
3. A prefetch moves the cursor of gathers to the group after that of the reached unit, and never moves the cursor of
   reductions. Ranks may reach units in different orders, or prefetch less: the order of their gathers is fixed before
   the backward.

A unit is unsharded during its lifetimes ([Note: lifetimes]). Both cursors stand still in a graph task inside of this
one: there all units in use are unsharded, and it is unknown which gradients this rank will compute. The cursor of
reductions stands still, too, as long as the backward brings no gradient of a parameter, on any rank.

A unit that is called again, or whose parameters others use, is reduced once, when its first call is over: parts of it
that are recomputed reentrantly produce gradients that are not known before, and on some ranks only.

[Note: passed over] A backward may not reach a unit that another rank's does. Its reduction is issued in its turn, with
zeros, when a unit is reached that ended before it began ([Note: backward order]): then neither that unit, nor missing
gradients that this backward does not compute, need to be awaited any longer.

[Note: tied owners] An owner is gathered with each of its users. All of its gradients may have arrived before this
backward reaches one of the users, or its own call: a rank's data may skip the use from which other ranks' gradients
come. If it were freed then, that rank alone would gather it again. So it stays unsharded until its own call is over,
and the calls of users that began later: the backward reaches these first, or passes over them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Generic, Literal, TypeVar

from .actions import Action
from .backward_clock import NEVER, BackwardClock, Lifetime
from .forward_schedule import CheckpointRegion, ForwardRecord
from .issue_order import Cut, GatherOrder, ReduceOrder

U = TypeVar("U", bound=Hashable)


@dataclass(frozen=True, slots=True)
class UnitRules(Generic[U]):
    """The settings of a unit that are fixed before the backward, the same on all ranks.

    Attributes:
        prefetch: when the next group is gathered: when this unit is reached, or when it is freed; None: not prefetched.
            "halfway" is "before", except for schedules that are attached for it.
        targets: units to gather right after it instead of the next group.
        reads: whether its backward reads the parameters, so that they are gathered.
        reduces: whether its gradients are reduced, instead of accumulated unsharded.
        stays_unsharded: whether it is left unsharded after its backward, and after the whole one.
        owners: units whose parameters it uses, which are gathered whenever it is.
        is_tied: whether modules of several units hold some of its parameters, or see them transformed.
    """

    prefetch: Literal["before", "halfway", "after"] | None = "before"
    targets: tuple[U, ...] = ()
    reads: bool = True
    reduces: bool = True
    stays_unsharded: bool = False
    owners: tuple[U, ...] = ()
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class UnitFacts(Generic[U]):
    """Functions that return facts about a unit, and about the running graph task.

    Attributes:
        has_gradients: whether any gradient has arrived of a unit that awaits some.
        is_used_once: whether in earlier backwards each of its gradients arrived once, and not in an inner graph task.
        is_unsharded: whether it is gathered, or its gather is in flight.
        is_trained: whether a parameter of it requires a gradient.
        awaits_gradients: whether the running graph task will compute gradients that it lacks.
        will_recompute: whether the running graph task will reach this reentrant checkpoint.
    """

    has_gradients: Callable[[U], bool]
    is_used_once: Callable[[U], bool]
    is_unsharded: Callable[[U], bool]
    is_trained: Callable[[U], bool]
    awaits_gradients: Callable[[U], bool]
    will_recompute: Callable[[object], bool]


class BackwardSchedule(Generic[U]):
    """The decisions of one backward.

    Attributes:
        clock: the ticks at which units are due. gathers, reductions: the collectives to issue, in order.
        recomputes_trained: whether reentrant checkpoints produce gradients, on this rank or on others.
        windows: units that await gradients, and accumulate them unsharded.
        double: `create_graph`: the parameters are needed again.
        brings: whether it brings gradients of parameters, or reduces those of earlier backwards; the same on all ranks.
        expecting: units whose gradients are awaited; completed: those of which every one has arrived that is awaited.
        finished: units whose first call this backward has finished, and therefore all calls.
    """

    def __init__(
        self,
        record: ForwardRecord[U],
        rules: Mapping[U, UnitRules[U]],
        facts: UnitFacts[U],
        *,
        coalesce: Cut[U],
        together: Mapping[U, Sequence[U]],
    ) -> None:
        """`coalesce` splits the gathers into groups. `together`: units that are gathered when one of them is needed."""
        clock = self.clock = BackwardClock(record, facts.will_recompute)
        self._rules, self._facts = rules, facts
        targets = {unit: rules[unit].targets for unit in record.anchored if rules[unit].targets}
        self.gathers: GatherOrder[U] = GatherOrder(
            clock.gathers[::-1], targets, coalesce=coalesce, together=together, due=clock.due
        )
        self.reductions: ReduceOrder[U] = ReduceOrder(record)
        self.windows: dict[U, None] = {}
        self.double = self.brings = False
        self.expecting: set[U] = set()
        self.completed: set[U] = set()
        self.finished: set[U] = set()
        self._owners_reached: dict[U, bool] = {}  # tied owners: whether gradients had arrived before that
        trained = tuple(filter(facts.is_trained, clock.recomputed))
        self.recomputes_trained = bool(trained)
        self._awaited = clock.planned.union(trained) if trained else clock.planned
        self._actions: list[Action[U]] = []  # of the last event: a new list for each

    # -- properties of units -----------------------------------------------------------------------------------------

    def _keeps_unsharded(self, unit: U) -> bool:
        """Whether `unit` stays unsharded after its backward."""
        return self.double or self._rules[unit].stays_unsharded

    def _reaches_again(self, unit: U) -> bool:
        """Whether this backward may reach `unit` again: it then stays unsharded, as others would not gather it."""
        clock = self.clock
        lifetime = clock.lifetime_of(unit) if clock.lifetimes else None
        if lifetime is not None and (lifetime.until_over or (unit in clock.recomputed and unit not in self.completed)):
            return True
        return (unit in clock.several and unit not in self.finished) or (
            bool(clock.tied_owners) and self._may_be_used(unit)
        )

    def _is_unsharded(self, unit: U) -> bool:
        """Whether `unit` is unsharded when the actions so far have been executed."""
        for verb, units in reversed(self._actions):
            if unit in units and verb in ("gather", "ahead", "free"):
                return verb in ("gather", "ahead")
        return self._facts.is_unsharded(unit)

    def _is_awaited(self, unit: U) -> bool:
        """Whether ranks still await gradients of `unit`, as far as this one knows."""
        return unit not in self.completed and unit in self._awaited

    # -- expectations ------------------------------------------------------------------------------------------------

    def expect(self, *units: U) -> None:
        """Expect gradients of `units`, from this backward or from earlier ones."""
        reduced = []
        for unit in units:
            if self._rules[unit].reduces:
                reduced.append(unit)
            else:
                self.windows[unit] = None
        if reduced:
            self.reductions.expect(*reduced)

    def expect_recomputed(self) -> None:
        """Expect gradients of units that get a graph during the backward, on all ranks."""
        for unit in self.clock.begun if self.recomputes_trained else ():
            if unit in self.clock.recomputed and unit in self._awaited:
                self.expect(unit)

    # -- events ------------------------------------------------------------------------------------------------------

    def reached(self, unit: U, *, inner: bool) -> list[Action[U]]:
        """The backward reaches `unit`: gather it, after all units before it, and wait for that. `inner`: in a graph
        task inside of that of this backward."""
        actions = self._actions = []
        if unit in self.clock.tied_owners:
            self._owners_reached.setdefault(unit, unit in self.expecting and self._facts.has_gradients(unit))
        # A graph made by a reentrant checkpoint is reached at the checkpoint's place, not at that of another graph that
        # the unit may have; ranks need not reach it.
        in_task, inner = inner, inner and self.clock.recomputes
        rules = self._rules[unit]
        needed = (*rules.owners, unit) if rules.owners else (unit,)
        if not inner:
            # At this tick all of these gathers, which are waited for, are due; a tied owner has ended with its last
            # user. Done before others are gathered, since each takes memory.
            self._pass(min(map(self.clock.ended.get, needed, repeat(NEVER))), inner=in_task)
        for each in needed:
            is_unsharded = self._is_unsharded if actions else self._facts.is_unsharded
            if not (is_unsharded(each) and (inner or self.gathers.is_past(each))):
                self._gather_in_turn(each)
        if unit in self.clock.planned and not (inner or self.gathers.is_over):
            self._prefetch_after(unit)
        if rules.owners or not rules.reads:
            needed = tuple([each for each in needed if self._rules[each].reads or self._is_unsharded(each)])
        actions.append(("wait", needed))
        return actions

    def _gather_in_turn(self, unit: U) -> None:
        """Gather `unit`, and all units whose turn comes before."""
        self._gather(self.gathers.until(unit))

    def left(self, unit: U) -> list[Action[U]]:
        """As far as gradients show, the backward of `unit` is over: free it, and prefetch if that is its setting."""
        actions = self._actions = []
        self._leave(unit)
        return actions

    def completes(self, unit: U, *, in_use: bool) -> list[Action[U]]:
        """All gradients of `unit` that this backward computes have arrived: free it, unless it is `in_use`, and reduce
        it in its turn."""
        actions = self._actions = []
        self.completed.add(unit)
        if not in_use:
            self._leave(unit)  # before the reduction allocates memory
        self._ready_to_reduce(unit)
        return actions

    def _ready_to_reduce(self, unit: U) -> None:
        """Reduce `unit` in its turn."""
        if not self._rules[unit].reduces:
            return
        clock = self.clock
        waits = unit in clock.called_again and (clock.recomputes or unit not in self.finished)
        # Its first call may not be over, or, if it was in another pass, this backward may not reach it.
        if waits and (clock.recomputes or unit not in clock.in_passes):
            return
        if waits and not self._facts.is_used_once(unit):
            return
        self.reductions.ready(unit)
        self._reduce(self.reductions.due())

    def recomputed(self, unit: U, *, inner: bool, region: CheckpointRegion | None) -> list[Action[U]]:
        """The forward of `unit` runs in this backward: gather it, after all units before it. `region`: that of the
        reentrant checkpoint that runs."""
        actions = self._actions = []
        clock, needed = self.clock, (*self._rules[unit].owners, unit)
        if not inner:
            due = [clock.due.get(each, NEVER) for each in needed]
            if region is not None:
                due.append(region.ended)
            self._pass(min(due), inner=False)
        for each in needed:
            # Outside of inner tasks also if it is unsharded: the driver refuses one whose gradients are in its memory.
            if not (inner and self._is_unsharded(each)):
                self._gather_in_turn(each)
        if not inner and unit in clock.recomputed and unit not in clock.planned:
            self._prefetch_after(unit)
        return actions

    def ended(self) -> list[Action[U]]:
        """The graph task has ended: complete all units that other ranks' backwards may have reached, and reduce them.
        [Note: passed over]"""
        actions = self._actions = []
        if self.brings:
            self._pass(-1, inner=False, awaits=False)
            for unit in self.clock.sequence:
                if unit not in self.completed:
                    self._complete(unit)
            remaining = self.reductions.due(flush=True)
            for unit in (*(unit for group in remaining for unit in group), *self.windows):
                if unit not in self.expecting:
                    self._participate(unit)
            self._reduce(remaining)
        return actions

    # -- gathers -----------------------------------------------------------------------------------------------------

    def _gather(self, groups: Iterable[Sequence[U]], *, ahead: bool = False) -> None:
        for group in groups:
            reading: Sequence[U] = group
            for unit in group:
                if not self._rules[unit].reads:
                    reading = [each for each in group if self._rules[each].reads]
            if reading:
                self._actions.append(("ahead" if ahead else "gather", reading))

    def _prefetch_after(self, unit: U) -> None:
        rules = self._rules[unit]
        if rules.targets:
            self._gather(self.gathers.through(rules.targets, ahead=True), ahead=True)
        elif rules.prefetch in ("before", "halfway"):
            self._gather(self.gathers.ahead(unit), ahead=True)

    # -- reductions --------------------------------------------------------------------------------------------------

    def _reduce(self, groups: Iterable[Sequence[U]]) -> None:
        for group in groups:
            if not self.gathers.is_over:
                began = self.clock.began.get(group[0], NEVER) if len(group) == 1 else self.clock.began_first(group)
                if due := self.gathers.due_before(began):
                    self._gather(due, ahead=True)
            self._actions.append(("reduce", group))
        to_come = self.reductions.expected
        self._actions.append(("end turn", (*to_come,) if len(to_come) == 1 else ()))

    def _reduce_in_turn(self, unit: U) -> None:
        """Reduce `unit`, which awaits no gradients, if it has any to reduce, and all units whose turn it is."""
        if unit in self.reductions.expected:
            self.reductions.ready(unit)
            self._reduce(self.reductions.due())

    # -- completion --------------------------------------------------------------------------------------------------

    def _leave(self, unit: U) -> None:
        clock, rules = self.clock, self._rules[unit]
        if self.double or rules.stays_unsharded:
            return
        if (clock.lifetimes or clock.called_again) and self._reaches_again(unit):
            return
        self._actions.append(("free", (unit,)))
        if rules.prefetch == "after" and not rules.targets and unit in self.clock.planned:
            self._gather(self.gathers.ahead(unit), ahead=True)

    def _participate(self, unit: U) -> None:
        """Provide zeros for gradients of `unit`, which this backward does not reach."""
        self.expecting.add(unit)
        self._actions.append(("participate", (unit,)))

    def _complete(self, unit: U) -> None:
        if unit not in self.expecting:
            # Not again if it was gathered with others and freed since: on ranks that reach it, it is still unsharded.
            self._gather(self.gathers.through((unit,)))
            self._participate(unit)
        self.completed.add(unit)
        self._actions.append(("complete", (unit,)))
        if unit not in self.clock.called_again:
            self._reduce_in_turn(unit)
        if not (self._keeps_unsharded(unit) or self.clock.lifetime_of(unit) is not None):
            self._actions.append(("free", (unit,)))

    def _pass(self, tick: float, *, inner: bool, awaits: bool = True) -> None:
        """Complete units, and end lifetimes, that began after `tick`. `awaits`: do not complete units for which the
        graph task still computes gradients."""
        clock, completed, brings = self.clock, self.completed, self.brings
        begun, began, lifetimes = clock.begun, clock.began, clock.lifetimes
        while True:
            last = began[begun[-1]] if begun and brings else -1
            if lifetimes and lifetimes[-1].over > max(last, tick):
                self._end_lifetime(lifetimes[-1], reads=brings)
                continue
            if last <= tick:
                return
            over = begun[-1]
            if over in completed and over not in clock.called_again:
                begun.pop()  # the usual case, handled without a call
                continue
            # The latter only on an accelerator, for which autograd has a separate thread.
            if awaits and self._is_awaited(over) and (inner or self._facts.awaits_gradients(over)):
                return
            self._complete_last()

    def _complete_last(self) -> None:
        """Complete the unit that began last, of which no call is left."""
        lifetimes, over = self.clock.lifetimes, self.clock.begun.pop()
        if self._is_awaited(over):
            self._complete(over)
        if over in self.clock.called_again:
            if lifetimes and lifetimes[-1].unit == over and lifetimes[-1].over == self.clock.began[over]:
                self._end_lifetime(lifetimes[-1], reads=True)  # before the reduction, which takes memory
            if over in self.completed:
                self._reduce_in_turn(over)

    def _end_lifetime(self, lifetime: Lifetime[U], *, reads: bool) -> None:
        """Free the parameters, which are not read any more, after they were gathered as on ranks that read them."""
        unit = lifetime.unit
        self.clock.end_lifetime(lifetime)
        if reads:
            self._gather(self.gathers.through((unit,)))
        # A unit that is left unsharded and has its turn to come is freed later: no rank may gather it again.
        if not (self._keeps_unsharded(unit) or (not reads and self.gathers.has_turn(unit))):
            self._actions.append(("free", (unit,)))

    # -- tied owners -------------------------------------------------------------------------------------------------

    def awaits_own_call(self, unit: U) -> bool:
        """Whether other units use parameters of `unit`, whose own call this backward has not reached."""
        return unit in self.clock.tied_owners and unit not in self._owners_reached

    def _may_be_used(self, owner: U) -> bool:
        """Whether this backward may still reach `owner`, or units that use its parameters and began later."""
        if owner not in self.clock.tied_owners:
            return False
        began, rules = self.clock.began, self._rules
        users = (unit for unit in self.clock.begun if began[unit] > began[owner] and owner in rules[unit].owners)
        return not (self._is_over(owner) and all(map(self._is_over, users)))

    def _is_over(self, unit: U) -> bool:
        """Whether it is known that this backward reaches no more calls of `unit`."""
        if unit in self.finished:
            return True
        if unit in self.clock.tied_owners and self._owners_reached.get(unit, True):
            return False  # its own use may still be recomputed, and compute a gradient late
        return unit in self.completed and unit not in self.clock.several
