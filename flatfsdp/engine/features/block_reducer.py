"""Reductions of blocks of microbatches, of which a rank may hold several. [Note: deterministic sums]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..comm.process_group_transport import all_of
from ..comm.sum_tree import Block, BlockExchange, SumTree
from ..comm.tensor_groups import TensorGroup
from ..comm.transport import Reducer, Transport
from ..device.memory import MemoryTracker
from ..device.streams import DONE, PendingWork, Stream
from ..flat.flat_param import FlatParamHandle
from ..flat.gradient_slots import Window
from ..flat.layout_views import segments_of
from ..flat.reduction import ReductionInput
from ..transports.block_sums import RankBlocks
from ..transports.pieces import RankPieces, pieces_of_ranks
from ..transports.staged import StagedTransport
from .microbatches import Ledger

UNFORESEEN = (
    "deterministic_sums=True: a backward brought gradients of parameters that its graph had not shown when it began, "
    "so ranks did not compare its microbatch. Use checkpoint(..., use_reentrant=False), and no custom autograd "
    "Functions that run backwards"
)


def _nothing() -> None:
    """The engine, or nobody else, owns the memory."""


@dataclass(frozen=True, eq=False)
class Held:
    """An unsharded block: a 1-D tensor and its segments. `free` gives its memory back, unless the engine owns it;
    `disown` leaves it to the tensor alone."""

    tensor: torch.Tensor
    segments: TensorGroup
    free: Callable[[], object] = _nothing
    disown: Callable[[], object] = _nothing


class BlockSums:
    """The sums of microbatches of one flat parameter that this rank holds.

    Attributes:
        blocks: unsharded, of backwards that have not been reduced; None for zeros.
        kept: this rank's pieces of blocks that were reduced over the shard axis. The last one is the partial sum that
            the engine keeps. [Note: partial sums]
        since: the number of exchanges of the step when they were.
    """

    def __init__(self, handle: FlatParamHandle, ledger: Ledger, reuse: Callable[[Window], None]) -> None:
        """`reuse` takes the memory of a window that was taken."""
        self.handle, self.ledger, self._reuse = handle, ledger, reuse
        self._tracker = handle.tracker
        self.blocks: dict[Block, Held | None] = {}
        self.kept: dict[Block, torch.Tensor] = {}
        self.since = 0
        self._uncount: Callable[[], object] = _nothing

    def add(self, microbatch: int, window: Window | None) -> None:
        """Add a microbatch, and merge blocks as far as possible."""
        held = None
        if window is not None:
            held = Held(window[0].tensor, window[2], partial(self._reuse, window), window[0].disown)
            if self.ledger.look is not None:
                self.ledger.look(self.handle, microbatch, held.tensor)
        self.blocks = self._merged({**self.blocks, (0, microbatch): held}, None)

    def _merged(self, blocks: Mapping[Block, Held | None], own: Held | None) -> dict[Block, Held | None]:
        """`blocks`, merged as far as possible; `own` is not freed."""
        tree = self.ledger.running.tree
        return {block: self._merge(tree, block, blocks, own) for block in tree.merged(blocks)}

    def _merge(self, tree: SumTree, block: Block, blocks: Mapping[Block, Held | None], own: Held | None) -> Held | None:
        if block in blocks:
            return blocks[block]
        left, right = (self._merge(tree, half, blocks, own) for half in tree.halves(block))
        if left is None or right is None:
            if (found := left or right) is not None:
                found.tensor.add_(0.0)  # -0.0 + 0.0
            return found
        into, other = (right, left) if right is own else (left, right)
        torch.add(left.tensor, right.tensor, out=into.tensor)
        other.free()
        return into

    def keep(self, kept: Mapping[Block, torch.Tensor]) -> None:
        """Replace `kept`."""
        self.kept = dict(kept)
        self._uncount()
        held = sum(each.nbytes for each in [*self.kept.values()][:-1])  # the engine counts the last one
        self._uncount = self._tracker.allocate("partial", held)

    def drop(self) -> None:
        """Drop all sums."""
        for held in self.blocks.values():
            if held is not None:
                held.free()
        self.blocks = {}
        self.keep({})
        self.since = 0

    def move_to_tracker(self, tracker: MemoryTracker) -> None:
        """Count the bytes in `tracker` from now on."""
        self._tracker = tracker
        self.keep(self.kept)

    def joining(
        self, inputs: Sequence[ReductionInput], scatter: Reducer, replicate: Reducer | None
    ) -> tuple[Reducer, Reducer | None]:
        """The reducers of the blocks of all `inputs`, whose buffers hold the running microbatch."""
        if self.ledger.step is None:
            self.ledger.refuse(UNFORESEEN)
        states = [each.carried for each in inputs if isinstance(each.carried, BlockSums)]
        joined = [state._enter(each, alone=len(inputs) == 1) for state, each in zip(states, inputs, strict=True)]
        complete = self.ledger.running.is_complete
        first = BlockReducer(joined, scatter, is_last=complete and replicate is None)
        return first, BlockReducer(joined, replicate, is_last=complete) if replicate is not None else None

    def _enter(self, given: ReductionInput, *, alone: bool) -> Joined:
        """Let the reduction of `given` include all blocks. `alone`: it is that of no other flat parameter."""
        step, buffer = self.ledger.running, given.buffer
        assert buffer is not None
        if self.ledger.look is not None:
            self.ledger.look(self.handle, self.ledger.current, buffer.tensor)
        if self.since == len(step.exchanged):
            self.ledger.refuse(
                f"deterministic_sums=True: gradients of unit {self.handle.label} came in two parts, which would be "
                "added in another order under no_sync(). Use checkpoint(..., use_reentrant=False)"
            )
        given.earlier, given.scale = None, 1.0 / step.tree.leaves if step.is_complete else 1.0
        blocks, self.blocks = self.blocks, {}
        in_place = alone and self.handle.is_unsharded_at_rest
        if in_place:  # no rank has pieces: sums of earlier backwards are whole
            blocks |= {block: Held(each, TensorGroup([each])) for block, each in self.kept.items()}
            self.keep({})
        own = Held(buffer.tensor, given.segments)
        if (current := self.ledger.current) is not None:
            blocks[0, current] = own
        blocks = self._merged(blocks, own)
        last = next((block for block, held in blocks.items() if held is own), None)
        if last is None and blocks:  # a stand-in: there are zeros, which are not added
            last, held = blocks.popitem()
            if held is not None:
                buffer.tensor.copy_(held.tensor)
                held.free()
        if last is not None:
            blocks.pop(last, None)
            blocks[last] = own
        joined = Joined(self, {block: held or self._zeros(given) for block, held in blocks.items()}, self.since)
        self.since = len(step.exchanged)
        if in_place:
            for held in joined.blocks.values():
                held.disown()
            self.keep({block: held.tensor for block, held in joined.blocks.items()})
        return joined

    def _zeros(self, given: ReductionInput) -> Held:
        assert given.buffer is not None
        zeros = torch.zeros_like(given.buffer.tensor)
        segments = segments_of(zeros, self.handle.layout) if given.segments[1:] else TensorGroup([zeros])
        free = self._tracker.allocate("slots", zeros.nbytes)
        return Held(zeros, segments, free, free)


@dataclass(frozen=True, eq=False)
class Joined:
    """One flat parameter in a reduction: its unsharded blocks, of which the last is in the buffer of the engine, and
    the number of exchanges when it was reduced before."""

    state: BlockSums
    blocks: Mapping[Block, Held]
    since: int


class BlockReducer:
    """One stage of a reduction, of one flat parameter or of several small ones."""

    def __init__(self, joined: Sequence[Joined], transport: Reducer, *, is_last: bool) -> None:
        """`is_last`: whether its results are gradients, and not sums of some microbatches."""
        assert isinstance(transport, Transport)
        self._joined, self._transport, self._is_last = joined, transport, is_last
        self._axis = transport.group
        self._step = joined[0].state.ledger.running

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum the blocks of all ranks, and leave this rank's piece in `output`. Collective."""
        return self._scatter(output, self._joined, stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors, whose results are concatenated. Collective."""
        if len({each.since for each in self._joined}) == 1:
            return self._scatter(output, self._joined, stream)
        outputs = output.split([each.state.handle.layout.shard_numel for each in self._joined])
        return all_of([self._scatter(out, [each], stream) for out, each in zip(outputs, self._joined, strict=True)])

    def _scatter(self, output: torch.Tensor, joined: Sequence[Joined], stream: Stream) -> PendingWork:
        step, ranks, since = self._step, self._axis.ranks, joined[0].since
        added = tuple(step.added_by([rank], since) for rank in ranks)
        exchange = BlockExchange.of(step.tree, added, step.added_by(ranks, 0, since))
        blocks = [
            self._pieces(TensorGroup.join([each.blocks[block].segments for each in joined]))
            for block in exchange.of_ranks[self._axis.rank]
        ]
        with stream.running():
            kept = [_joined_up([each.state.kept[block] for each in joined]) for block in exchange.kept]
            if not exchange.results:
                output.zero_()
            outputs = [*(torch.empty_like(output) for _ in exchange.results[:-1]), output]

        def finish() -> None:
            for each in joined:
                for held in each.blocks.values():
                    held.free()
            sizes = [each.state.handle.layout.shard_numel for each in joined]
            pieces = [whole.split(sizes) for whole in outputs]
            for number, each in enumerate(joined):
                found = {block: whole[number] for block, whole in zip(exchange.results, pieces, strict=False)}
                each.state.keep({} if self._is_last else found)

        if not exchange.results:
            finish()
            return DONE
        own = RankBlocks(exchange, self._axis.rank, blocks, kept, outputs, [output.numel()] * len(ranks))
        work = self._sum(own, stream)
        return work.followed_by(finish, *kept)

    def _pieces(self, segments: TensorGroup) -> list[RankPieces]:
        if isinstance(self._transport, StagedTransport) and segments[1:]:
            return self._transport.lists.of(segments).of_ranks  # which remembers them
        return pieces_of_ranks(segments, self._axis.size)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum the blocks of all ranks, of which the last is in `tensor`, in place. Collective."""
        step, states = self._step, [each.state for each in self._joined]
        groups = [states[0].ledger.groups.get(rank, frozenset({rank})) for rank in self._axis.ranks]
        exchange = BlockExchange.of(step.tree, tuple(map(step.added_by, groups)), frozenset())
        *others, last = states[0].kept or (None,)
        with stream.running():
            whole = {block: _joined_up([state.kept[block] for state in states]) for block in others} | {last: tensor}
        pieces = [whole[block].view(-1).tensor_split(len(groups)) for block in exchange.of_ranks[self._axis.rank]]
        blocks = [[RankPieces([piece]) for piece in of_ranks] for of_ranks in pieces]
        shared = tensor.view(-1).tensor_split(len(groups))
        sizes = [piece.numel() for piece in shared]
        own = RankBlocks(exchange, self._axis.rank, blocks, [], [shared[self._axis.rank]], sizes, shared)
        work = self._sum(own, stream)

        def finish() -> None:
            for state in states:
                state.keep({})

        return work.followed_by(finish, *whole.values())

    def _sum(self, own: RankBlocks, stream: Stream) -> PendingWork:
        if len(own.sizes) > 1:
            assert isinstance(self._transport, StagedTransport)
            return self._transport.sum_blocks(own, stream)
        with stream.running():
            own.add_up({}, 0, own.sizes[0])
        return stream.pending(
            *own.outputs, *own.kept, *(each for of_ranks in own.blocks for each in of_ranks[0].pieces)
        )


def _joined_up(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
