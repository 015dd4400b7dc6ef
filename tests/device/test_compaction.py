"""The first step of training leaves the free memory of an accelerator in one piece. [Note: compaction]"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import flatfsdp
from flatfsdp.engine.base.overrides import without_memory
from flatfsdp.engine.features.compaction import PRIORITY
from flatfsdp.engine.inspection.allocator import Allocator, Block
from flatfsdp.engine.inspection.simulated import SimulatedDevice
from flatfsdp.errors import ConfigTypeError

pytestmark = pytest.mark.single_process

MIB = 2**20
LARGE = 64 * MIB  # more than any tensor has
WIDTH, ROWS, LAYERS = 2048, 1024, 8


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


class Wide(nn.Module):
    """A unit of twice the size of a square layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:WIDTH] + x @ self.weight[WIDTH:]


def card() -> SimulatedDevice:
    found: SimulatedDevice = without_memory.value.device
    return found


def memory() -> Allocator:
    return card().allocator


def kept(blocks: list[Block]) -> int:
    """Bytes of those `blocks` that are of kept streams."""
    streams: list[tuple[Any, int]] = [(block.stream, block.size) for block in blocks]
    return sum(size for stream, size in streams if stream.priority == PRIORITY)


@contextmanager
def taken_as_one() -> Iterator[list[int]]:
    """A dry run; the sizes of its large requests."""
    sizes: list[int] = []
    with flatfsdp.dry_run(8, accelerator=True):
        malloc = memory().malloc

        def noted(size: int, *args: Any) -> Block:
            sizes.append(size)
            return malloc(size, *args)

        with patch.object(memory(), "malloc", noted):
            yield sizes
    sizes[:] = [size for size in sizes if size > LARGE]


def trained(between: Callable[[int], object] = id, *, steps: int = 4, microbatches: int = 1) -> Any:
    """A model after `steps` of training; `between` is called after each."""
    model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        memory().forget_peaks()
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        model.zero_grad()
        between(step)
    return model


@pytest.mark.parametrize("microbatches", [1, 3])
def test_after_the_second_step_the_device_is_asked_for_nothing(microbatches: int) -> None:
    taken: list[int] = []
    with flatfsdp.dry_run(8, accelerator=True):
        trained(lambda step: taken.append(memory().segments), steps=5, microbatches=microbatches)
    assert taken[1] == taken[4]


def test_what_is_free_between_steps_lies_in_few_large_pieces() -> None:
    with flatfsdp.dry_run(8, accelerator=True):
        model = trained()
        free = sorted((block.size for block in memory().cached()), reverse=True)
        assert sum(free[:2]) > 0.7 * sum(free)
        assert memory().reserved.peak < 1.15 * memory().active.peak
        del model


def test_an_evaluation_before_training_changes_nothing() -> None:
    with flatfsdp.dry_run(8, accelerator=True):
        model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
        requests = memory().segments
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
        assert memory().segments > requests
        assert memory().reserved.now == memory().reserved.peak  # nothing was given back


def test_gradients_that_live_through_the_forward_stay_apart() -> None:
    """Their memory would serve nothing after they are freed, if later ones were allocated elsewhere."""
    with flatfsdp.dry_run(8, accelerator=True):
        model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            loss = model(torch.ones(ROWS, WIDTH)).sum()
            model.zero_grad()
            loss.backward()
            optimizer.step()
        assert kept(memory().live()) > 2 * LAYERS * WIDTH * WIDTH * 4 // 8
        assert kept(memory().cached()) < MIB * LAYERS


def taken(stream: Any) -> int:
    """Bytes of the segments of `stream` for large requests."""
    return sum(block.size for block in [*memory().live(), *memory().cached()] if block.stream is stream)


def test_shards_share_a_segment() -> None:
    """Of 8 MiB each; alone, two of them would take one of 20."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    with flatfsdp.dry_run(8, accelerator=True):
        model = flatfsdp.FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear})
        shards = [block for block in memory().live() if block.size == 8 * MIB]
        assert len(shards) == 8
        assert taken(shards[0].stream) <= 8 * 8 * MIB + 2 * MIB
        del model


def test_smaller_units_are_gathered_into_room_for_larger_ones() -> None:
    """16 MiB, then 32 of each, of which three have memory at one time: the first alone would have a segment in which no
    other fits."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2048, 2048, bias=False), *(Wide() for _ in range(4)))
    with flatfsdp.dry_run(8, accelerator=True):
        model = flatfsdp.FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear, Wide})
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(16, 2048)).sum().backward()
            optimizer.step()
            model.zero_grad()
        gathers = {block.stream for block in memory().cached() if block.size > 30 * MIB and block.stream.priority == -1}
        assert sum(map(taken, gathers)) == 3 * 32 * MIB


