"""A model of torch's caching allocator for one device: which bytes it takes from the device, and when.

[Note: caching allocator] torch takes *segments* from the device, cuts them into *blocks*, and keeps what is freed. A
request is rounded up to `ROUND`, and served from one of two pools by its size: the small pool has segments of
`SMALL_SEGMENT`; the large one has segments of `LARGE_SEGMENT`, or for requests from `OWN_SEGMENT` up, a segment of
their own size in multiples of `ROUND_SEGMENT`. Each stream has its own free blocks. The smallest one that is large
enough is taken, and the rest is split off if it is of use; free neighbors within a segment are joined. So memory is
reserved that nobody uses: it is free on another stream, or lies in pieces that are too small.

[Note: events] A block that another stream was recorded to use is free only when the device has passed the point that
each of these streams had reached at the time of `free`. Until then it counts as active, but not as allocated.

[Note: expandable segments] With `expandable_segments`, a stream has one range of addresses for each pool, and maps
pages at its end (or where some are missing) instead of taking new segments; all blocks of a pool are then neighbors.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
UNLIMITED = 2**60
ROUND = 512
SMALL = MIB  # the largest request that is served from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB
ROUND_SEGMENT = 2 * MIB


class DeviceOutOfMemory(Exception):
    """The device has no more memory, even after everything that is cached was given back."""


@dataclass(frozen=True)
class Settings:
    """The settings of the variable `PYTORCH_ALLOC_CONF` and of `set_per_process_memory_fraction`.

    Attributes:
        capacity: bytes that the process may take from the device.
        collect_above: the share of `capacity` above which unused segments are given back, the oldest first; 0: never.
    """

    capacity: int = UNLIMITED
    expandable_segments: bool = False
    collect_above: float = 0.0

    @classmethod
    def of_environment(cls) -> Settings:
        """Those of this process, except for the collection of garbage, for a device without limit."""
        words = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        return cls(expandable_segments="expandable_segments:true" in words.lower().replace(" ", ""))


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: of one stream, free, allocated or waiting for events; `label` is the user's.

    Attributes:
        before, after: the neighbors within the segment.
        uses: other streams that were recorded to use it.
        pending: events that it waits for.
        mapped: whether it has memory; without expandable segments all have.
        since: the number of requests to its pool when it became free.
    """

    stream: Hashable
    pool: Pool
    start: int
    size: int
    before: Block | None = None
    after: Block | None = None
    allocated: bool = False
    uses: dict[Hashable, None] = field(default_factory=dict)
    pending: int = 0
    mapped: bool = True
    since: int = 0
    label: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None

    @property
    def is_idle(self) -> bool:
        """Whether it is neither allocated nor waiting."""
        return not (self.allocated or self.pending or self.uses)


class FreeBlocks:
    """Blocks by stream, ordered by size and address, or by address only."""

    def __init__(self, *, by_size: bool) -> None:
        self._by_size = by_size
        self._of: dict[Hashable, list[tuple[int, int, Block]]] = {}

    def _key(self, block: Block) -> tuple[int, int, Block]:
        return (block.size if self._by_size else 0, block.start, block)

    def of(self, stream: Hashable) -> list[tuple[int, int, Block]]:
        return self._of.setdefault(stream, [])

    def add(self, block: Block) -> None:
        insort(self.of(block.stream), self._key(block))

    def remove(self, block: Block) -> None:
        blocks = self.of(block.stream)
        index = bisect_left(blocks, self._key(block))
        assert blocks[index][2] is block
        del blocks[index]

    def from_size(self, stream: Hashable, size: int) -> Iterator[Block]:
        """Those of at least `size`, the smallest first."""
        blocks = self.of(stream)
        return (entry[2] for entry in blocks[bisect_left(blocks, (size, -1)) :])

    def __iter__(self) -> Iterator[Block]:
        return (entry[2] for blocks in self._of.values() for entry in [*blocks])


class Pool:
    """The free blocks for small or for large requests; `requests`: how often one was looked for."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free = FreeBlocks(by_size=True)
        self.unmapped = FreeBlocks(by_size=False)
        self.requests = 0

    @property
    def page(self) -> int:
        """The unit in which expandable segments grow."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


