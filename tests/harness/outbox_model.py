"""Ranks that exchange through outboxes, as a model: the code of `exchange.py`, `chunks.py` and `bell.py`, on doubles of
shared words, in every interleaving (`interleavings.py`).

Besides `inspect.py`, this is the only file that uses internals: it gives objects of the engine simulated memory.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flatfsdp.engine.cpu import bell as bells
from flatfsdp.engine.cpu import chunks, exchange
from flatfsdp.engine.cpu.bell import Bell, OwnBell
from flatfsdp.engine.cpu.chunks import ALIGNMENT, Chunk, ChunkStream
from flatfsdp.engine.cpu.exchange import SharedMemory, SharedWork
from tests.harness.interleavings import BARRIER, Interleavings, Replay, Request, Wrong


@dataclass(frozen=True)
class Scope:
    """The operations of the ranks, and the limits of their memory.

    Attributes:
        operations: for each, its elements, one per chunk, and whether it posts the result of the previous one.
        room: cells of an outbox, of which an element takes so many `cells`. in_flight: `chunks.IN_FLIGHT`.
        with_bells: ranks sleep, without a limit, until they are woken; otherwise they poll.
        others_go_on: only the first rank waits.
        apart: loads are never joined into one step.
        rests: ranks release the pages of their outboxes at the end.
        barriers, in_order: False for a processor that is weaker than x86.
    """

    world: int
    operations: tuple[tuple[int, bool], ...]
    room: int = 2
    cells: int = 1
    in_flight: int = 2
    with_bells: bool = False
    others_go_on: bool = False
    apart: bool = False
    rests: bool = False
    barriers: bool = True
    in_order: bool = True

    @property
    def words(self) -> int:
        """The number of words of a rank: two counters, its outbox, and two of its bell."""
        return 2 + self.room + 2

    def together(self, address: int) -> Hashable:
        """Counters of all ranks are loaded in one step, and so is a chunk: a failure between two loads also occurs at
        one of them, and counters only grow."""
        place = address % self.words
        return address if self.apart or place >= self.words - 2 else min(place, 2)


class Words:
    """Shared words for one process: the words for `indices` begin at `first`."""

    def __init__(self, replay: Replay, first: int, indices: Sequence[int] | None = None) -> None:
        self._replay, self._first = replay, first
        self._indices = indices

    def _address(self, index: int) -> int:
        return self._first + (index if self._indices is None else self._indices.index(index))

    def __getitem__(self, index: int) -> int:
        return self._replay.load(self._address(index))

    def __setitem__(self, index: int, value: int) -> None:
        self._replay.store(self._address(index), value)


class Round:
    """All peers' words, until a round is over."""

    def __init__(self, words: Sequence[Words], is_over: Callable[[], bool], then: Callable[[], Any]) -> None:
        self._words, self._is_over, self._then = words, is_over, then

    def __iter__(self) -> Iterator[Words]:
        if self._is_over():
            self._then()
        return iter(self._words)


