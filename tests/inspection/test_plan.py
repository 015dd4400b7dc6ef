"""A dry run in this process predicts the memory and the communication of the ranks of the real job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from tests.conftest import Run
from tests.harness.models import Block as SmallBlock
from tests.harness.models import Feedforward, Low, Transformer

pytestmark = pytest.mark.distributed

WIDTH = 192  # a unit of two such layers is too large to be joined


class Large(nn.Module):
    """Units of several sizes, and a norm of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Feedforward(WIDTH, width) for width in (2048, 800, 1536)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.units(x))


class Many(nn.Module):
    """Many units of a few KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Feedforward(16, 19) for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        return self.units(x)


def vectors(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, width)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[type[nn.Module]]]] = {
    "mlp": (Large, vectors(WIDTH), {Feedforward}),
    "tied": (
        lambda: Transformer(tied=True, depth=3),
        lambda: torch.randint(Transformer.vocabulary, (2, Transformer.length)),
        {SmallBlock},
    ),
    "many": (Many, vectors(16), {Feedforward}),
    "frozen": (lambda: nn.Sequential(*(Low(40) for _ in range(3)), nn.Linear(40, 3)), vectors(40), {Low}),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
}


def wrapped(name: str, options: dict[str, Any]) -> FullyShardedDataParallel:
    """Inside a job or a dry run: `mesh` in `options` stands for a mesh of that shape."""
    make, _, units = MODELS[name]
    options = dict(options)
    if shape := options.pop("mesh", None):
        options["device_mesh"] = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    return FullyShardedDataParallel(make(), auto_wrap_policy=units, **options)


def lived(
    rank: int, world: int, name: str, options: dict[str, Any], optimizer: str, microbatches: int, stepping: bool
) -> dict[str, Any]:
    """The figures of the last step of training: of the second, or, after one with steps in the backward, the third."""
    model = wrapped(name, options)
    batch = MODELS[name][1]
    stepper = OPTIMIZERS[optimizer](model.parameters())
    if stepping:
        flatfsdp.optimizer_in_backward(model, stepper)
    figures = flatfsdp.stats(model)
    for _ in range(2 + stepping):
        figures.reset()
        for place in range(microbatches):
            with model.no_sync() if place < microbatches - 1 else nullcontext():
                F.softplus(model(batch()).float()).sum().backward()
        grads = figures.bytes_grads
        found = {"comm": figures.comm, "unsharded_peak": figures.bytes_unsharded_peak, "at_peak": figures.bytes_at_peak}
        stepper.step()
        model.zero_grad()
    states = [value for state in stepper.state.values() for value in state.values() if isinstance(value, Tensor)]
    return found | {"params": figures.bytes_params, "grads": grads, "optimizer": sum(each.nbytes for each in states)}


def planned(
    rank: int, world: int, name: str, options: dict[str, Any], optimizer: str, microbatches: int, stepping: bool
) -> dict[str, Any]:
    with flatfsdp.dry_run(world, rank=rank):
        model = wrapped(name, options)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        how = flatfsdp.optimizer_in_backward(model, stepper) if stepping else stepper
        plan = flatfsdp.memory_plan(model, how, microbatches=microbatches)
    return {
        "comm": plan.comm,
        "unsharded_peak": plan.unsharded_peak,
        "at_peak": plan.at_peak,
        "params": plan.params,
        "grads": plan.grads,
        "optimizer": sum(plan.optimizer.values()),
    }


BF16: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
LOW: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
ORIGINAL: dict[str, Any] = {"use_orig_params": True}

JOBS: list[tuple[int, str, dict[str, Any], str, int, bool]] = [
    (1, "mlp", ORIGINAL | BF16, "adamw", 2, False),
    (2, "tied", ORIGINAL | BF16, "adamw", 2, False),
    (2, "mlp", {}, "adamw", 1, False),
    (3, "many", {}, "adamw", 1, False),
    (2, "tied", {"sharding_strategy": "SHARD_GRAD_OP"} | LOW, "adamw", 2, False),
    (3, "mlp", {"sharding_strategy": "SHARD_GRAD_OP"} | LOW, "sgd", 1, False),
    (4, "mlp", {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)} | ORIGINAL, "momentum", 2, False),
    (4, "tied", {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "mesh": (2, 2)}, "momentum", 1, False),
    (4, "mlp", {"reshard_after_forward": 2}, "sgd", 1, False),
    (3, "tied", ORIGINAL, "adagrad", 1, False),
    (3, "mlp", {"sharding_strategy": "NO_SHARD"}, "sgd", 2, False),
    (2, "mlp", {"join_units_below": 0, "backward_prefetch": None, "forward_prefetch": True}, "sgd", 1, False),
    (2, "mlp", {"cpu_offload": True}, "adamw", 1, False),
    (2, "mlp", ORIGINAL, "adamw", 2, True),
    (2, "frozen", {"join_units_below": 0} | BF16, "adamw", 2, False),
]


def named(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(key.removeprefix("sharding_") for key in value) or "default"
    return None


@pytest.mark.parametrize(("world", "name", "options", "optimizer", "microbatches", "stepping"), JOBS, ids=named)
def test_a_dry_run_predicts_what_ranks_hold_and_send(
    run: Run, world: int, name: str, options: dict[str, Any], optimizer: str, microbatches: int, stepping: bool
) -> None:
    job = name, options, optimizer, microbatches, stepping
    found = run(world, lived, *job)
    for rank in {0, world - 1}:
        assert planned(rank, world, *job) == found[rank]