@dataclass
class Count:
    """Bytes now, and at their peak."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class Allocator:
    """The memory of one device. [Note: caching allocator]

    Attributes:
        allocated: bytes of blocks that have an owner.
        active: bytes of blocks that have one, or wait for events. [Note: events]
        reserved: bytes taken from the device.
        segments, requests, retries: how often memory was taken from the device, asked for, and asked for again after
            everything cached was given back.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        mark: Callable[[Any], Any] = lambda stream: None,
        is_past: Callable[[Any], bool] = lambda event: True,
        wait: Callable[[Any], object] = lambda event: None,
    ) -> None:
        """`mark` records an event on a stream, `is_past` asks the device about one, `wait` blocks the host for one."""
        self.settings = settings or Settings()
        self._mark, self._is_past, self._wait = mark, is_past, wait
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.allocated, self.active, self.reserved = Count(), Count(), Count()
        self.segments = self.requests = self.retries = 0
        self._live: dict[Block, None] = {}  # allocated or waiting
        self._events: dict[Hashable, list[tuple[Any, Block]]] = {}
        self._next_address = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: Hashable, label: Any = None) -> Block:
        """A block for `size` bytes, more than 0, whose first use is on `stream`.

        Raises:
            DeviceOutOfMemory: the device has no memory for it.
        """
        self._process_events()
        self.requests += 1
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self.small if size <= SMALL else self.large
        block = self._cached(pool, stream, size)
        if block is None:
            self._collect()
            block = self._new(pool, stream, size)
        if block is None:
            self._release_cached()
            self.retries += 1
            block = self._new(pool, stream, size)
        if block is None:
            raise DeviceOutOfMemory(
                f"no memory for {size} bytes: {self.reserved.now} of {self.settings.capacity} are reserved, of which "
                f"{self.allocated.now} are allocated"
            )
        if self._splits(block, size):
            block = self._split(block, size)
        block.allocated, block.label = True, label
        self._live[block] = None
        self.allocated.add(block.size)
        self.active.add(block.size)
        return block

    def record_stream(self, block: Block, stream: Hashable) -> None:
        """Note that work of `stream` uses `block`. [Note: events]"""
        if stream != block.stream:
            block.uses[stream] = None

    def free(self, block: Block) -> None:
        """Take back `block`, for later requests on its stream."""
        assert block.allocated
        block.allocated = False
        self.allocated.add(-block.size)
        for stream in block.uses:
            self._events.setdefault(stream, []).append((self._mark(stream), block))
            block.pending += 1
        block.uses = {}
        if not block.pending:
            self._freed(block)

    def empty_cache(self) -> None:
        """Give all segments in which nothing is allocated back to the device."""
        self._release_cached()

    def forget_peaks(self) -> None:
        """Measure peaks from here on."""
        for count in (self.allocated, self.active, self.reserved):
            count.peak = count.now

    def live(self) -> list[Block]:
        """The blocks that are allocated or wait for events."""
        return [*self._live]

    def cached(self) -> list[Block]:
        """The free blocks."""
        return [*self.small.free, *self.large.free]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, stream: Hashable, size: int) -> Block | None:
        """A free block for `size`: the smallest, or of expandable segments the one that leaves least room to grow."""
        pool.requests += 1
        fitting = pool.free.from_size(stream, size)
        block = next(fitting, None)
        if block is None:
            return None
        if self.settings.expandable_segments:
            for other in fitting:
                if _room(other) >= _room(block):
                    break
                block = other
        pool.free.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        remainder = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return remainder >= ROUND
        return remainder > SMALL

    def _split(self, block: Block, size: int) -> Block:
        """The first `size` bytes of `block`, whose remainder is free."""
        first = _cut(block, size)
        self._insert(block)
        return first

    def _insert(self, block: Block) -> None:
        block.since = block.pool.requests
        block.pool.free.add(block)

    def _freed(self, block: Block) -> None:
        del self._live[block]
        self.active.add(-block.size)
        for neighbor in (block.before, block.after):
            _join(block, neighbor)
        self._insert(block)

    def _process_events(self) -> None:
        for waiting in self._events.values():
            while waiting and self._is_past(waiting[0][0]):
                block = waiting.pop(0)[1]
                block.pending -= 1
                if not block.pending:
                    self._freed(block)

    # -- segments ------------------------------------------------------------------------------------------------------

    def _new(self, pool: Pool, stream: Hashable, size: int) -> Block | None:
        """A block of memory from the device; None if it has too little."""
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        if size <= SMALL:
            taken = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            taken = LARGE_SEGMENT
        else:
            taken = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if not self._take(taken):
            return None
        return Block(stream, pool, self._addresses(taken), taken)

    def _take(self, size: int) -> bool:
        if self.reserved.now + size > self.settings.capacity:
            return False
        self.segments += 1
        self.reserved.add(size)
        return True

    def _addresses(self, size: int) -> int:
        start = self._next_address
        self._next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        return start

    def _release(self, block: Block) -> None:
        """Give a free, whole segment back."""
        block.pool.free.remove(block)
        self.reserved.add(-block.size)

    def _release_cached(self) -> None:
        for waiting in self._events.values():
            for event, _ in waiting:
                self._wait(event)
            for _, block in waiting:
                block.pending -= 1
                if not block.pending:
                    self._freed(block)
            waiting.clear()
        for pool in (self.large, self.small):
            for block in pool.free:
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def _collect(self) -> None:
        """Give back unused segments of the large pool that are older than the average, while too much is reserved."""
        if not self.settings.collect_above:
            return
        excess = self.reserved.now - self.settings.collect_above * self.settings.capacity
        ages = {block: self.large.requests - block.since for block in self.large.free if block.is_whole}
        while excess > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                excess -= block.size
                del ages[block]
                self._release(block)

    # -- expandable segments -------------------------------------------------------------------------------------------

    def _expand(self, pool: Pool, stream: Hashable, size: int) -> Block | None:
        """A block of mapped pages at least as large as `size`. [Note: expandable segments]"""
        block = self._expandable(pool, stream, size)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:
            after = block.after
            assert after is not None and not after.mapped
            if not self._map(after, size - block.size):
                return None
            block = after
        pool.free.remove(block)
        return block

    def _expandable(self, pool: Pool, stream: Hashable, size: int) -> Block:
        """The first of neighbors, free or without memory, that have `size` together; in a new range if need be."""
        for _, _, block in pool.unmapped.of(stream):
            first = block.before if block.before is not None and block.before.is_idle else block
            found, other = 0, first
            while found < size and other is not None and other.is_idle:
                found += other.size
                other = other.after  # type: ignore[assignment]
            if found >= size:
                return first
        extent = (self.settings.capacity + self.settings.capacity // 8) // LARGE_SEGMENT * LARGE_SEGMENT
        block = Block(stream, pool, self._addresses(extent), extent, mapped=False)
        pool.unmapped.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give pages to the first `size` bytes of `block`."""
        end = -(-(block.start + min(size, block.size)) // block.pool.page) * block.pool.page
        size = min(end - block.start, block.size)
        if not self._take(size):
            return False
        block.pool.unmapped.remove(block)
        if size < block.size:
            remainder = Block(
                block.stream, block.pool, block.start + size, block.size - size, block, block.after, mapped=False
            )
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            block.pool.unmapped.add(remainder)
        block.mapped = True
        for neighbor in (block.before, block.after):
            _join(block, neighbor)
        self._insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages within a free block back."""
        page = block.pool.page
        begin, end = -(-block.start // page) * page, (block.start + block.size) // page * page
        if begin >= end:
            return
        block.pool.free.remove(block)
        self.reserved.add(begin - end)
        if begin > block.start:
            self._insert(_cut(block, begin - block.start))
        if end < block.start + block.size:
            remainder, block = block, _cut(block, end - block.start)
            self._insert(remainder)
        block.mapped = False
        for neighbor in (block.before, block.after):
            _join(block, neighbor)
        block.pool.unmapped.add(block)


def _cut(block: Block, size: int) -> Block:
    """Split the first `size` bytes off `block`."""
    first = Block(block.stream, block.pool, block.start, size, block.before, block)
    if block.before is not None:
        block.before.after = first
    block.before = first
    block.start += size
    block.size -= size
    return first


def _room(block: Block) -> int:
    """The size of a block with what can be mapped after it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _join(block: Block, neighbor: Block | None) -> None:
    """Make `neighbor` part of `block`, if it is free and has memory as `block` has."""
    if neighbor is None or not neighbor.is_idle or neighbor.mapped is not block.mapped:
        return
    (neighbor.pool.free if neighbor.mapped else neighbor.pool.unmapped).remove(neighbor)
    if neighbor is block.before:
        block.start = neighbor.start
        block.before = neighbor.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbor.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbor.size
