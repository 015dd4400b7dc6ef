"""The execution of what the schedules decide: one loop over the actions of an event, of a forward or of a backward.

All gathers and reductions of forwards and backwards are actions ([Note: actions]), and no other file executes any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from ..base.peers import Peers
from ..flat.states import FORWARD
from ..flat.views import SHOWS_NOTHING
from ..schedule.actions import Action
from .backward import Backward, InFlightReductions
from .unit import Unit
from .unit_collectives import UnitCollectives

_ADVANCES_IN_WAITS = attrgetter("advances_in_waits")


class Executor:
    """Executes the actions of one model.

    Attributes:
        ahead: units to gather in this forward before their use, or gathered on a user's request; if they were sharded.
        has_freed: whether a unit was freed since the running, or last, forward began.
    """

    def __init__(self, coalescer: UnitCollectives, agreement: Peers) -> None:
        self.ahead: dict[Unit, None] = {}
        self.has_freed = False
        self._coalescer, self._agreement = coalescer, agreement

    def do(self, actions: Iterable[Action[Unit]], backward: Backward | None = None) -> None:
        """Execute the `actions` of an event, in order; of the running `backward` if there is one, else of a forward.
        Collective over both axes, and over the groups of hooks."""
        issued: Sequence[Unit]
        try:
            for verb, units in actions:
                if verb == "gather" or verb == "ahead":
                    if len(units) > 1:
                        issued = self._coalescer.launch_coalesced(units, ahead=verb == "ahead")
                    else:
                        issued = units if units[0].launch_unshard(ahead=verb == "ahead") else ()
                    if backward is not None:
                        for unit in issued:
                            self._agreement.issued.gathered.append(unit.position.index)
                    elif verb == "ahead" or len(units) > 1:
                        self.ahead.update(dict.fromkeys(units if verb == "ahead" else units[1:]))
                elif verb == "free" or verb == "retain":
                    unit = units[0]
                    if verb == "retain" and unit.kept.retain is not None:
                        unit.kept.retain(unit)
                    self.has_freed = True
                    unit.reshard(SHOWS_NOTHING, unreached=backward is not None)
                elif verb == "wait":
                    for unit in units:
                        unit.wait_unshard()
                elif verb == "leave":
                    unit = units[0]
                    in_use = bool(unit.sharing_units) and any(u.phase is FORWARD for u in unit.alive_sharing_units())
                    for views in unit.views:
                        views.track_writes(in_use=in_use)  # users' writes to them would be lost
                else:
                    assert backward is not None
                    if verb == "reduce":
                        # One input in addition to the one being filled, and one all-reduce: earlier ones are released
                        # before memory is allocated for more.
                        older, newer = backward.in_flight
                        for reduction in older.reductions:
                            reduction.finish()
                        for reduction in newer.reductions:
                            reduction.release_input()
                        made = self._coalescer.reduce(units)
                        in_waits = any(map(_ADVANCES_IN_WAITS, made))
                        backward.in_flight = newer, InFlightReductions(units, made, in_waits)
                        backward.reduced += units
                        for unit in units:
                            self._agreement.issued.reduced.append(unit.position.index)
                        if backward.finisher.acts_early:
                            backward.finish_early(older)  # overlaps with the reduction just issued
                    elif verb == "end turn":
                        if units or backward.in_flight[1].only_in_waits:
                            backward.end_turn(units)
                    elif verb == "participate":
                        backward.await_gradients(units[0], share=False)
                    elif verb == "complete":
                        backward.complete(units[0])
                    else:  # "release inputs"
                        backward.release_inputs()
        except RuntimeError as error:
            self._agreement.explain(error)
            raise
