"""From shards to full tensors and back: the single way to assemble full parameters, and states of their shape.

[Note: consolidation] A tensor laid out like a shard (the shard itself, its gradient, a moment of an optimizer) is
gathered into memory of its own, one flat tensor at a time, so that at most one unit is unsharded for it at any time
(`consolidated`). The way back needs no communication if a rank has the full tensor (`store`), and sends each rank its
piece if only the first one has it (`scatter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..comm.axes import ProcessGroups
from ..flat.layout_views import full_views, pieces_of, segments_of
from ..layout.layout import FlatLayout
from ..runtime.unit import Unit
from ..transports.blocking import broadcast, scatter_now
from .owned_interval import OwnedInterval
from .parts import axes_beside, cut, sent_by_first


def gather_shard(unit: Unit, kind: int, shard: torch.Tensor | None = None) -> torch.Tensor:
    """The full form of a tensor laid out like the shard of one handle, by default of the shard itself, on the compute
    device, in new memory of (padded_numel,) elements of its dtype. Collective over the shard axis."""
    handle = unit.handles[kind]
    transport, stream = unit.axes.transports_of(handle).gather, unit.resources.streams.unshard
    own, layout = (handle.shard if shard is None else shard).detach().to(handle.device), handle.layout
    make = torch.empty if len(layout.segments) == 1 else torch.zeros  # no rank sends the gaps between segments
    flat = make(layout.padded_numel, dtype=own.dtype, device=handle.device)
    segments, pieces = segments_of(flat, layout), pieces_of(own, layout)
    stream.follow_compute()  # which has just written the tensors to send
    if len(segments) == 1:
        transport.all_gather_base(segments[0], pieces[0], stream).wait()
    else:
        transport.all_gather_coalesced(segments, pieces, stream).wait()
    return flat


@contextmanager
def consolidated(unit: Unit, kind: int, shard: torch.Tensor | None = None) -> Iterator[list[torch.Tensor]]:
    """The parameters of one handle as full N-D views of memory that is freed at the end of the context; of a tensor
    laid out like its shard, if one is given. Collective over the shard axis.

    Precondition: the unit's model has been initialized (`initialize`), the shards are not being written to.
    """
    handle = unit.handles[kind]
    with torch.no_grad():
        flat = gather_shard(unit, kind, shard)
    free = handle.tracker.allocate("consolidated", flat.nbytes)
    unit.record_event("consolidate")
    try:
        yield full_views(flat, handle.layout)
    finally:
        free()


def is_first(groups: ProcessGroups) -> bool:
    """Whether this rank is the first of the shard and replicate axes: the one with values that only one rank has."""
    return groups.shard.rank == 0 and (groups.replicate is None or groups.replicate.rank == 0)


def store(layout: FlatLayout, rank: int, shard: torch.Tensor, index: int, unsharded: torch.Tensor) -> None:
    """Copy the elements that `rank` owns of parameter `index` from `unsharded` (its shape, any strides, dtype, device)
    into `shard` (1-D, shard_numel elements). No communication.

    An `OwnedInterval` is accepted if it is the interval that the rank owns.
    """
    spec = layout.params[index]
    span = layout.span_in_shard(index, rank)
    if span.is_empty:
        return
    target = OwnedInterval(shard[span.slice], spec, layout.span_in_param(index, rank))
    with torch.no_grad():
        target.copy_(unsharded)


def scatter(
    unit: Unit, kind: int, unsharded: Sequence[torch.Tensor | None] | None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Each rank's shard of the first rank's full tensors. Collective over the shard and the replicate axis.

    Args:
        unsharded: on the first rank ([Note: consolidation]) the parameters, N-D, on any device, as they are stored
            here; None stands for zeros. Ignored on other ranks.
        dtype: of the result; None for the master dtype.

    Returns:
        A 1-D tensor of shard_numel elements on the compute device; padding is zero.

    The first rank holds at most one shard in addition to `unsharded`, others hold their own.
    """
    handle = unit.handles[kind]
    layout, transports = handle.layout, unit.axes.transports_of(handle)
    axis, replicate = transports.gather, transports.replicate
    values = (unsharded or ()) if is_first(unit.axes.of(handle)) else ()

    def assemble(rank: int) -> torch.Tensor:
        shard = torch.zeros(layout.shard_numel, dtype=dtype or handle.precision.master, device=handle.device)
        for index, value in enumerate(values):
            if value is not None:
                store(layout, rank, shard, index, value)
        return shard

    with torch.no_grad():
        own = assemble(0)
        if replicate is None or replicate.group.rank == 0:
            scatter_now(axis, own, assemble)
        if replicate is not None:
            broadcast(replicate, own)
    return own


def scatter_from_first(
    unit: Unit,
    kind: int,
    wholes: Mapping[int, torch.Tensor | None],
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`scatter` of full tensors that the first of all ranks has, by their parameters' indices; other ranks have None
    for the same indices. Also collective over the axes of parts. [Note: parts of wholes]"""
    handle = unit.handles[kind]
    params, sent, groups = handle.layout.params, dtype or handle.precision.master, unit.axes.of(handle)
    unsharded: list[torch.Tensor | None] = [None] * len(params)
    axes = axes_beside(unit, groups) if is_first(groups) else []
    with torch.no_grad():
        for index, whole in wholes.items():
            if axes:
                whole = sent_by_first(axes, whole, params[index].whole.shape, sent)
            unsharded[index] = None if whole is None else cut(whole, params[index])
    return scatter(unit, kind, unsharded, dtype=dtype)
