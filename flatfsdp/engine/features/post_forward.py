"""Parameters that stay sharded over fewer ranks between forward and backward. [Note: post-forward shards]"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.events import Observer
from ..comm.process_groups import post_forward_axis
from ..runtime.resources import Resources
from ..runtime.unit import Unit


class PostForwardShards(Observer):
    """Gives the units of one model, where a user chose so, the axis over which they stay sharded."""

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
            count, device = unit.options.schedule.post_forward_ranks, self._resources.device.device
            found = {}
            for handle in unit.handles if count is not None else ():
                assert count is not None
                axis = unit.axes.of(handle).shard
                if axis.size > count:  # else it would be kept as it is sharded
                    axis = post_forward_axis(axis, count, device)
                    found[handle] = self._resources.transport(axis, "neighbors")
            if found != unit.kept.post_forward:
                unit.drop_post_forward_shards()
                unit.kept.post_forward = found
