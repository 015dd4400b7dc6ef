"""What one backward gathers, completes, reduces and frees next: events in, actions out; pure.

[Note: one clock] The record of the forward gives every unit two ticks of one clock, which a backward runs down: when it
last ended its gather is due, when it first began its reduction. Two cursors move over it, one for each communicator,
and never back. Three rules couple them:

1. When a unit is reached, the cursor of reductions moves past all that began after its end, then that of gathers to it.
   What this rank brought no gradients to is *completed*: it takes part with zeros ([Note: passed over]).
2. A reduction is issued after all gathers that are due before it: ahead of their use, or, where they have no turn in
   the plan, when it is known that they will be, it waits for them.
3. A gather ahead of its use moves the cursor of gathers to the group behind that of the unit that is reached, and never
   that of reductions. Ranks may reach units in another order: what is gathered ahead for all of them is the same.

Both cursors rest while nothing is known of what this rank will bring: in a graph task inside of this one's, and where
no gradient of a parameter comes at all. Those ranks find out at the end.

What had no graph when the backward began is gathered when a reentrant checkpoint recomputes it ([Note: recomputed]):
after all that ended later was gathered, and what began after its end is reduced then, as far as ranks agree on. It
gathers ahead right then: ranks need not reach all that they recompute, nor in one order.

A unit that is called again, or whose parameters others use, is reduced when its first call is over, once: parts of it
that are recomputed reentrantly bring gradients of which nothing is known before, and on some ranks only.

[Note: passed over] A backward may not reach a unit that another rank's does. Its reduction is issued in its turn, with
zeros, when something is reached that ended before it began ([Note: backward order]): it, and what lacks gradients that
this backward does not compute, need not be awaited any longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Generic, TypeVar

from .backward_clock import NEVER, BackwardClock
from .backward_driver import Driver, UnitFacts, UnitRules
from .forward_record import ForwardRecord
from .issue_order import Cut, GatherOrder, ReduceOrder
from .mid_backward import HalfwayTrigger
from .recomputation import Recomputations, taken_from
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
    ) -> None:
        """`coalesce` cuts the gathers into groups. `together`: units that are gathered when one of them is needed."""
        clock = self.clock = BackwardClock(record)
        self._rules, self._facts, self._driver = rules, facts, driver
        targets = {unit: rules[unit].targets for unit in record.anchored if rules[unit].targets}
        self.gathers: GatherOrder[U] = GatherOrder(clock.gathers[::-1], targets, coalesce=coalesce, together=together)
        self.windows: dict[U, None] = {}
        self.tied_owners: TiedOwners[U] = TiedOwners(clock, rules, facts)
        self._halfway: HalfwayTrigger[U] = HalfwayTrigger()
        self._repeats: Recomputations[U] = Recomputations(record, clock, driver.will_recompute)
        will_run = self._repeats.will_run
        self.recomputes_trained = bool(will_run) and any(map(facts.is_trained, will_run))
        # Rule 2 for gathers that cannot be issued ahead: what they are due before waits for them.
        self.reductions: ReduceOrder[U] = ReduceOrder(record, clock.began, self._repeats.to_come)

    # -- what is known -----------------------------------------------------------------------------------------------

    def keeps_unsharded(self, unit: U) -> bool:
        """Whether `unit` stays unsharded after its part."""
        return self._driver.double or self._rules[unit].stays_unsharded

    def reaches_again(self, unit: U) -> bool:
        """Whether this backward may come to `unit` again, which other ranks' do not: it cannot be gathered for that."""
        repeats = self._repeats
        if (self.clock.has_more_calls(unit) and not self._facts.is_over(unit)) or (
            self.clock.tied_owners and self.tied_owners.may_be_used(unit)
        ):
            return True
        if unit in repeats.used_repeatedly or unit in repeats.unreached:
            return True
        if self.clock.repeated and repeats.will_repeat(unit):
            return True
        return bool(self.clock.regions) and not repeats.are_over(unit) and repeats.hold(unit)

    def _is_awaited(self, unit: U) -> bool:
        """Whether ranks await the part of `unit`, as far as this one knows."""
        return not self._facts.completed(unit) and (unit in self.clock.planned or unit in self._repeats.trained)

    # -- events ------------------------------------------------------------------------------------------------------

    def expect(self, unit: U, *, reached: bool = True) -> None:
        """`unit` takes part with gradients, of this backward if it was `reached`, or of earlier ones."""
        if reached and unit not in self.clock.planned:
            self._repeats.trained[unit] = None
        if self._rules[unit].reduces:
            self.reductions.expect(unit)
        else:
            self.windows[unit] = None

    def reached(self, unit: U) -> None:
        """A gradient is about to flow into `unit`: it is gathered, after all that comes before."""
        if self._repeats.trained:
            self._complete_recomputed(but=unit)
        if self._repeats.used_repeatedly:
            self._end_repeated_use()
        if self._repeats.unreached:
            self._repeats.unreached.discard(unit)
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
            if not (self._facts.is_unsharded(each) and self.gathers.is_past(each)):
                self.gather_in_turn(each)
        if unit in self.clock.planned and not (inner or self.gathers.is_over):
            self._prefetch_after(unit)

    def reached_whole(self, unit: U) -> None:
        """A gradient is about to flow into `unit` again, for which nothing is to be gathered."""
        self._repeats.unreached.discard(unit)

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
        if waits and (clock.recomputes or unit not in clock.in_passes or facts.has_late_gradients(unit)):
            return
        self.reductions.ready(unit)
        self._reduce(self.reductions.due())

    def released(self, unit: U) -> None:
        """`unit` was resharded after its part."""
        # Ranks need not be at the same place when a unit's last gradient comes, but have to be for a gather that has no
        # turn in the plan.
        rules = self._rules[unit]
        if rules.prefetch == "after" and not (self.clock.recomputes or rules.targets):
            self._gather(self.gathers.ahead(unit), ahead=True)

    def recomputed(self, unit: U, *, with_graph: bool) -> None:
        """The forward of `unit` runs again inside of this backward, maybe `with_graph`: gather it."""
        if self._repeats.trained:
            self._complete_recomputed()
        if self._repeats.used_repeatedly:
            self._end_repeated_use()
        planned, needed = unit in self.clock.planned, (*self._rules[unit].owners, unit)
        if self.clock.recomputes:
            self._end_last_runs(needed, with_graph)
        if not (planned and self.clock.planned.issuperset(needed)):
            self._gather_passed(unit, with_graph)
        for each in needed:
            self.gather_in_turn(each)
        if planned:
            self._repeats.record_run(unit, self._facts.is_in_call)
        elif with_graph:
            self._repeats.unreached.add(unit)
            if not self.gathers.is_over:
                self._prefetch_after(unit)
        self._complete_before(unit, with_graph)
        if self.clock.recomputes and not self._driver.in_inner_task():
            self._repeats.record_reentrant_run(unit, needed, self._driver.running_node(), with_graph)

    def has_graph(self, unit: U) -> None:
        """`unit` was recomputed and has a graph from now on: on all ranks, of which maybe some bring it no gradient."""
        if unit not in self.clock.planned and unit not in self._repeats.trained and self._facts.is_trained(unit):
            self.expect(unit)
            if not self._driver.in_inner_task():
                self._repeats.node = self._driver.running_node()
        if self._repeats.to_come:
            self._repeats.record_graph(unit)
            if due := self.reductions.due():
                self._reduce(due)

    def ended(self) -> None:
        """The graph task has ended: do what is left of what other ranks' backwards did, and reduce it. [Note: passed
        over]"""
        driver, facts = self._driver, self._facts
        if not driver.gradient_has_arrived:
            if not self.recomputes_trained:
                self._gather_unreached()
                return
            driver.gradient_arrived(watched=True)
        for unit in tuple(self._repeats.trained):
            if not facts.completed(unit):
                self._complete(unit)
        while self.clock.begun:  # unit by unit, as a backward goes
            self._complete_last()
        for unit in self.clock.sequence:
            if not facts.completed(unit):
                self._complete(unit)
        self._gather(self.gathers.through(self.clock.repeated))
        rest = self.reductions.due(rest=True)
        for unit in (*chain.from_iterable(rest), *self.windows):
            if not facts.expects_gradients(unit):
                driver.take_part(unit)
        self.reductions.due(rest=True)  # these
        self._reduce(rest)

    def _gather_unreached(self) -> None:
        """No gradient completes units here: gather those that other ranks may have, where conditional units make
        ranks differ."""
        if not any(self._rules[unit].is_conditional for unit in self.clock.sequence):
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

    def _prefetch_after(self, unit: U) -> None:
        rules = self._rules[unit]
        if rules.targets:
            self._gather(self.gathers.through(rules.targets, ahead=True), ahead=True)
        elif rules.prefetch == "before":
            passed = (unit,) if unit in self.clock.planned else self._passed_at(unit)
            self._gather(self.gathers.ahead(*passed), ahead=True)
        elif rules.prefetch == "halfway":
            self._begin_halfway(unit)

    def _passed_at(self, unit: U) -> Sequence[U]:
        """Units whose gathers are due by the end of `unit`; one is gathered ahead, behind all of these, however many of
        those that end together gather ahead, and in which order."""
        return (
            (unit,) if unit in self.clock.planned else self.clock.due_from(self._repeats.end_of(unit, with_graph=True))
        )

    def _begin_halfway(self, unit: U) -> None:
        """Await half of the gradients of `unit`, unless none will come, it is around the next, or it is outside of the
        plan. [Note: half-way]"""
        following = tuple(self.gathers.following(unit))
        if unit not in self.clock.planned or self.clock.is_around(unit, following):
            self._gather(self.gathers.ahead(*self._passed_at(unit)), ahead=True)
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

    def _reduce_in_turn(self, unit: U) -> None:
        """No gradient of `unit` is to come: reduce it, if there is something to reduce, and all whose turn it is."""
        if self.reductions.expects(unit) and self._facts.takes_part(unit):
            self.reductions.ready(unit)
            self._reduce(self.reductions.due())

    # -- completion --------------------------------------------------------------------------------------------------

    def _complete(self, unit: U, *, keep: bool = False) -> None:
        if not self._facts.expects_gradients(unit):
            # Not again where it was gathered with others and freed since: those that reach it have it still.
            self._gather(self.gathers.through((unit,)))
            if self.clock.recomputes and unit in self.clock.planned:
                self._prefetch_after(unit)  # as ranks did that reached it: other gathers without a turn may follow
            self._driver.take_part(unit)
        self._driver.complete(unit)
        if not self.clock.waits_for_first_call(unit):
            self._reduce_in_turn(unit)
        if not (keep or self.keeps_unsharded(unit) or self._repeats.will_repeat(unit) or self._repeats.hold(unit)):
            self._driver.reshard(unit)

    def _pass(self, tick: float) -> None:
        """This backward is through with what began after `tick`, unless that is not known."""
        begun, began, completed = self.clock.begun, self.clock.began, self._facts.completed
        while begun and began[over := begun[-1]] > tick:
            if completed(over) and over not in self.clock.called_again and not self._repeats.held_unsharded:
                begun.pop()  # the usual case, without a call
                continue
            if self._is_awaited(over):
                if self._driver.in_inner_task():
                    return
                if not self._driver.brings_gradients():
                    if not self.clock.recomputes and self.reductions.at_the_end():
                        self._driver.report_no_gradients()
                    return
                if self._facts.awaits_gradients(over):  # on an accelerator, whose thread autograd has beside the CPU's
                    return
            self._complete_last()

    def _complete_last(self) -> None:
        """No call of what began last is left."""
        over = self.clock.begun.pop()
        if self._is_awaited(over):
            self._complete(over)
        if over in self.clock.called_again:
            if self._facts.completed(over) and self.clock.waits_for_first_call(over):
                self._reduce_in_turn(over)
            if over not in self.clock.again and not (self.keeps_unsharded(over) or self._repeats.hold(over)):
                self._driver.reshard(over)
        if self._repeats.held_unsharded:
            for unit in self._repeats.let_go(over):
                self._driver.reshard(unit)

    # -- recomputation -----------------------------------------------------------------------------------------------

    def _end_last_runs(self, units: Iterable[U], with_graph: bool) -> None:
        """`units`, one and its owners, are recomputed: those that another node made a graph of before are freed, as
        they are on ranks where all gradients came of their parameters and inputs."""
        if not self._driver.in_inner_task():
            self._repeats.enter(self._driver.running_node())
        for each in units:
            another = self._repeats.is_another(each, with_graph)
            if not another or each in self.clock.planned or self._repeats.will_repeat(each):
                continue
            self._repeats.unreached.discard(each)
            if each in self._repeats.trained:
                self._driver.complete(each)
            self._driver.reshard(each)

    def _end_repeated_use(self) -> None:
        """Free what a node that is over used more than once."""
        if not self._driver.in_inner_task():
            for unit in taken_from(self._repeats.used_repeatedly, self._driver.running_node()):
                if not self._rules[unit].stays_unsharded:
                    self._driver.reshard(unit)

    def _complete_recomputed(self, *, but: U | None = None) -> None:
        """Another unit was reached: the tasks are over in which gradients of units outside of the plan come."""
        if self._driver.in_inner_task():
            return
        facts, begins = self._facts, self._driver.running_node() == self._repeats.node  # the task of their gradients
        for each in tuple(self._repeats.trained):
            if facts.completed(each) or each is but or (begins and not facts.expects_gradients(each)):
                continue
            if not self._driver.may_reach(each):
                self._complete(each)

    def _complete_before(self, unit: U, with_graph: bool) -> None:
        """The forward of `unit` runs again: of those next in turn to reduce, complete what gets no gradients.

        They stay whole, since this backward may reach them still, only not for their gradients. A unit outside of the
        plan had no graph (reentrant checkpointing): its gradients are to come, and its collectives come after those
        of units that began later in the forward.
        """
        facts, planned = self._facts, unit in self.clock.planned
        if self._driver.in_inner_task() or (planned and not self._driver.brings_gradients()):
            return
        over, ended = [], self._repeats.end_of(unit, with_graph)
        if (owners := self._rules[unit].owners) and self._repeats.is_segmented(unit):
            # These gathers are waited for, too, and an owner may have been used later.
            ended = min(ended, *map(self.clock.due.get, owners, repeat(NEVER)))
        for each in self.reductions.outstanding():
            if not facts.completed(each) or self.clock.waits_for_first_call(each):
                if facts.may_still_run(each) or self.clock.began.get(each, 0) < ended:
                    break
                over.append(each)
        if not all(map(facts.completed, over)):
            # Ranks whose branches get gradients run all of `unit` again before they reduce any of these.
            self._gather(self.gathers.through(facts.inside(unit)), ahead=True)
        for each in over:
            if not facts.completed(each):
                self._complete(each, keep=True)
                if not planned and each in self.clock.planned:
                    self._prefetch_after(each)
            if self.clock.waits_for_first_call(each):
                self._reduce_in_turn(each)

    def _gather_passed(self, unit: U, with_graph: bool) -> None:
        """The forward of `unit`, which is outside of the plan, runs again: gather what ended later and was not reached,
        as ranks did that reached it, so that the gather of `unit` comes at the same place on all ranks."""
        if self._driver.in_inner_task():
            return
        ended = self._repeats.end_of(unit, with_graph)
        for each in self.clock.sequence:
            if self.clock.due.get(each, NEVER) < ended:
                continue
            self._gather(self.gathers.through((each,)), ahead=True)
            if not self._facts.expects_gradients(each) or tuple(self.gathers.following(each)):
                self._prefetch_after(each)
