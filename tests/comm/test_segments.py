"""Shared-memory segments alone: their pages, and faults that cannot happen to processes that map them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from flatfsdp.engine.cpu import segments
from flatfsdp.engine.cpu.segments import MemorySegment, create, is_sealed

pytestmark = pytest.mark.unit

PAGE, SIZE = 4096, 64 * 1024


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create(SIZE)
    yield made
    os.close(made)


def taken(descriptor: int) -> int:
    """Bytes of memory that the segment has."""
    return 512 * os.fstat(descriptor).st_blocks


def test_pages_that_are_given_back_are_zeros_until_they_are_taken_again(descriptor: int) -> None:
    own, peers = MemorySegment(descriptor, SIZE), MemorySegment(descriptor, SIZE)
    own.bytes.fill_(7)
    assert own.give_pages_back(PAGE)
    assert taken(descriptor) == PAGE
    assert is_sealed(descriptor, SIZE)
    with patch.object(segments, "_PAGES", 2 * PAGE):
        own.take_pages(2 * PAGE + 1)
    assert (taken(descriptor), own.held) == (4 * PAGE, 4 * PAGE)
    own.take_pages(SIZE)
    assert (taken(descriptor), own.held) == (SIZE, SIZE)
    assert peers.bytes[:PAGE].eq(7).all()
    assert peers.bytes[PAGE:].eq(0).all()
    own.bytes.fill_(8)
    assert peers.bytes.eq(8).all()


def test_a_peer_may_read_what_was_given_back(descriptor: int) -> None:
    own, peers = MemorySegment(descriptor, SIZE), MemorySegment(descriptor, SIZE)
    assert own.give_pages_back(PAGE)
    assert peers.bytes.eq(0).all()


def test_a_system_that_does_not_know_whether_there_is_memory_keeps_the_pages(descriptor: int) -> None:
    """As Linux before 5.14."""
    own = MemorySegment(descriptor, SIZE)
    own.bytes.fill_(7)
    with patch.object(segments, "_POPULATE_WRITE", 9999):
        assert not own.give_pages_back(PAGE)
    assert taken(descriptor) == SIZE
    assert own.bytes.eq(7).all()


def test_nobody_who_has_a_segment_gives_it_another_size(descriptor: int) -> None:
    """Otherwise a signal would end each process that maps it."""
    for size in (0, PAGE, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0)  # nor another seal
    assert is_sealed(descriptor, SIZE)
    assert not is_sealed(descriptor, SIZE - 1)


def test_what_is_not_sealed_is_not_taken_for_it() -> None:
    made = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, SIZE)
    assert not is_sealed(made, SIZE)
    os.close(made)
