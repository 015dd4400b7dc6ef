"""What the state of one unit consists of: what it was built with, where it is, how far its backward has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...api import CPUOffload, MixedPrecision
from ..base import _torch
from ..base import autograd as hooks
from ..comm.transport import Reducer, Transport
from ..config.strategy import Traits
from ..flat.flat_param import FlatParamHandle
from ..flat.param_refs import Listing, ParamRef


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Where a unit is in its model.

    Attributes:
        name: path from the model's outermost module, "" for that; of several entries, all of their paths.
        index: among the units, children before parents.
        first_parameter: of its first parameter among those of all units.
        is_outermost: whether it is the unit of the outermost wrapper.
    """

    name: str = ""
    index: int = 0
    first_parameter: int = 0
    is_outermost: bool = False


@dataclass(frozen=True)
class BuiltWith:
    """What a unit was built with.

    Attributes:
        modules: those of the unit, whose buffers it computes with.
        island: a full-precision module (batch norm) in a low-precision model: inputs are widened, outputs narrowed
            again.
        device_mesh: the mesh that the unit's groups are of, where a user gave one; pickles do not have it.
        output_dtype: to which the outputs of its forward are cast; None for as they are.
        counts_gradients: whether it may gather the next unit half-way through its gradients. [Note: half-way]
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
    """What carries out the collectives of a unit.

    Attributes:
        gather, scatter, replicate: over its axes; replicate is None where there is one copy.
        quantized: gathers what has a `gather` dtype. [Note: quantization]
        reducers: the last two, in few bits where a user chose so, or a communication hook in the place of one of them.
    """

    gather: Transport
    scatter: Transport
    replicate: Transport | None
    reducers: tuple[Reducer, Reducer | None]
    quantized: Transport


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the arguments of a unit, its place and what users chose of it come to; another one when these change.

    Attributes:
        input_dtype: to which inputs of its forward are cast, unless it computes in full precision; None: they are not.
        reshards_after_forward: whether the unsharded parameters are freed between forward and backward.
        reducers: by handle, what carries out both stages of a reduction now; None where there is no second.
        completes: handles of which a reduction brings gradients, not only partial sums. [Note: partial sums]
    """

    input_dtype: torch.dtype | None
    reshards_after_forward: bool
    reducers: Mapping[FlatParamHandle, tuple[Reducer, Reducer | None]]
    completes: frozenset[FlatParamHandle]


@dataclass
class KeptUnsharded:
    """Why a unit is unsharded between iterations.

    Attributes:
        by_choice: because of what a user chose for it.
        trusted: nobody writes to its shards meanwhile, so that what is kept is not compared with them.
        maybe_stale: some ranks may have written to their shards since, and others not.
        versions: of the shards of its handles, when a user asked for the unit; shards: copies of them, of DTensors.
        retain: keeps something of the unit, which a forward is about to free, from which its backward gathers then.
    """

    by_choice: bool = False
    trusted: bool = False
    maybe_stale: bool = False
    versions: list[tuple[int, ...]] = field(default_factory=list)
    shards: list[torch.Tensor] = field(default_factory=list)
    retain: Callable[[Any], None] | None = None

    def end_choice(self) -> None:
        """What a user chose, or asked for, keeps it no longer."""
        self.by_choice = False
        self.shards.clear()


class WatchedLeaves:
    """What is known of the leaves of a unit: how gradients come to them, and when modules list them.

    Attributes:
        hooked: by kind, the leaves that notify when their gradient is there, with all hooks that they have.
        unhooked_as_of: by kind, when holders that are no leaves were last found to have no hooks.
        before_first: ids of the leaves that notify before the first gradient of the unit comes.
        single_use: whether each gradient came once and in the backward's own graph task, as far as seen. [Note: slot
            sharing]
        runs_late: whether custom Functions brought gradients in graph tasks inside of a backward, as far as seen; None
            before a gradient has come.
        customs: those Functions that may. [Note: late gradients]
        listing: of those for which flat parameters stand at rest.
    """

    def __init__(self, kinds: int, flat_refs: Iterable[ParamRef]) -> None:
        self.hooked: list[dict[int, hooks.Registry]] = [{} for _ in range(kinds)]
        self.unhooked_as_of: dict[int, tuple[int, int]] = {}
        self.before_first: set[int] = set()
        self.single_use: bool | None = None
        self.runs_late: bool | None = None
        self.customs = hooks.CustomFunctions()
        self.listing = Listing(flat_refs)


class ForwardCall:
    """One forward of a unit: a name for what its backward still has to do.

    The hooks of its outputs hold it; those of its inputs hold it weakly ([Note: arrivals]).

    Attributes:
        watch: until its forward is over: what watches its inputs, if several.
        began: when, in ticks of the record's clock; None where that means nothing.
        finished_in_task: the graph task in which it was over last. An output that is reached later is what it was
            given.
        outlasts: it may go on when the gradients of its inputs are there: those of leaves come before those of outputs
            that were not computed from them.
    """

    __slots__ = ("__weakref__", "began", "finished_in_task", "outlasts", "watch")

    def __init__(self, began: int | None) -> None:
        self.began = began
        self.watch: hooks.MultiGradHook | None = None
        self.finished_in_task: int | None = None
        self.outlasts = False

    def let_go(self, outputs: Sequence[torch.Tensor]) -> tuple[ForwardCall | None, list[hooks.MultiGradHook | None]]:
        """The call, unless nothing will show its end, and for each output its `watch`, if hooks of that may hold it: of
        what was there before an input they may not. The graph would hold itself, and no collector sees that circle."""
        watch, self.watch = self.watch, None
        held = [watch if watch is not None and watch.precedes(each) else None for each in outputs]
        return self if any(held) else None, held


class UnitBackward:
    """How far one unit's backward has come; a new one begins where the last has ended.

    Attributes:
        keep_unsharded: its end cannot be observed, so the unit stays unsharded until the whole backward has ended.
        open_calls: calls whose backward has begun and has not reached their inputs: something in it may still read the
            parameters.
        completed: every gradient that is awaited has arrived.
        finished: it is over with the first call, and so with all.
        late_gradients: how many gradients come again, of a segment recomputed in a graph task of its own or after one.
        task: the graph task in which gradients are awaited.
        arrived_in_inner_tasks: leaves whose gradients only tasks inside that one brought, as (kind, index).
        ends_unseen: the nodes where calls began that were given nothing that gets a gradient, which would show the end.
    """

    __slots__ = (
        "arrived_in_inner_tasks",
        "completed",
        "ends_unseen",
        "finished",
        "keep_unsharded",
        "late_gradients",
        "open_calls",
        "task",
    )

    def __init__(self, *, keep_unsharded: bool = False) -> None:
        self.keep_unsharded = keep_unsharded
        self.open_calls: set[ForwardCall] = set()
        self.completed = False
        self.finished = False
        self.ends_unseen: list[Any] = []
        self.late_gradients = 0
        self.task = -1
        self.arrived_in_inner_tasks: set[tuple[int, int]] = set()

    def runs_again(self, customs: hooks.CustomFunctions) -> bool:
        """Whether nothing shows the end of the unit's part, and this backward comes to some of `customs`: reentrant
        checkpoints, maybe, that run parts of the unit again. What they bring after its reduction would need another,
        which other ranks lack."""
        if not self.ends_unseen:
            return False
        return _torch.graph_task() != self.task or customs.are_to_come()  # one that runs may bring more

    def forget_graph(self) -> None:
        """The backward has failed: hold nothing of its graph."""
        self.ends_unseen.clear()