class Step:
    """An operation whose chunks are cells that contain the chunk's number."""

    done = False

    def post(self, chunk: Chunk[Any], outbox: Any) -> None:
        for cell in self._cells(chunk):
            outbox[cell] = chunk.number + 1

    def take(self, chunk: Chunk[Any], outboxes: Sequence[Any]) -> None:
        for rank, outbox in enumerate(outboxes):
            for cell in self._cells(chunk) if outbox is not None else ():
                if (found := outbox[cell]) != chunk.number + 1:
                    raise Wrong(f"chunk {chunk.number} of rank {rank} has what is of chunk {found - 1}")

    @staticmethod
    def _cells(chunk: Chunk[Any]) -> range:
        return range(chunk.offset // ALIGNMENT, (chunk.offset + chunk.size) // ALIGNMENT)


class Pages:
    """The pages of an outbox; released ones become zeros."""

    def __init__(self, outbox: Words, room: int) -> None:
        self._outbox, self._room = outbox, room
        self.held = 2**20  # bytes

    def give_pages_back(self, start: int) -> bool:
        for cell in range(self._room):
            self._outbox[cell] = 0
        return True


class System:
    """Sleeping and waking, as in the kernel."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def syscall(self, number: int, address: int, operation: int, value: Any, *unused: Any) -> None:
        if operation == bells._WAIT:
            self._replay.ask(Request("sleep", address, seen=value.value))
        else:
            self._replay.ask(Request("wake", address))


class Rank:
    """One rank's code: it issues all operations, and waits for the last. Its local state is that of its stream."""

    def __init__(self, scope: Scope, rank: int, kind: type[ChunkStream[Step]]) -> None:
        self._scope, self._rank = scope, rank
        self._streams: dict[Hashable, ChunkStream[Step]] = {}
        stream = kind(scope.room * ALIGNMENT)
        for elements, depends in scope.operations:
            self._last = Step()
            stream.issue(self._last, elements, bytes_each=scope.cells * ALIGNMENT, depends=depends)
        self.begin = self._named(stream)

    def _named(self, stream: ChunkStream[Step]) -> Hashable:
        parts = [list(part) if isinstance(part, deque) else [part] for part in vars(stream).values()]
        key = tuple(tuple(each.number if isinstance(each, Chunk) else each for each in part) for part in parts)
        self._streams.setdefault(key, _copied(stream))
        return key

    def run(self, local: Hashable, replay: Replay) -> None:
        stream = _copied(self._streams[local])
        if not stream.has_work:
            if self._scope.rests and not self._shared(stream, replay).trim():
                replay.ask(Request("again", local=local))
            return
        self._last.done = False
        shared = self._shared(stream, replay)

        moves = stream.posted + stream.taken

        def begin_anew(*unused: Any) -> Any:
            replay.ask(Request("again", local=self._named(stream)))

        if self._scope.with_bells:
            shared.lost_peer = begin_anew
            with self._beside(shared, replay):
                if self._rank == 0 or not self._scope.others_go_on:
                    SharedWork(shared, self._last).wait()
                else:
                    shared.progress()
            return
        # After a chunk, its loop equals another call: earlier loads are forgotten.
        shared._their_words = Round(shared._their_words, lambda: stream.posted + stream.taken > moves, begin_anew)
        shared.progress()
        begin_anew()

    @contextmanager
    def _beside(self, shared: Any, replay: Replay) -> Iterator[None]:
        own = self._equipped(OwnBell, self._rank, replay)
        with ExitStack() as stack:
            shared.bell = own
            stack.enter_context(patch.object(exchange, "_progress_all", shared.progress))
            barrier = (lambda: replay.ask(BARRIER)) if self._scope.barriers else (lambda: None)
            stack.enter_context(patch.object(bells, "_barrier", barrier))
            stack.enter_context(patch.object(bells, "_system", lambda: System(replay)))
            moves = lambda rank: (shared._stream.posted + shared._stream.taken) * 8 + rank  # noqa: E731
            stack.enter_context(patch.object(exchange, "ring_value", moves))
            yield

    def _equipped(self, kind: type[Bell], rank: int, replay: Replay) -> Any:
        bell: Any = object.__new__(kind)
        bell._sleepers = 0
        bell._address = (rank + 1) * self._scope.words - 2
        bell._words = Words(replay, bell._address, (bells._WORD, bells._SLEEPS))
        return bell

    def _shared(self, stream: ChunkStream[Step], replay: Replay) -> Any:
        scope, rank = self._scope, self._rank
        shared: Any = SharedMemory.__new__(SharedMemory)
        words = [Words(replay, each * scope.words, (exchange._POSTED, exchange._TAKEN)) for each in range(scope.world)]
        outboxes = [Words(replay, each * scope.words + 2) for each in range(scope.world)]
        peers = [each for each in range(scope.world) if each != rank]
        sleepers = [] if not scope.with_bells else peers if not scope.others_go_on else [0] if rank else []
        bell_of = [self._equipped(Bell, each, replay) for each in sleepers]
        vars(shared).update(_name="of the model", rank=rank, _global_rank=rank, _stream=stream, _lock=threading.RLock())
        mine = SimpleNamespace(words=words[rank], bytes=outboxes[rank])
        vars(shared).update(_mine=mine, _their_words=[words[each] for each in peers], _bells=bell_of)
        theirs = [outboxes[each] if each != rank else None for each in range(scope.world)]
        vars(shared).update(_outboxes=theirs, _segment=Pages(outboxes[rank], scope.room))
        vars(shared).update(
            worked_at=0.0, _end=lambda error: None
        )  # a process that pauses raises, and restarts with another
        vars(shared).update(_peers=[type("Peer", (), {"rank": each}) for each in peers])
        return shared


def _copied(stream: ChunkStream[Step]) -> ChunkStream[Step]:
    made = copy.copy(stream)
    for name, part in vars(made).items():
        if isinstance(part, deque):
            setattr(made, name, part.copy())
    return made


def explore(scope: Scope, kind: type[ChunkStream[Any]] = ChunkStream) -> int:
    """Explore all states. Returned: their number.

    Raises:
        Wrong: one of them is a violation.
    """
    with (
        patch.object(chunks, "IN_FLIGHT", scope.in_flight),
        patch.object(SharedMemory, "looks", 1),
        patch.object(exchange, "retains_host_memory", lambda: False),
    ):
        ranks = [Rank(scope, rank, kind) for rank in range(scope.world)]
        model = Interleavings(
            [each.run for each in ranks],
            [each.begin for each in ranks],
            scope.world * scope.words,
            together=scope.together,
            in_order=scope.in_order,
        )
        model.explore()
        return model.states
