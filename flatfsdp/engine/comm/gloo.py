"""Reductions on gloo that sum in rank order, and the end of gloo's threads.

gloo's own reductions sum in an order of their own. `GlooAllToAll` sends each rank its pieces by gloo's all-to-all, and
that rank adds them up.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.wait_limits import blocked
from ..device.memory import MemoryTracker
from ..device.streams import PendingWork, Work
from .comm_stats import CommStats
from .pieces import add_up, copy, cut

WORKER = "pt_gloo_runloop"  # torch's name of its gloo threads, truncated by Linux
SECONDS = 2.0  # limit of the wait at exit; a worker in an operation that never completes sleeps, so is not waited for


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
        return PendingWork(work=summed, finish=lambda: self._share(pieces, flat))

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

    def _share(self, pieces: Sequence[torch.Tensor], full: torch.Tensor) -> None:
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

        def share() -> None:
            self._comm_stats.issued += 1
            self._hold(tensor, mine, copies=mine if self._world > 2 else 0)()

        summed = PendingWork(finish=self._hold(tensor, mine, copies=mine))
        return PendingWork(work=summed, finish=share)

    def _hold(self, full: torch.Tensor, mine: int, *, copies: int) -> Callable[[], None]:
        """Count scratch for the others' pieces of `full`, if they are apart, and for one of `copies` elements each."""
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
            _, name, rest = (task / "stat").read_text().replace(")", "(").split("(", 2)
        except (OSError, ValueError):  # the thread has just ended, or its name has parentheses
            continue
        if name == WORKER:
            yield rest.split()[0]


@functools.cache
def wait_at_exit() -> None:
    """Register `wait_for_workers` to run when the interpreter exits; further calls do nothing."""
    atexit.register(wait_for_workers)
