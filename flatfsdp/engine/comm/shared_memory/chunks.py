"""When a rank may write a chunk for its peers, and when it may read theirs: the protocol, without memory.

[Note: outbox] Each rank has an *outbox*: memory that it alone writes and all its peers read. A collective passes
through it in *chunks*. Ranks issue the same collectives in the same order, so chunks have the same numbers, sizes and
places on all of them, and two counters for each rank are all that they exchange: how many chunks it has *posted*
(written whole) and *taken* (read whole, from every peer).

- A chunk is taken when every peer has posted it.
- A chunk is posted when every peer has taken what was in its place before. So nobody overwrites what another one reads.
- Both happen in the order of numbers, wherever this rank waits for any collective of any group ([Note: progress]). So
  what a rank waits for depends on what others have issued, and not on what they wait for.

A rank that was given other collectives than its peers would take chunks of other sizes: each chunk has a *tag*, written
before it is counted, which peers compare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

ALIGNMENT = 64  # bytes: a cache line
IN_FLIGHT = 64  # chunks that are posted, and not taken by all
TAGS = 2 * IN_FLIGHT  # so many that a tag is not overwritten before all have read it

T = TypeVar("T")


class Chunk(NamedTuple, Generic[T]):
    """A part of a collective that passes through the outbox at once.

    Attributes:
        number: in the order of all chunks of the group.
        operation: what writes and reads it.
        start, end: the elements of each piece that it carries.
        place: where it begins in the outbox, in bytes; size: how many it takes there.
        posted_after: so many chunks this rank has to have taken before it can post this one.
        is_last: of its operation.
    """

    number: int
    operation: T
    start: int
    end: int
    place: int
    size: int
    posted_after: int
    is_last: bool

    def is_all_of(self, elements: int) -> bool:
        """Whether it carries all of a piece of so many `elements`."""
        return self.start == 0 and self.end >= elements


def longest_chunk(capacity: int, bytes_each: int) -> int:
    """How many elements a chunk has at most, each of which takes so many bytes in the outbox: two chunks find room."""
    return max(1, (capacity // 2 - ALIGNMENT) // bytes_each)


class ChunkStream(Generic[T]):
    """One rank's chunks over one group.

    Attributes:
        posted, taken: how many this rank has.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes of each rank's outbox."""
        self._capacity = capacity
        self._next_place = self._next_number = 0
        self._to_post: deque[Chunk[T]] = deque()
        self._to_take: deque[Chunk[T]] = deque()
        self._in_outbox: deque[tuple[int, int, int]] = deque()  # number, start and end of what not all have taken
        self.posted = self.taken = 0

    def issue(self, operation: T, elements: int, *, bytes_each: int, depends: bool = False) -> None:
        """Cut an `operation` into chunks, last in order: pieces of at most so many `elements`, each of which takes
        `bytes_each` in the outbox. `depends`: it posts what the operation before it brings."""
        most = longest_chunk(self._capacity, bytes_each)
        after = self._next_number if depends else 0
        for start in range(0, elements, most):
            end = min(start + most, elements)
            chunk = self._chunk(operation, start, end, bytes_each, after, is_last=end == elements)
            self._to_post.append(chunk)
            self._to_take.append(chunk)

    def _chunk(self, operation: T, start: int, end: int, bytes_each: int, after: int, *, is_last: bool) -> Chunk[T]:
        size = -(-(end - start) * bytes_each // ALIGNMENT) * ALIGNMENT
        place = self._next_place if self._next_place + size <= self._capacity else 0
        self._next_place = place + size
        number = self._next_number
        self._next_number += 1
        return Chunk(number, operation, start, end, place, size, after, is_last)

    def forget(self) -> None:
        """Let go of what is neither posted nor taken. Nothing comes to its end any more."""
        self._to_post.clear()
        self._to_take.clear()

    @property
    def has_work(self) -> bool:
        """Whether a chunk is yet to be posted or taken."""
        return bool(self._to_take)

    def is_drained(self, taken_by_peers: Sequence[int]) -> bool:
        """Whether nothing is under way, and peers, who have taken so many chunks, read nothing more of the outbox."""
        return not self._to_take and min(taken_by_peers) >= self.posted

    def to_post(self, taken_by_peers: Sequence[int]) -> Chunk[T] | None:
        """The chunk to be written now, if there is one: peers have taken so many chunks."""
        if not self._to_post:
            return None
        chunk = self._to_post[0]
        if chunk.posted_after > self.taken:
            return None
        old = self._in_outbox
        if old:
            through = min(taken_by_peers)
            while old and old[0][0] < through:
                old.popleft()
            if len(old) == IN_FLIGHT:
                return None
            for _, start, end in old:
                if start < chunk.place + chunk.size and chunk.place < end:
                    return None
        return chunk

    def was_posted(self) -> None:
        """What `to_post` returned is in the outbox."""
        chunk = self._to_post.popleft()
        self._in_outbox.append((chunk.number, chunk.place, chunk.place + chunk.size))  # not what it holds
        self.posted += 1

    def to_take(self, posted_by_peers: Sequence[int]) -> Chunk[T] | None:
        """The chunk to be read now, if there is one: peers have posted so many chunks."""
        if not self._to_take:
            return None
        chunk = self._to_take[0]
        # A rank's own share may be overwritten by what it takes: it posts first.
        return chunk if chunk.number < self.posted and chunk.number < min(posted_by_peers) else None

    def was_taken(self) -> None:
        """What `to_take` returned was read."""
        self._to_take.popleft()
        self.taken += 1
