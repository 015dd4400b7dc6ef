"""The model of torch's caching allocator: rounding, pools, splitting, streams, events, retries, expandable segments."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import pairwise

import pytest

from flatfsdp.engine.inspection.allocator import MIB, Allocator, Block, DeviceOutOfMemory, Settings

pytestmark = pytest.mark.unit

MAIN, SIDE, OTHER = "main", "side", "other"


class Device:
    """Events that are passed when the test says so."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.marks: list[Hashable] = []

    def mark(self, stream: Hashable) -> int:
        self.marks.append(stream)
        return len(self.marks) - 1

    def allocator(self, settings: Settings | None = None) -> Allocator:
        return Allocator(settings, mark=self.mark, is_past=self.passed.__contains__, wait=self.passed.add)


def test_small_requests_share_segments_of_two_mib() -> None:
    memory = Allocator()
    blocks = [memory.malloc(size, MAIN) for size in (1, 512, 513, MIB)]
    assert [block.size for block in blocks] == [512, 512, 1024, MIB]
    assert memory.reserved.now == 2 * MIB
    assert memory.allocated.now == 2048 + MIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [(MIB + 1, 20), (9 * MIB, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_large_requests_take_a_segment_of_twenty_mib_or_of_their_own(size: int, segment: int) -> None:
    memory = Allocator()
    memory.malloc(size, MAIN)
    assert memory.reserved.now == segment * MIB


def test_the_rest_of_a_segment_serves_later_requests() -> None:
    memory = Allocator()
    first = memory.malloc(8 * MIB, MAIN)
    second = memory.malloc(8 * MIB, MAIN)
    assert second.start == first.start + 8 * MIB
    assert memory.reserved.now == 20 * MIB
    memory.malloc(8 * MIB, MAIN)  # 4 are left
    assert memory.reserved.now == 40 * MIB


def test_large_blocks_keep_a_rest_of_one_mib_and_split_off_a_larger_one() -> None:
    for size, block in ((19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)):
        memory = Allocator()
        memory.free(memory.malloc(20 * MIB, MAIN))
        assert memory.malloc(size, MAIN).size == block


def test_the_smallest_block_that_fits_is_taken_and_of_two_that_with_the_lower_address() -> None:
    memory = Allocator()
    blocks = [memory.malloc(size * MIB, MAIN) for size in (40, 30, 50, 30)]
    starts = [block.start for block in blocks]
    for block in blocks:
        memory.free(block)
    assert [memory.malloc(29 * MIB, MAIN).start for _ in range(3)] == [starts[1], starts[3], starts[0]]
    assert memory.reserved.now == 150 * MIB


def test_freed_neighbors_become_one_block() -> None:
    memory = Allocator()
    blocks = [memory.malloc(5 * MIB, MAIN) for _ in range(4)]
    start = blocks[0].start
    for place in (1, 3, 2, 0):
        memory.free(blocks[place])
    assert [block.size for block in memory.cached()] == [20 * MIB]
    assert memory.malloc(20 * MIB, MAIN).start == start


def test_streams_do_not_share_what_is_free() -> None:
    memory = Allocator()
    memory.free(memory.malloc(30 * MIB, MAIN))
    memory.malloc(30 * MIB, SIDE)
    assert memory.reserved.now == 60 * MIB
    memory.malloc(30 * MIB, MAIN)
    assert memory.reserved.now == 60 * MIB


def test_a_block_that_another_stream_uses_waits_for_that_stream_and_counts_as_active() -> None:
    device = Device()
    memory = device.allocator()
    block = memory.malloc(30 * MIB, MAIN)
    memory.record_stream(block, MAIN)  # its own: nothing to wait for
    memory.record_stream(block, SIDE)
    memory.free(block)
    assert device.marks == [SIDE]
    assert (memory.allocated.now, memory.active.now) == (0, 30 * MIB)
    memory.malloc(30 * MIB, MAIN)
    assert memory.reserved.now == 60 * MIB
    device.passed.add(0)
    memory.malloc(30 * MIB, MAIN)
    assert memory.reserved.now == 60 * MIB
    assert memory.active.peak == 60 * MIB


def test_when_the_device_is_full_everything_cached_is_given_back_once() -> None:
    device = Device()
    memory = device.allocator(Settings(capacity=100 * MIB))
    waiting = memory.malloc(40 * MIB, SIDE)
    memory.record_stream(waiting, MAIN)
    memory.free(waiting)
    memory.malloc(40 * MIB, MAIN)
    assert memory.retries == 0
    memory.malloc(50 * MIB, MAIN)  # waits for the event, and frees the first segment
    assert (memory.retries, memory.reserved.now) == (1, 90 * MIB)
    with pytest.raises(DeviceOutOfMemory, match="reserved"):
        memory.malloc(50 * MIB, MAIN)
    assert memory.retries == 2


def test_a_segment_with_a_block_in_use_is_not_given_back() -> None:
    memory = Allocator()
    blocks = [memory.malloc(5 * MIB, MAIN) for _ in range(4)]
    memory.free(blocks[0])
    memory.empty_cache()
    assert memory.reserved.now == 20 * MIB
    for block in blocks[1:]:
        memory.free(block)
    memory.empty_cache()
    assert memory.reserved.now == 0


def test_peaks_begin_again_from_what_is_there() -> None:
    memory = Allocator()
    block = memory.malloc(30 * MIB, MAIN)
    memory.free(block)
    memory.forget_peaks()
    assert (memory.allocated.peak, memory.reserved.peak) == (0, 30 * MIB)


def test_collection_gives_back_the_oldest_unused_segments_first() -> None:
    memory = Allocator(Settings(capacity=1000 * MIB, collect_above=0.1))
    old, young = memory.malloc(60 * MIB, MAIN), memory.malloc(60 * MIB, MAIN)
    memory.free(old)
    for _ in range(5):
        memory.free(memory.malloc(10 * MIB, SIDE))
    memory.free(young)
    memory.malloc(70 * MIB, MAIN)  # 130 were reserved, 30 too many
    assert sorted(block.size // MIB for block in memory.cached()) == [10, 60]
    assert memory.reserved.now == 140 * MIB


def test_expandable_segments_grow_by_pages_and_are_one_range() -> None:
    memory = Allocator(Settings(expandable_segments=True))
    first = memory.malloc(30 * MIB, MAIN)
    assert memory.reserved.now == 40 * MIB
    second = memory.malloc(30 * MIB, MAIN)
    assert second.start == first.start + 30 * MIB
    assert memory.reserved.now == 60 * MIB
    memory.free(first)
    memory.free(second)
    assert memory.malloc(80 * MIB, MAIN).start == first.start
    assert memory.reserved.now == 80 * MIB
    memory.malloc(512, MAIN)
    assert memory.reserved.now == 82 * MIB


def test_expandable_segments_give_back_whole_pages_around_what_is_in_use() -> None:
    memory = Allocator(Settings(expandable_segments=True))
    blocks = [memory.malloc(30 * MIB, MAIN) for _ in range(4)]  # 0 to 120 MiB
    memory.free(blocks[1])
    memory.free(blocks[2])  # 30 to 90: pages 40 to 80
    memory.empty_cache()
    assert memory.reserved.now == 80 * MIB
    memory.malloc(60 * MIB, MAIN)
    assert memory.reserved.now == 120 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_the_counts_are_those_of_the_blocks(expandable: bool) -> None:
    rng = random.Random(0)
    device = Device()
    memory = device.allocator(Settings(expandable_segments=expandable, capacity=600 * MIB))
    mine: list[Block] = []
    for _ in range(3000):
        if mine and rng.random() < 0.5:
            memory.free(mine.pop(rng.randrange(len(mine))))
        else:
            size = rng.choice([rng.randrange(1, MIB), rng.randrange(MIB, 40 * MIB)])
            stream = rng.choice([MAIN, SIDE])
            try:
                block = memory.malloc(size, stream)
            except DeviceOutOfMemory:
                continue
            assert block.size >= size and block.stream == stream
            if rng.random() < 0.3:
                memory.record_stream(block, MAIN)
            mine.append(block)
        device.passed.update(range(len(device.marks) - rng.randrange(5)))
    everything = sorted([*memory.live(), *memory.cached()], key=lambda block: block.start)
    for block, other in pairwise(everything):
        assert block.start + block.size <= other.start
    assert memory.allocated.now == sum(block.size for block in mine)
    assert memory.active.now == sum(block.size for block in memory.live())
    assert memory.reserved.now == sum(block.size for block in everything)
    for block in mine:
        memory.free(block)
    memory.empty_cache()
    assert (memory.allocated.now, memory.active.now, memory.reserved.now) == (0, 0, 0)
