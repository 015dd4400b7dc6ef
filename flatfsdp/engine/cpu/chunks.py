"""The protocol of exchanges through outboxes: when a rank may write and read chunks. It does not touch the memory.

[Note: outbox] Each rank has an *outbox*: memory that only it writes and all its peers read. A collective passes through
it in *chunks*. Ranks issue the same collectives in the same order, so chunks have the same numbers, sizes and offsets
on all of them, and ranks only need to exchange two counters: the number of chunks that a rank has *posted* (completely
written) and *taken* (completely read, from every peer).

- A chunk can be taken when every peer has posted it.
- A chunk can be posted when every peer has taken the chunks that had its bytes: unread data are not overwritten.
- Both happen in the order of numbers, while this rank waits for any collective of any group ([Note: progress]). So a
  rank's wait depends on the collectives that others have issued, and not on their waits.

That ranks issue the same collectives is compared before, and at the end of a backward. [Note: issued alike]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

ALIGNMENT = 64  # bytes: a cache line
IN_FLIGHT = 64  # the most chunks that are posted but not taken by all peers

T = TypeVar("T")


class Chunk(NamedTuple, Generic[T]):
    """A part of a collective that passes through the outbox at once.

    Attributes:
        number: in the order of all chunks of the group.
        operation: the operation that writes and reads it.
        start, end: its range of elements of each piece.
        offset: where it begins in the outbox, in bytes; size: its bytes there.
        posted_after: the number of chunks that this rank must have taken before it can post this one.
        is_last: whether it is the last one of its operation.
    """

    number: int
    operation: T
    start: int
    end: int
    offset: int
    size: int
    posted_after: int
    is_last: bool

    def is_all_of(self, elements: int) -> bool:
        """Whether it contains all of a piece of so many `elements`."""
        return self.start == 0 and self.end >= elements


def longest_chunk(capacity: int, bytes_each: int) -> int:
    """The most elements of a chunk whose elements take `bytes_each` in the outbox: so that two chunks fit."""
    return max(1, (capacity // 2 - ALIGNMENT) // bytes_each)


class ChunkStream(Generic[T]):
    """The chunks of one rank over one group.

    Attributes:
        posted, taken: the numbers of chunks that this rank has posted and taken.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes of each rank's outbox."""
        self._capacity = capacity
        self._next_offset = self._next_number = 0
        self._to_post: deque[Chunk[T]] = deque()
        self._to_take: deque[Chunk[T]] = deque()
        self._in_outbox: deque[tuple[int, int, int]] = deque()  # number, start, end of chunks not taken by all
        self.posted = self.taken = 0

    def issue(self, operation: T, elements: int, *, bytes_each: int, depends: bool = False) -> None:
        """Append the chunks of an `operation` whose pieces have at most `elements`, each of which takes `bytes_each` in
        the outbox. `depends`: it posts the result of the operation before it."""
        most = longest_chunk(self._capacity, bytes_each)
        after = self._next_number if depends else 0
        for start in range(0, elements, most):
            end = min(start + most, elements)
            chunk = self._chunk(operation, start, end, bytes_each, after, is_last=end == elements)
            self._to_post.append(chunk)
            self._to_take.append(chunk)

    def _chunk(self, operation: T, start: int, end: int, bytes_each: int, after: int, *, is_last: bool) -> Chunk[T]:
        size = -(-(end - start) * bytes_each // ALIGNMENT) * ALIGNMENT
        offset = self._next_offset if self._next_offset + size <= self._capacity else 0
        self._next_offset = offset + size
        number = self._next_number
        self._next_number += 1
        return Chunk(number, operation, start, end, offset, size, after, is_last)

    def forget(self) -> None:
        """Drop all chunks that are yet to be posted or taken. Their operations never complete."""
        self._to_post.clear()
        self._to_take.clear()

    @property
    def position(self) -> tuple[int, int]:
        """The number of the next chunk, and where it begins in the outbox, if it fits there."""
        return self._next_number, self._next_offset

    @property
    def has_work(self) -> bool:
        """Whether a chunk is yet to be posted or taken."""
        return bool(self._to_take)

    def is_drained(self, taken_by_peers: Sequence[int]) -> bool:
        """Whether nothing is in flight, and peers, which have taken so many chunks, have read all of the outbox."""
        return not self._to_take and min(taken_by_peers) >= self.posted

    def to_post(self, taken_by_peers: Sequence[int]) -> Chunk[T] | None:
        """The chunk that can be written now, if any, given the numbers of chunks that peers have taken."""
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
                if start < chunk.offset + chunk.size and chunk.offset < end:
                    return None
        return chunk

    def was_posted(self) -> None:
        """Count the chunk returned by `to_post`, which is now in the outbox."""
        chunk = self._to_post.popleft()
        self._in_outbox.append((chunk.number, chunk.offset, chunk.offset + chunk.size))  # without its operation
        self.posted += 1

    def to_take(self, posted_by_peers: Sequence[int]) -> Chunk[T] | None:
        """The chunk that can be read now, if any, given the numbers of chunks that peers have posted."""
        if not self._to_take:
            return None
        chunk = self._to_take[0]
        # Taking a chunk may overwrite this rank's own part of it, so that is posted first.
        return chunk if chunk.number < self.posted and chunk.number < min(posted_by_peers) else None

    def was_taken(self) -> None:
        """Count the chunk returned by `to_take`, which has been read."""
        self._to_take.popleft()
        self.taken += 1
