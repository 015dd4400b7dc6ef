"""Reductions of blocks of microbatches, of which a rank may hold several. [Note: deterministic sums]"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..comm.process_group_transport import all_of
from ..comm.sum_tree import Block, BlockExchange, merged
from ..comm.tensor_groups import TensorGroup
from ..comm.transport import Reducer, Transport
from ..device.memory import MemoryTracker
from ..device.streams import DONE, PendingWork, Stream
from ..flat.gradients import Gradients
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
        window: the block whose gradients the running backward leaves in the slots, or has left; None for nothing.
        blocks: other ones, unsharded, of backwards that have not been reduced; None if no gradient came.
        reduced: those that a reduction reads, of which the last is in the buffer of the engine.
        kept: this rank's pieces of blocks that were reduced over the shard axis. The last one is the partial sum that
            the engine keeps. [Note: partial sums]
        since, before: the number of exchanges of the step in the last reduction, and in the one before.
    """

    def __init__(self, grads: Gradients, ledger: Ledger) -> None:
        self.grads, self.handle, self.ledger = grads, grads.handle, ledger
        # -0.0, unlike 0.0, changes no bit of what it is added to.
        grads.memory.missing = complex(-0.0, -0.0) if self.handle.precision.reduce.is_complex else -0.0
        self._tracker = self.handle.tracker
        self.window: Block | None = None
        self.blocks: dict[Block, Held | None] = {}
        self.reduced: dict[Block, Held] = {}
        self.kept: dict[Block, torch.Tensor] = {}
        self.since = self.before = 0
        self._uncount: Callable[[], object] = _nothing

    def begin(self, microbatch: int | None, *, is_left: bool) -> None:
        """The backward of `microbatch` begins, None for one that adds nothing. `is_left`: the one before has left its
        gradients. They stay where they are if those of `microbatch` are the next in the sum of both, and are a block of
        their own otherwise."""
        block = (0, microbatch) if microbatch is not None else None
        if is_left and self.window is not None:
            tree = self.ledger.running.tree
            precision = self.handle.precision
            rounds = precision.compute.itemsize > precision.reduce.itemsize  # once in place, and twice in two blocks
            apart = rounds or self.grads.repeats or self.ledger.look
            parent = tree.parent(block) if block and not apart else None
            if parent is not None and tree.halves(parent) == (self.window, block):
                self.window = parent
                return
            self._take()
        self.window = block

    def _take(self) -> None:
        """Take the window, and merge blocks as far as possible."""
        held, window = None, self.grads.take_window() if self.grads.accumulation.window_open else None
        if window is not None:
            held = Held(window[0].tensor, window[2], partial(self.grads.reuse, window), window[0].disown)
            self._check(held.tensor, again=False)
        assert self.window is not None
        self.blocks = self._merged({**self.blocks, self.window: held}, None)

    def _check(self, gradient: torch.Tensor, *, again: bool) -> None:
        """Look at the `gradient` in the slots, which was reduced before if it comes `again`. Refuse one in parts, which
        were added to others one by one."""
        level, position = self.window or (0, None)
        if again or (level and self.grads.repeats):
            self.ledger.refuse(
                f"deterministic_sums=True: gradients of unit {self.handle.label} came in two parts, which would be "
                "added in another order under no_sync(). Use checkpoint(..., use_reentrant=False)"
            )
        if self.ledger.look is not None and not level:
            self.ledger.look(self.handle, position, gradient)

    def _merged(self, blocks: Mapping[Block, Held | None], own: Held | None) -> dict[Block, Held | None]:
        """`blocks`, merged as far as possible; `own` is not freed."""
        found = dict(blocks)
        for block, *halves in merged(self.ledger.running.tree, (*blocks,))[1]:
            left, right = map(found.pop, halves)
            found[block] = left or right
            if left is not None and right is not None:
                into, other = (right, left) if right is own else (left, right)
                torch.add(left.tensor, right.tensor, out=into.tensor)
                other.free()
                found[block] = into
        return found

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
        self.blocks, self.window = {}, None
        self.keep({})
        self.grads.accumulation.keep_partial(None, set())
        self.since = self.before = 0

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
        for state, each in zip(states, inputs, strict=True):
            state._enter(each, alone=len(inputs) == 1)
        complete = self.ledger.running.is_complete
        first = BlockReducer(states, scatter, is_last=complete and replicate is None)
        return first, BlockReducer(states, replicate, is_last=complete) if replicate is not None else None

    def _enter(self, given: ReductionInput, *, alone: bool) -> None:
        """Let the reduction of `given` include all blocks. `alone`: it is that of no other flat parameter."""
        step, buffer = self.ledger.running, given.buffer
        assert buffer is not None
        self._check(buffer.tensor, again=self.since == len(step.exchanged))
        given.earlier, given.scale = None, 1.0 / step.tree.leaves if step.is_complete else 1.0
        blocks, self.blocks = self.blocks, {}
        in_place = alone and self.handle.is_unsharded_at_rest
        if in_place:  # no rank has pieces: sums of earlier backwards are whole
            blocks |= {block: Held(each, TensorGroup([each])) for block, each in self.kept.items()}
            self.keep({})
        own = Held(buffer.tensor, given.segments)
        if self.window is None and blocks:  # a stand-in: there are zeros, which are not added
            self.window, held = blocks.popitem()
            if held is not None:
                buffer.tensor.copy_(held.tensor)
                held.free()
        if self.window is not None:
            blocks[self.window] = own
        self.before, self.since = self.since, len(step.exchanged)
        merges = sorted(self._merged(blocks, own).items(), key=lambda each: each[1] is own)  # that one is the last
        reduced = {block: held or self._zeros(given) for block, held in merges}
        if not in_place:
            while self.reduced:  # of a reduction that failed
                self.reduced.popitem()[1].free()
            self.reduced = reduced
            return
        for held in reduced.values():
            held.disown()
        self.keep({block: held.tensor for block, held in reduced.items()})

    def _zeros(self, given: ReductionInput) -> Held:
        assert given.buffer is not None
        zeros = torch.full_like(given.buffer.tensor, self.grads.memory.missing)
        segments = segments_of(zeros, self.handle.layout) if given.segments[1:] else TensorGroup([zeros])
        free = self._tracker.allocate("slots", zeros.nbytes)
        return Held(zeros, segments, free, free)


