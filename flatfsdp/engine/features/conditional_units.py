"""Parts of a model that each rank runs depending on its data, and whose collectives all ranks issue: their declaration,
the plan of their turns, and its execution in forwards and backwards.

[Note: conditional units] A *branch* is a part of a model whose units a rank runs or not, depending on its data: the
tower for images, the experts of a mixture. All ranks take part in it regardless of their data, at one place of the
forward: within the forward of the unit *around* the branch, after the units registered before the branch, and before
the next unit that every rank runs. At its *turn* with a unit that it does not run, a rank gathers and frees it. In a
branch in order each unit has its own turn; before a rank enters a unit it takes the turns with those that it passed
over. A branch in any order has one turn for all of its units, which then stay unsharded until the branch is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from torch import nn

from ...api import check_bool
from ...errors import ConfigValueError, UsageError, refuse_type
from ..base.events import Observer
from ..config.schedule_options import Branch
from ..config.unit_options import NO_TARGETS, PrefetchTargets
from ..flat.states import FORWARD, IDLE
from ..models.rest import check_outside
from ..models.walks import units_in
from ..runtime.forward_driver import ForwardDriver
from ..runtime.model import Model, model_of
from ..runtime.module_tree import nesting
from ..runtime.turns import Turns
from ..runtime.unit import Unit, follow_requires_grad

U = TypeVar("U", bound=Hashable)
Position = tuple[int, int, int]

_FUNCTION = "ensure_unit_participation"


def ensure_unit_participation(module: nn.Module, *, any_order: bool = False, before: nn.Module | None = None) -> None:
    """Allow each rank to run any subset of the wrappers in `module`, depending on its data.

    Examples are an image tower and batches without images, experts that get no token, and layers of which each step
    uses a few. In every forward of the wrapper around `module`, all ranks gather all wrappers in it, in the order of
    registration, whether they run them or not. They do so in backward, too, where a rank contributes zeros to the
    gradients of wrappers that it did not run. Gradients are the mean over ranks, as without branches. If no rank
    computed a gradient for a wrapper, `.grad` stays as it was (None after `zero_grad()`), as in one process: optimizers
    then skip the step, with weight decay and momentum.

    Wrappers outside run as before: `module` runs in the forward of the wrapper around it, and a rank runs all of its
    wrappers before the next wrapper outside of it that is registered later, or that is passed as `before`. If a rank
    runs one of them at another time, an error is raised on all ranks. Some trained parameters must be outside of
    `module`: a rank that runs none of it would have no graph for a backward.

    The cost is that of a model that always runs all of it: each wrapper is gathered in forward and in backward (frozen
    ones, too; `set_unshard_in_backward(False)` avoids the latter for a frozen tower at the model's beginning), and its
    gradients are reduced, as zeros after `torch.autograd.grad`. Once ranks have used different wrappers, each backward
    ends with one more collective, of a byte per parameter, for which the host of a rank waits that ran fewer. In order,
    memory is needed for one wrapper at a time; in any order all of `module` is gathered when a rank runs its first
    wrapper, and freed after the last one, in backward as well, with the memory of its gradients. Activation
    checkpointing of it requires `any_order=True` and `use_reentrant=False`. Units inside must not share parameters with
    other units.

    Without this call, a rank that leaves out a wrapper, or runs another one first, raises an error, as do the others.
    Otherwise ranks that all leave out the same wrappers (layers dropped by a common seed) would gather them in every
    step, and step on zero gradients, unlike one process.

    Call it on every rank, once the whole model is wrapped; later calls replace earlier ones for the same part. It
    applies to copies and pickles of the model, too.

    Args:
        module: a wrapper or a module with wrappers inside, such as a `ModuleList`. All of them take part.
        any_order: whether its wrappers may run several times and in a different order than they are registered;
            otherwise, each may run at most once, in that order.
        before: a module outside, which every rank runs, whose first wrapper is the next to run after `module`; inside
            the same wrapper. None for the wrapper that is registered next.

    Raises:
        ConfigTypeError: an argument is of another type.
        ConfigValueError: no wrapper inside, or the outermost one; a part of a declared `module`; `before` is not in the
            wrapper around `module`, or is a branch itself.
        UsageError: inside a forward or a backward.
    """
    for name, value, optional in (("module", module, False), ("before", before, True)):
        if not (isinstance(value, nn.Module) or (optional and value is None)):
            refuse_type(f"{_FUNCTION}: {name}", value, "a module that is wrapped or contains wrapped modules")
    check_bool(f"{_FUNCTION}: any_order", any_order)
    units = _wrapped_in(module, "module")
    check_outside(units[0], _FUNCTION)
    _check_whole(module, units)
    targets = NO_TARGETS if before is None else PrefetchTargets([_next_of(units, before)])
    branch = Branch(any_order)
    for unit in units:
        model_of(unit).setup.set_options(unit, branch_before=targets)
        model_of(unit).setup.set_schedule(unit, branch=branch)
    attach_conditional_units(model_of(units[0]))


def _wrapped_in(module: nn.Module, argument: str) -> list[Unit]:
    units = units_in(module)
    if not units:
        raise ConfigValueError(
            f"{_FUNCTION}: {argument}: got a {type(module).__name__} without any FullyShardedDataParallel inside. It "
            "is part of the unit around it and is gathered whenever that unit runs: wrap the modules that should be "
            "gathered separately, or do not declare it"
        )
    return units


def _check_whole(module: nn.Module, units: list[Unit]) -> None:
    model = model_of(units[0])
    if model.outermost in units:
        raise ConfigValueError(
            f"{_FUNCTION}: module: got the outermost FullyShardedDataParallel ({model.outermost.entries.class_name}), "
            "which every rank runs, or a part of a model that is not completely wrapped yet. Wrap the whole model, "
            "then pass the part that depends on a rank's data"
        )
    known = {unit.options.schedule.branch for unit in units} - {None}
    split = [unit for unit in model.units if unit.options.schedule.branch in known and unit not in units]
    if split:
        raise ConfigValueError(
            f"{_FUNCTION}: module: got a {type(module).__name__} inside a part that was declared before, with unit "
            f"{split[0].label}. Declare only the outer part"
        )


def _next_of(units: list[Unit], before: nn.Module) -> Unit:
    """The next unit to run after the branch of `units`."""
    inside = set(_wrapped_in(before, "before"))
    around = dict(nesting(model_of(units[0]).outermost))
    first = next((unit for unit in around if unit in inside), None)
    outer = next(around[unit] for unit in around if unit in units)
    above = around.get(first) if first is not None else None
    while above is not None and above is not outer:
        above = around.get(above)
    if first is None or above is None or first in units or first.options.schedule.branch is not None:
        raise ConfigValueError(
            f"{_FUNCTION}: before: got a {type(before).__name__}. Accepted: a module inside the wrapper around the "
            "part, but outside of the part, that every rank runs and that contains a FullyShardedDataParallel"
        )
    return first


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ParticipationSlot(Generic[U]):
    """A turn: the gathers of conditional units that all ranks issue at one place of a forward.

    Attributes:
        around: the unit in whose forward it is.
        units: the units to gather, outer ones before inner ones: one unit, or all of a branch in any order.
    """

    position: Position
    around: U
    units: tuple[U, ...]
    any_order: bool


class ParticipationPlan(Generic[U]):
    """The positions of a model's units, and the turns of its conditional units.

    Attributes:
        slot: the turn of each conditional unit.
        position: the position of every unit.
    """

    def __init__(
        self, nesting: Iterable[tuple[U, U | None]], branches: Mapping[U, Branch], before: Mapping[U, U]
    ) -> None:
        """`nesting`: every unit with the one around it, in the order of registration, outer units first. `before`:
        for conditional units with another position than their own: the unit right after that position."""
        self._around = dict(nesting)
        own = {unit: i for i, unit in enumerate(self._around)}
        self.position: dict[U, Position] = {
            unit: (own[before[unit]], 0, i) if unit in before else (i, 1, 0) for unit, i in own.items()
        }
        members: dict[object, list[U]] = {}
        for unit in self._around:
            if (branch := branches.get(unit)) is not None:
                members.setdefault(branch if branch.any_order else unit, []).append(unit)
        self.slot: dict[U, ParticipationSlot[U]] = {}
        self._slots: dict[U, list[ParticipationSlot[U]]] = {}
        for units in members.values():
            around = self._around[units[0]]
            if around is None:
                continue
            slot = ParticipationSlot(self.position[units[0]], around, tuple(units), branches[units[0]].any_order)
            self.slot.update(dict.fromkeys(units, slot))
            self._slots.setdefault(around, []).append(slot)
        for slots in self._slots.values():
            slots.sort(key=lambda slot: slot.position)

    def is_inside(self, unit: U, around: U) -> bool:
        """Whether `unit` is somewhere inside `around`."""
        found = self._around.get(unit)
        while found is not None and found is not around:
            found = self._around.get(found)
        return found is around

    def cursor(self, unit: U) -> ParticipationCursor[U]:
        """A cursor for a forward of `unit` that begins."""
        return ParticipationCursor(unit, tuple(self._slots.get(unit, ())))


class ParticipationCursor(Generic[U]):
    """The progress of one running forward of a unit through the turns in it.

    Attributes:
        open: the turn of a branch in any order that has begun and is not over.
    """

    def __init__(self, unit: U, slots: tuple[ParticipationSlot[U], ...]) -> None:
        self.unit = unit
        self.open: ParticipationSlot[U] | None = None
        self._slots = slots
        self._taken = 0

    def has_passed(self, slot: ParticipationSlot[U]) -> bool:
        """Whether `slot` was taken already, or is not in this forward."""
        return slot not in self._slots[self._taken :]

    def next_before(self, position: Position | None) -> ParticipationSlot[U] | None:
        """The next turn, if it comes before `position` (None: the end of the forward)."""
        if self._taken == len(self._slots):
            return None
        slot = self._slots[self._taken]
        return slot if position is None or slot.position < position else None

    def take(self, slot: ParticipationSlot[U]) -> None:
        """Take `slot`, which is the next turn."""
        assert self._slots[self._taken] is slot
        self._taken += 1
        self.open = slot if slot.any_order else None


# -- its execution -----------------------------------------------------------------------------------------------------


class ConditionalUnits(Observer, Turns):
    """The branches of one model, and the position of its running forward among them.

    Attributes:
        cursors: one per running forward, the innermost last.
        training: whether a backward follows the running forward, also while a rank runs a unit without gradients.
    """

    plain = False
    never_stay = (
        "It belongs to a part that was passed to ensure_unit_participation(), so it cannot stay unsharded as other "
        "units would: ranks that do not run it free it."
    )

    def __init__(self) -> None:
        self.cursors: list[ParticipationCursor[Unit]] = []
        self.training = False
        self._units: Sequence[Unit] = ()
        self._ran: set[Unit] = set()  # units of the gathered branch
        self._without: set[Unit] = set()  # units that ran without a graph, in forwards of the next backward

    def forward_order(self, units: Sequence[Unit]) -> Turns | None:
        """`self` if any of `units`, the outermost last, is in a branch; else None."""
        branches = {unit: branch for unit in units if (branch := _branch_of(unit)) is not None}
        before = {unit: later for unit in units for later in unit.options.branch_before.units()}
        self._units, self.conditional = units, branches.keys()
        self._plan = ParticipationPlan(nesting(units[-1]), branches, before)
        return self if self._plan.slot else None

    def begin(self, *, training: bool, new_record: bool) -> None:
        self.training = training
        self.cursors.clear()
        if new_record:
            self._without.clear()

    def enter(self, unit: Unit, forwards: ForwardDriver) -> bool:
        """See `Turns`.

        Raises:
            UsageError: the turn of `unit` is over, or is in the forward of another unit.
        """
        held = self._advance_to(unit, forwards)
        if held:
            if unit in self._ran and self.training:
                forwards.iteration.record.repeat(unit)  # it was not freed in between
            self._ran.add(unit)
        self.cursors.append(self._plan.cursor(unit))
        return held

    def _advance_to(self, unit: Unit, forwards: ForwardDriver) -> bool:
        cursor = self.cursors[-1] if self.cursors else None
        slot = self._plan.slot.get(unit)
        if cursor is None:
            return False
        if slot is None:
            if self._plan.is_inside(unit, cursor.unit):
                self._complete(cursor, self._plan.position[unit], forwards)
            return False
        if self._holds(slot):
            return True
        if slot.around is not cursor.unit or cursor.has_passed(slot):
            _refuse_order(unit, slot)
        self._complete(cursor, slot.position, forwards)
        self._take(cursor, slot, forwards)
        return slot.any_order

    def _complete(self, cursor: ParticipationCursor[Unit], position: Position | None, forwards: ForwardDriver) -> None:
        """Take the remaining turns before `position`, or all for None: this rank's data did not need their units."""
        self._close(cursor, position, forwards)
        while (slot := cursor.next_before(position)) is not None:
            if slot.any_order:
                self._take(cursor, slot, forwards)
                self._close(cursor, position, forwards)
            else:
                self._participate(slot.units[0], forwards)

    def _take(self, cursor: ParticipationCursor[Unit], slot: ParticipationSlot[Unit], forwards: ForwardDriver) -> None:
        cursor.take(slot)
        if slot.any_order:
            self._ran.difference_update(slot.units)
            for unit in slot.units:
                forwards.iteration.executor.do(forwards.take_turn(unit))

    def _close(self, cursor: ParticipationCursor[Unit], position: Position | None, forwards: ForwardDriver) -> None:
        """End the gathered branch if `position` is behind it, or is None, and finish its units."""
        slot = cursor.open
        if slot is not None and (position is None or slot.position < position):
            cursor.open = None
            for unit in self._units:
                if unit in slot.units:
                    unit.wait_unshard()
                    _finish(unit, forwards, reached=self.training)

    def _participate(self, unit: Unit, forwards: ForwardDriver) -> None:
        """Issue the collectives of the forward of `unit` without running its module. Collective over the shard axis."""
        phase, depth = unit.phase, len(self.cursors)
        unit.enter_phase(FORWARD)
        try:
            follow_requires_grad((unit,))
            if not self.enter(unit, forwards):
                forwards.iteration.executor.do(forwards.take_turn(unit))
            for each in (*unit.owning_units, unit):
                each.wait_unshard()
            self.module_ran(unit, forwards)
        except BaseException:
            unit.phase = phase
            raise
        finally:
            self.leave(depth)
        unit.enter_phase(IDLE)
        _finish(unit, forwards, reached=self.training)

    def module_ran(self, unit: Unit, forwards: ForwardDriver) -> None:
        if self.cursors and self.cursors[-1].unit is unit:
            self._complete(self.cursors[-1], None, forwards)

    def leave(self, depth: int) -> None:
        del self.cursors[depth:]

    def ran(self, unit: Unit, *, reached: bool) -> bool | None:
        slot = self._plan.slot.get(unit)
        if slot is None:
            return reached
        if self.training and not reached:
            self._without.add(unit)
        return None if self._holds(slot) else self.training

    def _holds(self, slot: ParticipationSlot[Unit]) -> bool:
        return any(cursor.open is slot for cursor in self.cursors)

    # -- backward ----------------------------------------------------------------------------------------------------

    def coalesced(self, units: Iterable[Unit]) -> dict[Unit, tuple[Unit, ...]]:
        """Units of branches in any order, with all units of their branch: ranks may reach them in different orders."""
        slots = {unit: self._plan.slot.get(unit) for unit in units}
        return {unit: slot.units for unit, slot in slots.items() if slot is not None and slot.any_order}

    def check_recomputed(self, unit: Unit) -> None:
        """See `Turns`.

        Raises:
            UsageError: `unit` is in a branch in order, whose units other ranks gather one by one; or it ran without a
                graph, and other ranks do not know that it is recomputed with one.
        """
        branch = unit.options.schedule.branch
        if branch is None:
            return
        reported = (
            f"unit {unit.label} is recomputed inside a backward, for an activation checkpoint. It belongs to a part "
            "that was passed to ensure_unit_participation(), so other ranks may not run it, and"
        )
        if not branch.any_order:
            raise UsageError(
                f"{reported} they would not know that the whole part is needed now. Declare the part with "
                "any_order=True"
            )
        if unit in self._without:
            raise UsageError(
                f"{reported} they would not know that its gradients are computed only now. Pass use_reentrant=False "
                "to torch.utils.checkpoint"
            )

    def step_begins(self, unit: Unit | None) -> bool:
        """See `Observer`.

        Raises:
            UsageError: a backward begins inside of a forward; units of a branch in any order are gathered together, and
                the backward would free them.
        """
        for cursor in self.cursors if unit is None else ():
            if cursor.open is not None:
                raise UsageError(
                    f"a backward begins inside the forward of {cursor.unit.label}, while unit "
                    f"{cursor.open.units[0].label} and the other units of its part, which was passed to "
                    "ensure_unit_participation(any_order=True), are gathered together. Run that backward before the "
                    "part begins in the forward, or after the next unit outside of the part has run"
                )
        return False

    def check_recomputed_in_window(self, unit: Unit) -> None:
        """See `Turns`.

        Raises:
            UsageError: always; ranks would gather branches in different orders.
        """
        raise UsageError(
            f"unit {unit.label} is recomputed inside a backward without reduction, for a reentrant checkpoint, in a "
            "model with a part that was passed to ensure_unit_participation(): ranks that run other units of that "
            "part would gather in a different order. Pass use_reentrant=False to torch.utils.checkpoint, or "
            "accumulate without no_sync()"
        )


def attach_conditional_units(model: Model) -> None:
    """Attach them to `model` if a unit is in a branch."""
    if model.observers.find(ConditionalUnits) is None and any(unit.options.schedule.branch for unit in model.units):
        model.observers.add(ConditionalUnits())


def _branch_of(unit: Unit) -> Branch | None:
    branch = unit.options.schedule.branch
    if branch is not None and unit.is_tied:
        raise UsageError(
            f"unit {unit.label} belongs to a part that was passed to ensure_unit_participation(), and has parameters "
            "that are shared with other units or that an extension transforms. Wrap the modules that share parameters "
            "as one unit, outside of the part"
        )
    return branch


def _finish(unit: Unit, forwards: ForwardDriver, *, reached: bool) -> None:
    """The part of `unit` in the forward has ended. `reached`: a gradient can reach it."""
    iteration = forwards.iteration
    forwards.iteration.executor.do(
        forwards.schedule.finished(iteration.record, unit, training=iteration.training, reached=reached)
    )


def _refuse_order(unit: Unit, slot: ParticipationSlot[Unit]) -> NoReturn:
    words = f"unit {unit.label} belongs to a part that was passed to ensure_unit_participation(), and it ran too late"
    raise UsageError(
        f"{words} or too early: in each forward of {slot.around.label}, the units of the part must run once, in the "
        "order in which they are registered, and before units outside of the part that are registered later. Pass "
        "any_order=True if they run in a different order or repeatedly, and before= if the next unit outside is "
        "registered earlier"
    )
