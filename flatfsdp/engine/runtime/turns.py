"""When it is a unit's turn in a forward, the same on all ranks.

[Note: turns] A unit takes its turn when this rank reaches it: so do all ranks, and nothing has to be decided. A feature
under which ranks reach different units hands down another `Turns`, at the point `forward_order` of its observer, when
what users chose has changed. Where turns are `plain`, forwards and backwards do not call them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .unit import Unit


class Turns:
    """The plain turns, and what others may decide instead, who gather by the `ForwardGathers` that they are given."""

    plain = True
    conditional: Collection[Unit] = ()  # which a rank reaches or not, and others do not know
    never_stay = ""  # why these cannot stay unsharded until all of a backward is over, in a sentence

    def begin(self, *, training: bool, new_record: bool) -> None:
        """An outermost forward begins. `new_record`: the next backward will not reach what ran until now."""

    def leave(self, depth: int) -> None:
        """Only so many forwards run, one in the other."""

    def enter(self, unit: Unit, gathers: Any) -> bool:
        """`unit` is about to run: take the turns that come before it. Collective, unless nothing does. True if it is
        not its turn, but was that of several together, which are gathered."""
        return False

    def module_ran(self, unit: Unit, gathers: Any) -> None:
        """The module of `unit` has run: take the turns that are left in its forward. Collective, unless none is."""

    def ran(self, unit: Unit, *, reached: bool) -> bool | None:
        """`unit` ran, and a gradient can come to it on this rank (`reached`). Whether one can on any rank; None if the
        unit stays gathered, with others."""
        return reached

    def check_recomputed(self, unit: Unit) -> None:
        """`unit` runs again, inside a backward; may refuse it."""

    def check_backward_inside(self) -> None:
        """A backward begins inside of the forward; may refuse it."""

    def check_recomputed_in_window(self, unit: Unit) -> None:
        """`unit`, which had no graph, runs again inside a backward that does not reduce; may refuse it."""

    def coalesced(self, units: Iterable[Unit]) -> dict[Unit, tuple[Unit, ...]]:
        """Those of `units` that a backward gathers together with others, and with which."""
        return {}


PLAIN = Turns()