class Tables(nn.Module):
    """A table and a head of 8 million elements each, and between them units of 4 million."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, WIDTH)
        self.units = layers()
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.units(self.table(tokens)))


@pytest.mark.parametrize("rows", [256, 8192])
def test_large_gradients_of_the_outermost_unit_get_the_memory_of_gathers(rows: int) -> None:
    """Unless much more was free at the end of the first backward."""
    streams: set[int] = set()
    slots = 4 * 2 * 4096 * WIDTH
    mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with flatfsdp.dry_run(8, accelerator=True):
        with torch.device("meta"):
            net = Tables()
        model = flatfsdp.FullyShardedDataParallel(net, auto_wrap_policy={nn.Sequential}, mixed_precision=mixed)
        optimizer = torch.optim.AdamW(model.parameters())
        malloc = memory().malloc

        def noted(size: int, stream: Any, label: Any = None) -> Block:
            if size == slots:
                streams.add(stream.priority)
            return malloc(size, stream, label)

        with patch.object(memory(), "malloc", noted):
            for step in range(4):
                streams.clear()
                model(torch.ones(1, rows).long()).sum().backward()
                assert streams == ({-1} if step and rows == 256 else {0})
                optimizer.step()
                model.zero_grad()


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_no_segment_is_taken_from_which_nothing_could_be_cut(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:32")
    with taken_as_one() as sizes:
        trained()
    assert sizes == []


def test_an_allocator_that_joins_segments_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with taken_as_one() as sizes:
        model = trained(lambda step: sizes.append(kept(memory().live())))
        del model
    assert sizes == []


def test_it_can_be_turned_off() -> None:
    flatfsdp.compact_device_memory(False)
    try:
        with taken_as_one() as sizes:
            model = trained(steps=2)
            assert kept(memory().live()) == 0
            del model
    finally:
        flatfsdp.compact_device_memory()
    assert sizes == []
    with pytest.raises(ConfigTypeError, match="compact_device_memory: enabled"):
        flatfsdp.compact_device_memory(None)  # type: ignore[arg-type]


def test_a_segment_that_the_device_lacks_memory_for_is_not_asked_for() -> None:
    """Observers of failed requests, which write snapshots of the memory, would be called."""
    with taken_as_one() as sizes, patch.object(card(), "mem_get_info", lambda device: (LARGE, 2**40)):
        trained()
    assert sizes == []


@pytest.mark.parametrize("of", [{"device": 1}, {"stream": 1}, {"segment_pool_id": (0, 3)}], ids=str)
def test_free_memory_of_others_counts_for_nothing(of: dict[str, Any]) -> None:
    """That of other devices, of other streams, and of graphs. An older torch gives no snapshots without traces."""
    with taken_as_one() as sizes:
        device = card()

        def snapshot() -> list[dict[str, Any]]:
            here = {"device": 0, "stream": device.current_stream().cuda_stream, "segment_pool_id": (0, 0)}
            return [{**here, **of, "blocks": [{"size": 2**40, "state": "inactive"}]}]

        with patch.object(device, "memory_snapshot", snapshot):
            trained()
    assert len(sizes) == 2


def test_steps_of_another_model_in_its_backward_are_none_of_this_one() -> None:
    with taken_as_one() as sizes:
        model, other = (flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential}) for _ in range(2))
        stepping = flatfsdp.optimizer_in_backward(other, torch.optim.SGD(other.parameters()))
        loss = model(torch.ones(ROWS, WIDTH)).sum()
        for _ in range(2):
            other(torch.ones(ROWS, WIDTH)).sum().backward()
        loss.backward()
        model.zero_grad()
        model(torch.ones(ROWS, WIDTH))
        del stepping
    assert sizes == []


def test_states_that_are_made_in_a_backward_are_not_asked_for_again() -> None:
    with taken_as_one() as sizes:
        model = flatfsdp.FullyShardedDataParallel(layers(), auto_wrap_policy={nn.Sequential})
        stepping = flatfsdp.optimizer_in_backward(model, torch.optim.AdamW(model.parameters()))
        for _ in range(4):
            memory().forget_peaks()
            held = memory().active.now
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        in_step = memory().active.peak - held
        del stepping
    assert len(sizes) == 1
    assert sizes[0] <= in_step
