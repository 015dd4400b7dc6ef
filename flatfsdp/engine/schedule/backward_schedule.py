"""What one backward gathers, completes, reduces and frees next: events in, actions out; pure.

[Note: one clock] The record of the forward gives every unit two ticks of one clock, which a backward runs down: when it
last ended its gather is due, when it first began its reduction. Two cursors move over it, one for each communicator,
and never back. Three rules couple them:

1. When a unit is reached or recomputed, the cursor of reductions moves past all that began after its end, then that of
   gathers to it. What this rank brought no gradients to is *completed*: it takes part with zeros ([Note: passed over]).
2. A reduction is issued after all gathers that are due before it: ahead of their use, or, where they have no turn in
   the plan, since a reentrant checkpoint makes the graph, it waits for them.
3. A gather ahead of its use moves the cursor of gathers to the group behind that of the unit that is reached, never
   past one that has no turn, and never that of reductions. Ranks may reach units in another order, or gather less
   ahead: in which order they gather is settled before the backward.

For how long a unit is unsharded is in [Note: lifetimes]. Both cursors rest while nothing is known of what this rank
will bring: in a graph task inside of this one's, where all that is used is unsharded, and where no gradient of a
parameter comes at all. Those ranks find out at the end.

A unit that is called again, or whose parameters others use, is reduced when its first call is over, once: parts of it
that are recomputed reentrantly bring gradients of which nothing is known before, and on some ranks only.

[Note: passed over] A backward may not reach a unit that another rank's does. Its reduction is issued in its turn, with
zeros, when something is reached that ended before it began ([Note: backward order]): it, and what lacks gradients that
this backward does not compute, need not be awaited any longer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
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
        clock: when units are due. gathers, reductions: what is to be issued, in order.
        recomputes_trained: whether reentrant checkpoints bring gradients, or do so on other ranks.
        windows: units that await gradients and will add them up unsharded.
        tied_owners: which of them this backward may come to again.
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
        conditional: Collection[U] = (),
    ) -> None:
        """`coalesce` cuts the gathers into groups. `together`: units that are gathered when one of them is needed;
        `conditional`: those that ranks run or not as their data will have it."""
        clock = self.clock = BackwardClock(record, driver.will_recompute)
        self._rules, self._facts, self._driver, self._conditional = rules, facts, driver, conditional
        self._knows_late = record.knows_late
        record.asks_late = record.asks_late or bool(clock.in_passes)
        targets = {unit: rules[unit].targets for unit in record.anchored if rules[unit].targets}
        self.gathers: GatherOrder[U] = GatherOrder(clock.gathers[::-1], targets, coalesce=coalesce, together=together)
        self.reductions: ReduceOrder[U] = ReduceOrder(record, clock.began)
        self.windows: dict[U, None] = {}
        self.tied_owners: TiedOwners[U] = TiedOwners(clock, rules, facts)
        self._halfway: HalfwayTrigger[U] = HalfwayTrigger()
        self._reruns: dict[U, int] = {}
        self._rerun: set[U] = set()  # what such checkpoints inside of reentrant ones are to run again
        self._unforeseen: dict[U, None] = {}  # what got a graph unforeseen
        trained = tuple(filter(facts.is_trained, clock.recomputed))
        self.recomputes_trained = bool(trained)
        self._awaited = clock.planned.union(trained) if trained else clock.planned
        if clock.to_come:
            ticks = [lifetime.due for lifetime in clock.to_come]
            for lifetime, behind in zip(clock.to_come, self.gathers.due_after(clock.due, ticks), strict=True):
                lifetime.behind = behind
            self._limit()

    def _limit(self) -> None:
        """What has no turn to be gathered comes before gathers and reductions that are due later."""
        to_come = self.clock.to_come
        self.gathers.limit = to_come[-1].behind if to_come else len(self.clock.gathers)
        self.reductions.awaited = to_come[-1].due if to_come else 0

    # -- what is known -----------------------------------------------------------------------------------------------

    def keeps_unsharded(self, unit: U) -> bool:
        """Whether `unit` stays unsharded after its part."""
        return self._driver.double or self._rules[unit].stays_unsharded

    def reaches_again(self, unit: U) -> bool:
        """Whether this backward may come to `unit` again, which other ranks' do not: it cannot be gathered for that."""
        clock = self.clock
        if clock.lifetimes and (lifetime := clock.lifetime_of(unit)) is not None:
            if lifetime.shared or (lifetime.makes_graph and not self._is_through(unit)):
                return True
            if self._reruns.get(unit, 0) < lifetime.reruns:
                return True
        return (unit in clock.several and not self._facts.is_over(unit)) or (
            bool(clock.tied_owners) and self.tied_owners.may_be_used(unit)
        )

    def _is_through(self, unit: U) -> bool:
        """Whether the only use of `unit`, which had no graph, is over when gradients have flowed through: a checkpoint
        without reentrance inside may run it again before its own come, or beside others where it has none."""
        return self._facts.completed(unit) or not (unit in self._rerun or self._facts.is_trained(unit))

    def _is_awaited(self, unit: U) -> bool:
        """Whether ranks await the part of `unit`, as far as this one knows."""
        return not self._facts.completed(unit) and unit in self._awaited

    # -- events ------------------------------------------------------------------------------------------------------

    def expect(self, unit: U) -> None:
        """`unit` takes part with gradients, of this backward or of earlier ones."""
        if self._rules[unit].reduces:
            self.reductions.expect(unit)
        else:
            self.windows[unit] = None

    def expect_recomputed(self) -> None:
        """So do units that get a graph while the backward runs, on all ranks."""
        for unit in self.clock.begun if self.recomputes_trained else ():
            if unit in self.clock.recomputed and unit in self._awaited:
                self.expect(unit)

    def reached(self, unit: U) -> None:
        """A gradient is about to flow into `unit`: it is gathered, after all that comes before."""
        if self.clock.tied_owners:
            self.tied_owners.reached(unit)
        # What a reentrant checkpoint made is reached at its place, which is not that of a graph that the unit may have
        # besides; ranks need not reach it.
        inner = self.clock.recomputes and self._driver.in_inner_task()
        needed = (*self._rules[unit].owners, unit)
        if not inner:
            # By then all of these gathers are due, which are waited for; a tied owner has ended with its last
            # user. Before others are gathered: each takes memory.
            self._pass(min(map(self.clock.ended.get, needed, repeat(NEVER))))
        for each in needed:
            if not (self._facts.is_unsharded(each) and (inner or self.gathers.is_past(each))):
                self.gather_in_turn(each)
        if unit in self.clock.planned and not (inner or self.gathers.is_over):
            self._prefetch_after(unit)

    def gather_in_turn(self, unit: U) -> None:
        """Gather `unit` and all whose turn comes before."""
        if not (self.gathers.has_turn(unit) or self._facts.is_unsharded(unit)):
            self._gather_at_halfway(self._halfway.end_all())
        self._gather(self.gathers.until(unit))

    def progressed(self, unit: U, elements: int) -> None:
        """So many `elements` of gradients of `unit` have come: start on the next if they make half of all."""
        if following := self._halfway.gradient_elements_arrived(unit, elements):
            self._gather_at_halfway(following)

    def ready(self, unit: U) -> None:
        """All gradients of `unit` that this backward computes have come: reduce it if it is its turn."""
        if self._rules[unit].prefetch == "halfway" and (following := self._halfway.end(unit)):
            self._gather_at_halfway(following)
        if not self._rules[unit].reduces:
            return
        clock, facts = self.clock, self._facts
        waits = unit in clock.called_again and (clock.recomputes or not facts.is_over(unit))
        # That its first call is over is not known; nor that this backward comes to it, if it was in another pass.
        if waits and (clock.recomputes or unit not in clock.in_passes):
            return
        # What backwards before have not shown may be so in this one.
        if waits and not (self._knows_late and facts.is_used_once(unit) and not self._driver.may_bring_more(unit)):
            return
        self.reductions.ready(unit)
        self._reduce(self.reductions.due())

    def released(self, unit: U) -> None:
        """`unit` was resharded after its part."""
        rules = self._rules[unit]
        if rules.prefetch == "after" and not rules.targets and unit in self.clock.planned:
            self._gather(self.gathers.ahead(unit), ahead=True)

    def recomputed(self, unit: U, *, again: bool) -> None:
        """The forward of `unit` runs in this backward, and may `again`: gather it, after all that comes before."""
        clock, needed = self.clock, (*self._rules[unit].owners, unit)
        if clock.lifetimes:
            self._reruns[unit] = self._reruns.get(unit, 0) + 1
        if again:
            self._rerun.add(unit)
        if self._driver.in_inner_task():
            for each in needed:
                if not self._facts.is_unsharded(each):
                    self.gather_in_turn(each)
            return
        running = clock.running(self._driver.is_running)
        lifetimes = {each: clock.begin_lifetime(each, running) for each in needed}
        due = [clock.due.get(each, NEVER) if lifetime is None else lifetime.due for each, lifetime in lifetimes.items()]
        if running is not None:
            due.append(running.ended)
        # No rank leaves out a reentrant checkpoint: others wait for its gathers, having reduced what comes before.
        self._pass(min(due), rests=running is None and unit in clock.planned)
        for each, lifetime in lifetimes.items():
            if lifetime is None or lifetime.region is None:
                self.gather_in_turn(each)
            elif lifetime in clock.to_come:
                self._gather_without_turn(lifetime)
        if (lifetime := lifetimes[unit]) is not None and lifetime.region is not None:
            self._prefetch_after(unit, behind=lifetime.behind)
            self._reduce_due()

    def has_graph(self, unit: U) -> None:
        """`unit` was recomputed and has a graph from now on. Unforeseen, gradients may come still."""
        clock = self.clock
        if not (unit in self._awaited or unit in clock.began or unit in clock.due) and self._facts.is_trained(unit):
            self.expect(unit)
            self._unforeseen[unit] = None

    def ended(self) -> None:
        """The graph task has ended: do what is left of what other ranks' backwards did, and reduce it. [Note: passed
        over]"""
        driver, facts = self._driver, self._facts
        if not driver.gradient_has_arrived:
            if not self.recomputes_trained:
                self._gather_unreached()
                return
            driver.gradient_arrived(watched=True)
        self._pass(-1, rests=False, awaits=False)
        for unit in (*self._unforeseen, *self.clock.sequence):
            if not facts.completed(unit):
                self._complete(unit)
        rest = self.reductions.due(rest=True)
        for unit in (*chain.from_iterable(rest), *self.windows):
            if not facts.expects_gradients(unit):
                driver.participate(unit)
        self.reductions.due(rest=True)  # these
        self._reduce(rest)

    def _gather_unreached(self) -> None:
        """No gradient completes units here: gather those that other ranks may have, where conditional units make
        ranks differ."""
        if not any(unit in self._conditional for unit in self.clock.sequence):
            return
        for unit in self.clock.sequence:
            if not self.gathers.is_past(unit):
                self._gather(self.gathers.until(unit))
                if not self._driver.double:
                    self._driver.reshard(unit)

    # -- gathers -----------------------------------------------------------------------------------------------------

    def _gather(self, groups: Iterable[Sequence[U]], *, ahead: bool = False) -> None:
        for group in groups:
            reading = [unit for unit in group if self._rules[unit].reads]
            if reading:
                self._driver.gather(reading, ahead=ahead)

    def _gather_without_turn(self, lifetime: Lifetime[U]) -> None:
        """The reentrant checkpoint runs that `lifetime` is of."""
        self._gather(self.gathers.first(lifetime.behind), ahead=True)
        self._gather([(lifetime.unit,)])
        self.clock.to_come.remove(lifetime)
        self._limit()

    def _prefetch_after(self, unit: U, *, behind: int = 0) -> None:
        """`behind`: how many groups had their turn before `unit`, which has none."""
        rules = self._rules[unit]
        if rules.targets:
            self._gather(self.gathers.through(rules.targets, ahead=True), ahead=True)
        elif rules.prefetch == "halfway" and unit in self.clock.planned:
            self._begin_halfway(unit)
        elif rules.prefetch in ("before", "halfway"):
            self._gather(self.gathers.ahead(unit, behind=behind), ahead=True)

    def _begin_halfway(self, unit: U) -> None:
        """Await half of the gradients of `unit`, unless none will come or it is around the next. [Note: half-way]"""
        following = tuple(self.gathers.following(unit))
        if self.clock.is_around(unit, following):
            self._gather(self.gathers.ahead(unit), ahead=True)
            return
        self._halfway.begin(unit, self._facts.elements(unit) if self._driver.brings_gradients() else 0, following)
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
            if not driver.gradient_has_arrived:  # other ranks' gradients: this rank takes part to the end
                driver.gradient_arrived(watched=True)
            if not self.gathers.is_over and (due := self.clock.due_before(group)):
                self._gather(self.gathers.through(due), ahead=True)
            driver.reduce(group)
        driver.end_turn()

    def _reduce_due(self) -> None:
        """What has waited for a gather without a turn waits no more."""
        if due := self.reductions.due():
            self._reduce(due)

    def _reduce_in_turn(self, unit: U) -> None:
        """No gradient of `unit` is to come: reduce it, if there is something to reduce, and all whose turn it is."""
        if self.reductions.expects(unit) and self._facts.participates(unit):
            self.reductions.ready(unit)
            self._reduce(self.reductions.due())

    # -- completion --------------------------------------------------------------------------------------------------

    def _complete(self, unit: U) -> None:
        if not self._facts.expects_gradients(unit):
            # Not again where it was gathered with others and freed since: those that reach it have it still.
            self._gather(self.gathers.through((unit,)))
            self._driver.participate(unit)
        self._driver.complete(unit)
        if unit not in self.clock.called_again:
            self._reduce_in_turn(unit)
        if not (self.keeps_unsharded(unit) or self.clock.lifetime_of(unit) is not None):
            self._driver.reshard(unit)

    def _pass(self, tick: float, *, rests: bool = True, awaits: bool = True) -> None:
        """This backward is through with what began after `tick`: with gradients of units, and with lifetimes. `rests`:
        not with the former where no gradient is known to come; `awaits`: nor with what gradients are on their way to.
        """
        clock, completed = self.clock, self._facts.completed
        begun, began, lifetimes = clock.begun, clock.began, clock.lifetimes
        resting = False
        while True:
            last = began[begun[-1]] if begun and not resting else -1
            if lifetimes and lifetimes[-1].over > max(last, tick):
                self._end_lifetime(lifetimes[-1], reads=not resting)
                continue
            if last <= tick:
                return
            over = begun[-1]
            if completed(over) and over not in clock.called_again:
                begun.pop()  # the usual case, without a call
                continue
            if awaits and self._is_awaited(over):
                if self._driver.in_inner_task():
                    return
                if rests and not self._driver.brings_gradients():
                    if self.reductions.at_the_end():
                        self._driver.report_no_gradients()
                    resting = True
                    continue
                if self._facts.awaits_gradients(over):  # on an accelerator, whose thread autograd has beside the CPU's
                    return
            self._complete_last()

    def _complete_last(self) -> None:
        """No call of what began last is left."""
        lifetimes, over = self.clock.lifetimes, self.clock.begun.pop()
        if self._is_awaited(over):
            self._complete(over)
        if over in self.clock.called_again:
            if lifetimes and lifetimes[-1].unit == over and lifetimes[-1].over == self.clock.began[over]:
                self._end_lifetime(lifetimes[-1], reads=True)  # a reduction takes memory
            if self._facts.completed(over):
                self._reduce_in_turn(over)

    def _end_lifetime(self, lifetime: Lifetime[U], *, reads: bool) -> None:
        """Nothing reads the parameters any more: free them, after they were gathered as on ranks that read them."""
        clock = self.clock
        clock.end_lifetime(lifetime)
        if lifetime.region is None and reads:
            self._gather(self.gathers.through((lifetime.unit,)))
        elif lifetime in clock.to_come:  # it was not recomputed
            clock.to_come.remove(lifetime)
            self._limit()
            self._reduce_due()
        if not self.keeps_unsharded(lifetime.unit):
            self._driver.reshard(lifetime.unit)
