"""All collectives on tensors: one gather, one reduce-scatter, one all-reduce, one broadcast, each handed back as
`PendingWork`.

[Note: transports] How a collective is carried out depends on the backend and stands here only. `ProcessGroupTransport`
takes torch's flat collectives. `DeterministicGloo` serves gloo, whose reductions sum in an order of their own: every
rank sends each peer its piece and sums what it receives in rank order, so that worlds of any size are reproducible, bit
for bit, however late a rank is. Where much is gathered among a few ranks on one host, that goes by such messages, too
(`gloo.py`). `SingleRank` serves an axis of one rank.

[Note: staging] Several small tensors travel as one through a *staging buffer*: a row for each rank, in it a piece of
each tensor. What is copied in and out of it is counted apart (`CommStats.staged`). Where the backend makes one of
several operations by itself (`CoalescingNccl`), nothing is staged.

[Note: reduction] Reductions are SUM; scaling is the caller's (`config.precision.gradient_scaling`). Inputs are complete
when an operation is issued. On an accelerator the caller has made the lane follow what produced them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...api import ShardingStrategy
from ...errors import InternalError
from ..base import _torch
from ..base.wait_limits import blocked
from ..device.fake_tensors import is_memoryless
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, accelerator
from . import gloo
from . import gloo_shutdown as at_exit


@dataclass
class CommStats:
    """Collectives by kind: how many were issued and the bytes of their unsharded side (input of a reduction, output of
    a gather); the messages, sent and received, of those that are carried out pairwise; and the bytes that went through
    staging buffers."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    messages: int = 0
    staged: int = 0
    issued: int = 0  # what other ranks wait for: collectives of all kinds, and second halves of some; never reset

    def log(self, kind: str, count: int) -> None:
        """One collective of `kind` that moves `count` bytes."""
        self.issued += 1
        self.counts[kind] += 1
        self.bytes[kind] += count

    def issue(self) -> None:
        """This rank has issued what others wait for."""
        self.issued += 1

    def take_back(self) -> None:
        """The last collective that was logged was not issued after all."""
        self.issued -= 1

    def log_messages(self, count: int) -> None:
        """`count` messages to and from single ranks."""
        self.messages += count

    def reset(self) -> None:
        """Forget everything."""
        self.counts.clear()
        self.bytes.clear()
        self.messages = 0
        self.staged = 0


