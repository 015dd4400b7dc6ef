"""User-defined options of one unit, set after it was built: its schedule, gradient hooks and prefetch targets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from ...api import BackwardPrefetch
from .schedule_options import AS_BUILT, Schedule
from .state_dict_configs import StateDictSettings

U = TypeVar("U")  # a unit


@dataclass(frozen=True, eq=False)
class CommHook:
    """A communication hook as the user registered it.

    Attributes:
        state: passed to each call.
        function: called with the state, a gradient, and for sharded parameters the output for this rank's piece.
        reducers: from this hook, the axes of a unit and its transports of reductions to the reducers that take their
            place, and to the number of ranks over which the engine averages after these.
        alike: whether its results are equal on all ranks.
    """

    state: Any
    function: Callable[..., Any]
    reducers: Callable[[CommHook, Any, Any, Any], tuple[Any, int]]
    alike: bool = False

    @property
    def description(self) -> str:
        """The hook in words, which are equal on all ranks."""
        return f"a communication hook, {getattr(self.function, '__qualname__', type(self.function).__name__)}"


class PrefetchTargets(tuple["weakref.ref[U]", ...], Generic[U]):
    """The units that another one prefetches by the user's choice, in order; weak references, as cycles are possible.

    A tuple, whose truth value takes no Python call: every step checks it.
    """

    __slots__ = ()

    def __new__(cls, units: Iterable[U] = ()) -> PrefetchTargets[U]:
        return super().__new__(cls, map(weakref.ref, units))

    def units(self) -> Iterator[U]:
        """The units that still exist."""
        return (unit for ref in self if (unit := ref()) is not None)


NO_TARGETS: PrefetchTargets[Any] = PrefetchTargets()


@dataclass(frozen=True)
class UnitOptions:
    """The options of one unit.

    Attributes:
        schedule: [Note: schedule].
        backward_prefetch, forward_prefetch: as built, or as set since (`prefetch_was_set`).
        names_prefetch: whether the user chose `backward_prefetch`, so that no reduction is waited for early.
        comm_hook: [Note: communication hooks].
        all_reduce_hook: runs on the sum of gradients before it is scaled.
        forward_targets: units to prefetch when the unit's forward begins; if empty, the unit that followed last time.
        backward_targets: units to prefetch when its backward begins; if empty, the unit that comes next.
        branch_before: the unit right after its branch, outside of it; if empty, the order of registration decides.
        state_dict: the settings of state dicts; ranks may differ in them until they take one.
    """

    schedule: Schedule = AS_BUILT
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    prefetch_was_set: bool = False
    names_prefetch: bool = False
    comm_hook: CommHook | None = None
    all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
    forward_targets: PrefetchTargets[Any] = NO_TARGETS
    backward_targets: PrefetchTargets[Any] = NO_TARGETS
    branch_before: PrefetchTargets[Any] = NO_TARGETS
    state_dict: StateDictSettings = field(default_factory=StateDictSettings)

    def describe(self) -> Iterator[str]:
        """The options that were set, in words, which are equal on all ranks."""
        yield from self.schedule.describe()
        if self.comm_hook is not None:
            yield self.comm_hook.description
        if self.all_reduce_hook is not None:
            yield "an all-reduce hook"
        for pass_, targets in (("forward", self.forward_targets), ("backward", self.backward_targets)):
            if targets:
                yield f"prefetch in {pass_} of {', '.join(unit.label for unit in targets.units())}"
        for unit in self.branch_before.units():
            yield f"branch before {unit.label}"
        if self.prefetch_was_set:
            name = self.backward_prefetch.name if self.backward_prefetch is not None else None
            yield f"backward_prefetch={name} and forward_prefetch={self.forward_prefetch}"
