"""The state of one unit: its construction, its axes, its position in the model, the progress of its backward.

[Note: several meshes] Some kinds of a unit, for example experts, may be sharded over other ranks than the rest: they
are gathered, freed and reduced together with it, each over its own axes, kind after kind in the same order on all
ranks. Such a unit shares its collectives with no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...api import CPUOffload, MixedPrecision
from ..base import _torch
from ..base import autograd as hooks
from ..comm.axes import ProcessGroups
from ..comm.transport import Reducer, Transport
from ..config.strategy import Traits
from ..flat.flat_param import FlatParamHandle


@dataclass(frozen=True, slots=True)
class UnitPosition:
    """The position of a unit in its model.

    Attributes:
        name: path from the model's outermost module, "" for that; of several entries, all of their paths.
        index: among the units, children before parents.
        first_parameter: the index of its first parameter among those of all units.
        is_outermost: whether it is the unit of the outermost wrapper.
    """

    name: str = ""
    index: int = 0
    first_parameter: int = 0
    is_outermost: bool = False


@dataclass(frozen=True)
class BuiltWith:
    """The values with which a unit was constructed.

    Attributes:
        modules: those of the unit, whose buffers it computes with.
        island: a full-precision module (batch norm) in a low-precision model: inputs are widened, outputs narrowed
            again.
        device_mesh: the mesh of the unit's groups, if a user passed one; not in pickles.
        output_dtype: to which the outputs of its forward are cast; None: they are not.
        counts_gradients: whether a backward may gather the next unit half-way through its gradients. [Note: half-way]
    """

    traits: Traits
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    modules: Sequence[nn.Module] = ()
    island: bool = False
    device_mesh: Any = None
    output_dtype: torch.dtype | None = None
    counts_gradients: bool = False


@dataclass(frozen=True)
class Transports:
    """The transports of the collectives of a unit.

    Attributes:
        gather, scatter, replicate: over its axes; replicate is None without replicas.
        quantized: gathers handles with a `gather` dtype. [Note: quantization]
        reducers: scatter and replicate, quantized on request, or with a communication hook instead of one of them.
        averaged: the number of ranks over whose gradients the engine takes the mean.
    """

    gather: Transport
    scatter: Transport
    replicate: Transport | None
    reducers: tuple[Reducer, Reducer | None]
    quantized: Transport
    averaged: int


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


@dataclass(frozen=True, slots=True)
class Resolved:
    """The values that follow from the arguments, the place and the options of a unit; replaced when these change.

    Attributes:
        input_dtype: to which inputs of its forward are cast, unless it computes in full precision; None: they are not.
        reshards_after_forward: whether the unsharded parameters are freed between forward and backward.
        reducers: by handle, the reducers of both stages of a reduction; None if there is no second stage.
        completes: handles whose reductions yield gradients, and not only partial sums. [Note: partial sums]
    """

    input_dtype: torch.dtype | None
    reshards_after_forward: bool
    reducers: Mapping[FlatParamHandle, tuple[Reducer, Reducer | None]]
    completes: frozenset[FlatParamHandle]


@dataclass
class KeptUnsharded:
    """The reasons why a unit is unsharded between iterations.

    Attributes:
        by_choice: because of its options, or on a user's request.
        trusted: its shards are not written to meanwhile, so that kept parameters are not compared with them.
        maybe_stale: some ranks may have written to their shards since, and others not.
        shards: copies of those of its handles at the user's request, if not all writes change versions.
        retain: keeps shards of the unit, which a forward is about to free; its backward gathers from these.
    """

    by_choice: bool = False
    trusted: bool = False
    maybe_stale: bool = False
    shards: list[torch.Tensor] = field(default_factory=list)
    retain: Callable[[Any], None] | None = None

    def end_choice(self) -> None:
        """Options, or a user's request, keep the unit no longer."""
        self.by_choice = False
        self.shards.clear()


