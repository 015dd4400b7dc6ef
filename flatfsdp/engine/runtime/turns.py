"""The turns of units in a forward, which are the same on all ranks.

[Note: turns] A unit takes its turn when this rank reaches it: so do all ranks, and nothing has to be decided. A feature
under which ranks reach different units provides another `Turns`, at the point `forward_order` of its observer, after
changes of options. Plain turns cost no call for a unit: they are called only where a backward begins, or runs a forward
again, and where a forward fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .unit import Unit


class Turns:
    """The plain turns, and the interface of others, which gather by the `ForwardDriver` that they get."""

    plain = True
    conditional: Collection[Unit] = ()  # units that a rank may not reach, unknown to the others
    never_stay = ""  # why these cannot stay unsharded until a whole backward has ended, in a sentence

    def begin(self, *, training: bool, new_record: bool) -> None:
        """An outermost forward begins. `new_record`: the next backward will not reach earlier forwards."""

    def leave(self, depth: int) -> None:
        """Only `depth` nested forwards are still running."""

    def enter(self, unit: Unit, forwards: Any) -> bool:
        """`unit` is about to run: take the turns that come before it. Collective, unless there are none. True if it has
        no turn of its own, since it was gathered in a turn of several units."""
        return False

    def module_ran(self, unit: Unit, forwards: Any) -> None:
        """The module of `unit` has run: take the turns left in its forward. Collective, unless there are none."""

    def ran(self, unit: Unit, *, reached: bool) -> bool | None:
        """`unit` ran, and a gradient can reach it on this rank (`reached`). Returns whether one can on any rank; None
        if the unit stays gathered, with others."""
        return reached

    def check_recomputed(self, unit: Unit) -> None:
        """`unit` runs again, inside a backward; may refuse it."""

    def check_recomputed_in_window(self, unit: Unit) -> None:
        """`unit`, which had no graph, runs again inside a backward that does not reduce; may refuse it."""

    def coalesced(self, units: Iterable[Unit]) -> dict[Unit, tuple[Unit, ...]]:
        """Those of `units` that a backward gathers together with others, each with the whole group."""
        return {}


PLAIN = Turns()
