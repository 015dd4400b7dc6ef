"""Parts of a model that a rank runs as its data will have it, and in which all ranks take part. [Note: branches]"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from ...errors import UsageError
from ..schedule.conditional import Branch, ParticipationCursor, ParticipationPlan, ParticipationSlot, Place
from .module_tree import nesting
from .unit import Unit


class Gathers(Protocol):
    """What a forward does together with other ranks, in turn."""

    def gather_in_turn(self, unit: Unit) -> None:
        """It is the turn of `unit`: start to gather it."""

    def participate(self, unit: Unit) -> None:
        """Do what the forward of `unit` does together with other ranks, and nothing else."""

    def repeat(self, unit: Unit) -> None:
        """`unit` runs again in this forward, and was not freed since."""

    def finish(self, unit: Unit, *, reached: bool) -> None:
        """The part of `unit` in the forward is over. `reached`: a gradient can come to it."""


class ConditionalUnits:
    """The branches of one model, and how far its running forward has come past them.

    Attributes:
        exist: whether the model has any.
        cursors: the forwards that run, one in the other, where there are any.
        training: whether the running forward has a backward; on a rank that runs a unit without gradients, too.
    """

    def __init__(self) -> None:
        self.exist = False
        self.cursors: list[ParticipationCursor[Unit]] = []
        self.training = False
        self._plan: ParticipationPlan[Unit] | None = None
        self._version = -1  # of the choices that the plan follows from
        self._units: Sequence[Unit] = ()
        self._ran: set[Unit] = set()  # of a branch that is there
        # Of the forwards that the next backward may cover: what this rank ran, with a graph and without.
        self._with_graph: set[Unit] = set()
        self._without: set[Unit] = set()

    def begin(self, units: Sequence[Unit], *, version: int, training: bool) -> None:
        """An outermost forward of the model of these `units`, the outermost last, begins. `version`: of what users
        chose."""
        self.training = training
        self.cursors.clear()
        if self._version != version:
            self._version = version
            self._plan = ParticipationPlan(
                nesting(units[-1]),
                {unit: branch for unit in units if (branch := _branch_of(unit)) is not None},
                {unit: later for unit in units for later in unit.options.branch_before.units()},
            )
            self._units = units
            self.exist = bool(self._plan.slot)

    def enter(self, unit: Unit, gathers: Gathers) -> bool:
        """`unit` is about to run: take the turns that come before it. Collective, unless nothing does.

        True if it is not its turn, but that of all of its branch, which are gathered.

        Raises:
            UsageError: its turn was over, or is in the forward of another unit.
        """
        if not self.exist:
            return False
        held = self._advance_to(unit, gathers)
        if held:
            if unit in self._ran and self.training:
                gathers.repeat(unit)
            self._ran.add(unit)
        assert self._plan is not None
        self.cursors.append(self._plan.cursor(unit))
        return held

    def _advance_to(self, unit: Unit, gathers: Gathers) -> bool:
        assert self._plan is not None
        cursor = self.cursors[-1] if self.cursors else None
        slot = self._plan.slot.get(unit)
        if cursor is None:
            return False
        if slot is None:
            if self._plan.is_inside(unit, cursor.unit):
                self._complete(cursor, self._plan.position[unit], gathers)
            return False
        if self._holds(slot):
            return True
        if slot.around is not cursor.unit or cursor.has_passed(slot):
            _refuse_place(unit, slot)
        self._complete(cursor, slot.position, gathers)
        self._take(cursor, slot, gathers)
        return slot.any_order

    def _complete(self, cursor: ParticipationCursor[Unit], position: Place | None, gathers: Gathers) -> None:
        """Take the turns that come before `position` and that this rank's data left out."""
        self._close(cursor, position, gathers)
        while (slot := cursor.next_before(position)) is not None:
            if slot.any_order:
                self._take(cursor, slot, gathers)
                self._close(cursor, position, gathers)
            else:
                gathers.participate(slot.units[0])

    def _take(self, cursor: ParticipationCursor[Unit], slot: ParticipationSlot[Unit], gathers: Gathers) -> None:
        cursor.take(slot)
        if slot.any_order:
            self._ran.difference_update(slot.units)
            for unit in slot.units:
                gathers.gather_in_turn(unit)

    def _close(self, cursor: ParticipationCursor[Unit], position: Place | None, gathers: Gathers) -> None:
        """The branch that is there is over, if `position` lies behind it."""
        slot = cursor.open
        if slot is not None and (position is None or slot.position < position):
            cursor.open = None
            for unit in self._units:
                if unit in slot.units:
                    unit.wait_unshard()
                    gathers.finish(unit, reached=self.training)

    def finish(self, unit: Unit, gathers: Gathers) -> None:
        """The module of `unit` has run: take the turns that are left in its forward. Collective, unless none is."""
        if self.cursors and self.cursors[-1].unit is unit:
            self._complete(self.cursors[-1], None, gathers)

    def leave(self, depth: int) -> None:
        """Only so many forwards run."""
        del self.cursors[depth:]

    @property
    def depth(self) -> int:
        """How many forwards run, those of units that only take part among them."""
        return len(self.cursors)

    def holds(self, unit: Unit) -> bool:
        """Whether `unit` stays, with all of its branch."""
        slot = self._plan.slot.get(unit) if self._plan is not None else None
        return slot is not None and self._holds(slot)

    def _holds(self, slot: ParticipationSlot[Unit]) -> bool:
        return any(cursor.open is slot for cursor in self.cursors)

    # -- backward ----------------------------------------------------------------------------------------------------

    def coalesced(self, units: Iterable[Unit]) -> dict[Unit, tuple[Unit, ...]]:
        """Those of `units` that a backward gathers with others: they may be reached in any order, on every rank in
        another."""
        if not self.exist:
            return {}
        assert self._plan is not None
        slots = {unit: self._plan.slot.get(unit) for unit in units}
        return {unit: slot.units for unit, slot in slots.items() if slot is not None and slot.any_order}

    def begin_record(self) -> None:
        """The next backward will not reach what ran until now."""
        self._with_graph.clear()
        self._without.clear()

    def ran(self, unit: Unit, *, with_graph: bool) -> None:
        """`unit` ran in a forward that has a backward; `with_graph`: which may reach it."""
        (self._with_graph if with_graph else self._without).add(unit)

    def may_reach(self, unit: Unit) -> bool:
        """Whether this rank's backward may reach `unit`, of which no gradient of a parameter tells."""
        return unit in self._with_graph

    def check_recomputed(self, unit: Unit) -> None:
        """`unit` runs again, inside a backward.

        Raises:
            UsageError: it is of a branch in order, of which other ranks gather one unit after the other as they pass
                it; or it had no graph, and other ranks do not know that it gets one now.
        """
        branch = unit.options.schedule.branch
        if branch is None:
            return
        reported = (
            f"unit {unit.label} runs again inside a backward, for a checkpoint. It is of a part that was given to "
            "ensure_unit_participation(), so other ranks may not run it, and"
        )
        if not branch.any_order:
            raise UsageError(
                f"{reported} they would not know that all of the part is needed now. Declare it with any_order=True"
            )
        if unit in self._without:
            raise UsageError(
                f"{reported} they would not know that its gradients come only now. Pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )

    def check_backward_inside(self) -> None:
        """A backward begins inside of the forward.

        Raises:
            UsageError: units of a branch in any order are gathered for all of it, and the backward would free them.
        """
        for cursor in self.cursors:
            if cursor.open is not None:
                raise UsageError(
                    f"a backward begins inside the forward of {cursor.unit.label}, while unit "
                    f"{cursor.open.units[0].label} and the others of its part, which was given to "
                    "ensure_unit_participation(any_order=True), are gathered together. Call it before that part of the "
                    "forward begins, or after the next unit outside of it has run"
                )

    def refuse_window(self, unit: Unit) -> None:
        """`unit`, which had no graph, runs again inside a backward that does not reduce.

        Raises:
            UsageError: there are branches, whose gathers such a backward does not bring into order with this one's.
        """
        if self.exist:
            raise UsageError(
                f"unit {unit.label} runs again inside a backward without reduction, for a reentrant checkpoint, in a "
                "model of which a part was given to ensure_unit_participation(): ranks that run other units of that "
                "part would gather in another order. Pass use_reentrant=False to torch.utils.checkpoint, or accumulate "
                "without no_sync()"
            )


def _branch_of(unit: Unit) -> Branch | None:
    branch = unit.options.schedule.branch
    if branch is not None and unit.is_tied:
        raise UsageError(
            f"unit {unit.label} is of a part that was given to ensure_unit_participation(), and has parameters that "
            "other units have, too, or that an extension transforms. Wrap the modules that share parameters as one "
            "unit, outside of the part"
        )
    return branch


def _refuse_place(unit: Unit, slot: ParticipationSlot[Unit]) -> NoReturn:
    words = f"unit {unit.label} is of a part that was given to ensure_unit_participation(), and its turn was over"
    raise UsageError(
        f"{words}, or had not come: in each forward of {slot.around.label} its units run once, in the order in which "
        "they are registered, before those outside that are registered later. Pass any_order=True where they run in "
        "another order or again, and before= where the next unit outside is registered earlier"
    )