@dataclass(frozen=True)
class Axis:
    """One axis of ranks: a process group, or this rank alone.

    Attributes:
        process_group: None for an axis of size 1 that needs no communication.
        ranks: global ranks of the members in group order; known when the process group has been destroyed, too.
        rank: this rank's place among them.
        backend: the name of the backend that serves this device type.
    """

    process_group: Any
    ranks: tuple[int, ...]
    rank: int
    backend: str

    @staticmethod
    def alone() -> Axis:
        """The axis of size 1."""
        return Axis(None, (dist.get_rank() if dist.is_initialized() else 0,), 0, "alone")

    @staticmethod
    def of(process_group: Any, device: torch.device) -> Axis:
        """The axis over `process_group`, for tensors on `device`."""
        backends = dist.get_backend_config(process_group)
        # "cpu:gloo,cuda:nccl" or "gloo"
        by_type = dict(part.split(":") for part in str(backends).split(",") if ":" in part)
        backend = by_type.get(device.type, str(backends))
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return Axis(process_group, ranks, dist.get_rank(process_group), backend)

    @cached_property
    def size(self) -> int:
        """Ranks on the axis."""
        return len(self.ranks)


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
    """torch's flat collectives over one group, on one device."""

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        self.group = group
        self.device = device
        self.comm_stats = comm_stats
        self.tracker = tracker
        self._stagings: dict[int, StagingBuffer] = {}  # by id of the first of their tensors

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """Fill `output` (world * n elements) with every rank's `shard` (n elements) in rank order.

        Both 1-D and of one dtype; bytes travel unseen, so any dtype will do. `shard` may be this rank's slot of
        `output` (in place). Collective over the group.
        """
        self.comm_stats.log("all_gather", output.numel() * output.element_size())
        return self._issue(stream, self._gather, _as_bytes(output), _as_bytes(shard))

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `full` (world * n elements) over ranks and leave this rank's n elements in `output`. Collective."""
        self.comm_stats.log("reduce_scatter", full.numel() * full.element_size())
        return self._issue(stream, self._reduce_scatter, output, full)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum `tensor` over ranks in place. Collective."""
        self.comm_stats.log("all_reduce", tensor.numel() * tensor.element_size())
        return self._issue(stream, self._all_reduce, tensor)

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

        `output` has room for the results, one behind the other. The lane has followed what produced `fulls`.
        [Note: staging]
        """
        with stream.running():
            staging = self._stage(fulls)
            _torch.foreach_copy_(staging.pieces, staging.wholes)
        arriving = self.reduce_scatter_base(output, staging.memory.tensor, stream)
        return PendingWork(work=arriving, keep=(output,), finish=staging.memory.free)

    def _stage(self, tensors: Sequence[torch.Tensor]) -> StagingBuffer:
        """A staging buffer for whole `tensors`, which has its memory until that is freed."""
        staging = self._stagings.get(id(tensors[0]))
        if staging is None or staging.memory.allocated or not staging.serves(tensors):
            staging = self._stagings[id(tensors[0])] = StagingBuffer(tensors, self.group, self.tracker)
        staging.memory.allocate()
        self.comm_stats.staged += staging.memory.tensor.nbytes
        return staging

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite `tensor` with that of group rank `source`, blocking. Collective."""
        self.comm_stats.log("broadcast", tensor.numel() * tensor.element_size())
        if tensor.numel():
            with blocked():
                dist.broadcast(_as_bytes(tensor.view(-1)), self.group.ranks[source], group=self.group.process_group)

    def send_now(self, tensor: torch.Tensor, target: int) -> None:
        """Send `tensor` to group rank `target`, which receives it now, blocking."""
        self.comm_stats.log_messages(1)
        if tensor.numel():
            sending = self.group.process_group.send([_as_bytes(self._reachable(tensor))], target, gloo.PARCEL_TAG)
            with blocked():
                sending.wait()

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with what group rank `source` sends now, blocking."""
        self.comm_stats.log_messages(1)
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
        self.comm_stats.log("scalar", tensor.numel() * tensor.element_size())
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        with blocked():
            dist.all_reduce(tensor, op=operation, group=self.group.process_group)
        return tensor

    def gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor` stacked along a new first dimension, blocking; for small things. Collective."""
        output = tensor.new_empty((self.group.size, *tensor.shape))
        self.comm_stats.log("scalar", output.numel() * output.element_size())
        ProcessGroupTransport._gather(self, output.view(-1), tensor.reshape(-1).contiguous(), beside=False).wait()
        return output

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, *, beside: bool) -> PendingWork:
        work = _torch.gather_base(self.group.process_group, output, shard, beside=beside)
        return self._pending(work, output, shard)

    def _reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, *, beside: bool) -> PendingWork:
        work = _torch.reduce_scatter_base(self.group.process_group, output, full, beside=beside)
        return self._pending(work, output, full)

    def _all_reduce(self, tensor: torch.Tensor, *, beside: bool) -> PendingWork:
        return self._pending(_torch.all_reduce(self.group.process_group, tensor, beside=beside), tensor)

    @staticmethod
    def _pending(work: Any, *keep: torch.Tensor) -> PendingWork:
        return PendingWork(work=work, keep=keep)

    def _issue(self, stream: Stream, start: Callable[..., PendingWork], *tensors: torch.Tensor) -> PendingWork:
        if tensors[0].numel() == 0:
            return DONE  # equal on every rank: sizes of a collective are agreed
        if stream.is_callers:
            return start(*tensors, beside=True)
        with stream.running():
            # Runs on the lane's own stream: the event behind it is the end of the work.
            start(*tensors, beside=False).wait()
            return PendingWork(device=self.device, event=stream.mark(), keep=tensors)


class DeterministicGloo(ProcessGroupTransport):
    """gloo: reductions sum in rank order, and a few ranks on one host exchange what is large pairwise. [Note:
    transports]"""

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        super().__init__(group, device, comm_stats=comm_stats, tracker=tracker)
        self._pairs = gloo.PairwiseExchange(
            group.process_group, tracker=tracker, log=comm_stats.log_messages, issue=comm_stats.issue
        )
        self._all_to_all: gloo.AllToAll | gloo.SimulatedExchange
        if is_memoryless():
            self._all_to_all = gloo.SimulatedExchange(group.rank, group.size, tracker=tracker, issue=comm_stats.issue)
        else:
            self._all_to_all = gloo.AllToAll(group.process_group, tracker=tracker, issue=comm_stats.issue)

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, *, beside: bool) -> PendingWork:
        if self._is_for_pairs(output):
            return self._pairs.gather(output, shard)
        return super()._gather(output, shard, beside=beside)

    def _reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, *, beside: bool) -> PendingWork:
        return (self._pairs if self._is_for_pairs(full) else self._all_to_all).reduce_scatter(output, full)

    def _all_reduce(self, tensor: torch.Tensor, *, beside: bool) -> PendingWork:
        return (self._pairs if self._is_for_pairs(tensor) else self._all_to_all).all_reduce(tensor)

    def _is_for_pairs(self, unsharded: torch.Tensor) -> bool:
        # gloo sends no message from an accelerator's memory.
        is_large = unsharded.numel() * unsharded.element_size() >= gloo.SMALLEST
        return is_large and unsharded.device.type == "cpu" and gloo.is_near(self.group.process_group)


class CoalescingNccl(ProcessGroupTransport):
    """NCCL, which makes one operation of several by itself: nothing is staged. (Dry runs do not issue it: torch knows
    no such operation on tensors without memory.)"""

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        pairs = [(output, shard) for output, shard in zip(outputs, shards, strict=True) if output.numel()]
        outputs, shards = [output for output, _ in pairs], [shard for _, shard in pairs]
        with stream.running():
            slots = [output.narrow(0, self.group.rank * shard.numel(), shard.numel()) for output, shard in pairs]
            _torch.foreach_copy_(slots, shards, non_blocking=True)
        self.comm_stats.log("all_gather", sum(output.numel() * output.element_size() for output in outputs))

        def start(*outputs: torch.Tensor, beside: bool) -> PendingWork:
            group, unsharded, own = self.group.process_group, list(map(_as_bytes, outputs)), list(map(_as_bytes, slots))
            work = None if is_memoryless() else _torch.gather_grouped(group, unsharded, own, beside=beside)
            return self._pending(work, *outputs)

        return self._issue(stream, start, *outputs)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        fulls = [full for full in fulls if full.numel()]
        sizes = [full.numel() // self.group.size for full in fulls]
        self.comm_stats.log("reduce_scatter", sum(full.numel() * full.element_size() for full in fulls))

        def start(output: torch.Tensor, *fulls: torch.Tensor, beside: bool) -> PendingWork:
            group, pieces = self.group.process_group, list(output.split(sizes))
            work = None if is_memoryless() else _torch.reduce_scatter_grouped(group, pieces, list(fulls), beside=beside)
            return self._pending(work, output, *fulls)

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

_served_as: str | None = None


@contextmanager
def served_as(backend: str) -> Iterator[None]:
    """Inside, groups are served as those of `backend` are, whatever theirs is: for dry runs."""
    global _served_as
    before, _served_as = _served_as, backend
    try:
        yield
    finally:
        _served_as = before


class Reducer(Protocol):
    """What gradients are reduced with: a transport, or a user's hook."""

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork: ...

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork: ...


_double: Callable[[Transport], Transport] | None = None


@contextmanager
def doubled(double: Callable[[Transport], Transport]) -> Iterator[None]:
    """Put `double` in front of every transport made inside the context (late, failing or counting ones, for tests)."""
    global _double
    before, _double = _double, double
    try:
        yield
    finally:
        _double = before


def transport(group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> Transport:
    """The transport for `group`: by backend and world size."""
    kind = (
        SingleRank
        if group.process_group is None
        else _BY_BACKEND.get(_served_as or group.backend, ProcessGroupTransport)
    )
    if kind is DeterministicGloo:
        at_exit.install()
    made = kind(group, device, comm_stats=comm_stats, tracker=tracker)
    return _double(made) if _double is not None else made


class DelayedTransport(ProcessGroupTransport):
    """A double that delivers late: outputs are NaN (or zero bytes) until `wait()`, whatever the backend did
    meanwhile."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.group, inner.device, comm_stats=inner.comm_stats, tracker=inner.tracker)
        self._inner = inner

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = torch.empty_like(output)
        return self._deliver(output, hidden, self._inner.all_gather_base(hidden, shard.clone(), stream))

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = torch.empty_like(output)
        return self._deliver(output, hidden, self._inner.reduce_scatter_base(hidden, full.clone(), stream), full)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        hidden = tensor.clone()
        return self._deliver(tensor, hidden, self._inner.all_reduce(hidden, stream))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        self._inner.broadcast(tensor, source=source)

    def all_reduce_now(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        return self._inner.all_reduce_now(tensor, maximum=maximum)

    def gather_now(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.gather_now(tensor)

    @staticmethod
    def _deliver(output: torch.Tensor, hidden: torch.Tensor, inner: PendingWork, *keep: torch.Tensor) -> PendingWork:
        def arrive() -> None:
            output.copy_(hidden)

        if output.is_floating_point():
            output.fill_(float("nan"))
        return PendingWork(work=inner, keep=(output, hidden, *keep), finish=arrive)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Backends know few dtypes; here bytes only move. Floating types stay as they are where all backends know them.
    if tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return tensor
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class ProcessGroups:
    """The axes of one unit.

    Attributes:
        shard: ranks that hold the pieces of one copy; parameters are gathered over it.
        scatter: the same ranks on a communicator of its own, for reductions ([Note: backward order]).
        replicate: ranks that hold the same piece of different copies; None where there is one copy.
        strategy: what the axes were made for.
        given: the process group the user knows, or the pair (shard group, replicate group).
        device: where the tensors that travel are.
    """

    shard: Axis
    scatter: Axis
    replicate: Axis | None
    strategy: ShardingStrategy
    given: Any
    device: torch.device

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroups:
        return self  # copies of a model communicate over the same groups

    @property
    def given_ranks(self) -> tuple[Any, ...]:
        """The global ranks of `given`; a pair of such tuples for a pair."""
        if isinstance(self.given, tuple):
            return tuple(tuple(dist.get_process_group_ranks(group)) for group in self.given)
        return tuple(dist.get_process_group_ranks(self.given))

    @property
    def process_groups(self) -> set[Any]:
        """All of the axes', the user's own, and the default one."""
        given = self.given if isinstance(self.given, tuple) else (self.given,)
        axes = (axis.process_group for axis in (self.shard, self.scatter, self.replicate) if axis is not None)
        return {group for group in (*given, *axes, dist.group.WORLD) if group is not None}

    @cached_property
    def world(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.shard.size * (self.replicate.size if self.replicate is not None else 1)


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
