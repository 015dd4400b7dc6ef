"""One backward: gathers and reductions in the agreed order, from its first hook to its last reduction.

[Note: issued alike] Collectives of two ranks are matched by their order alone: if ranks issue those of different units
with equal sizes, there is no error. So ranks also compare this order at the end of a backward: a rank whose backward is
new to it raises before any gradient becomes `.grad`, a rank that repeats an earlier one raises in its next call. What
backwards under `no_sync()` have gathered is compared at the end of the next one that reduces.

[Note: backwards without gradients] A backward as of `torch.autograd.grad` brings no gradient of a parameter and reduces
nothing. This is part of the plan that ranks compare when it begins. The graph task shows which gradients it accumulates
itself.
Reentrant checkpoints, and custom Functions like them, compute gradients in graph tasks of their own: a backward that
may reach some may bring gradients, and reduces zeros if it does not. So does one of conditional units, whose graphs
differ between ranks ([Note: conditional units]). What a window of `no_sync()` has accumulated is reduced with these
zeros, earlier than in the window's last backward; the sum is the same. Which parameters got no gradient on any rank is
found at the end, in any case ([Note: unused]). If a gradient arrives that none of this has shown, ranks compare that as
well.

[Note: running backward] The object lives from the first gradient that reaches a unit until the graph task ends or
fails. Its schedule decides which collectives it issues in which order ([Note: one clock]), and autograd when.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ...api import BackwardPrefetch
from ..base import _torch
from ..base import autograd as hooks
from ..base.peers import Peers
from ..flat.flat_param import indices_of
from ..flat.reduction import Reduction
from ..flat.states import POST_BACKWARD, PRE_BACKWARD
from ..schedule.actions import Action
from ..schedule.backward_schedule import BackwardSchedule, UnitFacts, UnitRules
from ..schedule.forward_schedule import CheckpointRegion, ForwardRecord
from . import late_gradients
from .finish import Finisher
from .model_facts import lacking_in, leave_out
from .turns import Turns
from .unit import Unit
from .unit_collectives import UnitCollectives

_REQUIRES_GRAD = attrgetter("requires_grad")
BACKWARD_PRE, BACKWARD_POST, BACKWARD_MID = BackwardPrefetch
PREFETCH: dict[BackwardPrefetch | None, Literal["before", "halfway", "after"] | None] = {
    BACKWARD_PRE: "before",
    BACKWARD_MID: "halfway",
    BACKWARD_POST: "after",
    None: None,
}


def awaits_gradients(unit: Unit) -> bool:
    """Whether the running graph task will compute gradients that `unit`, which has not completed, lacks."""
    if unit.phase is not PRE_BACKWARD:
        return any(map(hooks.will_accumulate, unit.trainable_leaves()))
    unit.pick_up_grads()
    return any(hooks.will_accumulate(handle.leaves[i]) for handle, _, grads in unit.kinds for i in grads.missing)


def will_recompute(checkpoint: Any) -> bool:
    """Whether the running graph task will reach this reentrant checkpoint."""
    return (node := checkpoint()) is not None and _torch.will_compute(node)


FACTS: UnitFacts[Unit] = UnitFacts(
    has_gradients=Unit.has_gradients,
    is_used_once=lambda unit: unit.leaves.single_use is True,
    is_unsharded=attrgetter("is_unsharded"),
    is_trained=lambda unit: bool(unit.trainable_leaves()),
    awaits_gradients=awaits_gradients,
    will_recompute=will_recompute,
)


def rules_of(unit: Unit, *, reduces: bool) -> UnitRules[Unit]:
    """The rules of `unit` for the schedule of a backward."""
    chosen, prefetch = unit.options.schedule, PREFETCH[unit.options.backward_prefetch]
    frees = chosen.reshard_after_backward
    return UnitRules(
        prefetch=None if prefetch == "before" and chosen.unshard_async_op else prefetch,
        targets=tuple(unit.options.backward_targets.units()),
        reads=chosen.unshard_in_backward,
        reduces=reduces,
        stays_unsharded=not (reduces or unit.built.traits.reshard_without_sync) if frees is None else not frees,
        owners=tuple(unit.owning_units),
        is_tied=unit.is_tied,
    )


@dataclass
class InFlightReductions:
    """The reductions of one group of units; `only_in_waits`: some progress only while ranks wait."""

    units: Sequence[Unit] = ()
    reductions: Sequence[Reduction] = ()
    only_in_waits: bool = False

    @property
    def input_bytes(self) -> int:
        """The bytes of inputs of the first stages."""
        return sum([each.input_bytes for reduction in self.reductions for each in reduction.inputs])

    def finish(self) -> None:
        """Wait for both stages. Collective over the replicate axis, and over the groups of hooks."""
        for reduction in self.reductions:
            reduction.finish()


def _largest_gradient(unit: Unit) -> int:
    """Bytes of the largest gradient that a backward can compute, in the compute dtype."""
    return max(
        (
            spec.numel * handle.precision.compute.itemsize
            for handle in unit.handles
            if handle.options.trainable
            for spec in handle.layout.params
        ),
        default=0,
    )


class Backward:
    """The state of one backward.

    Attributes:
        sync: whether any unit reduces.
        weight: the factor of this rank's gradients in the mean over ranks. [Note: uneven inputs]
        schedule: decides on gathers and reductions.
        rules: of its units.
        reduced: the units whose reductions were issued, in order.
        in_flight: the reductions of the units before the last, and of the last: their all-reduces, and their inputs.
        collecting: the graph task in which only the arrival of gradients is to be recorded, if any.
        task: autograd's graph task, inside of which others may run.
        finisher: publishes reduced gradients. [Note: finishers]
        muted: the units whose hooks on leaves were muted. [Note: muted hooks]
    """

    def __init__(
        self,
        record: ForwardRecord[Unit],
        *,
        rules: Mapping[Unit, UnitRules[Unit]],
        sync: bool,
        weight: float,
        agreement: Peers,
        coalescer: UnitCollectives,
        finisher: Finisher,
        turns: Turns,
        schedule: type[BackwardSchedule[Unit]],
    ) -> None:
        """Plan the backward. `record`: the forwards that it covers."""
        self.sync = sync
        self.weight = weight
        self.agreement = agreement
        self._turns = turns
        self.schedule = schedule(
            record,
            rules,
            FACTS,
            coalesce=coalescer.gathers,
            together=turns.coalesced(record.anchored),
        )
        self._reductions = self.schedule.reductions
        self._reduced_at_the_end: Sequence[Unit] = ()  # their reductions may go on when it has ended
        self.rules = rules
        self._coalescer = coalescer
        self.task = _torch.graph_task()
        self.reduced: list[Unit] = []
        self.collecting: int | None = None
        self.in_flight = InFlightReductions(), InFlightReductions()
        self.finisher = finisher
        self.muted: list[Unit] = []

    def is_over_with_gradients(self, unit: Unit) -> bool:
        """Whether nothing will read the parameters of `unit` once its gradients have arrived. [Note: slot sharing]"""
        rules = self.rules[unit]
        if unit.leaves.single_use is not True or rules.is_tied or unit not in self.schedule.clock.reached_once:
            return False
        if unit in self._reduced_at_the_end or not rules.reduces:
            return False
        return not (self.schedule.double or rules.stays_unsharded or unit.backward.keep_unsharded)

    def gradients_may_wait(self) -> bool:
        """Whether other gradients hold memory for their reduction now, or need it earlier. [Note: late slots]"""
        return len(self._reductions.expected) != 1 or self.in_flight[1].input_bytes > 0

    # -- events ------------------------------------------------------------------------------------------------------

    def recomputed(self, unit: Unit) -> Sequence[Action[Unit]]:
        """A forward of `unit` runs inside this backward: what gathers it."""
        if not self.rules[unit].reduces and unit not in self.schedule.clock.planned:
            self._turns.check_recomputed_in_window(unit)
        inner = self.in_inner_task()
        return self.schedule.recomputed(unit, inner=inner, region=None if inner else self._running_checkpoint())

    def _running_checkpoint(self) -> CheckpointRegion | None:
        """The region of the reentrant checkpoint whose node in the graph runs."""
        running = _torch.node_now()
        return self.schedule.clock.running(lambda checkpoint: checkpoint() is running)  # type: ignore[operator]

    def ended(self) -> Sequence[Action[Unit]]:
        """The graph task has ended: what issues the outstanding collectives."""
        for unit in [each for each in self.muted if any([grads.muted for grads in each.grads])]:  # got no input's
            unit.pick_up_grads(sound=True)
        return self.schedule.ended()

    def join_reductions(self) -> None:
        """Coalesce the reductions of small units, when all units that take part on all ranks are known."""
        self._reductions.coalesce(self._coalescer.reductions)
        self.schedule.expect_recomputed()
        if not self.finisher.ends_with_all:
            self._reduced_at_the_end = self._reductions.at_the_end()

    def collect(self, *, watched: bool) -> None:
        """Only record the arrival of gradients, unless it is `watched`: an observer needs every gradient."""
        self.collecting = None if watched or self.schedule.double else self.task

    def bring(self) -> None:
        """A gradient of a parameter has arrived, which ranks did not foresee."""
        self.schedule.brings = True
        self.agreement.check_unforeseen()

    # -- facts -------------------------------------------------------------------------------------------------------

    def in_inner_task(self) -> bool:
        """Whether a graph task inside that of this backward runs, for example that of a recomputation."""
        return _torch.graph_task() != self.task

    def may_bring(self, units: Iterable[Unit]) -> bool:
        """Whether this backward will compute gradients of `units`, all those of the model, or may: by the graph task
        itself, or where that does not show them. [Note: backwards without gradients]"""
        schedule, conditional = self.schedule, self._turns.conditional
        with _torch.as_plain_tensors():  # leaves may be hidden
            for unit in (*schedule.clock.sequence, *units):  # usually the first leaf shows it
                for leaf in unit.trainable_leaves():
                    if hooks.will_accumulate(leaf):
                        return True
            trained = [leaf for unit in units for leaf in unit.trainable_leaves()]
            if not trained:
                return False  # a frozen model: its graph need not be walked
            reached = [*hooks.downstream([_torch.node_now()])]
            if hooks.accumulates_in(reached, trained):
                return True
        return (
            schedule.recomputes_trained
            or any(unit in conditional for unit in schedule.clock.sequence)
            or late_gradients.are_likely(reached, self.rules)
        )

    # -- actions, for the executor -------------------------------------------------------------------------------------

    def participate(self, unit: Unit, *, share: bool = False) -> None:
        """The backward reaches `unit`, or a gradient of it: await those of all leaves. `share`: in the memory of the
        parameters."""
        self.schedule.expecting.add(unit)
        if self.await_gradients(unit, share=share) and unit not in self._reductions.expected:
            self.schedule.expect(unit)

    def await_gradients(self, unit: Unit, *, share: bool) -> bool:
        """Await the gradients of all leaves of `unit` that require one; zeros for those that this backward does not
        compute. Returns whether there are any, or some that earlier backwards have left."""
        hooked, divide_by = unit.options.comm_hook is not None, unit.options.schedule.divide_by
        sync, participates = self.rules[unit].reduces, False
        for handle, _, grads in unit.kinds:
            transports = unit.axes.transports_of(handle) if unit.axes.elsewhere else unit.axes.own_transports
            expects = grads.expect_gradients(
                indices_of(handle.face.flags or tuple(map(_REQUIRES_GRAD, handle.leaves))),
                world=transports.averaged,
                divide_by=divide_by,
                weight=self.weight if divide_by is None else min(self.weight, 1.0),
                sync=sync,
                share=share,
                hooked=hooked,
                may_wait=self.gradients_may_wait,
                collects_in=self.collecting,
            )
            participates = participates or expects
        # Gradients of its graph arrive in this task, even if recomputations contribute in others.
        unit.backward.task = self.task if unit in self.schedule.clock.planned else _torch.graph_task()
        unit.backward.arrived_in_inner_tasks.clear()
        return participates

    def complete(self, unit: Unit) -> None:
        """No gradient of `unit` is awaited any longer."""
        unit.pick_up_grads(sound=True)  # one that comes nevertheless is a late one
        if unit.leaves.runs_late is None and unit.has_gradients() and not any(g.missing for g in unit.grads):
            unit.leaves.runs_late = False

    def end_turn(self, to_come: Sequence[Unit]) -> None:
        """End the turn of groups, reduced or not: let no reduction hold its input if memory use is highest now.
        `to_come`: the unit whose turn is to come, if it is the only one."""
        older, newer = self.in_flight
        if to_come and 0 < older.input_bytes + newer.input_bytes < _largest_gradient(to_come[0]):
            # If an embedding's gradient is larger than all inputs in flight, memory use is highest when it arrives:
            # these inputs are released before it. Otherwise their reductions overlap with the last unit's backward.
            self.release_inputs()
            for grads in to_come[0].grads:
                if grads.slots.late:
                    grads.slots.move_collected()
        if newer.only_in_waits and not newer.units[-1].options.names_prefetch:
            self.release_inputs()

    def release_inputs(self) -> None:
        """Let no reduction hold its input. Collective over both axes, and over the groups of hooks."""
        older, newer = self.in_flight
        older.finish()
        for reduction in newer.reductions:
            reduction.release_input()
        if self.finisher.acts_early:
            self.finish_early(older)

    def finish_early(self, flight: InFlightReductions) -> None:
        # A unit that was passed over has another phase, although all of its gradients may be of earlier microbatches.
        arrived = [unit for unit in flight.units if unit.phase is POST_BACKWARD]
        through = [unit for unit in arrived if self.is_over_with_gradients(unit)]
        # This rank has gradients of all leaves of these, so it needs no report of other ranks.
        self.finisher.reduced([u for u in through if all(g.expected <= g.contributed for g in u.grads)])

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All collectives were issued: wait for them, and compare them between ranks. Collective over both axes."""
        if self.schedule.brings:
            older, newer = self.in_flight
            older.finish()
            if not (self._reduced_at_the_end and self.finisher.leaves(newer.units)):
                newer.finish()
            for unit in self.schedule.windows:
                for grads in unit.grads:
                    grads.keep_in_window()
        elif any(unit.resolved.reshards_after_forward for unit in self.schedule.clock.sequence):
            self.agreement.check_gathered()
        if self.sync and self.reduced:  # on all ranks, or on none
            self._end_reductions()
        else:
            self.agreement.issued.carry_over()

    def _end_reductions(self) -> None:
        """Check that all ranks have issued the same collectives, and set no `.grad` for parameters of which no rank has
        a gradient, as in one process. [Note: unused]"""
        lacking: dict[Unit, int] = {}
        for unit in self.reduced:
            for grads in unit.grads:
                if not grads.expected <= grads.contributed and unit.resolved.completes:
                    lacking[unit] = lacking_in(unit)
                elif grads.absent:  # in a backward that was differentiated by this one
                    grads.absent = frozenset()
        absent = self.agreement.check_issued(functools.reduce(operator.or_, lacking.values(), 0))
        for unit in lacking:
            leave_out(unit, absent)
