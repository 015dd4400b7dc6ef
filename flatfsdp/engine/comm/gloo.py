"""Exchanges on gloo: all-to-all exchanges of pieces, and reductions that sum in rank order.

gloo's own gather and reductions allocate a second buffer of full size, and its reductions sum in an order of their own.
`PairwiseExchange` exchanges large tensors among a few ranks on one host by point-to-point messages, in place;
`GlooAllToAll` uses gloo's all-to-all collective in all other cases.

[Note: messages] Requirements of gloo's point-to-point messages, and the consequences of violating them:

- *All are posted before the first is waited for*, or ranks deadlock. A rank's wait then depends only on the operations
  that the others have issued, never on their waits. (If there is no room to receive all of them, a thread posts the
  rest as room becomes available: [Note: ordered sums].)
- *Sends are posted before receives.* A receive lets the peer's data come at once, and gloo's thread that reads them
  spins while the main thread posts more to the same connection. If the main thread is preempted at that moment, it
  spins for milliseconds: small exchanges (below `SMALLEST`) are better left to gloo's own collectives.
- *Tags* are matched in the order of posting, and `monitored_barrier` and users use small ones: ours count from
  `FIRST_TAG`, one per exchange, however many messages the exchange has for a peer. Every rank of a group takes them in
  the same order.
- *Sizes must agree*: gloo aborts the process if more bytes arrive than were requested, as in its collectives. Layouts
  are compared before the first exchange.
- *A tensor must live until its message has completed*, also on the sending side, or gloo aborts the process. A wait
  covers sends and receives, once each (a second wait for a message never returns). Messages that are never waited for,
  because of an exception, are kept alive for as long as the process group.
- *A peer that dies* in the middle of a message does not interrupt a wait for that message, only a wait for a message
  that has not begun. So an empty message, the *end*, follows those to each peer, and is waited for first.
- No waits with a time limit (a timeout breaks the whole group), no `is_completed` (false until waited for).

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
import itertools
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.hashing import hash63
from ..base.per_group import for_group
from ..base.wait_limits import blocked
from ..device.fake_tensors import is_memoryless
from ..device.memory import MemoryTracker
from ..device.streams import PendingWork, Work
from .comm_stats import CommStats
from .ordered_sum import OrderedSum, SumWorker
from .pieces import Row, add, copy_apart

FIRST_TAG, TAGS = 2**30, 2**20  # more than can be in flight
PARCEL_TAG = FIRST_TAG + TAGS  # of all blocking messages: one at a time, so one tag suffices
MOST_RANKS = 8  # the most that was measured; for some larger number, W-1 messages each way cost more than a ring
MOST_ROOM = 2  # scratch pieces of a sum, in addition to its output; more are slower from 16 MiB on (with 8 ranks)
SMALLEST = 2 * 1024 * 1024  # unsharded bytes; measured on two busy cores (on idle ones messages always cost less)
WORKER = "pt_gloo_runloop"  # torch's name of its gloo threads, truncated by Linux
SECONDS = 2.0  # limit of the wait at exit; a worker in an operation that never completes sleeps, so is not waited for


class PeerMessages:
    """Messages in flight that are waited for together. [Note: messages]"""

    def __init__(self, works: list[Work], line: PeerConnection) -> None:
        self._works = works  # the last one is waited for first
        self._connection = line
        line.under_way.add(self)

    def wait(self) -> None:
        """Block until all messages have arrived and the tensors of all sent ones may be released.

        Raises:
            RuntimeError: a connection broke.
        """
        while self._works:
            self._works[-1].wait()
            self._works.pop()
        self._connection.under_way.discard(self)


class PeerConnection:
    """State shared by all pairwise exchanges over one process group.

    Attributes:
        peers: all other ranks, in an order that differs by rank, so that not all send to the same one first.
        under_way: exchanges that have not been waited for.
        sum_worker: runs the sums that receive in turns.
    """

    def __init__(self, process_group: Any) -> None:
        self._group = weakref.ref(process_group)
        rank, world = process_group.rank(), process_group.size()
        self.peers = [*range(rank + 1, world), *range(rank)]
        self._tags = itertools.cycle(range(FIRST_TAG, FIRST_TAG + TAGS))
        self.under_way: set[PeerMessages] = set()
        self.sum_worker = SumWorker()

    def tag(self) -> int:
        """The tag of the next exchange. Every rank takes it at the same point of the group's order."""
        return next(self._tags)

    def send(self, peer: int, tag: int, row: Row) -> list[Work]:
        """Send contiguous pieces, and an end. Empty pieces are not sent."""
        group: Any = self._group()
        return [group.send([part], peer, tag) for part in _with_end(row)]

    def receive(self, peer: int, tag: int, row: Row) -> list[Work]:
        """Receive the messages of `peer`, into contiguous pieces, and the end. Empty pieces have no message."""
        group: Any = self._group()
        return [group.recv([part], peer, tag) for part in _with_end(row)]


