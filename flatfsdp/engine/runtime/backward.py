"""One backward: gathers and reductions in the agreed order, from its first sign to its last reduction.

[Note: passed over] A backward may not reach a unit that another rank's does. Its reduction is issued in its turn, with
zeros, when something is reached that ended before it began ([Note: backward order]): it, and what lacks gradients that
this backward does not compute, need not be awaited any longer.

[Note: recomputed] A reentrant checkpoint runs its units without a graph first, and again inside the backward, where
they are gathered without a turn in the plan: on every rank, since none can leave the checkpoint out. Where a unit is
recomputed more than once it is freed and gathered for each, and its gradients are reduced when this backward is
through with its first run, whichever of them brought some on this rank. What is trained and was recomputed is reduced
on all ranks, also where a rank's data brings it no gradient: when the node that recomputed it is over. An owner of
tied parameters takes part as if it were run where a unit that holds them is.

[Note: issued alike] Collectives of two ranks meet by their order alone: where ranks issue those of different units that
are of one size, nobody notices. So the order is part of what ranks compare, when it is over: the rank whose backward is
new to it hears before anything has become `.grad`, one that did as ever by its next call.

[Note: running backward] It is disposable: begun at the first gradient that reaches a unit, dropped when its graph
task ends or dies. What it issues, and in which order, is settled when it begins ([Note: backward order]); autograd says
when.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch

from ...api import BackwardPrefetch
from ..agreement.agreement import Agreement
from ..base import _torch
from ..base import autograd as hooks
from ..flat.reduction import Reduction
from ..flat.views import SHOWS_NOTHING
from ..schedule.mid_backward import HalfwayTrigger
from ..schedule.order import CheckpointRegion, ForwardRecord, GatherOrder, ReduceOrder
from .coalesced_collectives import Coalescer
from .conditional_units import ConditionalUnits
from .finish import Finisher
from .model_facts import lacking_in, leave_out, parameters_of
from .module_tree import units_in
from .repeats import RecomputedUnits
from .unit import Unit
from .unit_data import UnitData

P = ParamSpec("P")

BACKWARD_PRE, BACKWARD_POST, BACKWARD_MID = BackwardPrefetch
NEVER = math.inf  # when a unit ended that did not run in a pass, and when it began


def explained(method: Callable[Concatenate[Backward, P], None]) -> Callable[Concatenate[Backward, P], None]:
    """Runs `method`, where a failure of the communication is raised as the disagreement that caused it, if one did."""

    @functools.wraps(method)
    def run(self: Backward, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except RuntimeError as error:
            self.agreement.explain(error)
            raise

    return run


@dataclass
class InFlightReductions:
    """The reductions of a group of units that go together."""

    units: Sequence[Unit] = ()
    reductions: Sequence[Reduction] = ()

    @property
    def input_bytes(self) -> int:
        """Bytes that are held for the first stages."""
        return sum(reduction.input_bytes for reduction in self.reductions)

    def release_input(self) -> None:
        """Wait for the first stages, free their inputs and issue the second. Collective over the replicate axis."""
        for reduction in self.reductions:
            reduction.release_input()

    def finish(self) -> None:
        """Wait for both stages. Collective over the replicate axis, and over what hooks use."""
        for reduction in self.reductions:
            reduction.finish()

    @property
    def can_finish_later(self) -> bool:
        """Whether it may be waited for after the backward. [Note: awaited]"""
        return all(unit.can_finish_later for unit in self.units)


class Backward:
    """What lives for one backward.

    Attributes:
        record: the forwards that it covers.
        sync: whether there is a unit that reduces.
        began: when units began that it may reach, in ticks of the record's clock.
        stays_unsharded: units that stay unsharded after their part, and when it is over.
        deferred: units whose gradients are reduced still when it is over. [Note: awaited]
        double: `create_graph`: the parameters are needed again.
        gradient_has_arrived: a gradient of a leaf arrived (`torch.autograd.grad` brings none), or this rank reduces
            what other ranks' backwards brought.
        gathered, reduced: the units whose collectives were issued, in order; the former by their places. [Note: issued
            alike]
        recomputes: whether units ran without a graph, which reentrant checkpoints may still make.
        collecting: the graph task in which nothing but their arrival is to be noted of gradients; None until that is
            known.
        task: autograd's graph task, which others may run inside of.
        finisher: what becomes of reduced gradients. [Note: finishers]
    """

    def __init__(
        self,
        record: ForwardRecord[Unit],
        *,
        unreduced: frozenset[Unit],
        stays_unsharded: frozenset[Unit],
        sync: bool,
        agreement: Agreement,
        coalescer: Coalescer,
        finisher: Finisher,
        branches: ConditionalUnits,
    ) -> None:
        """Plan it. `unreduced`: units that add their gradients up unsharded; `stays_unsharded`: those that stay whole
        after it."""
        targets = {unit: tuple(chosen.units()) for unit in record.anchored if (chosen := unit.options.backward_targets)}
        self.record = record
        self.sync = sync
        self.agreement = agreement
        self._conditional_units = branches
        together = branches.coalesced(record.anchored)
        self._gathers: GatherOrder[Unit] = GatherOrder(
            record.anchored, targets, coalesce=coalescer.gathers, together=together
        )
        self._reductions = ReduceOrder(record)
        self._span = record.span
        self.recomputes = record.may_recompute or bool(self._span.unseen)
        self._due = self._span.due  # when gathers of the plan are
        self._halfway: HalfwayTrigger[Unit] = HalfwayTrigger()
        self._windows: dict[Unit, None] = {}  # units that await gradients and will add them up unsharded
        self._reduced_last: Sequence[Unit] = ()  # that may linger
        self.deferred: Sequence[Unit] = ()
        self.stays_unsharded = stays_unsharded
        self._unreduced = unreduced
        self._sequence = record.anchored[::-1]  # in which units are reached, if they are
        self._positions = {unit: position for position, unit in enumerate(self._sequence)}
        self._again = record.begun_again.difference(self._positions)
        self.began = self._span.began
        if self._again:
            began = self.began | {unit: record.began(unit) for unit in self._again}
            self.began = dict(sorted(began.items(), key=lambda item: item[1]))
        # Those that are not known to be over, the next last.
        self._begun = [unit for unit in self.began if unit in self._positions or unit in self._again]
        self._repeats = RecomputedUnits(self._span, self.began)
        self._called_again = self._span.again | self._again
        self._ended = 0  # how many of the sequence were due to be gathered later than what was reduced last began
        self._recomputed: dict[Unit, None] = {}  # outside of the plan, having had no graph; with what is trained
        self._recomputing = 0  # the node whose backward ran units again last
        self._frozen_in: dict[Unit, int] = {}  # the node whose backward recomputed a frozen unit last
        self._runs: dict[Unit, int] = {}  # how many of their runs were recomputed, the last first
        self._repeated: dict[Unit, int] = {}  # in how many segments the next of these ran again without a graph
        self._coalescer = coalescer
        self.task = _torch.graph_task()
        self.double = False
        self.gradient_has_arrived = False
        self._no_gradients_came = False  # and that was said
        self.gathered: list[int] = []
        self.reduced: list[UnitData] = []
        self.collecting: int | None = None
        # Of the units before the last and of the last: their all-reduces and their inputs are in flight.
        self._in_flight = InFlightReductions(), InFlightReductions()
        self.finisher = finisher

    def reduces(self, unit: Unit) -> bool:
        """Whether `unit` reduces its gradients."""
        return unit not in self._unreduced

    def keeps_unsharded(self, unit: Unit) -> bool:
        """Whether `unit` stays unsharded after its part."""
        return self.double or unit in self.stays_unsharded

    def reaches_again(self, unit: Unit) -> bool:
        """Whether this backward may come to `unit` again, which other ranks' do not: it cannot be gathered for that."""
        called, repeats = unit in self._span.again and unit not in self._again, self._repeats
        if (called and not unit.backward_finished) or unit in repeats.used_repeatedly:
            return True
        return bool(repeats.segments) and not repeats.are_over(unit) and repeats.hold(unit, self._begun)

    def is_over_with_gradients(self, unit: Unit) -> bool:
        """Whether nothing will read the parameters of `unit` once its gradients have come. [Note: slot sharing]"""
        if unit.single_use is not True or unit not in self._positions or unit.is_tied:
            return False
        if unit in self._span.again or unit in self.record.begun_again or unit in self._reduced_last:
            return False
        return not (unit in self._unreduced or self.double or unit in self.stays_unsharded or unit.keep_unsharded)

    def brings_gradients(self) -> bool:
        """Whether a gradient of a parameter has arrived or will (`torch.autograd.grad` brings none)."""
        return self.gradient_has_arrived or any(
            hooks.will_accumulate(leaf) for unit in self._sequence for leaf in unit.trainable_leaves()
        )

    def in_inner_task(self) -> bool:
        """Whether a graph task inside this one's runs (a recomputation's, say)."""
        return _torch.graph_task() != self.task

    # -- gathers -----------------------------------------------------------------------------------------------------

    @explained
    def gather(self, unit: Unit) -> None:
        """Unshard `unit` in the agreed order, and start on the next. Collective over the shard axis."""
        if self._recomputed:
            self._complete_what_was_recomputed(but=unit)
        if self._repeats.used_repeatedly and not (self.double or self.in_inner_task()):
            self._repeats.free_used_repeatedly(self.stays_unsharded)
        self._complete_what_is_over(unit)  # before others are gathered: each takes memory
        for each in (*unit.owning_units, unit):
            if not (each.is_unsharded and self._gathers.is_past(each)):
                self.gather_in_turn(each)
        if not self._gathers.is_over:
            self._prefetch_after(unit)
        for each in (*unit.owning_units, unit):
            if each.is_unsharded:
                each.wait_unshard()
            else:
                each.show_shapes()

    def has_yet_to_gather(self, unit: Unit) -> bool:
        """Whether the turn of `unit` is to come."""
        return self._gathers.has_turn(unit)

    def gather_in_turn(self, unit: Unit) -> None:
        """Issue the gathers of `unit` and of all whose turn comes before. Collective over the shard axis."""
        if not (self._gathers.has_turn(unit) or unit.is_unsharded):
            self._gather_at_halfway(self._halfway.end_all())
        self._coalescer.launch_in_backward(self._gathers.until(unit))

    def gather_again(self, unit: Unit) -> None:
        """Issue the gathers for a forward of `unit` inside this backward. Collective over the shard axis."""
        if self._recomputed:
            self._complete_what_was_recomputed()
        if self._repeats.used_repeatedly and not (self.double or self.in_inner_task()):
            self._repeats.free_used_repeatedly(self.stays_unsharded)
        if unit not in self._positions:
            if not (self.double or self.in_inner_task()):
                self._end_last_run(unit)
            if not self.reduces(unit):
                self._conditional_units.refuse_window(unit)
            self._complete_what_comes_no_more(unit)
            self._gather_what_was_passed(unit)
            if not self.in_inner_task():
                if self._segment_of(unit) is not None:
                    self._repeated[unit] = self._repeated.get(unit, 0) + 1
                else:
                    self._runs[unit] = self._runs.get(unit, 0) + 1
                    self._repeated.pop(unit, None)
                    self._repeats.record_use(unit, self._positions)
        for each in (*unit.owning_units, unit):
            self.gather_in_turn(each)
        if unit in self._positions:
            self._repeats.record_run(unit)
            self._complete_what_comes_no_more(unit)

    def _end_last_run(self, unit: Unit) -> None:
        """`unit` is recomputed: if it was before, or was used by others, free it as it is on ranks where all gradients
        came of its parameters and inputs."""
        now = _torch.running_node()
        if unit in self._recomputed:
            if self._recomputing != now:
                unit.completed = True
                unit.reshard(SHOWS_NOTHING)
        elif torch.is_grad_enabled() and not unit.trainable_leaves():
            before, self._frozen_in[unit] = self._frozen_in.get(unit, now), now
            if before != now:
                unit.reshard(SHOWS_NOTHING)

    def released(self, unit: Unit) -> None:
        """`unit` was resharded after its part."""
        # Ranks need not be at the same place when a unit's last gradient comes, but have to be for a gather that has no
        # turn in the plan.
        ahead = unit.backward_prefetch is BACKWARD_POST and not self.recomputes
        if ahead and not unit.options.backward_targets:
            self._prefetch(unit)

    def _prefetch_after(self, unit: Unit) -> None:
        if unit.completed and unit not in self._positions:
            return  # recomputed once more: other ranks may not come to this run, and do not make up for it
        targets = unit.options.backward_targets
        if targets:
            self._coalescer.launch_in_backward(self._gathers.through(targets.units()), ahead=True)
        elif unit.backward_prefetch is BACKWARD_PRE and not unit.options.schedule.unshard_async_op:
            self._prefetch(unit)
        elif unit.backward_prefetch is BACKWARD_MID:
            self._begin_halfway(unit)

    def _prefetch(self, unit: Unit) -> None:
        self._coalescer.launch_in_backward(self._gathers.ahead(unit), ahead=True)

    def _begin_halfway(self, unit: Unit) -> None:
        """Await half of the gradients of `unit`, unless none will come, it is around the next, or it is outside of the
        plan. [Note: half-way]"""
        following = tuple(self._gathers.following(unit))
        began, own = self.began, self.began.get(unit, NEVER)
        if unit not in self._positions or any(began.get(each, NEVER) > own for each in following):
            self._prefetch(unit)
            return
        self._halfway.begin(unit, unit.trainable_numel if self.brings_gradients() else 0, following)
        self.gradient_elements_arrived(unit, 0)

    def gradient_elements_arrived(self, unit: Unit, elements: int) -> None:
        """So many `elements` of gradients of a unit that counts them: start on the next if they make half of all.
        Collective over both axes, and over what hooks use."""
        if following := self._halfway.gradient_elements_arrived(unit, elements):
            self._gather_at_halfway(following)

    @explained
    def _gather_at_halfway(self, following: Sequence[Unit]) -> None:
        due = self._gathers.through(following)
        if any(_is_to_be_gathered(unit) for group in due for unit in group):
            self._release_inputs()
        self._coalescer.launch_in_backward(due, ahead=True)

    # -- reductions --------------------------------------------------------------------------------------------------

    def expect(self, unit: Unit, *, reached: bool = True) -> None:
        """`unit` takes part with gradients, of this backward if it was `reached`, or of earlier ones."""
        if reached and unit not in self._positions:
            self._recomputed[unit] = None
        if unit in self._unreduced:
            self._windows[unit] = None
        else:
            self._reductions.expect(unit)

    def expect_recomputed(self, unit: Unit) -> None:
        """`unit` has a graph from now on, if it had none: on all ranks, of which maybe some bring it no gradient."""
        if unit not in self._positions and unit not in self._recomputed and unit.trainable_leaves():
            self.expect(unit)
            if not self.in_inner_task():
                self._recomputing = _torch.running_node()

    def join_reductions(self) -> None:
        """All units that take part are known, as far as they are the same on all ranks: let small ones go together."""
        unused = self.agreement.unused
        if self._conditional_units.exist and any(
            unit.options.schedule.branch for unit in self._reductions.outstanding()
        ):
            unused.branch()
        self._reductions.coalesce(self._coalescer.reductions)
        if not self.finisher.ends_with_all:
            self._reduced_last = self._reductions.at_the_end()
        elif unused.expects and all(map(self._waits_for_all, self._reductions.outstanding())):
            unused.rely()

    def _waits_for_all(self, unit: Unit) -> bool:
        """Whether the host of each rank waits for the reduction of `unit`, to which no other rank can be missing."""
        alike = unit.groups.world == len(self.agreement.peers.ranks) and unit.options.comm_hook is None
        return alike and not unit.resources.device.has_streams

    def gradient_arrived(self, *, watched: bool) -> None:
        """The first gradient of a parameter is there. `watched`: somebody looks at each."""
        self.gradient_has_arrived = True
        self.collecting = None if watched or self.double else self.task
        self.agreement.check_gradients(came=True)

    @explained
    def gradients_ready(self, unit: Unit) -> None:
        """All gradients of `unit` are in their slots: reduce it if it is its turn. Collective over the shard axis."""
        if unit.backward_prefetch is BACKWARD_MID and (following := self._halfway.end(unit)):
            self._gather_at_halfway(following)
        if self.reduces(unit) and not self._waits_for_first_call(unit):
            self._reductions.ready(unit)
            self._reduce(self._reductions.due())

    def _waits_for_first_call(self, unit: Unit) -> bool:
        """Whether `unit` is reduced when this backward is through with its first call, wherever its gradients come
        from: units that have no graph yet, and are none of the plan, may have begun later. [Note: recomputed]"""
        return unit in self._again or (self.recomputes and unit in self._span.again)

    def _reduce_in_turn(self, unit: Unit) -> None:
        """No gradient of `unit` is to come: reduce it, if there is something to reduce, and all whose turn it is."""
        if self._reductions.expects(unit) and any(grads.participates for grads in unit.grads):
            self._reductions.ready(unit)
            self._reduce(self._reductions.due())

    def _reduce(self, groups: Iterable[Sequence[Unit]]) -> None:
        for group in groups:
            if not self.gradient_has_arrived:  # other ranks' gradients: this rank takes part to the end
                self.gradient_arrived(watched=True)
            if not self._gathers.is_over:
                self._gather_what_comes_before(group)
            # One input besides the one being filled, and one all-reduce: the previous make way first.
            older, newer = self._in_flight
            older.finish()
            newer.release_input()
            if self.agreement.unused.foreseen is not None:
                completed = [unit for unit in group if unit.completes]
                self.agreement.unused.before_reduction((parameters_of(unit), lacking_in(unit)) for unit in completed)
            self._in_flight = newer, InFlightReductions(group, self._coalescer.reduce(group))
            self.reduced += group
            if self.finisher.acts_early:
                self._finish_early(older)  # beside what was issued just now
        older, newer = self._in_flight
        last = self._reductions.last
        halfway = newer.units and newer.units[-1].backward_prefetch is BACKWARD_MID
        if last is not None and 0 < older.input_bytes + newer.input_bytes < last.largest_gradient:
            # Where an embedding's gradient is larger than what is in flight, a step is highest when that gradient
            # comes: the others make way before it. Elsewhere they overlap the last unit's backward.
            self._release_inputs()
        elif halfway and self._last_comes(after=newer.units[-1]):
            self._release_inputs()

    def _gather_what_comes_before(self, group: Sequence[Unit]) -> None:
        """`group` is reduced: issue the gathers that are due after it began. [Note: backward order]"""
        began = self.began.get(group[0], NEVER) if len(group) == 1 else min(self.began.get(u, NEVER) for u in group)
        due, sequence, before = self._due, self._sequence, self._ended
        while self._ended < len(sequence) and due.get(sequence[self._ended], NEVER) > began:
            self._ended += 1
        if self._ended > before:
            self._coalescer.launch_in_backward(self._gathers.through(self._sequence[before : self._ended]), ahead=True)

    def _release_inputs(self) -> None:
        """Let no reduction hold what it reads. Collective over both axes, and over what hooks use."""
        older, newer = self._in_flight
        older.finish()
        newer.release_input()
        if self.finisher.acts_early:
            self._finish_early(older)

    def _last_comes(self, *, after: Unit) -> bool:
        """Whether nothing is left to be gathered, and what was gathered last is to compute alone. [Note: half-way]"""
        if after.options.backward_targets or not self._gathers.is_over:
            return False
        return any(unit.reshards_after_forward for unit in self._reductions.outstanding())

    def _finish_early(self, flight: InFlightReductions) -> None:
        through = [unit for unit in flight.units if unit.has_all_gradients and self.is_over_with_gradients(unit)]
        self.finisher.reduced(through)

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """The graph task has ended: issue what is outstanding and wait for it. Collective over both axes."""
        if self.double or not self.gradient_has_arrived:
            self._gather_what_others_reached()
        if self.gradient_has_arrived:
            if not self.double:
                self._complete_plan()
            rest, windows = self._reductions.rest(), list(self._windows)
            for unit in (*itertools.chain(*rest), *windows):
                if not unit.expects_gradients:
                    unit.expect_gradients(self)
            self._reductions.rest()
            self._reduce(rest)
            older, newer = self._in_flight
            older.finish()
            if self._reduced_last and newer.can_finish_later:
                self.deferred = newer.units
            else:
                newer.finish()
            for unit in windows:
                for grads in unit.grads:
                    grads.keep_in_window()
        else:
            gathers = any(unit.reshards_after_forward for unit in self._sequence)
            if not self._no_gradients_came and (self._reductions.rest() if self.sync else self._windows and gathers):
                self.agreement.check_gradients(came=False)
            if gathers:
                self.agreement.check_gathered(self.gathered)
        if self.sync and self.reduced:  # on all ranks, or on none
            self._leave_out_what_no_rank_used()
            self.agreement.check_issued(self.gathered, [unit.index for unit in self.reduced])

    def _gather_what_others_reached(self) -> None:
        """No gradient completes units here: gather those that other ranks may have, where branches tell them apart."""
        if not any(unit.options.schedule.branch for unit in self._sequence):
            return
        for unit in self._sequence:
            if not self._gathers.is_past(unit):
                self._coalescer.launch_in_backward(self._gathers.until(unit))
                if not self.double:
                    unit.reshard(SHOWS_NOTHING)

    def _leave_out_what_no_rank_used(self) -> None:
        """Parameters to which no rank's gradients came get none, as in one process. [Note: unused]"""
        lacking: dict[UnitData, int] = {}
        for unit in self.reduced:
            for grads in unit.grads:
                if not grads.expected <= grads.contributed and unit.completes:
                    lacking[unit] = lacking_in(unit)
        absent = self.agreement.unused.settle(functools.reduce(operator.or_, lacking.values(), 0))
        for unit in lacking:
            leave_out(unit, absent)

    def _complete_plan(self) -> None:
        """Do for units that this rank's backward did not reach, or not all of, what the other ranks' backwards did.

        Unit by unit, as a backward goes. [Note: passed over]
        """
        for unit in tuple(self._recomputed):
            if not unit.completed:
                self._complete(unit)
        while self._begun:
            self._complete_last()
        for unit in self._sequence:
            if not unit.completed:
                self._complete(unit)

    def _complete_what_is_over(self, unit: Unit) -> None:
        """`unit` was reached: this backward is through with what began after its end. [Note: backward order]"""
        ended, begun = self._span.ended.get(unit, NEVER), self._begun
        while begun and self.began[over := begun[-1]] > ended:
            if over.completed and over not in self._called_again:
                begun.pop()
                self._release_held(over)
                continue
            awaited = self._is_awaited(over)
            if awaited and (self.double or self.in_inner_task()):
                return
            if awaited and not self.brings_gradients():
                self._report_no_gradients()
                return
            if awaited and over.awaits_gradients():  # on an accelerator, whose thread autograd has beside the CPU's
                return
            self._complete_last()

    def _report_no_gradients(self) -> None:
        """This backward passes over units without a gradient of any: other ranks reduce them before they gather what
        is reached now, unless none comes there, either. Here is where that is found out, and not at the end, which a
        rank that waits for the others' gather would not come to."""
        if self.sync and not (self.recomputes or self._no_gradients_came) and any(self._reductions.outstanding()):
            self._no_gradients_came = True
            self.agreement.check_gradients(came=False)

    def _is_awaited(self, unit: Unit) -> bool:
        """Whether ranks await the part of `unit`, as far as this one knows."""
        return not unit.completed and (unit in self._positions or unit in self._recomputed)

    def _complete_last(self) -> None:
        """No call of what began last is left. Collective over the shard axis."""
        over = self._begun.pop()
        if self._is_awaited(over):
            self._complete(over)
        if over.completed and self._waits_for_first_call(over):
            self._reduce_in_turn(over)
        called_again = over in self._span.again and over not in self._again
        if called_again and not (self.keeps_unsharded(over) or self._repeats.hold(over, self._begun)):
            over.reshard(SHOWS_NOTHING)
        self._release_held(over)

    def _release_held(self, over: Unit) -> None:
        """Free what was held since it might have been recomputed with `over`, or with what began later."""
        for unit, began in tuple(self._repeats.held_unsharded.items()) if self._repeats.held_unsharded else ():
            if began >= self.began[over]:
                del self._repeats.held_unsharded[unit]
                unit.reshard(SHOWS_NOTHING)

    def _complete_what_was_recomputed(self, *, but: Unit | None = None) -> None:
        """Another unit was reached: the tasks are over in which gradients of units outside of the plan come."""
        if self.double or self.in_inner_task():
            return
        begins = _torch.running_node() == self._recomputing  # the task of their gradients
        for each in tuple(self._recomputed):
            if each.completed or each is but or (begins and not each.expects_gradients) or self._may_come_to(each):
                continue
            self._complete(each)

    def _may_come_to(self, unit: Unit) -> bool:
        leaves = unit.trainable_leaves()
        return any(map(hooks.will_accumulate, leaves)) if leaves else self._conditional_units.may_reach(unit)

    def _complete_what_comes_no_more(self, unit: Unit) -> None:
        """The forward of `unit` runs again: of those next in turn to reduce, complete what gets no gradients.

        They stay whole, since this backward may reach them still, only not for their gradients. A unit outside of the
        plan had no graph (reentrant checkpointing): its gradients are to come, and its collectives come after those
        of units that began later in the forward.
        """
        planned = unit in self._positions
        if self.double or self.in_inner_task() or (planned and not self.brings_gradients()):
            return
        over, ended = [], self._end_of(unit)
        for each in self._reductions.outstanding():
            if not each.completed or self._waits_for_first_call(each):
                if each.may_still_run() or each not in self._positions or self.began.get(each, 0) < ended:
                    break
                over.append(each)
        missed = [each for each in over if not each.completed]
        if missed:  # ranks whose branches get gradients run all of `unit` again before they reduce any of these
            self._coalescer.launch_in_backward(self._gathers.through(units_in(unit.module)), ahead=True)
        for each in over:
            if not each.completed:
                self._complete(each, keep=True)
                if not planned:
                    self._prefetch_after(each)
            if self._waits_for_first_call(each):
                self._reduce_in_turn(each)

    def _end_of(self, unit: Unit) -> float:
        """When the last call of `unit` ended, and what is recomputed with it; or the one that is recomputed now where
        it had no graph, with what is recomputed before it gets one."""
        if unit in self._due:
            return self._due[unit]
        segment = self._segment_of(unit)
        return self.record.left(unit, later=self._runs.get(unit, 0)) if segment is None else segment.ended

    def _segment_of(self, unit: Unit) -> CheckpointRegion | None:
        """The segment that is recomputed, in which `unit` runs without a graph as it did in the forward."""
        if torch.is_grad_enabled():
            return None
        around = self.record.left_in(unit, later=self._runs.get(unit, 0))
        return around[max(0, len(around) - 1 - self._repeated.get(unit, 0))] if around else None

    def _gather_what_was_passed(self, unit: Unit) -> None:
        """The forward of `unit`, which is outside of the plan, runs again: gather what ended later and was not reached,
        as ranks did that reached it, so that the gather of `unit` comes at the same place on all ranks."""
        if self.double or self.in_inner_task():
            return
        ended = self._end_of(unit)
        for each in self._sequence:
            if not (self._gathers.is_past(each) and each.expects_gradients) and self._due.get(each, NEVER) >= ended:
                self._coalescer.launch_in_backward(self._gathers.through((each,)), ahead=True)
                self._prefetch_after(each)

    def _complete(self, unit: Unit, *, keep: bool = False) -> None:
        if not unit.expects_gradients:
            # Not again where it was gathered with others and freed since: those that reach it have it still.
            self._coalescer.launch_in_backward(self._gathers.through((unit,)))
            unit.expect_gradients(self)
        unit.completed = True
        if not self._waits_for_first_call(unit):
            self._reduce_in_turn(unit)
        if keep or self.keeps_unsharded(unit):
            return
        if not self._repeats.hold(unit, self._begun):
            unit.reshard(SHOWS_NOTHING)


def _is_to_be_gathered(unit: Unit) -> bool:
    """Whether a gather of `unit` takes memory."""
    return unit.options.schedule.unshard_in_backward and not unit.is_unsharded
