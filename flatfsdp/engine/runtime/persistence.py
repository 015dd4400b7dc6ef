"""Flat parameters that stay unsharded where a feature wants them, gathered once. [Note: persistent parameters]"""

from __future__ import annotations

from ..flat.sources import DEVICE, HOST, HostCache
from ..flat.states import GATHERING, SHARDED, UNSHARDED
from ..flat.views import SHOWS_SHARD
from .unit import Unit


def fetch(unit: Unit, kind: int) -> None:
    """Gather a flat parameter of `unit` to where it stays. Collective over the shard axis.

    Precondition: its leaves show the shard.
    """
    handle, resources = unit.handles[kind], unit.resources
    if handle.state is SHARDED:  # it is not where a user has asked for the unit, or it stayed after a backward
        source = unit.source_of(handle)
        if resources.limiter.held:
            resources.limiter.make_room(handle.buffer(source.dtype), ahead=False)
        handle.launch_unshard(source, resources.streams.unshard)
        if source.is_local:
            resources.limiter.record_upload()
    if handle.state is GATHERING:
        handle.wait_unshard()
    unit.record_event("keep")
    if handle.persistence is HOST:
        handle.drop_kept_source()
        cache = HostCache(handle.unsharded, tracker=handle.tracker)
        handle.keep(cache)
        resources.free(handle)
        cache.versions = handle.writes.all


def evict(unit: Unit, kind: int) -> None:
    """Free what stays of a flat parameter, at once unless a backward is to read it: then it does not stay any more."""
    handle, views = unit.handles[kind], unit.views[kind]
    if handle.kept_source is not None and not handle.kept_source.as_of_forward:
        handle.drop_kept_source()
    if handle.persistence is DEVICE and handle.state is UNSHARDED:
        if views.mode is SHOWS_SHARD:
            unit.resources.free(handle)
        else:
            handle.persistence = None


def evict_all(unit: Unit) -> None:
    """Free what stays of `unit`; the next forward gathers it."""
    for kind in range(len(unit.handles)):
        evict(unit, kind)
