"""Memory that stays is allocated on streams on which nothing runs, and which nobody else gets. [Note: kept streams]"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from flatfsdp.engine.device.memory import MemoryTracker
from flatfsdp.engine.device.streams import Device, standing_in
from flatfsdp.engine.features.compaction import PRIORITY, keep_apart
from tests.harness.fake_device import FakeDevice, FakeStream

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


class Card(FakeDevice):
    """A fake device with an allocator like that of CUDA.

    Attributes:
        highest: the priority that it maps higher ones to.
        captures: whether the current stream is captured.
        ran: the priorities of the streams on which operations ran, and their names.
    """

    def __init__(self, *, highest: int = -3) -> None:
        super().__init__()
        self.highest, self.captures = highest, False
        self.ran: set[tuple[int, str]] = set()

    def Stream(self, device: Any = None, *, priority: int = 0) -> FakeStream:
        return super().Stream(device, priority=max(priority, self.highest))

    def get_allocator_backend(self) -> str:
        return "native"

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.add((self.current_stream().priority, str(func)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def owner_of_new(self, tracker: MemoryTracker) -> FakeStream:
        """The stream whose memory a tensor that stays gets."""
        made = tracker.apart(torch.empty(0, dtype=torch.bfloat16), 1000)
        assert (made.shape, made.dtype, made.untyped_storage().nbytes()) == ((1000,), torch.bfloat16, 2000)
        return self._memory[weakref.ref(made.untyped_storage())].owner


@contextmanager
def keeping(**options: Any) -> Iterator[tuple[Card, MemoryTracker]]:
    tracker = MemoryTracker()
    with Card(**options) as card:
        keep_apart(tracker, Device(CPU))
        yield card, tracker


def test_no_operation_runs_there() -> None:
    """With deterministic algorithms, torch fills new memory, by a kernel on the stream that is current then."""
    with keeping() as (card, tracker):
        assert card.owner_of_new(tracker).priority == PRIORITY
    assert card.ran
    assert not [name for priority, name in card.ran if priority == PRIORITY]


def test_each_stream_of_a_caller_has_its_own() -> None:
    with keeping() as (card, tracker):
        one, again = (card.owner_of_new(tracker) for _ in range(2))
        with card.stream(card.Stream()):
            other = card.owner_of_new(tracker)
    assert one is again
    assert one is not other
    assert other.priority == PRIORITY


def test_none_is_taken_that_torch_would_give_again() -> None:
    """After 32 streams of one priority torch begins from the first."""
    with keeping() as (card, tracker):
        owners = []
        for _ in range(34):
            with card.stream(card.Stream()):
                owners.append((card.owner_of_new(tracker), card.current_stream()))
    kept = [owner for owner, callers in owners if owner is not callers]
    assert len(set(kept)) == len(kept) == 32


def test_where_the_priority_is_one_that_others_use_nothing_is_kept_apart() -> None:
    with keeping(highest=-1) as (card, tracker):
        assert card.owner_of_new(tracker) is card.current_stream()


def test_a_graph_that_is_captured_gets_memory_of_its_own_stream() -> None:
    with keeping() as (card, tracker):
        card.captures = True
        assert card.owner_of_new(tracker) is card.current_stream()


def test_a_lack_of_memory_there_leaves_pieces_of_the_callers_stream() -> None:
    with keeping() as (card, tracker):
        resize: Any = torch.UntypedStorage.resize_

        def lacking(storage: torch.UntypedStorage, size: int) -> Any:
            if card.current_stream().priority == PRIORITY:
                raise torch.OutOfMemoryError("no memory")
            return resize(storage, size)

        with patch.object(torch.UntypedStorage, "resize_", lacking):
            assert card.owner_of_new(tracker) is card.current_stream()


def test_other_kinds_of_devices_keep_nothing_apart() -> None:
    """Some have allocators that answer as CUDA's does; nothing is known of their streams."""
    module: Any = ModuleType("torch.other")
    module.get_allocator_backend = lambda: "native"
    tracker = MemoryTracker()
    with standing_in(module):
        keep_apart(tracker, Device(CPU))
    assert tracker.apart is torch.Tensor.new_empty
