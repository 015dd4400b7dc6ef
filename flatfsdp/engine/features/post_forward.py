"""Parameters that stay sharded over fewer ranks between forward and backward.

[Note: post-forward shards] With `reshard_after_forward=n` the unsharded parameter is split again after a forward, into
n pieces that n consecutive ranks of the shard axis, the *post-forward axis*, keep in the compute dtype. The backward's
all-gather then stays on that axis, inside one host for example. It costs a copy of the piece, since the unsharded
buffer can neither be given back in part nor stay another ([Note: one storage]); the gather itself reads the piece in
place. Only a backward reads such pieces: they hold the values that the forward computed with, while a forward computes
with the values of the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...errors import ConfigValueError
from ..agreement.process_groups import post_forward_axis
from ..base import _torch
from ..base.events import Observer
from ..comm.transport import Transport
from ..device.memory import FlatBuffer, MemoryTracker
from ..flat.flat_param import FlatParamHandle
from ..flat.layout_views import own_pieces_of, pieces_of
from ..flat.sources import KeptSource, UnshardedParam
from ..flat.states import UNSHARDED
from ..layout.layout import FlatLayout
from ..runtime.model import Model
from ..runtime.resources import Resources
from ..runtime.unit import Unit


def layout_over(layout: FlatLayout, world: int) -> FlatLayout:
    """The flat space of `layout`, including padding, split over `world` ranks, each of which has several consecutive
    pieces of each segment.

    Raises:
        ConfigValueError: `world` does not divide that of the layout.
    """
    if world < 1 or layout.world % world:
        raise ConfigValueError(f"expected a divisor of the {layout.world} shards of a layout, found {world}")
    return replace(layout, world=world, shard_numel=layout.shard_numel * layout.world // world)


class PostForwardShard(KeptSource):
    """One rank's piece of the unsharded parameter left by a forward. [Note: post-forward shards]

    Attributes:
        dtype: the compute dtype of that forward.
    """

    as_of_forward = True

    def __init__(
        self, unsharded: UnshardedParam, transport: Transport, over: FlatLayout, *, tracker: MemoryTracker
    ) -> None:
        """Copy this rank's piece of `unsharded`, whose layout is `over` the ranks of `transport`."""
        group, flat = transport.group, unsharded.flat
        self.dtype = unsharded.dtype
        self._memory = FlatBuffer(
            over.shard_numel, flat.dtype, flat.device, tracker=tracker, category="post_forward_shard"
        )
        self._memory.allocate()
        # A gather comes after the last use of `unsharded`, hence after the copy. [Note: limiter]
        self.transport, self.pieces = transport, pieces_of(self._memory.tensor, over)
        for piece, own in zip(self.pieces, own_pieces_of(flat, over, group.rank), strict=True):
            piece.copy_(own)

    def serves(self, dtype: torch.dtype) -> bool:
        """True in a backward, which computes in the dtype of its forward."""
        return _torch.in_backward()

    def free(self) -> None:
        self._memory.free()


@dataclass(frozen=True)
class KeepShards:
    """Keeps post-forward shards of a unit that a forward is about to free. `transports`: of the post-forward axes."""

    transports: Mapping[FlatParamHandle, Transport]
    _layouts: dict[FlatParamHandle, tuple[FlatLayout, FlatLayout]] = field(default_factory=dict, compare=False)

    def __call__(self, unit: Unit) -> None:
        for handle, neighbors in self.transports.items():
            if handle.state is UNSHARDED and handle.persistence is None:
                over = self._over(handle, neighbors.group.size)
                handle.keep(PostForwardShard(handle.unsharded, neighbors, over, tracker=handle.tracker))
        unit.record_event("post_forward_shard")

    def _over(self, handle: FlatParamHandle, world: int) -> FlatLayout:
        """The layout of what was gathered, over `world` ranks. It is not the handle's if that is opaque bytes."""
        whole, over = self._layouts.get(handle, (None, None))
        if over is None or whole is not handle.unsharded.layout:
            whole = handle.unsharded.layout
            over = layout_over(whole, world)
            self._layouts[handle] = whole, over
        return over


class PostForwardShards(Observer):
    """The post-forward shards of one model, for units with the option `post_forward_ranks`."""

    def __init__(self, units: Sequence[Unit], resources: Resources) -> None:
        self._units = units
        self._resources = resources
        self._due = True

    def options_changed(self) -> None:
        """An option of a unit was changed."""
        self._due = True

    def first_gather_agreed(self) -> None:
        """Create the axes: collective over the ranks of an axis if its group is created, and so only when all ranks are
        known to have the same options."""
        if not self._due:
            return
        self._due = False
        for unit in self._units:
            count, device = unit.options.schedule.post_forward_ranks or 0, self._resources.device.device
            found = {
                handle: self._resources.transport(post_forward_axis(axis, count, device), "neighbors")
                for handle in unit.handles
                if 0 < count < (size := (axis := unit.axes.of(handle).shard).size)  # else both shards would be the same
                and size % count == 0  # it was for the ranks of the plan; the model has moved to others
            }
            retain = KeepShards(found) if found else None
            if retain != unit.kept.retain:
                unit.drop_retained()
                unit.kept.retain = retain


def attach_post_forward_shards(model: Model) -> None:
    """Attach them to `model` if a unit has the option. Persistent parameters may be gathered over their axes, so they
    come first."""
    if model.observers.find(PostForwardShards) is None and any(
        type(unit.options.schedule.reshard_after_forward) is int for unit in model.units
    ):
        model.observers.set(PostForwardShards(model.units, model.resources), *model.observers.all)
