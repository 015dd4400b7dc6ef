"""Operations of Accelerate, transformers, PEFT and Lightning on a wrapped model, in the form in which they do them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import MixedPrecision
from flatfsdp.api import TrainingState
from tests.conftest import Run
from tests.harness.corners import Net, data, full_parameters, joined, loss_of, seeded
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


def upcast(rank: int, world: int, orig: bool) -> list[str]:
    """Accelerate: fp32 master weights for a low-precision checkpoint, before the first step."""
    lines = []
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    model: Any = FSDP(
        seeded(Net).bfloat16(), auto_wrap_policy={Feedforward}, use_orig_params=orig, mixed_precision=precision
    )
    before = full_parameters(model)
    for module in FSDP.fsdp_modules(model):
        assert module._has_params
        flat = module._flat_param
        assert flat.dtype == torch.bfloat16 and len(flat._fqns) == len(flat._shapes)
        flat.data = flat.data.to(torch.float32)
        module._handle._orig_param_dtype = torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(data(rank, step)).float()).backward()
        optimizer.step()
    for name, p in full_parameters(model).items():
        if p.dtype != torch.float32:
            lines.append(f"{name} is {p.dtype}")
        elif torch.equal(p.bfloat16().float(), p):
            lines.append(f"{name} still has the precision of the checkpoint")
        elif not torch.allclose(p, before[name].float(), atol=1e-3):
            lines.append(f"{name} is far from what was loaded")
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_master_weights_for_a_low_precision_checkpoint(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(upcast, orig))


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank addition, as PEFT makes it of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    """Two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def adapter(rank: int, world: int, orig: bool) -> list[str]:
    """PEFT: the adapter's parameters by name, whole, inside summon_full_params; modules by name outside."""
    plain = seeded(Adapted)
    model: Any = FSDP(seeded(Adapted), auto_wrap_policy={Adapter}, use_orig_params=orig)
    lines = []
    with FSDP.summon_full_params(model, writeback=False):
        state = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    expected = {n: p for n, p in plain.named_parameters() if "lora_" in n}
    if state.keys() != expected.keys() or any(not torch.equal(state[n], expected[n]) for n in expected):
        lines.append(f"the adapter is {sorted(state)}")
    modules = dict(model.named_modules())
    targets = [n for n, m in modules.items() if isinstance(m, Adapter)]
    if targets != ["layers.0", "layers.1"] or not isinstance(model.get_submodule("layers.0"), FSDP):
        lines.append(f"found adapters at {targets}")
    for name in targets:
        if re.sub(r"\.\d+", "", name) != "layers" or model.get_submodule(name).base_layer.in_features != WIDTH:
            lines.append(f"{name} is not reached")
    loss_of(model(data(rank, 0))).backward()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        trained = {n for n, p in model.named_parameters() if p.grad is not None}
    if trained != set(expected):
        lines.append(f"gradients of {sorted(trained)}")
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_a_low_rank_adapter(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(adapter, orig))


class Generator(nn.Module):
    """Has methods, properties and a config in addition to its forward, as transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.config = {"hidden": WIDTH}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(self.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def generate(self, x: Tensor, *, steps: int) -> Tensor:
        """Feeds its own output back."""
        for _ in range(steps):
            x = torch.nn.functional.pad(self(x), (0, WIDTH - 3))
        return x


def attributes(rank: int, world: int) -> list[str]:
    model: Any = FSDP(seeded(Generator), auto_wrap_policy={Feedforward}, use_orig_params=True)
    lines = []
    if model.config is not model.module.config or model.dtype != torch.float32:
        lines.append("attributes of the module are not reached")
    states = [model.training_state]
    model.net.head.register_forward_hook(lambda *_: states.append(model.training_state))
    loss_of(model(data(rank, 0))).backward()
    with FSDP.summon_full_params(model):
        states.append(model.training_state)
    with torch.no_grad():
        generated = type(model.module).generate(model, data(0, 0), steps=2)
        plain = seeded(Generator).generate(data(0, 0), steps=2)
    expected = [TrainingState.IDLE, TrainingState.FORWARD_BACKWARD, TrainingState.SUMMON_FULL_PARAMS]
    if states[:3] != expected:
        lines.append(f"training states were {states}")
    return lines if torch.equal(generated, plain) else [*lines, "generated something else"]


def lightning(rank: int, world: int) -> list[str]:
    """Lightning: clips through the root, counts gradients, moves between eval and train, and looks up the root."""
    model: Any = FSDP(seeded(Net), auto_wrap_policy={Feedforward}, use_orig_params=True)
    lines = [] if model._is_root is None else ["knows too early whether it is the root"]
    model._lazy_init()
    if not (model._is_root and model.check_is_root()) or model.blocks[0]._is_root:
        lines.append("does not know who is root")
    loss_of(model(data(rank, 0))).backward()
    first, second = model.clip_grad_norm_(1e-2), model.clip_grad_norm_(1e-2)
    if not (first > second and abs(float(second) - 1e-2) < 1e-4):
        lines.append(f"norms {first} and {second}")
    model.eval()
    if any(m.training for m in model.modules()):
        lines.append("not all modules are in eval mode")
    return lines


@pytest.mark.parametrize("job", [attributes, lightning])
def test_trainers(job: Any, pool2: Run) -> None:
    assert not joined(pool2(job))
