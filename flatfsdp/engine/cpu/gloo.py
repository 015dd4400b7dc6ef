"""The transport of gloo: through shared memory where ranks have it, and otherwise with sums in rank order.

gloo's own reductions sum in an order of their own. `GlooAllToAll` sends each rank its pieces by gloo's all-to-all, and
that rank adds them up, so that results are bitwise reproducible for any world size and timing.

gloo's own gather receives into a buffer of its own, in new pages, and copies that to the output: for 32 MiB it takes
three times as long as the exchange. So large tensors are gathered in place, by a broadcast from each rank.

[Note: at exit] A worker thread of gloo releases an operation's tensors a moment after the operation was waited for. If
Python has released them before, the worker frees them, which takes the interpreter's lock. A native thread that
requests that lock while the interpreter exits is unwound through C++ frames that cannot be unwound: "terminate called
without an active exception", SIGABRT, after all work was done. (`destroy_process_group()` joins the workers only if the
group has no other references; those of torch's modules that were imported after it was made hold one.) So the
interpreter's exit waits until no worker is running.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.overrides import is_memoryless
from ..base.wait_limits import blocked
from ..comm.axes import Axis
from ..comm.comm_stats import CommStats
from ..comm.process_group_transport import Several, as_bytes, copy, copy_unless_there
from ..device.memory import MemoryTracker
from ..device.streams import DONE, Device, PendingWork, Stream, Work
from ..transports.block_sums import RankBlocks
from ..transports.pieces import RankPieces, add_up, cut, pieces_of_ranks
from ..transports.staged import StagedTransport, TensorList
from .collectives import SharedMemoryExchange, SimulatedSharedMemory, waits_early_if_large
from .groups import capacity_of, of_group, would_share

WORKER = "pt_gloo_runloop"  # torch's name of its gloo threads, truncated by Linux
LARGE = 2 * 1024 * 1024  # bytes of an output that is gathered in place
MOST_RANKS = 8  # that gather in place; for a larger number, as many broadcasts take longer than copies
SECONDS = 2.0  # limit of the wait at exit; a worker in an operation that never completes sleeps, so is not waited for


class DeterministicGloo(StagedTransport):
    """gloo: reductions sum in rank order, and tensors on the CPU are exchanged through shared memory if the ranks have
    it."""

    trims = True

    def __init__(self, group: Axis, device: Device, *, comm_stats: CommStats, tracker: MemoryTracker) -> None:
        super().__init__(group, device, comm_stats=comm_stats, tracker=tracker)
        wait_at_exit()
        all_to_all = SimulatedExchange if is_memoryless() else GlooAllToAll
        self._all_to_all = all_to_all(group.process_group, tracker=tracker, comm_stats=comm_stats)

    def all_gather_base(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        shared = self._shared_memory(output)
        if shared is None and self._gathers_in_place(output):
            return self._gather_in_place(output, shard, stream)
        if shared is None:
            return super().all_gather_base(output, shard, stream)
        return self._gather_by(shared, pieces_of_ranks([output], self.group.size), [shard], stream)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        listed = self.lists.of(outputs)
        shared = self._shared_memory(listed)
        if shared is None:
            return super().all_gather_coalesced(outputs, shards, stream)
        return self._gather_by(shared, listed.of_ranks, shards, stream)

    def reduce_scatter_base(self, output: torch.Tensor, full: torch.Tensor, stream: Stream) -> PendingWork:
        shared = self._shared_memory(full)
        if shared is None:
            self.comm_stats.log("reduce_scatter", full.nbytes)
            return self._exchange(stream, lambda: self._all_to_all.reduce_scatter(output, full), full, output)
        return self._reduce_by(shared, RankPieces([output]), pieces_of_ranks([full], self.group.size), stream)

    def reduce_scatter_coalesced(
        self, output: torch.Tensor, fulls: Sequence[torch.Tensor], stream: Stream
    ) -> PendingWork:
        listed = self.lists.of(fulls)
        shared = self._shared_memory(listed)
        if shared is None:
            return super().reduce_scatter_coalesced(output, fulls, stream)
        return self._reduce_by(shared, listed.of_ranks[0].of(output), listed.of_ranks, stream)

    def _gathers_in_place(self, output: torch.Tensor) -> bool:
        is_large = output.nbytes >= LARGE and self.group.size <= MOST_RANKS
        return is_large and output.device.type == "cpu" and not is_memoryless()

    def _gather_in_place(self, output: torch.Tensor, shard: torch.Tensor, stream: Stream) -> PendingWork:
        """`all_gather_base` by a broadcast from each rank."""
        self.comm_stats.log("all_gather", output.nbytes)
        pieces, group = as_bytes(output).chunk(self.group.size), self.group.process_group

        def start() -> PendingWork:
            copy_unless_there([pieces[self.group.rank]], [as_bytes(shard)])
            each = zip(pieces, self.group.ranks, strict=True)
            works = [dist.broadcast(piece, rank, group=group, async_op=True) for piece, rank in each]
            # This rank's own broadcast is waited for last: gloo reports a lost peer to ranks that receive from it, but
            # not to those that send to it.
            works.append(works.pop(self.group.rank))
            return PendingWork(work=Several(works), keep=(output, shard))

        return self._exchange(stream, start, output, shard)

    def _gather_by(
        self,
        shared: SharedMemoryExchange,
        of_ranks: Sequence[RankPieces],
        shards: Sequence[torch.Tensor],
        stream: Stream,
    ) -> PendingWork:
        self.comm_stats.log("all_gather", self.group.size * of_ranks[0].nbytes)
        return self._exchange(stream, lambda: shared.gather(of_ranks, shards), *shards)

    def _reduce_by(
        self, shared: SharedMemoryExchange, output: RankPieces, of_ranks: Sequence[RankPieces], stream: Stream
    ) -> PendingWork:
        self.comm_stats.log("reduce_scatter", self.group.size * of_ranks[0].nbytes)
        keep = output.pieces if output.memory is None else [output.memory]
        return self._exchange(stream, lambda: shared.reduce_scatter(output, of_ranks), *keep)

    def all_reduce(self, tensor: torch.Tensor, stream: Stream) -> PendingWork:
        self.comm_stats.log("all_reduce", tensor.nbytes)
        way = self._shared_memory(tensor) or self._all_to_all
        return self._exchange(stream, lambda: way.all_reduce(tensor), tensor)

    def sum_blocks(self, own: RankBlocks, stream: Stream) -> PendingWork:
        shared = self._shared_memory(own.outputs[0]) if own.exchange.most and min(own.sizes) else None
        if not isinstance(shared, SharedMemoryExchange) or isinstance(shared, SimulatedSharedMemory):
            return super().sum_blocks(own, stream)
        self.comm_stats.log("reduce_scatter", len(own.blocks) * sum(own.sizes) * own.outputs[0].itemsize)
        return self._exchange(stream, lambda: shared.sum_blocks(own), *own.outputs)

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor, stream: Stream) -> PendingWork:
        shared = self._shared_memory(sent)
        if shared is None:
            return super().all_to_all(arrived, sent, stream)
        return self._exchange(stream, lambda: shared.all_to_all(arrived, sent), sent)

    @property
    def settings(self) -> dict[str, str]:
        return {"share_host_memory, early_waits": str(waits_early_if_large())}

    def trim(self) -> None:
        if (shared := self.__dict__.get("_in_memory")) is not None:  # without creating it
            shared.trim()

    def _shared_memory(self, of: torch.Tensor | TensorList) -> SharedMemoryExchange | None:
        return self._in_memory if of.device.type == "cpu" and of.nbytes else None

    @cached_property
    def _in_memory(self) -> SharedMemoryExchange | None:
        group = self.group.process_group
        if is_memoryless():
            return (
                SimulatedSharedMemory(group, capacity_of(group), tracker=self.tracker, comm_stats=self.comm_stats)
                if would_share(group)
                else None
            )
        shared = of_group(group)
        if shared is None:
            return None
        return SharedMemoryExchange(shared, tracker=self.tracker, comm_stats=self.comm_stats)

    def _exchange(self, stream: Stream, start: Callable[[], PendingWork], *keep: torch.Tensor) -> PendingWork:
        if stream.is_callers or not any(tensor.numel() for tensor in keep):
            return start() if any(tensor.numel() for tensor in keep) else DONE
        with stream.running():
            start().wait()
            return stream.communicating(*keep)


class GlooAllToAll:
    """Reductions by gloo's all-to-all, which sends from one contiguous tensor and receives into another.

    A rank receives the pieces of all W - 1 others into scratch; of two ranks, into the output. Ranks that are neither
    the first nor the last also need scratch for what they send, because their own piece is in the middle of it.
    """

    def __init__(self, process_group: Any, *, tracker: MemoryTracker, comm_stats: CommStats) -> None:
        self._group = process_group
        self._rank, self._world = process_group.rank(), process_group.size()
        self._is_between = 0 < self._rank < self._world - 1
        self._tracker = tracker
        self._comm_stats = comm_stats

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> PendingWork:
        """The sum over ranks of this rank's piece of `full`, in rank order, into `output`, which is not in `full`."""
        return self._scatter(output, full.chunk(self._world), full)

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        """The sum over ranks, in rank order, in place: each rank sums a piece, and sends it on when waited for."""
        flat = tensor.view(-1)
        pieces = flat.tensor_split(self._world)
        summed = self._scatter(pieces[self._rank], pieces, flat)
        return PendingWork(work=summed, finish=lambda: self._send_sum(pieces, flat))

    def _scatter(self, output: torch.Tensor, pieces: Sequence[torch.Tensor], full: torch.Tensor) -> PendingWork:
        """Sum this rank's piece of `full` into `output`, which may be that piece itself."""
        rank, own = self._rank, pieces[self._rank]
        outgoing = self._of_others(pieces, full)
        if self._is_between:
            torch.cat([*pieces[:rank], *pieces[rank + 1 :]], out=outgoing)
        is_direct = self._world == 2 and output is not own
        arrived = output if is_direct else self._scratch(full, own.numel() * (self._world - 1))
        scratch = [*([] if is_direct else [arrived]), *([outgoing] if self._is_between else [])]
        work = self._exchange(arrived, outgoing, [own.numel()] * self._world, [piece.numel() for piece in pieces])

        def finish() -> None:
            if own.numel():
                terms = list(arrived.split(own.numel()))
                terms.insert(rank, own)
                add_up(output, terms, rank)
            self._free(scratch)

        return PendingWork(work=work, keep=(output, outgoing, arrived, full), finish=finish)

    def _send_sum(self, pieces: Sequence[torch.Tensor], full: torch.Tensor) -> None:
        """Send this rank's piece of `full` to all others, and receive theirs, blocking."""
        rank, own = self._rank, pieces[self._rank]
        arrived = self._of_others(pieces, full)
        outgoing = own if self._world == 2 else self._scratch(full, own.numel() * (self._world - 1))
        if outgoing is not own:
            outgoing.view(self._world - 1, own.numel()).copy_(own)
        self._comm_stats.issued += 1
        sizes = [piece.numel() for piece in pieces]
        with blocked():
            self._exchange(arrived, outgoing, sizes, [own.numel()] * self._world).wait()
        if self._is_between:
            others = [*pieces[:rank], *pieces[rank + 1 :]]
            copy(others, cut(arrived, others))
        self._free([*([arrived] if self._is_between else []), *([outgoing] if outgoing is not own else [])])

    def _exchange(self, arrived: torch.Tensor, outgoing: torch.Tensor, arriving: list[int], sent: list[int]) -> Work:
        """Send the pieces of `outgoing`, of the sizes `sent`, to the other ranks, and receive theirs."""
        arriving[self._rank] = sent[self._rank] = 0
        work: Work = dist.all_to_all_single(arrived, outgoing, arriving, sent, group=self._group, async_op=True)
        return work

    def _of_others(self, pieces: Sequence[torch.Tensor], full: torch.Tensor) -> torch.Tensor:
        """The other ranks' pieces of `full` as one tensor, if they are contiguous; scratch of their size otherwise."""
        own = pieces[self._rank].numel()
        if self._is_between:
            return self._scratch(full, full.numel() - own)
        return full[own:] if self._rank == 0 else full[: full.numel() - own]

    def _scratch(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        made = like.new_empty(numel)
        self._tracker.add("exchange", made.nbytes)
        return made

    def _free(self, scratch: Sequence[torch.Tensor]) -> None:
        for tensor in scratch:
            self._tracker.remove("exchange", tensor.nbytes)
            # Freed explicitly: gloo's thread may hold a finished work, and its tensors, a little longer.
            tensor.untyped_storage().resize_(0)


class SimulatedExchange(GlooAllToAll):
    """The memory accounting of `GlooAllToAll`, without its exchanges and sums, whose time would grow with the number of
    ranks. [Note: dry run]"""

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> PendingWork:
        mine = output.numel()
        return PendingWork(finish=self._hold(full, mine, copies=mine if self._world > 2 else 0))

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        mine = tensor.numel() // self._world + (self._rank < tensor.numel() % self._world)

        def send_sum() -> None:
            self._comm_stats.issued += 1
            self._hold(tensor, mine, copies=mine if self._world > 2 else 0)()

        summed = PendingWork(finish=self._hold(tensor, mine, copies=mine))
        return PendingWork(work=summed, finish=send_sum)

    def _hold(self, full: torch.Tensor, mine: int, *, copies: int) -> Callable[[], None]:
        """Count scratch for the others' pieces of `full`, if this rank lies between them, and for `copies` elements of
        each."""
        others = full.numel() - mine if self._is_between else 0
        return self._tracker.allocate("exchange", (others + copies * (self._world - 1)) * full.element_size())


def wait_for_workers(seconds: float = SECONDS) -> None:
    """Return when no worker thread of gloo is running, or after that many seconds.

    A sleeping worker is idle, or waits for a peer or for the interpreter's lock, which this function releases.
    """
    deadline = time.monotonic() + seconds
    time.sleep(0.001)  # even where threads cannot be listed
    while time.monotonic() < deadline and any(state == "R" for state in _states()):
        time.sleep(0.001)


def _states() -> Iterator[str]:
    """The states of gloo's worker threads, in Linux's letters; none on other systems."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            _, name, fields = (task / "stat").read_text().replace(")", "(").split("(", 2)
        except (OSError, ValueError):  # the thread has just ended, or its name has parentheses
            continue
        if name == WORKER:
            yield fields.split()[0]


@functools.cache
def wait_at_exit() -> None:
    """Register `wait_for_workers` to run when the interpreter exits; further calls do nothing."""
    atexit.register(wait_for_workers)
