"""The card that does not exist: storages take and give back memory of the stream that is current, as on a real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatfsdp.engine.inspection.allocator import MIB
from flatfsdp.engine.inspection.assumed import CUBLAS, partial_sums
from tools.reserved.card import DEVICE, simulated

pytestmark = pytest.mark.single_process


def test_a_storage_holds_its_memory_until_its_last_view_is_gone() -> None:
    with simulated() as card:
        memory = card.allocator
        tensor = torch.empty(4, MIB, device=DEVICE)
        view = tensor[1:].t()
        assert memory.allocated.now == 16 * MIB
        del tensor
        assert memory.allocated.now == 16 * MIB
        del view
        assert (memory.allocated.now, memory.reserved.now) == (0, 16 * MIB)


def test_resizing_a_storage_gives_back_and_takes_memory() -> None:
    with simulated() as card:
        tensor = torch.empty(4 * MIB, device=DEVICE)
        tensor.untyped_storage().resize_(0)
        assert card.allocator.allocated.now == 0
        tensor.untyped_storage().resize_(16 * MIB)
        assert card.allocator.allocated.now == 16 * MIB


def test_memory_belongs_to_the_stream_that_was_current() -> None:
    with simulated() as card:
        side = card.Stream()
        with card.stream(side):
            tensor = torch.empty(4 * MIB, device=DEVICE)
        del tensor
        again = torch.empty(4 * MIB, device=DEVICE)
        assert card.allocator.reserved.now == 32 * MIB
        del again


def test_recorded_memory_is_free_at_the_next_request() -> None:
    with simulated() as card:
        tensor = torch.empty(4 * MIB, device=DEVICE)
        tensor.record_stream(card.Stream())
        del tensor
        assert (card.allocator.allocated.now, card.allocator.active.now) == (0, 16 * MIB)
        again = torch.empty(4 * MIB, device=DEVICE)
        assert card.allocator.reserved.now == 16 * MIB
        del again


def test_a_training_step_holds_what_it_does_on_a_card() -> None:
    """Two residual linear layers: activations in the forward, gradients of parameters afterwards; a workspace from the
    first product of each of both on."""
    with simulated() as card:
        memory = card.allocator
        layers = [nn.Linear(1024, 1024, bias=False, device=DEVICE) for _ in range(2)]
        x = torch.empty(1024, 1024, device=DEVICE)
        assert memory.allocated.now == 12 * MIB
        for layer in layers:
            x = x + layer(x)
        assert memory.allocated.now == 20 * MIB + CUBLAS  # the input, both sums
        loss = x.sum()
        del x
        loss.backward()
        del loss
        assert memory.allocated.now == 16 * MIB + 2 * CUBLAS
        # Before the second product of a layer: its weight's gradient, one of its input, which both ways add up to.
        assert memory.allocated.peak <= 32 * MIB + 2 * CUBLAS
        for layer in layers:
            layer.zero_grad()
        assert memory.allocated.now == 8 * MIB + 2 * CUBLAS


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "found"),
    [
        (1024, 8192, torch.bfloat16, (64 * MIB, 256)),
        (1024, 6144, torch.bfloat16, (48 * MIB, 192)),
        (1024, 2048, torch.bfloat16, (16 * MIB, 64)),
        (512, 8192, torch.bfloat16, ()),  # few enough for one block of threads
        (1024, 8191, torch.bfloat16, ()),  # another split
    ],
)
def test_a_sum_over_rows_exchanges_partial_sums(
    rows: int, outputs: int, dtype: torch.dtype, found: tuple[int, ...]
) -> None:
    """64 MiB and 512 bytes were seen on an H100, in the peak of a training step."""
    assert partial_sums((torch.empty(rows, outputs, dtype=dtype, device="meta"), [0], True)) == found