class WatchedLeaves:
    """Observations of the leaves of a unit: their hooks, and how their gradients arrive.

    Attributes:
        hooked: by kind, the leaves that notify when their gradient has arrived, with all hooks that they have.
        before_first: ids of the leaves that notify before the first gradient of the unit arrives.
        before_any: ids of the leaves that notify before a gradient is accumulated in them.
        single_use: whether each gradient has arrived once and in the backward's own graph task, so far. [Note: slot
            sharing]
        runs_late: whether custom Functions have computed gradients in graph tasks inside of a backward, so far; None
            before a gradient has arrived.
        customs: the Functions that may. [Note: late gradients]
    """

    def __init__(self, kinds: int) -> None:
        self.hooked: list[dict[int, hooks.Registry]] = [{} for _ in range(kinds)]
        self.before_first: set[int] = set()
        self.before_any: set[int] = set()
        self.single_use: bool | None = None
        self.runs_late: bool | None = None
        self.customs = hooks.CustomFunctions()


class ForwardCall:
    """One forward of a unit, which identifies its own backward.

    The hooks of its outputs hold it; those of its inputs hold it weakly ([Note: arrivals]).

    Attributes:
        watch: until its forward has ended: the hook on its inputs, if there are several.
        began: when, in ticks of the record's clock; None if that is not defined.
        finished_in_task: the last graph task in which its backward finished. An output that is reached later is one of
            its inputs.
        on_device: its only input is on the unit's device, whose thread of autograd has accumulated all gradients of
            leaves that it can before that of the input arrives.
        outlasts: its backward may continue when the gradients of its inputs have arrived: those of leaves arrive before
            those of outputs that were not computed from them.
    """

    # Defaults in the class instead of a constructor: one is made in every call of a unit.
    began: int | None = None
    watch: hooks.MultiGradHook | None = None
    finished_in_task: int | None = None
    on_device = outlasts = False

    def let_go(self, outputs: Sequence[torch.Tensor]) -> tuple[ForwardCall | None, list[hooks.MultiGradHook | None]]:
        """The call, unless nothing will show its end, and for each output its `watch`, if hooks of that may hold it: an
        output that is older than an input may not, or the graph would hold itself, unseen by garbage collection."""
        watch, self.watch = self.watch, None
        held = [watch if watch is not None and watch.precedes(each) else None for each in outputs]
        return self if any(held) else None, held


class UnitBackward:
    """The progress of one unit's backward; replaced when that has ended.

    Attributes:
        keep_unsharded: its end cannot be observed, so the unit stays unsharded until the whole backward has ended.
        open_calls: calls whose backward has begun and has not reached their inputs, so that it may still read the
            parameters.
        late_gradients: how many gradients arrive again, from a segment recomputed in a graph task of its own, or later.
        task: the graph task in which gradients are awaited.
        arrived_in_inner_tasks: leaves whose gradients have arrived only in tasks inside that one, as (kind, index).
        ends_unseen: the nodes at which calls began that have no input with a gradient, which would show their end.
    """

    __slots__ = (
        "arrived_in_inner_tasks",
        "ends_unseen",
        "keep_unsharded",
        "late_gradients",
        "open_calls",
        "task",
    )

    def __init__(self, *, keep_unsharded: bool = False) -> None:
        self.keep_unsharded = keep_unsharded
        self.open_calls: set[ForwardCall] = set()
        self.ends_unseen: list[Any] = []
        self.late_gradients = 0
        self.task = -1
        self.arrived_in_inner_tasks: set[tuple[int, int]] = set()

    def runs_again(self, customs: hooks.CustomFunctions) -> bool:
        """Whether nothing shows the end of the unit's backward, and the whole one will reach some of `customs`:
        possibly reentrant checkpoints that run segments of the unit again. Their gradients after its reduction would
        need another one, which other ranks do not issue."""
        if not self.ends_unseen:
            return False
        return _torch.graph_task() != self.task or customs.are_to_come()  # a running one may contribute more

    def forget_graph(self) -> None:
        """The backward has failed: drop all references to its graph."""
        self.ends_unseen.clear()
