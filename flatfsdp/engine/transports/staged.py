"""Lists of tensors as one collective, without shared memory: large tensors in place, small ones staged together.

[Note: staging] A collective for each of many small tensors would take longer than copies. So tensors of at most `SMALL`
bytes are communicated together in a *staging buffer*, which has a section for each rank, with a piece of each tensor.
Copies into and out of it are counted separately (`CommStats.staged`). Larger tensors are sent from and received into
their own memory, without staging.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest

import torch
import torch.distributed as dist

from ..base import _torch
from ..base.overrides import is_memoryless
from ..comm.axes import Axis
from ..comm.comm_stats import CommStats
from ..comm.process_group_transport import (
    ProcessGroupTransport,
    Several,
    all_of,
    as_bytes,
    copy,
    is_ordered,
    real,
    wait_for,
)
from ..comm.sum_tree import Block
from ..comm.tensor_groups import TensorGroup
from ..device.memory import FlatBuffer, MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, Work
from .block_sums import RankBlocks
from .pieces import RankPieces, pieces_of_ranks

SMALL = 64 * 1024  # bytes of an unsharded tensor
KNOWN = 256  # lists that a transport remembers


class StagingBuffer:
    """A staging buffer for given unsharded tensors, with views that are kept: creating them takes longer than copies.

    Attributes:
        memory: shape (world * n,): a section of n elements for each rank.
        sections: its view, shape (world, n); own: this rank's, shape (n,); own_pieces: `own`, split by tensor.
        wholes: views of the tensors, shape (world, elements of a piece).
        unpack: copies all sections to the tensors.
        sums: shape (n,): for the result of a reduction.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: Axis, tracker: MemoryTracker) -> None:
        first, world = tensors[0], group.size
        sizes = [tensor.numel() // world for tensor in tensors]
        self.memory, self.sums = (
            FlatBuffer(numel, first.dtype, first.device, tracker=tracker, category="staging")
            for numel in (world * sum(sizes), sum(sizes))
        )
        self.memory.allocate()
        self.sections = self.memory.tensor.view(world, sum(sizes))
        self.own = self.sections[group.rank]
        self.own_pieces = self.own.split(sizes)
        self.wholes = [tensor.view(world, size) for tensor, size in zip(tensors, sizes, strict=True)]
        self._sizes = sizes
        if is_ordered(first):  # one kernel; the other way launches one for each tensor
            self.unpack = partial(torch.split_with_sizes_copy, self.sections, sizes, 1, out=self.wholes)
        else:
            self.unpack = partial(_torch.foreach_copy_, self.wholes, self.sections.split(sizes, dim=1))

    def unpack_sums(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy the result of a reduction to `targets`."""
        copy(targets, self.sums.tensor.split(self._sizes))


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """The plan of an all-gather of given shards.

    Attributes:
        shards: these shards, which are kept alive; given: their ids.
        outputs, sources: the arguments of the all-gathers.
        copies: (targets, sources) of the copies before, one pair per dtype and device of the sources: shards to cast,
            and small shards to stage. Copies of one dtype are one kernel of an accelerator.
        ordered: whether reads of the targets are ordered after a non-blocking copy.
    """

    shards: list[torch.Tensor]
    given: list[int]
    outputs: list[torch.Tensor]
    sources: list[torch.Tensor]
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    ordered: bool


class TensorList:
    """Unsharded tensors of one dtype that are communicated as one, with the plan for it. [Note: pieces of ranks]

    Attributes:
        nbytes, numel, device: totals over all tensors, and their device.
        staged: bytes that are staged in each collective.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: Axis,
        tracker: MemoryTracker,
        *,
        fewest: int,
        forget: Callable[[object], None],
    ) -> None:
        """Small tensors are staged if there are at least `fewest`. `forget` is called when one of the tensors dies."""
        self._kept = [weakref.ref(tensor, forget) for tensor in tensors]
        self._given = list(map(id, tensors))  # ids stay valid: `forget` is called when one of the tensors dies
        self._group_of: Callable[[], object] = lambda: None  # the last TensorGroup that was passed
        self._tensors = [tensor.data for tensor in tensors]  # so that views do not keep the caller's tensors alive
        self._group, self._tracker = group, tracker
        self._plan: _Gather | None = None
        self.device = tensors[0].device
        self.nbytes, self.numel = sum(each.nbytes for each in tensors), sum(each.numel() for each in tensors)
        small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= SMALL]
        self._sizes = [tensor.numel() // group.size for tensor in tensors]  # of a rank's pieces
        self._small = small if len(small) >= fewest else []
        self._large = [index for index in range(len(tensors)) if index not in {*self._small}]
        self.staged = sum(tensors[index].nbytes for index in self._small)

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for these `tensors` (by identity), and its staging buffer is not in use."""
        in_use = self.staged and "staging" in vars(self) and self.staging.memory.allocated
        if in_use or (tensors is not self._group_of() and list(map(id, tensors)) != self._given):
            return False
        if isinstance(tensors, TensorGroup):
            self._group_of = weakref.ref(tensors)
        return self._tensors[0].data_ptr() == tensors[0].data_ptr()  # unless `.data` was set to other memory

    @cached_property
    def of_ranks(self) -> list[RankPieces]:
        """Each rank's pieces of these tensors, for exchanges that are done by the engine."""
        return pieces_of_ranks(self._tensors, self._group.size)

    @cached_property
    def staging(self) -> StagingBuffer:
        """The staging buffer of the small tensors."""
        return StagingBuffer([self._tensors[index] for index in self._small], self._group, self._tracker)

    def to_gather(self, shards: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs and shards to pass to all-gathers; shards of another dtype or device are cast here.

        Call `finish_gather` after the all-gathers.
        """
        plan = self._plan
        if plan is None or list(map(id, shards)) != plan.given:
            plan = self._plan = self._planned(shards)
        if self._small:
            self.staging.memory.allocate()
        for targets, copied in plan.copies:
            _torch.foreach_copy_(targets, copied, non_blocking=plan.ordered)
        return plan.outputs, plan.sources

    def _planned(self, shards: Sequence[torch.Tensor]) -> _Gather:
        rank = self._group.rank
        own = [each.narrow(0, rank * size, size) for each, size in zip(self._tensors, self._sizes, strict=True)]
        targets = {index: own[index] for index in self._large if _differs(own[index], shards[index])}
        outputs = [self._tensors[index] for index in self._large]
        sources = [targets.get(index, shards[index]) for index in self._large]
        if self._small:
            outputs.append(self.staging.memory.tensor)
            sources.append(self.staging.own)
            targets |= zip(self._small, self.staging.own_pieces, strict=True)
        copies: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, target in targets.items():
            into, of = copies.setdefault((shards[index].dtype, shards[index].device), ([], []))
            into.append(target)
            of.append(shards[index])
        ordered = is_ordered(self._tensors[0])
        return _Gather(list(shards), list(map(id, shards)), outputs, sources, list(copies.values()), ordered)

    def finish_gather(self) -> None:
        """Copy the staged pieces to the outputs and free the staging buffer."""
        if self._small:
            staging = self.staging
            staging.unpack()
            staging.memory.free()

    def to_reduce(self, output: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs and inputs to pass to reduce-scatters. Call `finish_reduction` after these."""
        if self._small:
            staging = self.staging
            staging.memory.allocate()
            torch.cat(staging.wholes, 1, out=staging.sections)
            if not self._large:
                return [output], [self.staging.memory.tensor]
            self.staging.sums.allocate()
        results = output.split(self._sizes)
        outputs, fulls = [results[index] for index in self._large], [self._tensors[index] for index in self._large]
        if self._small:
            outputs.append(self.staging.sums.tensor)
            fulls.append(self.staging.memory.tensor)
        return outputs, fulls

    def finish_reduction(self, output: torch.Tensor) -> None:
        """Copy the staged sums to their positions in `output` and free the staging buffer."""
        if self._small and self._large:
            results = output.split(self._sizes)
            self.staging.unpack_sums([results[index] for index in self._small])
            self.staging.sums.free()
        if self._small:
            self.staging.memory.free()


def _differs(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.dtype != source.dtype or target.device != source.device


class TensorLists:
    """The cache of one transport's lists; a list stays for as long as all of its tensors live."""

    def __init__(self, group: Axis, tracker: MemoryTracker, *, fewest: int) -> None:
        self._group, self._tracker, self._fewest = group, tracker, fewest
        self._known: dict[tuple[int, int, int], TensorList] = {}

    def of(self, tensors: Sequence[torch.Tensor]) -> TensorList:
        """The list of these `tensors`."""
        key = id(tensors[0]), id(tensors[-1]), len(tensors)
        known = self._known.get(key)
        if known is not None and known.serves(tensors):
            return known
        lists = weakref.ref(self)

        def forget(gone: object) -> None:
            if (found := lists()) is not None:
                found._known.pop(key, None)

        if len(self._known) == KNOWN:  # for example if a model joins different units at every step
            self._known.clear()
        made = TensorList(tensors, self._group, self._tracker, fewest=self._fewest, forget=forget)
        self._known[key] = made
        return made


class StagedTransport(ProcessGroupTransport):
    """torch's collectives, with lists of tensors as one collective, if they are small.

    Attributes:
        fewest_staged: the number of small tensors in a list from which on they are staged together.
        lists: the lists that were communicated.
    """

    fewest_staged = 2

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        super().__init__(group, device, comm_stats=comm_stats, tracker=tracker)
        self.lists = TensorLists(group, tracker, fewest=self.fewest_staged)

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        """Send each other rank, in rank order, its section of `sent`, shape (world - 1, n), and receive theirs into
        `arrived`; both uint8. Collective; the caller counts it in `comm_stats`."""
        splits = [1] * self.group.size
        splits[self.group.rank] = 0
        if is_memoryless():
            return DONE
        with stream.running():
            return self._exchange_messages(arrived, sent, splits, splits, stream)

    def sum_blocks(self, own: RankBlocks, stream: Stream) -> PendingWork:
        """The sums of blocks of microbatches over ranks, of this rank's pieces. Collective.
        [Note: tree of microbatches]"""
        rank, sizes, out = own.rank, own.sizes, own.outputs[0]
        self.comm_stats.log("reduce_scatter", len(own.blocks) * sum(sizes) * own.outputs[0].itemsize)
        if is_memoryless():
            return DONE
        others = [r for r in range(len(sizes)) if r != rank]
        landed: dict[Block, torch.Tensor] = {}
        works, held = list[PendingWork](), list[torch.Tensor]()
        with stream.running():
            for number, of_ranks in enumerate(zip_longest(*own.exchange.of_ranks)):  # some arrive during others' copies
                sent = [size if of_ranks[rank] and r != rank else 0 for r, size in enumerate(sizes)]
                arriving = [sizes[rank] if block and r != rank else 0 for r, block in enumerate(of_ranks)]
                pieces = [piece for r in others for piece in own.blocks[number][r].pieces] if of_ranks[rank] else []
                outgoing = pieces[0] if len(pieces) == 1 else torch.cat([out[:0], *pieces])
                arrived = out.new_empty(sum(arriving))
                works.append(self._exchange_messages(arrived, outgoing, arriving, sent, stream))
                held += [arrived] if len(pieces) == 1 else [arrived, outgoing]
                those = [of_ranks[r] for r in others if of_ranks[r]]
                parts = arrived.split(sizes[rank]) if arrived.numel() else [arrived] * len(those)
                landed |= zip(those, parts, strict=True)
        self.comm_stats.issued += own.exchange.most - 1
        free = self.tracker.allocate("exchange", sum(each.nbytes for each in held))

        def finish() -> None:
            own.add_up(landed, 0, sizes[rank])
            free()
            if own.share:
                self._share(own.share)

        return followed(all_of(works), stream, finish, *held, *own.outputs, *own.kept)

    def _share(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send this rank's one of `pieces` to all others, and receive theirs, blocking."""
        self.comm_stats.issued += 1
        sources = [(piece, rank) for piece, rank in zip(pieces, self.group.ranks, strict=True) if piece.numel()]
        group = self.group.process_group
        wait_for(Several([dist.broadcast(piece, rank, group=group, async_op=True) for piece, rank in sources]))

    def _exchange_messages(
        self, arrived: torch.Tensor, outgoing: torch.Tensor, arriving: list[int], sent: list[int], stream: Stream
    ) -> PendingWork:
        """Send the parts of `outgoing`, of the sizes `sent`, to the ranks, and receive theirs; on this stream."""
        work: Work = dist.all_to_all_single(
            arrived, outgoing, arriving, sent, group=self.group.process_group, async_op=True
        )
        if stream.is_callers:
            return PendingWork(work=work, keep=(arrived, outgoing))
        wait_for(work)
        return stream.communicating(arrived, outgoing)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` of several outputs (of one dtype) as one. Collective over the group.

        Shards may have other dtypes and devices: they are cast first. [Note: lists]
        """
        listed = self.lists.of(outputs)
        if not listed.numel:
            return DONE
        if stream.is_callers:
            filled, sent = listed.to_gather(shards)
        else:
            with stream.running():
                filled, sent = listed.to_gather(shards)
        if len(sent) == 1:  # the usual case: small ones, staged together
            arriving = self.all_gather_base(filled[0], sent[0], stream)
        else:
            arriving = self._gather_each(filled, sent, stream)
        if not listed.staged:
            return arriving
        self.comm_stats.staged += listed.staged
        if stream.is_callers:
            return arriving.followed_by(listed.finish_gather, *outputs)
        return followed(arriving, stream, listed.finish_gather, *outputs)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors (of one dtype) as one. Collective over the group.

        `output` has room for the concatenated results. The stream is ordered after the kernels that produce `fulls`.
        [Note: lists]
        """
        listed = self.lists.of(fulls)
        if not listed.numel:
            return DONE
        if stream.is_callers:
            sums, sent = listed.to_reduce(output)
        else:
            with stream.running():
                sums, sent = listed.to_reduce(output)
        if len(sent) == 1:
            arriving = self.reduce_scatter_base(sums[0], sent[0], stream)
        else:
            arriving = self._reduce_each(sums, sent, stream)
        if not listed.staged:
            return arriving
        self.comm_stats.staged += listed.staged
        finish = partial(listed.finish_reduction, output)
        return arriving.followed_by(finish, output) if stream.is_callers else followed(arriving, stream, finish, output)

    def _gather_each(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`all_gather_base` for each pair."""
        return all_of([self.all_gather_base(*each, stream) for each in zip(outputs, shards, strict=True)])

    def _reduce_each(
        self, outputs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` for each pair."""
        return all_of([self.reduce_scatter_base(*each, stream) for each in zip(outputs, fulls, strict=True)])


class CoalescingNccl(StagedTransport):
    """NCCL, which coalesces several collectives into one operation. (Dry runs do not issue it: torch does not support
    that on tensors without memory.)
    """

    fewest_staged = 65  # for fewer tensors, a coalesced operation takes less time of the host than copies

    def _gather_each(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        pairs = [
            (as_bytes(output), as_bytes(shard)) for output, shard in zip(outputs, shards, strict=True) if output.numel()
        ]
        unsharded, own = [output for output, _ in pairs], [shard for _, shard in pairs]
        self.comm_stats.log("all_gather", sum(output.nbytes for output in unsharded))

        def start(flat: _torch.FlatCollectives) -> Work | None:
            return None if is_memoryless() else flat.gather_grouped(unsharded, own)

        return self._issue(stream, start, *unsharded, *own)

    def _reduce_each(
        self, outputs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        sums, wholes = ([real(each) for each in tensors if each.numel()] for tensors in (outputs, fulls))
        self.comm_stats.log("reduce_scatter", sum(full.nbytes for full in wholes))

        def start(flat: _torch.FlatCollectives) -> Work | None:
            return None if is_memoryless() else flat.reduce_scatter_grouped(sums, wholes)

        return self._issue(stream, start, *wholes, *sums)


def followed(arriving: PendingWork, stream: Stream, finish: Callable[[], None], *keep: torch.Tensor) -> PendingWork:
    """`arriving`, followed by `finish`: if the stream is the caller's, `finish` runs in the wait."""
    if stream.is_callers:
        return arriving.followed_by(finish, *keep)
    with stream.running():
        arriving.wait()
        finish()
        return stream.communicating(*keep)
