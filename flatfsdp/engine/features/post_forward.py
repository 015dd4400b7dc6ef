"""Parameters that stay sharded over fewer ranks between forward and backward. [Note: post-forward shards]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..agreement.process_groups import post_forward_axis
from ..base.events import Observer
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.sources import PostForwardShard
from ..flat.states import UNSHARDED
from ..runtime.model import Model
from ..runtime.resources import Resources
from ..runtime.unit import Unit


@dataclass(frozen=True)
class KeepShards:
    """Keeps post-forward shards of a unit that a forward is about to free. `transports`: of the post-forward axes."""

    transports: Mapping[FlatParamHandle, Transport]

    def __call__(self, unit: Unit) -> None:
        for handle, neighbors in self.transports.items():
            if handle.state is UNSHARDED and handle.persistence is None:
                handle.keep(PostForwardShard(handle.unsharded, neighbors, tracker=handle.tracker))
        unit.record_event("post_forward_shard")


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
                if 0 < count < (axis := unit.axes.of(handle).shard).size  # else both shards would be the same
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
