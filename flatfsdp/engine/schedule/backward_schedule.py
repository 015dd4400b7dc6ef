"""The schedule of one backward, which decides what to gather, complete, reduce and free: events in, actions out; pure.

[Note: one clock] The record of the forward gives every unit two ticks of one clock, which a backward runs down: its
gather is due at the tick when it last ended, its reduction at the tick when it first began. Two cursors move over the
clock, one for each communicator, and never back. Three rules couple them:

1. When a unit is reached or recomputed, the cursor of reductions moves past all units that began after its end, then
   that of gathers to it. Units without gradients on this rank are *completed*, with zeros ([Note: passed over]).
2. A reduction is issued after all gathers that are due before it: these are issued ahead of their use.
3. A prefetch moves the cursor of gathers to the group after that of the reached unit, and never moves the cursor of
   reductions. Ranks may reach units in different orders, or prefetch less: the order of their gathers is fixed before
   the backward.

A unit is unsharded during its lifetimes ([Note: lifetimes]). Both cursors rest in a graph task inside of this one:
there all units in use are unsharded, and it is unknown which gradients this rank will compute. The cursor of reductions
rests, too, as long as the backward brings no gradient of a parameter, on any rank.

A unit that is called again, or whose parameters others use, is reduced once, when its first call is over: parts of it
that are recomputed reentrantly produce gradients that are not known before, and on some ranks only.

[Note: passed over] A backward may not reach a unit that another rank's does. Its reduction is issued in its turn, with
zeros, when a unit is reached that ended before it began ([Note: backward order]): then neither that unit, nor missing
gradients that this backward does not compute, need to be awaited any longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Generic, TypeVar

from .backward_clock import NEVER, BackwardClock, Lifetime
from .backward_driver import Driver, UnitFacts, UnitRules
from .forward_record import ForwardRecord
from .issue_order import Cut, GatherOrder, ReduceOrder
from .mid_backward import HalfwayTrigger
from .tied_owners import TiedOwners

U = TypeVar("U", bound=Hashable)


class BackwardSchedule(Generic[U]):
    """The decisions of one backward.

    Attributes:
        clock: the ticks at which units are due. gathers, reductions: the collectives to issue, in order.
        recomputes_trained: whether reentrant checkpoints produce gradients, on this rank or on others.
        windows: units that await gradients, and accumulate them unsharded.
        tied_owners: the owners of tied parameters that this backward may reach again.
    """

    def __init__(
        self,
        record: ForwardRecord[U],
        rules: Mapping[U, UnitRules[U]],
        facts: UnitFacts[U],
        driver: Driver[U],
        *,
        coalesce: Cut[U],
        together: Mapping[U, Sequence[U]],
    ) -> None:
        """`coalesce` splits the gathers into groups. `together`: units that are gathered when one of them is needed."""
        clock = self.clock = BackwardClock(record, driver.will_recompute)
        self._rules, self._facts, self._driver = rules, facts, driver
        targets = {unit: rules[unit].targets for unit in record.anchored if rules[unit].targets}
        self.gathers: GatherOrder[U] = GatherOrder(clock.gathers[::-1], targets, coalesce=coalesce, together=together)
        self.reductions: ReduceOrder[U] = ReduceOrder(record)
        self.windows: dict[U, None] = {}
        self.tied_owners: TiedOwners[U] = TiedOwners(clock, rules, facts)
        self._halfway: HalfwayTrigger[U] = HalfwayTrigger()
        trained = tuple(filter(facts.is_trained, clock.recomputed))
        self.recomputes_trained = bool(trained)
        self._awaited = clock.planned.union(trained) if trained else clock.planned

    # -- properties of units -----------------------------------------------------------------------------------------

    def keeps_unsharded(self, unit: U) -> bool:
        """Whether `unit` stays unsharded after its part of the backward."""
        return self._driver.double or self._rules[unit].stays_unsharded

    def reaches_again(self, unit: U) -> bool:
        """Whether this backward may reach `unit` again: it then stays unsharded, as others would not gather it."""
        clock = self.clock
        lifetime = clock.lifetime_of(unit) if clock.lifetimes else None
        if lifetime is not None and (
            lifetime.until_over or (unit in clock.recomputed and not self._facts.completed(unit))
        ):
            return True
        return (unit in clock.several and not self._facts.is_over(unit)) or (
            bool(clock.tied_owners) and self.tied_owners.may_be_used(unit)
        )

    def _is_awaited(self, unit: U) -> bool:
        """Whether ranks still await gradients of `unit`, as far as this one knows."""
        return not self._facts.completed(unit) and unit in self._awaited

    # -- events ------------------------------------------------------------------------------------------------------

    def expect(self, unit: U) -> None:
        """Expect gradients of `unit`, from this backward or from earlier ones."""
        if self._rules[unit].reduces:
            self.reductions.expect(unit)
        else:
            self.windows[unit] = None

    def expect_recomputed(self) -> None:
        """Expect gradients of units that get a graph during the backward, on all ranks."""
        for unit in self.clock.begun if self.recomputes_trained else ():
            if unit in self.clock.recomputed and unit in self._awaited:
                self.expect(unit)

    def reached(self, unit: U) -> None:
        """Gather `unit`, after all units before it, because the backward reaches it."""
        if self.clock.tied_owners:
            self.tied_owners.reached(unit)
        # A graph made by a reentrant checkpoint is reached at the checkpoint's place, not at that of another graph that
        # the unit may have; ranks need not reach it.
        inner = self.clock.recomputes and self._driver.in_inner_task()
        needed = (*self._rules[unit].owners, unit)
        if not inner:
            # At this tick all of these gathers, which are waited for, are due; a tied owner has ended with its last
            # user. Done before others are gathered, since each takes memory.
            self._pass(min(map(self.clock.ended.get, needed, repeat(NEVER))))
        for each in needed:
            if not (self._facts.is_unsharded(each) and (inner or self.gathers.is_past(each))):
                self.gather_in_turn(each)
        if unit in self.clock.planned and not (inner or self.gathers.is_over):
            self._prefetch_after(unit)

    def gather_in_turn(self, unit: U) -> None:
        """Gather `unit`, and all units whose turn comes before."""
        if not (self.gathers.has_turn(unit) or self._facts.is_unsharded(unit)):
            self._gather_at_halfway(self._halfway.end_all())
        self._gather(self.gathers.until(unit))

    def progressed(self, unit: U, elements: int) -> None:
        """Count `elements` of gradients of `unit` that have arrived; gather the next unit when they are half of all."""
        if following := self._halfway.gradient_elements_arrived(unit, elements):
            self._gather_at_halfway(following)

    def ready(self, unit: U) -> None:
        """Called when all gradients of `unit` that this backward computes have arrived: reduce it in its turn."""
        if self._rules[unit].prefetch == "halfway" and (following := self._halfway.end(unit)):
            self._gather_at_halfway(following)
        if not self._rules[unit].reduces:
            return
        clock, facts = self.clock, self._facts
        waits = unit in clock.called_again and (clock.recomputes or not facts.is_over(unit))
        # Its first call may not be over, or, if it was in another pass, this backward may not reach it.
        if waits and (clock.recomputes or unit not in clock.in_passes):
            return
        if waits and not facts.is_used_once(unit):
            return
        self.reductions.ready(unit)
        self._reduce(self.reductions.due())

    def released(self, unit: U) -> None:
        """Called when `unit` was resharded after its part: prefetch the next group if that is its setting."""
        rules = self._rules[unit]
        if rules.prefetch == "after" and not rules.targets and unit in self.clock.planned:
            self._gather(self.gathers.ahead(unit), ahead=True)

    def recomputed(self, unit: U) -> None:
        """Gather `unit`, after all units before it, because its forward runs in this backward."""
        clock, needed = self.clock, (*self._rules[unit].owners, unit)
        if self._driver.in_inner_task():
            for each in needed:
                if not self._facts.is_unsharded(each):
                    self.gather_in_turn(each)
            return
        running = clock.running(self._driver.is_running)
        due = [clock.due.get(each, NEVER) for each in needed]
        if running is not None:
            due.append(running.ended)
        self._pass(min(due))
        for each in needed:
            self.gather_in_turn(each)
        if unit in clock.recomputed and unit not in clock.planned:
            self._prefetch_after(unit)

    def ended(self) -> None:
        """At the end of the graph task, complete all units that other ranks' backwards may have reached, and reduce
        them. [Note: passed over]"""
        driver, facts = self._driver, self._facts
        if not driver.brings:
            return
        self._pass(-1, awaits=False)
        for unit in self.clock.sequence:
            if not facts.completed(unit):
                self._complete(unit)
        rest = self.reductions.due(rest=True)
        for unit in (*chain.from_iterable(rest), *self.windows):
            if not facts.expects_gradients(unit):
                driver.participate(unit)
        self.reductions.due(rest=True)  # these
        self._reduce(rest)

    # -- gathers -----------------------------------------------------------------------------------------------------

    def _gather(self, groups: Iterable[Sequence[U]], *, ahead: bool = False) -> None:
        for group in groups:
            reading = [unit for unit in group if self._rules[unit].reads]
            if reading:
                self._driver.gather(reading, ahead=ahead)

    def _prefetch_after(self, unit: U) -> None:
        rules = self._rules[unit]
        if rules.targets:
            self._gather(self.gathers.through(rules.targets, ahead=True), ahead=True)
        elif rules.prefetch == "halfway" and unit in self.clock.planned:
            self._begin_halfway(unit)
        elif rules.prefetch in ("before", "halfway"):
            self._gather(self.gathers.ahead(unit), ahead=True)

    def _begin_halfway(self, unit: U) -> None:
        """Await half of the gradients of `unit`, unless none will arrive or it encloses the next. [Note: half-way]"""
        following = tuple(self.gathers.following(unit))
        if self.clock.is_around(unit, following):
            self._gather(self.gathers.ahead(unit), ahead=True)
            return
        self._halfway.begin(unit, self._facts.elements(unit) if self._driver.brings else 0, following)
        self.progressed(unit, 0)

    def _gather_at_halfway(self, following: Sequence[U]) -> None:
        due = self.gathers.through(following, ahead=True)
        if any(self._rules[unit].reads and not self._facts.is_unsharded(unit) for group in due for unit in group):
            self._driver.release_inputs()
        self._gather(due, ahead=True)

    # -- reductions --------------------------------------------------------------------------------------------------

    def _reduce(self, groups: Iterable[Sequence[U]]) -> None:
        driver = self._driver
        for group in groups:
            if not self.gathers.is_over and (due := self.clock.due_before(group)):
                self._gather(self.gathers.through(due), ahead=True)
            driver.reduce(group)
        driver.end_turn()

    def _reduce_in_turn(self, unit: U) -> None:
        """Reduce `unit`, which awaits no gradients, if it has any to reduce, and all units whose turn it is."""
        if self.reductions.expects(unit) and self._facts.participates(unit):
            self.reductions.ready(unit)
            self._reduce(self.reductions.due())

    # -- completion --------------------------------------------------------------------------------------------------

    def _complete(self, unit: U) -> None:
        if not self._facts.expects_gradients(unit):
            # Not again if it was gathered with others and freed since: on ranks that reach it, it is still unsharded.
            self._gather(self.gathers.through((unit,)))
            self._driver.participate(unit)
        self._driver.complete(unit)
        if unit not in self.clock.called_again:
            self._reduce_in_turn(unit)
        if not (self.keeps_unsharded(unit) or self.clock.lifetime_of(unit) is not None):
            self._driver.reshard(unit)

    def _pass(self, tick: float, *, awaits: bool = True) -> None:
        """Complete units, and end lifetimes, that began after `tick`. `awaits`: do not complete units for which the
        graph task still computes gradients."""
        clock, completed, brings = self.clock, self._facts.completed, self._driver.brings
        begun, began, lifetimes = clock.begun, clock.began, clock.lifetimes
        while True:
            last = began[begun[-1]] if begun and brings else -1
            if lifetimes and lifetimes[-1].over > max(last, tick):
                self._end_lifetime(lifetimes[-1], reads=brings)
                continue
            if last <= tick:
                return
            over = begun[-1]
            if completed(over) and over not in clock.called_again:
                begun.pop()  # the usual case, handled without a call
                continue
            # The latter only on an accelerator, for which autograd has a separate thread.
            if (
                awaits
                and self._is_awaited(over)
                and (self._driver.in_inner_task() or self._facts.awaits_gradients(over))
            ):
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
            if self._facts.completed(over):
                self._reduce_in_turn(over)

    def _end_lifetime(self, lifetime: Lifetime[U], *, reads: bool) -> None:
        """Free the parameters, which are not read any more, after they were gathered as on ranks that read them."""
        self.clock.end_lifetime(lifetime)
        if reads:
            self._gather(self.gathers.through((lifetime.unit,)))
        # A unit that is left unsharded and has its turn to come is freed later: no rank may gather it again.
        if not (self.keeps_unsharded(lifetime.unit) or (not reads and self.gathers.has_turn(lifetime.unit))):
            self._driver.reshard(lifetime.unit)
