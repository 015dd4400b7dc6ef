"""The collectives of a transport through the outboxes of its group, and their memory accounting for dry runs.

[Note: in waits] Exchanges make progress while ranks wait, not while they compute. Waiting later for a large reduction
hides little of it, and holds its inputs for longer; a small one takes less time than it may have to wait for its peers.
So large reductions are waited for early, where they are issued, unless the user chose `backward_prefetch`. That follows
from the sizes of units and from settings, which ranks compare before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.comm_stats import CommStats
from ..device.memory import MemoryTracker
from ..device.streams import PendingWork
from ..transports.block_sums import RankBlocks
from ..transports.pieces import RankPieces
from .chunks import longest_chunk
from .exchange import SharedMemory, SharedWork
from .operations import Operation

LARGE = 1024 * 1024  # bytes that a rank sends, from which on a reduction is waited for early

_early_waits = True


def choose_early_waits(wanted: bool) -> None:
    """Set whether large reductions are waited for early. [Note: in waits]"""
    global _early_waits
    _early_waits = wanted


def waits_early_if_large() -> bool:
    """Whether large reductions are waited for early."""
    return _early_waits


def is_waited_for_early(sent: int) -> bool:
    """Whether a reduction for which this rank sends so many bytes is waited for early."""
    return _early_waits and sent >= LARGE


class SharedMemoryExchange:
    """The collectives of a transport, through the shared memory of its group.

    An in-place sum takes scratch of a chunk's size on ranks from 2 on, whose piece is not among the first two terms.
    """

    def __init__(self, shared: SharedMemory, *, tracker: MemoryTracker, comm_stats: CommStats) -> None:
        self._shared = shared
        self._tracker = tracker
        self._comm_stats = comm_stats

    def gather(self, of_ranks: Sequence[RankPieces], shards: Sequence[torch.Tensor]) -> PendingWork:
        """All-gather every rank's `shards`, of any dtype and device, into its pieces. [Note: pieces of ranks]"""
        of_ranks[self._shared.rank].fill(shards)
        return self._under_way(self._shared.gather(of_ranks, just_filled=True))

    def reduce_scatter(self, output: RankPieces, of_ranks: Sequence[RankPieces]) -> PendingWork:
        """The sum over ranks of this rank's pieces, in rank order, into `output`. [Note: in waits]"""
        operation = self._shared.sum_pieces(output, of_ranks)
        return self._under_way(operation, advances_in_waits=_is_large(of_ranks))

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        """The sum over ranks, in rank order, in place: each rank sums a piece, and the sums are gathered."""
        shared = self._shared
        of_ranks = [RankPieces([piece]) for piece in tensor.view(-1).tensor_split(shared.world)]
        free = _hold_scratch(tensor, shared.rank, shared.world, shared.capacity, self._tracker)
        shared.sum_pieces(of_ranks[shared.rank], of_ranks)
        self._comm_stats.issued += 1
        last = shared.gather(of_ranks, depends=True)
        return PendingWork(work=SharedWork(shared, last), keep=(tensor,), finish=free)

    def sum_blocks(self, own: RankBlocks) -> PendingWork:
        """`StagedTransport.sum_blocks`."""
        operation = self._shared.sum_blocks(own)
        if not own.share:
            large = is_waited_for_early(sum(own.sizes) * own.exchange.most * own.outputs[0].itemsize)
            return self._under_way(operation, advances_in_waits=large)
        self._comm_stats.issued += 1
        return self._under_way(self._shared.gather([RankPieces([piece]) for piece in own.share], depends=True))

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor) -> PendingWork:
        """Send the rows of `sent`, uint8, one to each other rank in rank order, and receive theirs into `arrived`."""
        return self._under_way(self._shared.all_to_all(arrived, sent))

    def trim(self) -> None:
        """Give the outbox's pages back soon, because no collective follows for a while. [Note: trimming]"""
        self._shared.trim_soon()

    def _under_way(self, operation: Operation, *, advances_in_waits: bool = False) -> PendingWork:
        # The operation keeps its tensors alive.
        return PendingWork(work=SharedWork(self._shared, operation), advances_in_waits=advances_in_waits)


class SimulatedSharedMemory(SharedMemoryExchange):
    """The memory accounting of `SharedMemoryExchange`, without exchanges. [Note: dry run]"""

    def __init__(self, process_group: Any, capacity: int, *, tracker: MemoryTracker, comm_stats: CommStats) -> None:
        """`capacity`: bytes of an outbox."""
        self._rank, self._world, self._capacity = process_group.rank(), process_group.size(), capacity
        self._tracker = tracker
        self._comm_stats = comm_stats

    def gather(self, of_ranks: Sequence[RankPieces], shards: Sequence[torch.Tensor]) -> PendingWork:
        return PendingWork(keep=tuple(shards))

    def reduce_scatter(self, output: RankPieces, of_ranks: Sequence[RankPieces]) -> PendingWork:
        return PendingWork(keep=tuple(output.pieces), advances_in_waits=_is_large(of_ranks))

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor) -> PendingWork:
        return PendingWork(keep=(arrived, sent))

    def trim(self) -> None:
        return

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        self._comm_stats.issued += 1
        return PendingWork(finish=_hold_scratch(tensor, self._rank, self._world, self._capacity, self._tracker))


def _is_large(of_ranks: Sequence[RankPieces]) -> bool:
    return is_waited_for_early((len(of_ranks) - 1) * of_ranks[0].nbytes)


def _hold_scratch(
    tensor: torch.Tensor, rank: int, world: int, capacity: int, tracker: MemoryTracker
) -> Callable[[], None]:
    """Count the scratch memory of an in-place sum of `tensor`; returns a function to call at its end."""
    size = tensor.element_size()
    piece = tensor.numel() // world + (rank < tensor.numel() % world)
    elements = min(piece, longest_chunk(capacity, size * (world - 1))) if rank > 1 else 0
    return tracker.allocate("exchange", elements * size)