def _with_end(row: Row) -> list[torch.Tensor]:
    return [*row.parts, row.pieces[0].new_empty(0)] if row.numel else []


def is_near(process_group: Any) -> bool:
    """Whether the ranks are few and all on one host. Collective over the group at its first call."""
    return for_group(process_group, "near", lambda: process_group.size() <= MOST_RANKS and _on_one_host(process_group))


def _on_one_host(process_group: Any) -> bool:
    if is_memoryless():  # a dry run, which has no other rank
        return True
    host = hash63(platform.node())
    extremes = torch.tensor([host, -host])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
    return bool(extremes.sum() == 0)


class PairwiseExchange:
    """Exchanges by messages: 2(W-1) per rank for each piece, and an end per peer. [Note: messages]"""

    def __init__(self, process_group: Any, *, tracker: MemoryTracker, comm_stats: CommStats) -> None:
        self._rank, self._world = process_group.rank(), process_group.size()
        self._connection = for_group(process_group, "messages", lambda: PeerConnection(process_group))
        self._tracker = tracker
        self._comm_stats = comm_stats

    def gather(self, rows: Sequence[Row], shards: Sequence[torch.Tensor]) -> PendingWork:
        """All-gather: every rank's `shards`, of the dtype of `rows`, into its row, without a copy in between."""
        return self._gather(self._connection.tag(), rows, Row(shards))

    def reduce_scatter(self, output: Row, rows: Sequence[Row]) -> PendingWork:
        """The sum over ranks of this rank's row, in rank order, into `output`."""
        return self._scatter(self._connection.tag(), output, rows)

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        """The sum over ranks, in rank order, in place: each rank sums a piece, and sends the sum in `wait()`."""
        rows = [Row([piece]) for piece in tensor.view(-1).tensor_split(self._world)]
        # Both tags now: their order must not depend on where a rank waits.
        first, second = self._connection.tag(), self._connection.tag()
        total = self._like(rows[self._rank])
        free = self._tracker.allocate("exchange", total.nbytes)
        scattered = self._scatter(first, total, rows)

        def share() -> None:
            self._comm_stats.issued += 1
            self._gather(second, rows, total).wait()
            free()

        return PendingWork(work=scattered, finish=share)

    def _gather(self, tag: int, rows: Sequence[Row], mine: Row) -> PendingWork:
        work = self._exchange(tag, [mine] * self._world, rows)
        copy_apart(rows[self._rank].pieces, mine.pieces)
        return PendingWork(work=work, keep=(*mine.pieces, *(piece for row in rows for piece in row.pieces)))

    def _scatter(self, tag: int, output: Row, rows: Sequence[Row]) -> PendingWork:
        """Receive the first peer's row in `output` and the others in scratch, in turns if that has no room for all."""
        rank, own, others = self._rank, rows[self._rank], self._world - 2
        scratch = [self._like(own) for _ in range(min(others, MOST_ROOM))]
        free = self._tracker.allocate("exchange", len(scratch) * own.nbytes)
        arriving = [output, *scratch]
        keep = tuple(piece for row in (*rows, *arriving) for piece in row.pieces)
        if others > MOST_ROOM:
            return PendingWork(work=self._add_in_order(tag, rows, arriving), keep=keep, finish=free)
        in_order = [*arriving[:rank], own, *arriving[rank:]]
        work = self._exchange(tag, rows, in_order)

        def add_up() -> None:
            add(in_order[0], in_order[1], output)  # `output` is one of the two
            for row in in_order[2:]:
                add(output, row, output)
            free()

        return PendingWork(work=work, keep=keep, finish=add_up)

    def _add_in_order(self, tag: int, rows: Sequence[Row], room: Sequence[Row]) -> PeerMessages:
        line = self._connection

        def receive(peer: int, row: Row) -> PeerMessages:
            return PeerMessages(line.receive(peer, tag, row), line)

        sends = self._send(tag, rows)
        total = OrderedSum(self._rank, self._world, own=rows[self._rank], room=room, receive=receive)
        line.sum_worker.submit(total)
        return PeerMessages([*sends, total], line)

    def _exchange(self, tag: int, outgoing: Sequence[Row], incoming: Sequence[Row]) -> PeerMessages:
        line = self._connection
        sends = self._send(tag, outgoing)
        receives = [work for peer in line.peers for work in line.receive(peer, tag, incoming[peer])]
        return PeerMessages([*sends, *receives], line)

    def _send(self, tag: int, outgoing: Sequence[Row]) -> list[Work]:
        line = self._connection
        # Twice: as many are received; ends are not counted.
        self._comm_stats.messages += 2 * sum(len(outgoing[peer].parts) for peer in line.peers)
        return [work for peer in line.peers for work in line.send(peer, tag, outgoing[peer])]

    @staticmethod
    def _like(row: Row) -> Row:
        """Uninitialized memory with the sizes of `row`."""
        return row.of(row.pieces[0].new_empty(row.numel))


