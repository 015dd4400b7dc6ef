"""The ranks over which the parameters of one unit are sharded.

[Note: several meshes] Some kinds of a unit, for example experts, may be sharded over other ranks than the rest: they
are gathered, freed and reduced together with it, each over its own axes, kind after kind in the same order on all
ranks. Such a unit shares its collectives with no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ..comm.axes import ProcessGroups
from ..flat.flat_param import FlatParamHandle
from .unit_state import Transports


class UnitAxes:
    """The axes of one unit, and the transports over them.

    Attributes:
        own: those of the unit.
        elsewhere: those of handles that are sharded over others. [Note: several meshes]
        transports: of all of them, by the ids of the groups; own_transports: of the unit's own. Set when the unit is
            connected.
    """

    transports: Mapping[int, Transports]
    own_transports: Transports

    def __init__(self, own: ProcessGroups, elsewhere: Mapping[FlatParamHandle, ProcessGroups]) -> None:
        self.own, self.elsewhere = own, elsewhere

    def connect(self, transports: Mapping[int, Transports]) -> None:
        """Set the `transports`."""
        self.transports, self.own_transports = transports, transports[id(self.own)]

    def of(self, handle: FlatParamHandle) -> ProcessGroups:
        """The axes over which `handle` is sharded."""
        return self.elsewhere.get(handle, self.own) if self.elsewhere else self.own

    def transports_of(self, handle: FlatParamHandle) -> Transports:
        """The transports of the collectives of `handle`."""
        return self.transports[id(self.of(handle))]

    @cached_property
    def all(self) -> tuple[ProcessGroups, ...]:
        """The unit's own axes, and those of handles that are elsewhere, each once."""
        return tuple({id(groups): groups for groups in (self.own, *self.elsewhere.values())}.values())

    @cached_property
    def is_spread(self) -> bool:
        """Whether any part of the unit is sharded over several ranks."""
        return any(groups.shard.size > 1 for groups in self.all)
