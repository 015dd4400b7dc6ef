"""Frozen tensors that are quantized in blocks, sharded as rows of bytes with their scales: modules compute with the
same bits, and blocks of rows stay on one rank."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.errors import UsageError
from flatfsdp.extensions import QuantizedRows, set_extensions
from flatfsdp.layout import Rows, declared
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import seeded

pytestmark = pytest.mark.distributed

HAS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
GROUP = 4  # columns that share a scale


class Int4(Tensor):
    """Two values in each byte, and the scales of groups of columns, with rows in the last dimension as torchao's."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, (values.shape[0], 2 * values.shape[1]), dtype=torch.float32)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Int4:
        groups = weight.detach().unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(2) / 7
        codes = (groups / scale[..., None]).round().add(8).to(torch.uint8).flatten(1)
        return cls(codes[:, ::2] | codes[:, 1::2] << 4, scale.t().contiguous().to(torch.bfloat16))

    def dequantized(self) -> Tensor:
        codes = torch.stack([self.values & 15, self.values >> 4], 2).flatten(1).unflatten(1, (-1, GROUP))
        return ((codes.float() - 8) * self.scale.t().float()[..., None]).flatten(1)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].values.clone(), args[0].scale.clone())
        raise NotImplementedError(func)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Int4"


class Layer(nn.Module):
    """A frozen quantized weight, and a trainable bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Int4.of(torch.randn(rows, columns)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight.data) is Int4
        return F.linear(x, self.weight.dequantized(), self.bias)


def net() -> nn.Sequential:
    return nn.Sequential(Layer(12, 8), Layer(10, 12))


def trained(model: nn.Module, batches: list[Tensor], params: list[nn.Parameter], count: int) -> Tensor:
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        for x in batches:
            (model(x + step).square().mean() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(batches[0])


def with_rows(rank: int, world: int, **settings: Any) -> list[int]:
    """The rows of bytes that this rank has of each weight."""
    batches = [torch.linspace(-1, 1, 8)[None] * (each + 1) for each in range(world)]
    alone = seeded(net)
    expected = trained(alone, batches, [each.bias for each in alone], world)
    set_extensions(QuantizedRows())
    try:
        made = seeded(net)
        for layer in made:
            layer.weight.fsdp_grain = Rows(2)
        model = FSDP(made, auto_wrap_policy={Layer}, use_orig_params=True, **settings)
    finally:
        set_extensions(None)
    params = [each for each in model.parameters() if each.requires_grad]
    mine = batches[rank : rank + 1]
    trained(model, mine, params, 1)
    with torch.no_grad():
        found = model(batches[0])
    assert torch.allclose(found, expected, atol=1e-6), (found, expected)
    held = []
    for layer, columns in zip(model.module, (8, 12), strict=True):
        (flat,) = (each for each in inspect.unit(layer).flat_params if each.layout.params[0].name == "weight")
        (spec,) = flat.layout.params
        assert spec.shape[1] == columns // 2 + columns // GROUP * 2
        held.append(flat.layout.span_in_param(0, rank).numel / spec.shape[1])
    return held


@pytest.mark.parametrize("settings", [{"layout": declared}, {}, {"layout": {}, "sharding_strategy": "SHARD_GRAD_OP"}])
def test_modules_compute_with_the_same_bits(settings: dict[str, Any], pool3: Run) -> None:
    results = pool3(with_rows, **settings)
    assert [sum(each[layer] for each in results) for layer in (0, 1)] == [12, 10]
    if "layout" in settings:
        assert all(rows % 2 == 0 for each in results for rows in each)


@pytest.mark.parametrize("shape", [(1, 8), (3, 4), (1, 4), (0, 8)])
def test_a_tensor_has_memory_of_its_own(shape: tuple[int, int]) -> None:
    """It is put together from gathered bytes, which are overwritten later, at any place of theirs."""
    weight = Int4.of(torch.randn(shape)) if shape[0] else Int4(torch.empty(0, 4, dtype=torch.uint8), torch.empty(2, 0))
    extensions = QuantizedRows()
    rows, state = extensions.pre_flatten_transform(weight)
    gathered = torch.zeros(rows.numel() + 1, dtype=torch.uint8)
    stored = gathered[1:].view(rows.shape).copy_(rows)
    found: Any = extensions.post_unflatten_transform(stored, state)
    gathered.zero_()
    assert torch.equal(found.values, weight.values) and torch.equal(found.scale, weight.scale)


class Unrelated(Int4):
    """One of whose tensors no dimension is that of rows."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.table = torch.zeros(3)
        return ["values", "table"], None


def refused(rank: int, world: int) -> None:
    set_extensions(QuantizedRows())
    try:
        made = net()
        made[0].weight = nn.Parameter(Unrelated.of(torch.randn(12, 8)), requires_grad=False)
        with pytest.raises(UsageError, match=r"'0.weight' is a Unrelated, a tensor that wraps other tensors"):
            FSDP(made, use_orig_params=True)
    finally:
        set_extensions(None)


def test_tensors_without_rows_are_refused(pool2: Run) -> None:
    pool2(refused)


def of_torchao(rank: int, world: int, name: str) -> None:
    import torchao.quantization as quantization

    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.Int4WeightOnlyConfig(group_size=32),
    }[name]()
    made = nn.Sequential(nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    quantization.quantize_(made, config)
    x = torch.randn(2, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    expected = made(x)
    made.append(nn.Linear(96, 4, dtype=torch.bfloat16))
    set_extensions(QuantizedRows())
    try:
        model = FSDP(made, use_orig_params=True, layout={"0.weight": Rows(8)})
    finally:
        set_extensions(None)
    found = []
    model.module[0].register_forward_hook(lambda module, args, output: found.append(output))
    model(x).sum().backward()
    assert torch.equal(found[0], expected)


@HAS_TORCHAO
@pytest.mark.parametrize("name", ["int8"])
def test_weights_of_torchao(name: str, pool2: Run) -> None:
    pool2(of_torchao, name)
