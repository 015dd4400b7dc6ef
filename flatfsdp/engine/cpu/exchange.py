"""Collectives through the outboxes of one process group, which make progress while a rank waits.

[Note: progress] A rank writes and reads chunks when it issues a collective, as far as there is room, and whenever it
waits for one. In a wait it does so for all groups of this process, so that ranks that wait for different collectives
complete each other's. If a rank neither issues nor waits for a while, a thread does. [Note: attendant]

[Note: looks] Waking a sleeping rank takes longer than most waits last. So a rank that has a processor to itself polls
for longer before it sleeps. If ranks share processors, it sleeps sooner: a peer may need this one.

[Note: trimming] An outbox has pages up to the highest byte that chunks have used. An outbox without work for
`TRIM_AFTER` gives its pages back, and takes them again for the next chunks: together less than a hundredth of that
time. Before a time without collectives the engine calls `trim_soon`: if the backward gathers nothing, a step's memory
peaks when the backward begins, and should not include outboxes. `retain_host_memory()` retains the pages, too.

[Note: attendant] A rank advances its exchanges while it waits ([Note: progress]). A rank that does not reach a wait
(its batch is larger, it caught an exception, it writes a file) would hold up the collectives that it has issued; with
gloo, threads would complete them. So this thread advances exchanges that have had no progress for `PERIOD`. Usually
there are none, and each check takes time of a processor from the computation: so the interval doubles, up to `SLOWEST`
periods, until there is something to do. Exchanges without work for `TRIM_AFTER`, or that are to be trimmed soon, give
back memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import UsageError
from ..base import _torch
from ..transports.block_sums import RankBlocks
from ..transports.pieces import RankPieces
from .bell import Bell, OwnBell, forget_in_child, ring_value
from .chunks import ALIGNMENT, ChunkStream
from .malloc import retains_host_memory
from .operations import AllToAll, BlockSum, Gather, Operation, Sum
from .peers import Peer
from .segments import MemorySegment

CAPACITY = 4 * 1024 * 1024  # bytes of an outbox
CONTROL = 4096  # bytes before an outbox, for counters
# Indices of 64-bit words; frequently changed words have a cache line of their own.
_POSTED, _TAKEN, _BROKEN = 0, ALIGNMENT // 8, ALIGNMENT // 8 + 1
_LOOKS, _LOOKS_ALONE = 10, 100  # polls of the counters before this rank sleeps: some 3 us each [Note: looks]
_NAP = 0.1  # seconds between two checks whether a peer has ended
# Of the thread that advances exchanges:
PERIOD = 0.005  # seconds
SLOWEST = 8  # periods between two checks, at most
TRIM_AFTER = 0.2  # seconds
LONG_AGO = float("-inf")


class _Outbox:
    """The mapped outbox of one rank."""

    def __init__(self, segment: MemorySegment) -> None:
        self.words = memoryview(segment.memory)[:CONTROL].cast("q")
        self.bytes = segment.bytes[CONTROL:]


class SharedMemory:
    """The outboxes of one process group, and this rank's collectives through them."""

    looks = _LOOKS
    _in_a_chunk = False  # true from the beginning of a chunk until it is counted
    _broken = ""  # the error that interrupted a chunk
    _lost = ""  # the message about a lost peer

    def __init__(self, process_group: Any, peers: Sequence[Peer], own: MemorySegment, bell: OwnBell) -> None:
        """`own`: this rank's outbox; the two segments of each peer are its outbox and its bell."""
        self.bell = bell
        self.rank, self.world = process_group.rank(), process_group.size()
        self._name = f"process group {process_group.group_name}"
        self._limit = _torch.time_limit(process_group)
        self._global_rank = dist.get_rank()
        if dist.get_world_size() <= len(os.sched_getaffinity(0)):
            self.looks = _LOOKS_ALONE
        self._peers = peers
        self._mine, self._segment = _Outbox(own), own
        own.give_pages_back(CONTROL)
        theirs = {peer.rank: _Outbox(peer.segments[0]) for peer in peers}
        self._bells = [Bell(peer.segments[1]) for peer in peers]
        self._outboxes = [theirs[rank].bytes if rank in theirs else None for rank in range(self.world)]
        self._their_words = [outbox.words for outbox in theirs.values()]
        self._stream: ChunkStream[Operation] = ChunkStream(self.capacity)
        self._lock = threading.RLock()
        self.worked_at = time.monotonic()
        self._finalizer = weakref.finalize(self, _close, peers)
        _remember(self)

    @property
    def capacity(self) -> int:
        """Bytes of an outbox."""
        return self._mine.bytes.numel()

    # -- collectives -------------------------------------------------------------------------------------------------

    def gather(self, of_ranks: Sequence[RankPieces], *, depends: bool = False, just_filled: bool = False) -> Operation:
        """All-gather into the pieces `of_ranks`, of which this rank's are filled. The first rank's are the longest.

        `just_filled`: the sources from which this rank's pieces were filled are unchanged.
        """
        made = Gather(of_ranks, self.rank, just_filled=just_filled)
        with self._lock:
            self._issue(made, of_ranks[0].numel, bytes_each=of_ranks[0].dtype.itemsize, depends=depends)
            made.just_filled = False  # from now on the sources may change
        return made

    def sum_pieces(self, output: RankPieces, of_ranks: Sequence[RankPieces]) -> Operation:
        """The sum over ranks of this rank's pieces, in rank order, into `output`. The first rank's are the longest."""
        each = of_ranks[0].dtype.itemsize * (self.world - 1)
        return self._issue(Sum(output, of_ranks, self.rank), of_ranks[0].numel, bytes_each=each)

    def sum_blocks(self, own: RankBlocks) -> Operation:
        """The sums of blocks of microbatches over ranks, of this rank's pieces."""
        each = own.outputs[0].itemsize * (self.world - 1) * own.exchange.most
        return self._issue(BlockSum(own), max(own.sizes), bytes_each=each)

    def all_to_all(self, arrived: torch.Tensor, sent: torch.Tensor) -> Operation:
        """Send the rows of `sent`, uint8, one to each other rank, and receive theirs into `arrived`."""
        return self._issue(AllToAll(arrived, sent, self.rank), sent.shape[1], bytes_each=self.world - 1)

    def _issue(self, operation: Operation, elements: int, *, bytes_each: int, depends: bool = False) -> Operation:
        with self._lock:
            if self._lost:  # the wait for the operation raises
                return operation
            self._stream.issue(operation, elements, bytes_each=bytes_each, depends=depends)
            self.progress()
            if self._stream.has_work:
                _attendant.begin()
        return operation

    @property
    def position(self) -> tuple[int, int]:
        """The position of this rank's stream, the same on all ranks that have issued the same collectives."""
        return self._stream.position

    @property
    def has_work(self) -> bool:
        """Whether a collective is in flight."""
        return self._stream.has_work

    # -- progress ----------------------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Post and take all chunks that can be posted and taken now; returns whether there were any.

        Raises:
            RuntimeError: this rank was interrupted in the middle of a chunk.
        """
        moved = False
        if not self._stream.has_work:
            return False
        self.worked_at = time.monotonic()
        with self._lock:
            if self._broken:  # an in-place sum cannot be repeated
                raise dist.DistBackendError(
                    f"shared memory of {self._name}: rank {self.rank} of the group was interrupted in the middle of "
                    f"an exchange, which cannot continue, by {self._broken}. Create the process group again, or "
                    "restart the program"
                )
            # Outputs of collectives that were issued in inference mode can be written only in inference mode.
            with torch.inference_mode():
                try:
                    while self._next_chunk():
                        moved = True
                except BaseException as error:
                    self._end(error)
                    raise
        if moved:
            value = ring_value(self._global_rank)
            for bell in self._bells:
                bell.ring(value)
        return moved

    def _next_chunk(self) -> bool:
        """Post or take one chunk; False if none can be."""
        stream, words = self._stream, self._their_words
        if (chunk := stream.to_post([each[_TAKEN] for each in words])) is not None:
            self._in_a_chunk = True
            if (end := CONTROL + chunk.offset + chunk.size) > self._segment.held:
                self._take_pages(end)
            chunk.operation.post(chunk, self._mine.bytes)
            stream.was_posted()
            self._mine.words[_POSTED] = stream.posted
        elif (chunk := stream.to_take([each[_POSTED] for each in words])) is not None:
            self._in_a_chunk = True
            chunk.operation.take(chunk, self._outboxes)
            stream.was_taken()
            self._mine.words[_TAKEN] = stream.taken
            chunk.operation.done = chunk.is_last
        else:
            return False
        self._in_a_chunk = False
        return True

    def trim(self) -> bool:
        """Give the outbox's pages back, unless a peer has yet to read from it; returns whether there is no more to do.
        [Note: trimming]"""
        with self._lock:
            if not (self._segment.held == CONTROL or self._broken or self._lost or retains_host_memory()):
                if not self._stream.is_drained([each[_TAKEN] for each in self._their_words]):
                    return False
                self._segment.give_pages_back(CONTROL)
            if self.worked_at == LONG_AGO:
                self.worked_at = time.monotonic()
            return True

    def trim_soon(self) -> None:
        """`trim` now, or as soon as the peers have read the outbox, because no collective follows for a while."""
        with self._lock:
            if not self._stream.has_work and not self.trim():
                self.worked_at = LONG_AGO
                _attendant.begin(soon=True)

    def _take_pages(self, end: int) -> None:
        """Take pages up to the byte `end` of the segment. The attendant gives them back after a time without work."""
        try:
            self._segment.take_pages(end)
        except OSError as error:
            raise dist.DistBackendError(
                f"shared memory of {self._name}: cannot allocate the {self.capacity} bytes of the send buffer of rank "
                f"{self.rank} of the group: {error}"
            ) from error
        _attendant.begin()

    def _end(self, error: BaseException) -> None:
        """Handle an `error` in `progress`: if it interrupted a chunk, all exchanges of the group are broken."""
        if self._in_a_chunk:
            self._broken = f"{type(error).__name__}: {error}"
            self._mine.words[_BROKEN] = 1

    def give_up(self, lost: str) -> None:
        """Stop all exchanges, which cannot complete, and release their tensors. `lost`: the message about the peer."""
        with self._lock:
            self._lost = self._lost or lost
            self._stream.forget()

    def check_lost(self) -> None:
        """
        Raises:
            RuntimeError: a peer is lost.
        """
        if self._lost:
            raise dist.DistNetworkError(self._lost)

    def lost_peer(self, since: float) -> str:
        """The reason to stop a wait that began at `since`; "" to continue."""
        for peer, words in zip(self._peers, self._their_words, strict=True):
            if peer.has_ended:
                return (
                    f"shared memory of {self._name}: connection closed by peer: the process of rank {peer.rank} of "
                    f"the group has ended or has left the group, and rank {self.rank} is waiting for it"
                )
            if words[_BROKEN]:
                return (
                    f"shared memory of {self._name}: rank {peer.rank} of the group was interrupted in the middle of "
                    f"an exchange, and rank {self.rank} is waiting for it. See the output of rank {peer.rank} for the "
                    "cause"
                )
        if time.monotonic() - since > self._limit:
            return (
                f"shared memory of {self._name}: timed out: rank {self.rank} of the group waited for other ranks for "
                f"more than {self._limit:.0f} s"
            )
        return ""


_exchanges: tuple[weakref.ref[SharedMemory], ...] = ()  # replaced, never changed: several threads iterate over it


def _remember(shared: SharedMemory) -> None:
    global _exchanges
    _exchanges = (*(each for each in _exchanges if each() is not None), weakref.ref(shared))


def _all() -> list[SharedMemory]:
    return [shared for each in _exchanges if (shared := each()) is not None]


def give_up_all(lost: str) -> None:
    """Stop the exchanges of all groups: a rank is `lost`, in words. Members of groups that it is not in may wait for
    ranks that wait for it."""
    for each in _all():
        each.give_up(lost)


class Attendant:
    """The thread, which starts when it is first needed and sleeps while no collective is in flight."""

    def __init__(self, attended: Callable[[], Iterable[SharedMemory]]) -> None:
        """`attended` returns all current exchanges; the thread keeps none of them alive."""
        self._attended = attended
        self._wanted, self._hurried = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, *, soon: bool = False) -> None:
        """Wake the thread: a collective is in flight, or (`soon`) an exchange is to be trimmed as soon as possible."""
        if not self._wanted.is_set():
            self._wanted.set()
        if soon:
            self._hurried.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # A daemon: the process must be able to exit if another rank has died.
                    self._thread = threading.Thread(target=self._run, name="flatfsdp exchange", daemon=True)
                    self._thread.start()

    def forget(self) -> None:
        """Reset the state in a forked child, which does not have the thread."""
        self._wanted, self._hurried = threading.Event(), threading.Event()
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            pause = PERIOD
            while self._wanted.is_set():
                if self._hurried.wait(pause):
                    self._hurried.clear()
                    pause = PERIOD
                pause = PERIOD if self._work() else min(2 * pause, SLOWEST * PERIOD)
                if self._is_idle():
                    self._wanted.clear()
                    if not self._is_idle():  # a collective was issued in the meantime
                        self._wanted.set()

    def _is_idle(self) -> bool:
        """Trim exchanges that had no work for `TRIM_AFTER`; returns whether nothing is in flight and all are
        trimmed."""
        attended = list(self._attended())
        idle = [each for each in attended if not each.has_work]
        trimmed = [time.monotonic() - each.worked_at > TRIM_AFTER and each.trim() for each in idle]
        return len(idle) == len(attended) and all(trimmed)

    def _work(self) -> bool:
        """Advance exchanges without progress for `PERIOD`; returns whether any advanced, or one is to be trimmed
        soon."""
        attended = list(self._attended())
        moved = any(each.worked_at == LONG_AGO for each in attended)
        for each in attended:
            if each.has_work and time.monotonic() - each.worked_at > PERIOD:
                try:
                    moved |= each.progress()
                except RuntimeError:
                    each.worked_at = float("inf")  # leaves the group alone: the next wait for it raises the same error
        return moved


_attendant = Attendant(_all)


def _progress_all() -> bool:
    """Progress in all groups; returns whether there was any. Errors are raised only by waits for a broken group."""
    moved = False
    for each in _all():
        with contextlib.suppress(RuntimeError):
            moved |= each.progress()
    return moved


class SharedWork:
    """A collective in flight through shared memory."""

    def __init__(self, shared: SharedMemory, operation: Operation) -> None:
        self._shared, self._operation = shared, operation

    def wait(self) -> None:
        """Do this rank's part of all collectives in flight, until this one is complete.

        Raises:
            RuntimeError: a peer has ended, or this rank has waited for longer than the group allows.
        """
        operation, shared = self._operation, self._shared
        since, looks, bell = time.monotonic(), 0, shared.bell
        shared.progress()
        while not operation.done:
            shared.check_lost()
            if _progress_all():
                looks = 0
                continue
            looks += 1
            if looks < shared.looks:
                continue
            shared.progress()  # raises the errors of this group
            seen = bell.look()
            try:
                if _progress_all() or operation.done:
                    continue
                bell.sleep(seen, _NAP)
            finally:
                bell.wake()
            lost = shared.lost_peer(since)
            if lost and not _progress_all() and not operation.done:  # the peer may have done its part before it ended
                shared.give_up(lost)


def _close(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.close()


class _ForkedStream(ChunkStream[Operation]):
    """Replaces the streams in a forked child, which does not have the shared memory."""

    def issue(self, *unused: Any, **unused_too: Any) -> NoReturn:
        raise UsageError(
            "this process was forked from a rank but is not a rank itself: it cannot exchange parameters and "
            "gradients with the ranks. Start it with the spawn method, or do not use the model in it"
        )

    has_work = property(issue)


def _forget_in_child() -> None:
    """In a forked child, which has no shared memory: close connections whose end reports the end of this rank."""
    global _exchanges
    for each in _all():
        each._finalizer()
        each._stream, each._lock = _ForkedStream(0), threading.RLock()
    _exchanges = ()
    _attendant.forget()
    forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
