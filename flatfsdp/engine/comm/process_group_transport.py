"""torch's collectives over one group, which is how tensors travel where nothing better is known of the backend.

[Note: reduction] Reductions are SUM; scaling is the caller's (`config.precision.gradient_scaling`). Inputs are complete
when an operation is issued. On an accelerator the caller has made the stream follow what produced them.

[Note: lists] `all_gather_coalesced` and `reduce_scatter_coalesced` take lists of tensors that travel as one: those of
several small units, or the segments of one. Through shared memory, and by messages, that is one exchange whatever their
number; NCCL makes one operation of several; elsewhere each is a collective. Where memory is not shared small ones are
staged together. [Note: rows] [Note: staging]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from ..base import _torch
from ..base.wait_limits import blocked
from ..device.fake_tensors import is_memoryless
from ..device.memory import MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, Work
from . import gloo
from .axes import Axis
from .comm_stats import CommStats
from .tensor_lists import TensorLists

# Backends know few dtypes; in a gather bytes only move. These stay as they are: all backends know them.
_KNOWN_TO_ALL = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class ProcessGroupTransport:
    """torch's flat collectives over one group, on one device.

    Attributes:
        casts_shards: whether a shard that is gathered alone may have another dtype than the output, and be elsewhere.
        rests: whether `rest` does anything.
        fewest_staged: so many small tensors of a list, at least, travel through a staging buffer.
        lists: those that travelled.
    """

    casts_shards = rests = False
    fewest_staged = 2

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        self.group = group
        self.device = device
        self.comm_stats = comm_stats
        self.tracker = tracker
        self.lists = TensorLists(group, tracker, fewest=self.fewest_staged)

    @cached_property
    def _beside(self) -> _torch.FlatCollectives:
        return _torch.FlatCollectives(self.group.process_group, beside=True)

    @cached_property
    def _in_order(self) -> _torch.FlatCollectives:
        return _torch.FlatCollectives(self.group.process_group, beside=False)

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `output` (world * n elements) with every rank's `shard` (n elements) in rank order.

        Both 1-D and of one dtype, which may be any. `shard` may be this rank's slot of `output` (in place). Collective
        over the group.
        """
        self.comm_stats.log("all_gather", output.nbytes)
        if output.dtype not in _KNOWN_TO_ALL:
            output, shard = as_bytes(output), as_bytes(shard)
        if stream.is_callers and output.numel():  # as `_issue`, which a unit need not call three times a step
            return PendingWork(work=self._beside.gather(output, shard), keep=(output, shard))
        return self._issue(stream, lambda flat: flat.gather(output, shard), output, shard)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `full` (world * n elements) over ranks and leave this rank's n elements in `output`. Collective."""
        self.comm_stats.log("reduce_scatter", full.nbytes)
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

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        """Send each other rank, in rank order, its row of `sent`, shape (world - 1, n), and receive theirs into
        `arrived`; both uint8. Collective, and counted by who issues it."""
        splits = [1] * self.group.size
        splits[self.group.rank] = 0
        if is_memoryless():
            return DONE
        with stream.running():
            work: Work = dist.all_to_all_single(
                arrived, sent, splits, splits, group=self.group.process_group, async_op=True
            )
            if stream.is_callers:
                return PendingWork(work=work, keep=(arrived, sent))
            wait_for(work)
            return PendingWork(device=self.device, event=stream.mark(), keep=(arrived, sent))

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of several outputs (of one dtype) as one. Collective over the group.

        Shards may be of other dtypes and elsewhere: they are cast on their way. [Note: lists]
        """
        listed = self.lists.of(outputs)
        if not listed.numel:
            return DONE
        if stream.is_callers:
            gathered = listed.to_gather(shards)
        else:
            with stream.running():
                gathered = listed.to_gather(shards)
        self.comm_stats.staged += listed.staged
        arriving = self._gather_each(*gathered, stream)
        return self._followed(arriving, stream, listed.finish_gather, *outputs) if listed.staged else arriving

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors (of one dtype) as one. Collective over the group.

        `output` has room for the results, one behind the other. The stream has followed what produced `fulls`.
        [Note: lists]
        """
        listed = self.lists.of(fulls)
        if not listed.numel:
            return DONE
        if stream.is_callers:
            reduced = listed.to_reduce(output)
        else:
            with stream.running():
                reduced = listed.to_reduce(output)
        self.comm_stats.staged += listed.staged
        arriving = self._reduce_each(*reduced, stream)
        if not listed.staged:
            return arriving
        return self._followed(arriving, stream, lambda: listed.finish_reduction(output), output)

    def _gather_each(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of each."""
        if len(outputs) == 1:
            return self.all_gather_base(outputs[0], shards[0], stream)
        return _all_of([self.all_gather_base(*each, stream) for each in zip(outputs, shards, strict=True)])

    def _reduce_each(
        self, outputs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of each."""
        if len(outputs) == 1:
            return self.reduce_scatter_base(outputs[0], fulls[0], stream)
        return _all_of([self.reduce_scatter_base(*each, stream) for each in zip(outputs, fulls, strict=True)])

    def rest(self) -> None:
        """Nothing travels for a while: let go of memory that serves that alone. Not collective."""

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite `tensor` with that of group rank `source`, blocking. Collective."""
        self.comm_stats.log("broadcast", tensor.nbytes)
        if tensor.numel():
            with blocked():
                dist.broadcast(as_bytes(tensor.view(-1)), self.group.ranks[source], group=self.group.process_group)

    def send_now(self, tensor: torch.Tensor, target: int) -> None:
        """Send `tensor` to group rank `target`, which receives it now, blocking."""
        self.comm_stats.messages += 1
        if tensor.numel():
            sending = self.group.process_group.send([as_bytes(self._reachable(tensor))], target, gloo.PARCEL_TAG)
            with blocked():
                sending.wait()

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with what group rank `source` sends now, blocking."""
        self.comm_stats.messages += 1
        if tensor.numel():
            landing = self._reachable(tensor)
            with blocked():
                self.group.process_group.recv([as_bytes(landing)], source, gloo.PARCEL_TAG).wait()
            if landing is not tensor:
                tensor.copy_(landing)

    def _reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        # gloo sends no message from an accelerator's memory.
        return tensor.cpu() if self.group.backend == "gloo" else tensor

    def all_reduce_now(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        """Sum (or maximum) of `tensor` over ranks in place, blocking; for scalars such as norms. Collective."""
        self.comm_stats.log("scalar", tensor.nbytes)
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        with blocked():
            dist.all_reduce(tensor, op=operation, group=self.group.process_group)
        return tensor

    def gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor` stacked along a new first dimension, blocking; for small things. Collective."""
        output = tensor.new_empty((self.group.size, *tensor.shape))
        self.comm_stats.log("scalar", output.nbytes)
        wait_for(self._in_order.gather(output.view(-1), tensor.reshape(-1).contiguous()))
        return output

    def _issue(
        self, stream: Stream, start: Callable[[_torch.FlatCollectives], Work | None], *keep: torch.Tensor
    ) -> PendingWork:
        """What `start` starts with the collectives that it is given, which use the tensors `keep`."""
        if keep[0].numel() == 0:
            return DONE  # equal on every rank: sizes of a collective are agreed
        if stream.is_callers:
            return PendingWork(work=start(self._beside), keep=keep)
        with stream.running():
            # Runs on that stream itself: the event behind it is the end of the work.
            wait_for(start(self._in_order))
            return PendingWork(device=self.device, event=stream.mark(), keep=keep)

    def _followed(
        self, arriving: PendingWork, stream: Stream, finish: Callable[[], None], *keep: torch.Tensor
    ) -> PendingWork:
        """What arrives, and then `finish`: where the stream is the caller's, when it is waited for."""
        if stream.is_callers:
            return arriving.followed_by(finish, *keep)
        with stream.running():
            arriving.wait()
            finish()
            return PendingWork(device=self.device, event=stream.mark(), keep=keep)


class Several:
    """Work that is over when each of some is."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each, in the order in which they were issued."""
        for work in self._works:
            work.wait()


def _all_of(works: Sequence[PendingWork]) -> PendingWork:
    return PendingWork(work=Several(works))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, in a dtype that every backend moves."""
    return tensor if tensor.dtype in _KNOWN_TO_ALL else tensor.view(torch.uint8)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as real numbers: in its last dimension twice as many of a complex one."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor


def wait_for(work: Work | None) -> None:
    """Keep the host until `work` is over, or order the current stream after it, whatever the backend does."""
    if work is not None:
        with blocked():
            work.wait()  # where backends have work that orders a stream, it does so only here
