"""torch's collectives over one group: the transport for backends without a more specific one.

[Note: reduction] Reductions are SUM; the caller scales (`config.precision.gradient_scaling`). Inputs are complete when
an operation is issued. On an accelerator, the caller has ordered the stream after the kernels that produce them.

[Note: lists] `all_gather_coalesced` and `reduce_scatter_coalesced` communicate a list of tensors as one: those of
several small units, or the segments of one. Here each tensor is a collective of its own. The transports that models are
given need fewer: through shared memory, a list is one exchange regardless of the number of tensors; NCCL coalesces
several operations into one; otherwise small tensors are staged together. [Note: staging]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from ..base import _torch
from ..base.wait_limits import blocked
from ..device.memory import MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, Work
from .axes import Axis
from .comm_stats import CommStats

# All backends support these dtypes. Gathers of other dtypes move bytes.
_KNOWN_TO_ALL = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class ProcessGroupTransport:
    """torch's flat collectives over one group, on one device.

    Attributes:
        casts_shards: whether `all_gather_base` takes a shard of another dtype and device than the output.
        trims: whether `trim` does anything.
    """

    casts_shards = trims = False

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        self.group = group
        self.device = device
        self.comm_stats = comm_stats
        self.tracker = tracker

    @cached_property
    def _beside(self) -> _torch.FlatCollectives:
        return _torch.FlatCollectives(self.group.process_group, beside=True)

    @cached_property
    def in_order(self) -> _torch.FlatCollectives:
        return _torch.FlatCollectives(self.group.process_group, beside=False)

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `output` (world * n elements) with every rank's `shard` (n elements) in rank order.

        Both 1-D and of one dtype, which may be any. `shard` may be this rank's slot of `output` (in place). Collective
        over the group.
        """
        stats, nbytes = self.comm_stats, output.nbytes
        stats.issued += 1  # as `log`, without its call
        stats.counts["all_gather"] += 1
        stats.bytes["all_gather"] += nbytes
        if output.dtype not in _KNOWN_TO_ALL:
            output, shard = as_bytes(output), as_bytes(shard)
        if stream.is_callers and output.numel():  # inlined from `_issue`, to save calls per unit and step
            return PendingWork(work=self._beside.gather(output, shard), keep=(output, shard))
        return self._issue(stream, lambda flat: flat.gather(output, shard), output, shard)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `full` (world * n elements) over ranks and leave this rank's n elements in `output`. Collective."""
        stats, nbytes = self.comm_stats, full.nbytes
        stats.issued += 1
        stats.counts["reduce_scatter"] += 1
        stats.bytes["reduce_scatter"] += nbytes
        if full.is_complex():
            output, full = real(output), real(full)
        if stream.is_callers and full.numel():
            return PendingWork(work=self._beside.reduce_scatter(output, full), keep=(output, full))
        return self._issue(stream, lambda flat: flat.reduce_scatter(output, full), full, output)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `tensor` over ranks in place. Collective."""
        self.comm_stats.log("all_reduce", tensor.nbytes)
        summed = real(tensor) if tensor.is_complex() else tensor
        return self._issue(stream, lambda flat: flat.all_reduce([summed]), summed)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of several outputs (of one dtype). Collective over the group.

        Shards may have other dtypes and devices: they are cast first, into their slots of the outputs. [Note: lists]
        """
        rank, pairs = self.group.rank, []
        for output, shard in zip(outputs, shards, strict=True):
            if (shard.dtype, shard.device) != (output.dtype, output.device):
                slot = output.narrow(0, rank * shard.numel(), shard.numel())
                with stream.running():
                    copy([slot], [shard])
                shard = slot
            pairs.append((output, shard))
        return all_of([self.all_gather_base(*pair, stream) for pair in pairs])

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors (of one dtype). Collective over the group.

        `output` has room for the concatenated results. The stream is ordered after the kernels that produce `fulls`.
        [Note: lists]
        """
        results = output.split([full.numel() // self.group.size for full in fulls])
        return all_of([self.reduce_scatter_base(*pair, stream) for pair in zip(results, fulls, strict=True)])

    @property
    def settings(self) -> dict[str, str]:
        """The settings of this process that must be the same on all ranks."""
        return {}

    def trim(self) -> None:
        """Release memory that only collectives use, because none follows for a while. Not collective."""

    def _issue(
        self, stream: Stream, start: Callable[[_torch.FlatCollectives], Work | None], *keep: torch.Tensor
    ) -> PendingWork:
        """The work that `start` issues through the collectives passed to it; these use the tensors `keep`."""
        if keep[0].numel() == 0:
            return DONE  # on every rank: all ranks have the same sizes
        if stream.is_callers:
            return PendingWork(work=start(self._beside), keep=keep)
        with stream.running():
            # Runs on that stream itself: an event recorded after it marks the end of the work.
            wait_for(start(self.in_order))
            return stream.communicating(*keep)


class Several:
    """Several works, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each, in the order of issue."""
        for work in self._works:
            work.wait()


def all_of(works: Sequence[PendingWork]) -> PendingWork:
    return PendingWork(work=Several(works))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, viewed as bytes if some backend does not support its dtype."""
    return tensor if tensor.dtype in _KNOWN_TO_ALL else tensor.view(torch.uint8)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as real numbers: the last dimension of a complex tensor doubles."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor


def wait_for(work: Work | None) -> None:
    """Block the host until `work` is complete, or order the current stream after it, depending on the backend."""
    if work is not None:
        with blocked():
            work.wait()  # on backends with stream-ordered works, only orders the stream


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Fill each target from its source, which does not overlap it and may have another dtype or device."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=is_ordered(targets[0]))
    elif targets:
        _torch.foreach_copy_(targets, sources, non_blocking=is_ordered(targets[0]))


def copy_unless_there(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy`, but skip sources that are their targets (same address)."""
    others = [pair for pair in zip(targets, sources, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
    copy([target for target, _ in others], [source for _, source in others])


def is_ordered(target: torch.Tensor) -> bool:
    """Whether later reads of `target` are ordered after a non-blocking copy to it."""
    return target.device.type != "cpu"