class GlooAllToAll:
    """Exchanges by gloo's all-to-all.

    A reduce-scatter of n bytes receives n (W-1)/W bytes into scratch on each rank; all ranks but the first and the last
    also copy that many bytes to send them.
    """

    def __init__(self, process_group: Any, *, tracker: MemoryTracker, comm_stats: CommStats) -> None:
        self._group = process_group
        self._rank, self._world = process_group.rank(), process_group.size()
        self._tracker = tracker
        self._comm_stats = comm_stats

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> PendingWork:
        """The sum over ranks of this rank's piece of `full`, in rank order, into `output`."""
        return self._scatter(output, full.chunk(self._world), full)

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        """The sum over ranks, in rank order, in place: each rank sums a piece, and sends it on when waited for."""
        rank, flat = self._rank, tensor.view(-1)
        pieces = flat.tensor_split(self._world)
        mine = pieces[rank]
        scattered = self._scatter(mine, pieces, flat)

        def share() -> None:
            sizes = [piece.numel() for piece in pieces]
            sizes[rank] = 0
            sent = [mine.numel()] * self._world
            sent[rank] = 0
            others, outgoing = self._scratch(flat, sum(sizes)), self._scratch(flat, sum(sent))
            outgoing.view(self._world - 1, mine.numel()).copy_(mine)
            self._comm_stats.issued += 1
            with blocked():
                dist.all_to_all_single(others, outgoing, sizes, sent, group=self._group)
            for piece, arrived in zip(pieces, others.split(sizes), strict=True):
                if arrived.numel():
                    piece.copy_(arrived)
            self._free_scratch(others, outgoing)

        return PendingWork(work=scattered, finish=share)

    def _scatter(self, output: torch.Tensor, pieces: Sequence[torch.Tensor], full: torch.Tensor) -> PendingWork:
        rank, own = self._rank, pieces[self._rank]
        send = [piece.numel() for piece in pieces]
        before, after = sum(send[:rank]), sum(send[rank + 1 :])
        send[rank] = 0
        receive = [own.numel()] * self._world
        receive[rank] = 0
        # all_to_all sends from one contiguous tensor: leaving out this rank's piece needs no copy on the first and the
        # last rank.
        copied = 0 < rank < self._world - 1
        if copied:
            outgoing = self._scratch(full, before + after)
            torch.cat([full[:before], full[full.numel() - after :]], out=outgoing)
        else:
            outgoing = full[full.numel() - after :] if rank == 0 else full[:before]
        scratch = self._scratch(full, sum(receive))
        work: Any = dist.all_to_all_single(scratch, outgoing, receive, send, group=self._group, async_op=True)

        def add_up() -> None:
            if own.numel():
                in_order = list(scratch.split(own.numel()))
                in_order.insert(rank, own)
                total = torch.add(in_order[0], in_order[1])
                for piece in in_order[2:]:
                    total.add_(piece)
                output.copy_(total)
            self._free_scratch(scratch, *([outgoing] if copied else []))

        return PendingWork(work=work, keep=(output, outgoing, scratch, full), finish=add_up)

    def _scratch(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        made = like.new_empty(numel)
        self._tracker.add("exchange", made.nbytes)
        return made

    def _free_scratch(self, *scratch: torch.Tensor) -> None:
        for tensor in scratch:
            self._tracker.remove("exchange", tensor.nbytes)
            # Freed explicitly: gloo's thread may hold a finished work, and its tensors, a little longer.
            tensor.untyped_storage().resize_(0)


class SimulatedExchange(GlooAllToAll):
    """The memory accounting of `GlooAllToAll`, without its exchanges and sums, whose time would grow with the number of
    ranks. [Note: dry run]"""

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor) -> PendingWork:
        return self._hold_scatter(output.numel(), full)

    def all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        numel, world = tensor.numel(), self._world
        mine = numel // world + (self._rank < numel % world)

        def share() -> None:
            self._comm_stats.issued += 1
            self._hold(tensor, numel - mine + mine * (world - 1))()

        return PendingWork(work=self._hold_scatter(mine, tensor), finish=share)

    def _hold_scatter(self, mine: int, full: torch.Tensor) -> PendingWork:
        copied = full.numel() - mine if 0 < self._rank < self._world - 1 else 0
        return PendingWork(finish=self._hold(full, mine * (self._world - 1) + copied))

    def _hold(self, like: torch.Tensor, numel: int) -> Callable[[], None]:
        return self._tracker.allocate("exchange", numel * like.element_size())


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
