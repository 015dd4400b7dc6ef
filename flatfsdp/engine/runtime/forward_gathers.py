"""Which units a forward gathers, in which order, and when it frees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..agreement.agreement import Agreement
from ..base import _torch
from ..base.events import Observers
from ..flat.sources import PostForwardShard
from ..flat.states import FORWARD, SUMMONED, UNSHARDED
from ..flat.views import SHOWS_NOTHING
from ..schedule.forward_record import ForwardOrder
from .coalesced_collectives import Coalescer
from .iteration import Iteration
from .replica_checks import ReplicaChecks
from .setup import Setup
from .unit import Unit
from .user_writes import apply_shard_writes, follow_other_ranks


@dataclass(eq=False)
class ForwardGathers:
    """The gathers of one model's forwards, in the order in which all ranks issue them."""

    setup: Setup
    iteration: Iteration
    agreement: Agreement
    observers: Observers
    coalescer: Coalescer
    replica_checks: ReplicaChecks
    order: ForwardOrder[Unit] = field(default_factory=ForwardOrder)
    lacking: dict[Unit, set[int]] = field(default_factory=dict)  # of units that lack entries: those that ran, by id

    def free_lacking(self, outermost: Unit) -> None:
        """The forward is complete: units of which not all entries have run are freed, but the `outermost` one that ran:
        its entry may be called again."""
        for unit in self.lacking:
            if unit is not outermost and unit.reshards_after_forward and not unit.backward.keep_unsharded:
                self._reshard(unit, unit)
        self.lacking.clear()

    def entry_ran(self, unit: Unit, entry: nn.Module) -> None:
        """One of the several entries of `unit` has run: it is kept for the others of this forward. [Note: entries]"""
        ran = self.lacking.setdefault(unit, set())
        ran.add(id(entry))
        if not unit.entries.lacks(ran):
            del self.lacking[unit]

    def gather(self, unit: Unit) -> None:
        """Unshard `unit` (and the owners of its tied parameters), and start on the next. Collective."""
        turns = self.iteration.turns
        if _torch.in_backward():
            if not turns.plain:
                turns.check_recomputed(unit)
            if self.iteration.backward is not None:
                self.iteration.backward.recomputed(unit)
            else:
                self._gather(unit)
        elif turns.plain or not turns.enter(unit, self):
            self.gather_in_turn(unit)
        for each in (*unit.owning_units, unit):
            each.wait_unshard()

    def gather_in_turn(self, unit: Unit) -> None:
        """It is the turn of `unit`, on all ranks: start to gather it, and maybe the next. Collective."""
        first = self.order.enter(unit)
        schedule = self.setup.words_of_choices  # read at every unit
        if schedule is None:
            schedule = self.setup.description
        for observe in self.observers.before_first_gather if first else ():
            if words := observe():
                schedule += f"; {words}" if schedule else words
        self.agreement.check_order(unit.place.index, schedule=schedule)
        if first and not self.agreement.forwards_are_local:
            units = self.setup.units
            if self.replica_checks.due is None and torch.is_grad_enabled() and self.agreement.compares_forwards:
                self.replica_checks.at_first(units)
            follow_other_ranks(units, self.agreement)
            for act in self.observers.first_gather_agreed:
                act()
        record = self.iteration.record
        if torch.is_grad_enabled() or (self.iteration.training and unit.options.schedule.branch is not None):
            record.enter(unit, segment=_torch.saving(), segments=_torch.segments)
            for owning_unit in unit.owning_units:
                record.enter_sharing(owning_unit)
        elif self.iteration.training:
            record.enter_without_graph(
                unit, checkpoint=_torch.custom_forward(), segment=_torch.saving(), segments=_torch.segments
            )
            for owning_unit in unit.owning_units:
                record.enter_sharing_without_graph(owning_unit)
        self._gather(unit)
        if unit.options.forward_prefetch or unit.options.forward_targets:
            self._prefetch(unit)

    def _gather(self, unit: Unit) -> None:
        if not _torch.in_backward():
            for each in (*unit.owning_units, unit):
                apply_shard_writes(each)
        for owning_unit in unit.owning_units:
            if owning_unit.phase is not SUMMONED:
                self.coalescer.launch_unshard((owning_unit,), ahead=False)
        self._launch(unit, self.order.upcoming())

    def _launch(self, unit: Unit, following: Iterable[Unit], *, ahead: bool = False) -> None:
        """Gather `unit`, and small ones that are `following` it."""
        if unit.is_unsharded:
            return
        group = self.coalescer.first_gather(unit, following)
        self.coalescer.launch_unshard(group, ahead=ahead)
        self.iteration.ahead.update(dict.fromkeys(group if ahead else group[1:]))

    def _prefetch(self, unit: Unit) -> None:
        for target in unit.options.forward_targets.units():
            self._launch(target, (), ahead=True)
        if unit.options.forward_prefetch and not unit.options.forward_targets:
            following = self.order.upcoming()
            for each in itertools.islice(following, 1):
                self._launch(each, following, ahead=True)

    def repeat(self, unit: Unit) -> None:
        """`unit` runs again in this forward, and was not freed since."""
        self.iteration.record.repeat(unit)

    # -- the end of a unit's part ------------------------------------------------------------------------------------

    def finish(self, unit: Unit, *, reached: bool, keep: bool = False) -> None:
        """The part of `unit` in the forward is over: free it, unless it is to `keep` its parameters.

        `reached`: a gradient can come to it.
        """
        record = self.iteration.record
        if reached:
            record.leave(unit)
            for owning_unit in unit.owning_units:
                record.leave(owning_unit, itself=False)
        elif self.iteration.training:
            record.leave_without_graph(unit)
        keep = keep or unit in self.lacking
        if keep or (unit.sharing_units and _is_used_by_sharing_unit(unit)) or not unit.reshards_after_forward:
            for views in unit.views:
                views.track_writes()
        else:
            self._reshard(unit, unit)
        for owning_unit in unit.owning_units:
            self._sharing_unit_finished(owning_unit, unit)

    def _sharing_unit_finished(self, unit: Unit, sharing_unit: Unit) -> None:
        """`sharing_unit`, which holds some parameters of `unit` too, has run its forward: reshard, unless they are
        needed still."""
        if unit.phase in (FORWARD, SUMMONED) or unit.backward.keep_unsharded or _is_used_by_sharing_unit(unit):
            return
        if unit.reshards_after_forward:
            self._reshard(unit, unit, sharing_unit)
        else:
            unit.track_writes()

    def _reshard(self, unit: Unit, *readers: Unit) -> None:
        """Free the unsharded parameters; where the backward of one of the `readers` is to come, they may stay among
        the ranks of the post-forward axis. [Note: post-forward shards]"""
        if unit.kept.post_forward and any(map(self.iteration.record.awaits, readers)):
            for handle, neighbors in unit.kept.post_forward.items():
                if handle.state is UNSHARDED and handle.persistence is None:
                    handle.keep(PostForwardShard(handle.unsharded, neighbors, tracker=handle.tracker))
            unit.record_event("post_forward_shard")
        self.iteration.has_freed = True
        unit.reshard(SHOWS_NOTHING, unreached=self.iteration.backward is not None)


def _is_used_by_sharing_unit(unit: Unit) -> bool:
    """Whether a unit that holds some parameters of `unit` too is in its forward."""
    return any(each.phase is FORWARD for each in unit.alive_sharing_units())