class BlockReducer:
    """One stage of a reduction, of one flat parameter or of several small ones."""

    def __init__(self, sums: Sequence[BlockSums], transport: Reducer, *, is_last: bool) -> None:
        """`is_last`: whether its results are gradients, and not sums of some microbatches."""
        assert isinstance(transport, Transport)
        self._sums, self._transport, self._is_last = sums, transport, is_last
        self._axis = transport.group
        self._step = sums[0].ledger.running

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        """Sum the blocks of all ranks, and leave this rank's piece in `output`. Collective."""
        return self._scatter(output, self._sums, stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        """`reduce_scatter_base` of several tensors, whose results are concatenated. Collective."""
        if len({each.before for each in self._sums}) == 1:
            return self._scatter(output, self._sums, stream)
        outputs = output.split([each.handle.layout.shard_numel for each in self._sums])
        return all_of([self._scatter(out, [each], stream) for out, each in zip(outputs, self._sums, strict=True)])

    def _scatter(self, output: torch.Tensor, sums: Sequence[BlockSums], stream: Stream) -> PendingWork:
        step, ranks, since = self._step, self._axis.ranks, sums[0].before
        added = tuple(step.added_by([rank], since) for rank in ranks)
        exchange = BlockExchange.of(step.tree, added, step.added_by(ranks, 0, since))
        blocks = [
            self._pieces(TensorGroup.join([each.reduced[block].segments for each in sums]))
            for block in exchange.of_ranks[self._axis.rank]
        ]
        with stream.running():
            kept = [_joined_up([each.kept[block] for each in sums]) for block in exchange.kept]
            if not exchange.results:
                output.zero_()
            same = dict(zip(exchange.kept, kept, strict=True))  # those that nothing is added to stay where they are
            outputs = [*(same[b] if b in same else torch.empty_like(output) for b in exchange.results[:-1]), output]

        def finish() -> None:
            for each in sums:
                while each.reduced:
                    each.reduced.popitem()[1].free()
            sizes = [each.handle.layout.shard_numel for each in sums]
            pieces = [whole.split(sizes) for whole in outputs]
            for number, each in enumerate(sums):
                found = {block: whole[number] for block, whole in zip(exchange.results, pieces, strict=False)}
                each.keep({} if self._is_last else found)

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
        groups = [self._sums[0].ledger.groups.get(rank, frozenset({rank})) for rank in self._axis.ranks]
        exchange = BlockExchange.of(self._step.tree, tuple(map(self._step.added_by, groups)), frozenset())
        *others, last = self._sums[0].kept or (None,)
        with stream.running():
            whole = {block: _joined_up([each.kept[block] for each in self._sums]) for block in others} | {last: tensor}
        pieces = [whole[block].view(-1).tensor_split(len(groups)) for block in exchange.of_ranks[self._axis.rank]]
        blocks = [[RankPieces([piece]) for piece in of_ranks] for of_ranks in pieces]
        shared = tensor.view(-1).tensor_split(len(groups))
        sizes = [piece.numel() for piece in shared]
        own = RankBlocks(exchange, self._axis.rank, blocks, [], [shared[self._axis.rank]], sizes, shared)
        work = self._sum(own, stream)

        def finish() -> None:
            for each in self._sums:
                each.keep({})

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
