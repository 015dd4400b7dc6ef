"""CPU offload on a machine whose compute device is the CPU: memory of its own and the same copies, counted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.flat import flat_param
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import Net, data, full_gradients, full_parameters, joined, loss_of, seeded
from tests.harness.fake import fake_world
from tests.harness.models import Feedforward
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed


class Copies(TorchDispatchMode):
    """Counts copies out of and into watched storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages
        self.out = self.into = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = (tensor.untyped_storage().data_ptr() for tensor in args[:2])
            self.out += source in self.storages
            self.into += target in self.storages
        return func(*args, **(kwargs or {}))


def wrap(net: nn.Module, orig: bool, offload: Any = True, **options: Any) -> Any:
    return FullyShardedDataParallel(
        net, use_orig_params=orig, cpu_offload=offload, auto_wrap_policy={Feedforward}, **options
    )


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Spied(Net):
    """Notes where its blocks' and its own parameters lie while it computes."""

    def forward(self, x: Tensor, **more: Any) -> Any:
        self.seen = {storage(self.head.weight)}
        return super().forward(x, **more)


def separate(rank: int, world: int, strategy: str, orig: bool) -> list[str]:
    lines = []
    net = seeded(Spied)
    model = wrap(net, orig, sharding_strategy=strategy, join_units_below=0)
    flats = inspect.flat_params(model)
    shards = {storage(flat.shard) for flat in flats}
    with Copies(shards) as copies:
        loss_of(model(data(rank, 0))).backward()
    if net.seen & shards:
        lines.append("the model computed with the shards themselves")
    if {storage(flat.shard) for flat in flats} != shards:
        lines.append("the shards moved")
    # Forward copies every unit's shard to the compute device once; backward those that were given up.
    expected = len(flats) + (len(flats) - 1 if strategy == "FULL_SHARD" else 0)
    if copies.out != expected:
        lines.append(f"{copies.out} copies out of shards, expected {expected}")
    if copies.into:
        lines.append(f"{copies.into} copies into shards")
    for flat in flats:
        holders = flat.originals if orig else [flat.parameter]
        for holder in holders:
            if storage(holder) != storage(flat.shard) or holder.device.type != "cpu":
                lines.append("a parameter at rest is not a view of its shard")
            if holder.grad is not None and storage(holder.grad) in shards:
                lines.append("a gradient lies in a shard")
    return lines


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("orig", [True, False])
def test_memory_of_its_own(strategy: str, orig: bool, pool2: Run) -> None:
    assert not joined(pool2(separate, strategy, orig))


SEQUENCES = ["s", "ss", "ns", "nns", "sns", "nsn", "snsn", "nsns"]


def accumulated(rank: int, world: int, orig: bool, mixed: bool) -> list[str]:
    """Microbatches with (s) and without (n) synchronisation, in any order, with and without offload."""
    lines = []
    precision = MixedPrecision(torch.bfloat16, torch.float32) if mixed else None
    models = [wrap(seeded(Net), orig, offload, mixed_precision=precision) for offload in (True, False)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for sequence in some(SEQUENCES, 2, orig + mixed):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for micro, kind in enumerate(sequence):
                with model.no_sync() if kind == "n" else nullcontext():
                    loss_of(model(data(rank, 0, micro)).float()).backward()
            if sequence[-1] == "n":  # a window that is left open is closed by one more
                loss_of(model(data(rank, 1)).float()).backward()
        found, expected = (full_gradients(model) for model in models)
        lines += [f"{sequence}: gradient of {n}" for n in expected if not torch.equal(found[n], expected[n])]
        for optimizer in optimizers:
            optimizer.step()
        found, expected = (full_parameters(model) for model in models)
        lines += [f"{sequence}: {n}" for n in expected if not torch.equal(found[n], expected[n])]
    return lines


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_accumulation(orig: bool, mixed: bool, pool2: Run) -> None:
    assert not joined(pool2(accumulated, orig, mixed))


@pytest.mark.parametrize("pinned", [True, False])
def test_pinning(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard is page-locked on request, and only then; pinning itself is simulated."""
    asked: list[torch.Size] = []

    def pin(tensor: Tensor) -> Tensor:
        asked.append(tensor.shape)
        return tensor

    monkeypatch.setattr(flat_param, "pin", pin)
    with fake_world(2):
        model = wrap(seeded(Net), True, CPUOffload(True, pin_memory=pinned))
        shards = [flat.shard.shape for flat in inspect.flat_params(model)]
        assert asked == (shards if pinned else [])
        asked.clear()
        model.double()
        assert sorted(asked) == (sorted(shards) if pinned else [])
