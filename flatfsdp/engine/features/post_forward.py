"""Parameters that stay sharded over fewer ranks between forward and backward. [Note: post-forward shards]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.events import Observer
from ..comm.process_groups import post_forward_axis
from ..comm.transport import Transport
from ..flat.flat_param import FlatParamHandle
from ..flat.sources import PostForwardShard
from ..flat.states import UNSHARDED
from ..runtime.resources import Resources
from ..runtime.unit import Unit


@dataclass(frozen=True)
class KeepShards:
    """Lets ranks keep what a forward is about to free of a unit, over the post-forward axes of its handles."""

    transports: Mapping[FlatParamHandle, Transport]

    def __call__(self, unit: Unit) -> None:
        for handle, neighbors in self.transports.items():
            if handle.state is UNSHARDED and handle.persistence is None:
                handle.keep(PostForwardShard(handle.unsharded, neighbors, tracker=handle.tracker))
        unit.record_event("post_forward_shard")


class PostForwardShards(Observer):
    """Lets units of one model, where a user chose so, stay sharded over post-forward axes."""

    def __init__(self, units: Sequence[Unit], resources: Resources) -> None:
        self._units = units
        self._resources = resources
        self._due = True

    def options_changed(self) -> None:
        """What users chose for a unit was changed."""
        self._due = True

    def first_gather_agreed(self) -> None:
        """Collective over the ranks of an axis where its group is made, and so not before all ranks are known to have
        chosen alike."""
        if not self._due:
            return
        self._due = False
        for unit in self._units:
            count, device = unit.options.schedule.post_forward_ranks or 0, self._resources.device.device
            found = {
                handle: self._resources.transport(post_forward_axis(axis, count, device), "neighbors")
                for handle in unit.handles
                if 0 < count < (axis := unit.axes.of(handle).shard).size  # else it would be kept as it is sharded
            }
            retain = KeepShards(found) if found else None
            if retain != unit.kept.retain:
                unit.drop_retained()
                unit.kept.retain = retain
