"""Quantised frozen weights with trainable additions, as bitsandbytes has them: the bytes are of a parameter class with
a method that undoes the quantisation, and are stored in any dtype that the user chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision, checkpoint, summary
from flatfsdp.errors import CheckpointError, UsageError
from tests.conftest import Run
from tests.harness.corners import Setting, joined, seeded
from tests.harness.fake import fake_world
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

WIDTH, GROUP, STORAGES = 8, 4, (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Bytes(nn.Parameter):
    """A quantised weight, which carries the scales of its groups; operations that copy it lose them."""

    quant_state: Tensor | None

    def __new__(cls, data: Tensor, quant_state: Tensor | None = None) -> Bytes:
        made: Bytes = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made


class Linear8(nn.Module):
    """A linear layer of 8 bits a weight, without bias."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        weight, self.quant_state = torch.randn(WIDTH * WIDTH // GROUP, GROUP), torch.rand(WIDTH * WIDTH // GROUP)
        packed = weight.mul(50).clamp(-127, 127).to(torch.int8).view(-1).view(storage)
        self.weight = Bytes(packed[:, None], self.quant_state)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.weight, "quant_state", None) is None:
            if not isinstance(self.weight, Bytes):
                self.weight = Bytes(self.weight)
            self.weight.quant_state = self.quant_state
        numbers = self.weight.view(-1).view(torch.int8).view(-1, GROUP) * self.weight.quant_state[:, None] / 50
        return F.linear(x, numbers.view(WIDTH, WIDTH).to(x.dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = self.weight.quant_state


class Block(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.base, self.norm = Linear8(storage), nn.LayerNorm(WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + torch.relu(self.base(x) + self.up(self.down(x)))


def build(storage: torch.dtype = torch.float32) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(Block(storage) for _ in range(2))))


SHARDED = Setting()


def wrapped(model: nn.Module, setting: Setting = SHARDED, **more: Any) -> FSDP:
    return setting.wrap(model, (Block,), **more)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, ranks: Iterable[int], steps: int = 2) -> list[float]:
    """Losses of SGD steps, the gradients of which are those of the mean over `ranks`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, ranks = torch.optim.SGD(parameters, lr=0.05), [], list(ranks)
    for step in range(steps):
        for rank in ranks:
            loss = model(batch(rank, step)).float().square().mean()
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(value: Tensor) -> list[int]:
    return list(value.detach().contiguous().view(-1).view(torch.uint8))


def same_bits(model: nn.Module, expected: nn.Module) -> bool:
    """Whether the quantised weights are, in a state dict of `model`."""
    state = model.state_dict()
    return all(bits(state[key]) == bits(value) for key, value in expected.state_dict().items() if "base.weight" in key)


# -- packed bytes are never cast ---------------------------------------------------------------------------------------


def stored(rank: int, world: int, storage: torch.dtype) -> Iterator[str]:
    for setting in (Setting(), Setting(orig=False, doubled=True), Setting("SHARD_GRAD_OP"), Setting(offload=True)):
        plain, model = build(storage), wrapped(build(storage), setting)
        expected = trained(plain, range(world))[rank::world]
        if trained(model, [rank]) != pytest.approx(expected, rel=1e-6):
            yield f"{setting}: other losses"
        if not same_bits(model, plain):
            yield f"{setting}: other weights"
        low = trained(wrapped(build(storage), setting, mixed_precision=BF16), [rank])
        if low != trained(wrapped(build(torch.uint8), setting, mixed_precision=BF16), [rank]):
            yield f"{setting}: other losses in bfloat16"
        few = wrapped(build(storage), setting, mixed_precision=MixedPrecision(gather_dtype=torch.int8))
        if trained(few, [rank]) != pytest.approx(expected, rel=0.05):
            yield f"{setting}: other losses in few bits"
        if not same_bits(few, plain):
            yield f"{setting}: other weights in few bits"


@pytest.mark.parametrize("storage", STORAGES if is_thorough() else STORAGES[:3])  # elements of each size
def test_weights_are_gathered_bit_by_bit(pool2: Run, storage: torch.dtype) -> None:
    assert not joined(pool2(listed, stored, storage))


def listed(rank: int, world: int, function: Any, *args: Any) -> list[str]:
    return list(function(rank, world, *args))


def test_the_dtype_of_packed_bytes_stays() -> None:
    with fake_world(2):
        model = wrapped(build(torch.float16), mixed_precision=BF16)
        assert "float16 frozen," in summary(model)
        with pytest.raises(UsageError, match=r"'base.weight' is a quantized weight, whose bytes are stored"):
            model.to(torch.bfloat16)


def test_what_quantized_gathers_leave_as_it_is_stands_in_the_summary() -> None:
    with fake_world(2):
        text = summary(wrapped(build(torch.uint8), mixed_precision=MixedPrecision(gather_dtype=torch.int8)))
        assert "uint8 frozen gathered as stored" in text
        assert "float32 by int8" in text


def test_bytes_in_another_order_are_refused() -> None:
    with fake_world(2):
        plain = build()
        layer = plain[1].base
        model = wrapped(plain)
        layer.register_forward_pre_hook(lambda *_: setattr(layer.weight, "data", layer.weight.data.view(4, 4)))
        layer.forward = lambda x: x
        refusal = (
            r"'base.weight' of unit '1': its forward replaced the .data of a quantized weight, \(16, 1\), by \(4, 4\)"
        )
        with pytest.raises(UsageError, match=refusal), torch.no_grad():
            model(batch(0, 0))


def remade(rank: int, world: int) -> Iterator[str]:
    """A module that lost the state of its weight builds the weight again in its forward."""
    for setting in (Setting(), Setting(orig=False), Setting("SHARD_GRAD_OP", doubled=True), Setting("NO_SHARD")):
        plain, inside = build(), build()
        for block in inside:
            block.base.weight = nn.Parameter(block.base.weight.data, requires_grad=False)
        model = wrapped(inside, setting)
        leaves = list(model.parameters())
        if trained(model, [rank]) != pytest.approx(trained(plain, range(world))[rank::world], rel=1e-6):
            yield f"{setting}: other losses"
        if list(map(id, leaves)) != list(map(id, model.parameters())):
            yield f"{setting}: other parameters"
        if not same_bits(model, plain):
            yield f"{setting}: another state dict"


def test_a_weight_may_be_made_anew(pool2: Run) -> None:
    assert not joined(pool2(listed, remade))


# -- from the meta device ----------------------------------------------------------------------------------------------


def on_meta(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Bytes):
                module._parameters[name] = Bytes(parameter.data.to("meta"), parameter.quant_state)
            elif parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
    return model


def from_first(rank: int, world: int, storage: torch.dtype) -> Iterator[str]:
    for setting in (Setting(), Setting(orig=False)):
        plain = build(storage)
        model = wrapped(
            on_meta(build(storage)) if rank else build(storage),
            setting,
            sync_module_states=True,
            param_init_fn=(lambda module: module.to_empty(device="cpu", recurse=False)) if rank else None,
            mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
        )
        if trained(model, [rank]) != pytest.approx(trained(plain, range(world))[rank::world], rel=1e-6):
            yield f"{setting}: other losses"
        if list(model.state_dict()) != list(plain.state_dict()) or not same_bits(model, plain):
            yield f"{setting}: another state dict"


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_only_the_first_rank_has_values(pool2: Run, storage: torch.dtype) -> None:
    assert not joined(pool2(listed, from_first, storage))


# -- state dicts and checkpoints ---------------------------------------------------------------------------------------


def loaded(rank: int, world: int, kind: str) -> Iterator[str]:
    """Adapters and bytes come back; the scales, which modules list and do not read, are listed as in one process."""
    for setting in (Setting(), Setting(orig=False), Setting("SHARD_GRAD_OP")):
        saved = wrapped(build(), setting)
        trained(saved, [rank])
        with FSDP.state_dict_type(saved, kind):
            state = saved.state_dict()
        other = nn.Sequential(*(Block(torch.float32) for _ in range(2)))
        model = wrapped(other, setting)
        trained(model, [rank], steps=1)
        with FSDP.state_dict_type(model, kind):
            result = model.load_state_dict(state, strict=False)
        if result.missing_keys or sorted(result.unexpected_keys) != ["0.base.weight.scales", "1.base.weight.scales"]:
            yield f"{setting}: {result}"
        found = model.state_dict()
        for key, value in saved.state_dict().items():
            if "scales" not in key and bits(found[key]) != bits(value):
                yield f"{setting}: {key} differs"
        for block in other:
            block.base.quant_state.copy_(build()[0].base.quant_state)
        trained(model, [rank], steps=1)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_state_dicts_are_loaded(pool2: Run, kind: str) -> None:
    assert not joined(pool2(listed, loaded, kind))


def resumed(rank: int, world: int, folder: str) -> Iterator[str]:
    model = wrapped(build())
    trained(model, [rank])
    checkpoint.save(folder, model=model)
    expected = trained(model, [rank])
    again = wrapped(build())
    checkpoint.load(folder, model=again)
    if trained(again, [rank]) != expected:
        yield "other losses"
    other = nn.Sequential(*(Block(torch.float32) for _ in range(2)))
    try:
        checkpoint.load(folder, model=wrapped(other))
        yield "scales that nobody loads were taken for loaded"
    except CheckpointError as error:
        entries = "0.base.weight.scales, 1.base.weight.scales"
        if f"modules do not load their extra entries in the state dict: {entries}" not in str(error):
            yield str(error)


def test_a_checkpoint_is_loaded_into_the_same_base_and_into_no_other(pool2: Run, tmp_path: Path) -> None:
    assert not joined(pool2(listed, resumed, str(tmp_path / "saved")))
