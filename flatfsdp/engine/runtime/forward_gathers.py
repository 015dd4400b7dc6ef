"""The gathers of a forward, as `forward_schedule.py` decides, and the comparisons between ranks that precede them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from ...errors import UsageError
from ..agreement.agreement import Agreement
from ..agreement.ops import RUNS, STAYED, with_unsharded
from ..base import _torch
from ..base.events import Observers
from ..flat.states import FORWARD, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_NOTHING
from ..schedule.forward_schedule import ForwardFacts, ForwardSchedule
from .coalesced_collectives import Coalescer
from .iteration import Iteration
from .replica_checks import ReplicaChecks
from .setup import Setup
from .unit import Unit, shared_under_reentrance
from .user_writes import apply_shard_writes, follow_other_ranks


@dataclass(eq=False)
class ForwardGathers(ForwardSchedule[Unit]):
    """Carries out the schedule of one model's forwards, and compares its order between ranks."""

    setup: Setup
    iteration: Iteration
    agreement: Agreement
    observers: Observers
    coalescer: Coalescer
    replica_checks: ReplicaChecks

    def __post_init__(self) -> None:
        super().__init__(replace(FACTS, coalesced=self.coalescer.first_gather))

    def unshard(self, unit: Unit, *, runs: bool = False) -> None:
        """Unshard `unit` (and the owners of its tied parameters), and start on the next. Collective.

        `runs`: inside of its own forward."""
        turns = self.iteration.turns
        if _torch.in_backward():
            if not turns.plain:
                turns.check_recomputed(unit)
            if self.iteration.backward is not None:
                self.iteration.backward.recomputed(unit)
            else:
                self.enters(unit, in_order=False)
        elif turns.plain or not turns.enter(unit, self):
            self.gather_in_turn(unit, runs=runs)
        for each in (*unit.owning_units, unit):
            each.wait_unshard()

    def gather_in_turn(self, unit: Unit, *, runs: bool = False) -> None:
        """It is the turn of `unit`, on all ranks: start to gather it, and possibly the next. Collective."""
        first = self.order.enter(unit)
        schedule = self.setup.words_of_choices  # read at every unit
        if schedule is None:
            schedule = self.setup.description
        for observe in self.observers.before_first_gather if first else ():
            if words := observe():
                schedule += f"; {words}" if schedule else words
        # Ranks compare whether a gather is issued here: in another structure of calls, or with an output that needs no
        # gradient on one of them, the same unit is still gathered there, and they would wait for each other.
        gathered = RUNS if runs else ""
        for each in (*unit.owning_units, unit) if unit.owning_units else (unit,):
            # A prefetched one has not been waited for yet; one without handles has no state.
            if each.handles and each.handles[0].state is UNSHARDED and each.resolved.reshards_after_forward:
                if each is not unit:
                    gathered += with_unsharded(each.label)
                elif not (runs or unit in self.iteration.requested):
                    gathered += STAYED
        self.agreement.check_order(unit.place.index, schedule=schedule, gathered=gathered)
        if first and not self.agreement.forwards_are_local:
            units = self.setup.units
            if self.replica_checks.due is None and torch.is_grad_enabled() and self.agreement.compares_forwards:
                self.replica_checks.at_first(units)
            follow_other_ranks(units, self.agreement)
            for act in self.observers.first_gather_agreed:
                act()
        record = self.iteration.record
        if (uses := self.iteration.uses_of_shards).starts_clean and torch.is_grad_enabled():
            with _torch.as_plain_tensors():  # leaves may be hidden
                for each in (*unit.owning_units, unit) if unit.owning_units else (unit,):
                    for handle in each.handles:
                        if max(map(_torch.use_count, handle.leaves), default=1) > 1 and each not in record.entered:
                            uses.maybe = True
        if torch.is_grad_enabled() or (self.iteration.training and unit in self.iteration.turns.conditional):
            record.enter(unit, segment=_torch.saving(), segments=_torch.segments)
            for owning_unit in unit.owning_units:
                record.enter_sharing(owning_unit)
        elif self.iteration.training:
            checkpoint = _torch.custom_forward()
            if checkpoint is not None:
                for other in (*unit.owning_units, *unit.alive_sharing_units()):
                    raise UsageError(shared_under_reentrance(unit, other))
            record.enter_without_graph(unit, checkpoint=checkpoint, segment=_torch.saving(), segments=_torch.segments)
            for owning_unit in unit.owning_units:
                record.enter_sharing_without_graph(owning_unit)
        for each in (*unit.owning_units, unit):
            apply_shard_writes(each)
        self.enters(unit)

    def repeat(self, unit: Unit) -> None:
        """`unit` runs again in this forward, and was not freed in between."""
        self.iteration.record.repeat(unit)

    def finish(self, unit: Unit, *, reached: bool, keep: bool = False) -> None:
        """The part of `unit` in the forward has ended. `reached`: a gradient can reach it; `keep`: it stays unsharded
        for the backward."""
        iteration = self.iteration
        self.finished(iteration.record, unit, training=iteration.training, reached=reached, keep=keep)

    # -- actions -----------------------------------------------------------------------------------------------------

    def gather(self, units: Sequence[Unit], *, ahead: bool) -> None:
        """Issue the gathers of all sharded handles of a group. Collective over the shard axis."""
        self.coalescer.launch_unshard(units, ahead=ahead)
        self.iteration.ahead.update(dict.fromkeys(units if ahead else units[1:]))

    def free(self, unit: Unit, *, retains: bool) -> None:
        """Free the unsharded parameters; `retains`: a feature may first keep a part of them for the backward."""
        if retains and unit.kept.retain is not None:
            unit.kept.retain(unit)
        self.iteration.has_freed = True
        unit.reshard(SHOWS_NOTHING, unreached=self.iteration.backward is not None)

    def leave_unsharded(self, unit: Unit) -> None:
        """Track writes to the parameters that are left unsharded."""
        in_use = bool(unit.sharing_units) and any(each.phase is FORWARD for each in unit.alive_sharing_units())
        for views in unit.views:
            views.track_writes(in_use=in_use)


FACTS: ForwardFacts[Unit] = ForwardFacts(
    owners=attrgetter("owning_units"),
    users=Unit.alive_sharing_units,
    has_users=attrgetter("sharing_units"),
    runs=lambda unit: unit.phase is FORWARD,
    is_requested=lambda unit: unit.phase is SUMMONED,
    is_unsharded=attrgetter("is_unsharded"),
    gathers_next=attrgetter("options.forward_prefetch"),
    listed=attrgetter("options.forward_targets"),
    coalesced=lambda unit, following: (unit,),
    reshards=attrgetter("resolved.reshards_after_forward"),
    stays=attrgetter("backward.keep_unsharded"),
    retains=attrgetter("kept.retain"),
    lacks=lambda unit, ran: unit.entries.lacks(ran),
)
