"""All collectives on tensors: one gather, one reduce-scatter, one all-reduce, one broadcast, each handed back as
`PendingWork`.

[Note: transports] How a collective is carried out depends on the backend and stands here only. `ProcessGroupTransport`
takes torch's flat collectives. `DeterministicGloo` serves gloo, whose reductions sum in an order of their own: every
rank sends each peer its piece and sums what it receives in rank order, so that worlds of any size are reproducible, bit
for bit, however late a rank is. Where much is gathered among a few ranks on one host, that goes by such messages, too
(`gloo.py`). What is on the CPU passes through memory instead where ranks share some (`shared_memory/`). `SingleRank`
serves an axis of one rank.

[Note: reduction] Reductions are SUM; scaling is the caller's (`config.precision.gradient_scaling`). Inputs are complete
when an operation is issued. On an accelerator the caller has made the stream follow what produced them.

[Note: staging] Several small tensors travel as one in a *staging buffer*, which has a row for each rank, and in the row
a piece of each tensor. Copies into it and out of it are counted apart (`CommStats.staged`). A backend that makes one of
several operations (`CoalescingNccl`) needs none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InternalError
from ..base import _torch
from ..base.overrides import Override
from ..base.wait_limits import blocked
from ..device.fake_tensors import is_memoryless
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, Work, accelerator
from . import gloo
from .axes import Axis
from .comm_stats import CommStats
from .shared_memory.collectives import SharedMemoryExchange, SimulatedSharedMemory
from .shared_memory.groups import of_group, would_share

# Backends know few dtypes; in a gather bytes only move. These stay as they are: all backends know them.
_KNOWN_TO_ALL = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class StagingBuffer:
    """A staging buffer for certain tensors, and its views, which take longer to make than to fill. [Note: staging]

    Attributes:
        memory: shape (world * n,): a row of n elements for each rank.
        own: shape (n,): this rank's row; `own_pieces`: cut, one piece for each tensor.
        pieces, wholes: for each tensor, shape (world, numel / world): what the rows have of it; the tensor itself.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: Axis, tracker: MemoryTracker) -> None:
        first = tensors[0]
        self._tensors = list(tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        self.memory = FlatBuffer(numel, first.dtype, first.device, tracker=tracker, kind="staging")
        self.memory.allocate()
        sizes = [tensor.numel() // group.size for tensor in tensors]
        rows = self.memory.tensor.view(group.size, -1)
        self.own = rows[group.rank]
        self.own_pieces = list(self.own.split(sizes))
        self.pieces = list(rows.split(sizes, dim=1))
        self.wholes = [tensor.view(group.size, -1) for tensor in tensors]

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these very `tensors`."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))


class ProcessGroupTransport:
    """torch's flat collectives over one group, on one device.

    Attributes:
        casts_shards: whether a shard that is gathered may have another dtype than the output, and be elsewhere.
    """

    casts_shards = False

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        self.group = group
        self.device = device
        self.comm_stats = comm_stats
        self.tracker = tracker
        self._stagings: dict[int, StagingBuffer] = {}  # by id of the first of their tensors

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
            output, shard = _as_bytes(output), _as_bytes(shard)
        if stream.is_callers and output.numel():  # as `_issue`, which a unit need not call three times a step
            return PendingWork(work=self._beside.gather(output, shard), keep=(output, shard))
        return self._issue(stream, lambda flat: flat.gather(output, shard), output, shard)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `full` (world * n elements) over ranks and leave this rank's n elements in `output`. Collective."""
        self.comm_stats.log("reduce_scatter", full.nbytes)
        if full.is_complex():
            output, full = torch.view_as_real(output), torch.view_as_real(full)
        if stream.is_callers and full.numel():
            return PendingWork(work=self._beside.reduce_scatter(output, full), keep=(output, full))
        return self._issue(stream, lambda flat: flat.reduce_scatter(output, full), full, output)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `tensor` over ranks in place. Collective."""
        self.comm_stats.log("all_reduce", tensor.nbytes)
        summed = torch.view_as_real(tensor) if tensor.is_complex() else tensor
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
        """`all_gather_base` of several outputs (of one dtype) as one operation. Collective over the group.

        Shards may be of other dtypes and elsewhere: they are cast on their way. [Note: staging]
        """
        with stream.running():
            staging = self._stage(outputs)
            _torch.foreach_copy_(staging.own_pieces, list(shards), non_blocking=True)
        arriving = self.all_gather_base(staging.memory.tensor, staging.own, stream)

        def spread() -> None:
            _torch.foreach_copy_(staging.wholes, staging.pieces)
            staging.memory.free()

        if not self.device.has_streams:
            return PendingWork(work=arriving, keep=tuple(outputs), finish=spread)
        with stream.running():
            arriving.wait()
            spread()
            return PendingWork(device=self.device, event=stream.mark(), keep=tuple(outputs))

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors (of one dtype) as one operation. Collective over the group.

        `output` has room for the results, one behind the other. The stream has followed what produced `fulls`.
        [Note: staging]
        """
        with stream.running():
            staging = self._stage(fulls)
            _torch.foreach_copy_(staging.pieces, staging.wholes)
        arriving = self.reduce_scatter_base(output, staging.memory.tensor, stream)
        return PendingWork(work=arriving, keep=(output,), finish=staging.memory.free)

    def _stage(self, tensors: Sequence[torch.Tensor]) -> StagingBuffer:
        """A staging buffer for unsharded `tensors`, which has its memory until that is freed."""
        staging = self._stagings.get(id(tensors[0]))
        if staging is None or staging.memory.allocated or not staging.serves(tensors):
            staging = self._stagings[id(tensors[0])] = StagingBuffer(tensors, self.group, self.tracker)
        staging.memory.allocate()
        self.comm_stats.staged += staging.memory.tensor.nbytes
        return staging

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite `tensor` with that of group rank `source`, blocking. Collective."""
        self.comm_stats.log("broadcast", tensor.nbytes)
        if tensor.numel():
            with blocked():
                dist.broadcast(_as_bytes(tensor.view(-1)), self.group.ranks[source], group=self.group.process_group)

    def send_now(self, tensor: torch.Tensor, target: int) -> None:
        """Send `tensor` to group rank `target`, which receives it now, blocking."""
        self.comm_stats.messages += 1
        if tensor.numel():
            sending = self.group.process_group.send([_as_bytes(self._reachable(tensor))], target, gloo.PARCEL_TAG)
            with blocked():
                sending.wait()

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with what group rank `source` sends now, blocking."""
        self.comm_stats.messages += 1
        if tensor.numel():
            landing = self._reachable(tensor)
            with blocked():
                self.group.process_group.recv([_as_bytes(landing)], source, gloo.PARCEL_TAG).wait()
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


class DeterministicGloo(ProcessGroupTransport):
    """gloo: reductions sum in rank order, and a few ranks on one host exchange what is large pairwise. [Note:
    transports]"""

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        super().__init__(group, device, comm_stats=comm_stats, tracker=tracker)
        self._pairs = gloo.PairwiseExchange(group.process_group, tracker=tracker, comm_stats=comm_stats)
        all_to_all = gloo.SimulatedExchange if is_memoryless() else gloo.AllToAll
        self._all_to_all = all_to_all(group.process_group, tracker=tracker, comm_stats=comm_stats)

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        way = self._shared_memory(output) or (self._pairs if self._is_for_pairs(output) else None)
        if way is None:
            return super().all_gather_base(output, shard, stream)
        self.comm_stats.log("all_gather", output.nbytes)
        output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        return self._exchange(stream, lambda: way.gather(output, shard), output, shard)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        self.comm_stats.log("reduce_scatter", full.nbytes)
        way = self._shared_memory(full) or (self._pairs if self._is_for_pairs(full) else self._all_to_all)
        return self._exchange(stream, lambda: way.reduce_scatter(output, full), full, output)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        self.comm_stats.log("all_reduce", tensor.nbytes)
        way = self._shared_memory(tensor) or (self._pairs if self._is_for_pairs(tensor) else self._all_to_all)
        return self._exchange(stream, lambda: way.all_reduce(tensor), tensor)

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        way = self._shared_memory(sent)
        if way is None:
            return super().all_to_all(arrived, sent, stream)
        return self._exchange(stream, lambda: way.all_to_all(arrived, sent), sent)

    def _shared_memory(self, tensor: torch.Tensor) -> SharedMemoryExchange | None:
        return self._in_memory if tensor.device.type == "cpu" and tensor.numel() else None

    @cached_property
    def _in_memory(self) -> SharedMemoryExchange | None:
        group = self.group.process_group
        if is_memoryless():
            return (
                SimulatedSharedMemory(group, tracker=self.tracker, comm_stats=self.comm_stats)
                if would_share(group)
                else None
            )
        shared = of_group(group)
        if shared is None:
            return None
        return SharedMemoryExchange(shared, tracker=self.tracker, comm_stats=self.comm_stats)

    def _exchange(self, stream: Stream, start: Callable[[], PendingWork], *keep: torch.Tensor) -> PendingWork:
        if keep[0].numel() == 0 or stream.is_callers:
            return start() if keep[0].numel() else DONE
        with stream.running():
            start().wait()
            return PendingWork(device=self.device, event=stream.mark(), keep=keep)

    def _is_for_pairs(self, unsharded: torch.Tensor) -> bool:
        # gloo sends no message from an accelerator's memory.
        could = unsharded.nbytes >= gloo.SMALLEST and unsharded.device.type == "cpu"
        return could and gloo.is_near(self.group.process_group)


class CoalescingNccl(ProcessGroupTransport):
    """NCCL, which makes one operation of several on its own: nothing is staged. (Dry runs do not issue it: torch knows
    no such operation on tensors without memory.)"""

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        pairs = [(output, shard) for output, shard in zip(outputs, shards, strict=True) if output.numel()]
        outputs, shards = [output for output, _ in pairs], [shard for _, shard in pairs]
        with stream.running():
            slots = [output.narrow(0, self.group.rank * shard.numel(), shard.numel()) for output, shard in pairs]
            _torch.foreach_copy_(slots, shards, non_blocking=True)
        self.comm_stats.log("all_gather", sum(output.nbytes for output in outputs))
        unsharded, own = list(map(_as_bytes, outputs)), list(map(_as_bytes, slots))

        def start(flat: _torch.FlatCollectives) -> Work | None:
            return None if is_memoryless() else flat.gather_grouped(unsharded, own)

        return self._issue(stream, start, *unsharded)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        fulls = [full for full in fulls if full.numel()]
        sizes = [full.numel() // self.group.size for full in fulls]
        self.comm_stats.log("reduce_scatter", sum(full.nbytes for full in fulls))

        def start(flat: _torch.FlatCollectives) -> Work | None:
            return None if is_memoryless() else flat.reduce_scatter_grouped(list(output.split(sizes)), list(fulls))

        return self._issue(stream, start, output, *fulls)


class SingleRank(ProcessGroupTransport):
    """An axis of one rank: nothing travels, and nothing is counted."""

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        if output.data_ptr() != shard.data_ptr():
            with stream.running():
                output.copy_(shard)
        return PendingWork(device=self.device, event=stream.mark(), keep=(output, shard))

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        return self.all_gather_base(output, full, stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        with stream.running():
            torch.cat(list(fulls), out=output)
        return PendingWork(device=self.device, event=stream.mark(), keep=(output, *fulls))

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        return DONE

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        return

    def send_now(self, tensor: torch.Tensor, target: int) -> None:
        raise InternalError(f"a message to rank {target} of an axis of one rank")

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        raise InternalError(f"a message from rank {source} of an axis of one rank")

    def all_reduce_now(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        return tensor

    def gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


_BY_BACKEND: dict[str, type[ProcessGroupTransport]] = {"gloo": DeterministicGloo, "nccl": CoalescingNccl}

Transport = ProcessGroupTransport


_double: Override[Callable[[Transport], Transport] | None] = Override(None)
doubled = _double.being  # inside, a double is put in front of every transport that is made (a late one, for tests)


def transport(group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> Transport:
    """The transport for `group`: by backend and world size."""
    kind = SingleRank if group.process_group is None else _BY_BACKEND.get(group.served_as, ProcessGroupTransport)
    if kind is DeterministicGloo:
        gloo.wait_at_exit()
    made = kind(group, device, comm_stats=comm_stats, tracker=tracker)
    return _double.value(made) if _double.value is not None else made


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _KNOWN_TO_ALL else tensor.view(torch.uint8)


def wait_for(work: Work | None) -> None:
    """Keep the host until `work` is over, or order the current stream after it, whatever the backend does."""
    if work is not None:
        with blocked():
            work.wait()  # where backends have work that orders a stream, it does so only here


def is_initialized() -> bool:
    """Whether this process is a rank of a job."""
    return dist.is_initialized()


def agree_on_maximum(flags: dict[torch.device, torch.Tensor], process_group: Any) -> dict[torch.device, torch.Tensor]:
    """The maximum over `process_group` (None: the default group) of scalars that this rank holds per device.
    Collective.

    All scalars travel as one, on a device that the group's backend serves (the accelerator's where flags are on the CPU
    and the backend does not serve it), and each device gets the answer.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return flags
    served = {part.partition(":")[0] for part in str(dist.get_backend_config(process_group)).split(",")}
    here = accelerator()
    candidates = [*flags, *([here] if here is not None else [])]
    param_ref = next((device for device in candidates if device.type in served), torch.device("cpu"))
    worst = torch.stack([flag.detach().to(param_ref, torch.float32).reshape(()) for flag in flags.values()]).amax()
    with blocked():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=process_group)
    for flag in flags.values():
        flag.copy_(worst)
    return flags
