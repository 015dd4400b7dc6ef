"""Training with an optimizer that steps flat, and with one that does not: the same bits everywhere.

Changes between two steps are tested in `tests/features/test_fused_steps_after_changes.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
import flatfsdp.checkpoint
from flatfsdp import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler
from tests.conftest import Run
from tests.harness.corners import full_parameters, seeded
from tests.harness.meshes import replicas_of_shards
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

Tensors = dict[str, Tensor]


class Stack(nn.Module):
    """Blocks, of which one is frozen in a step, and a head that each rank uses as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(WIDTH, 21) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.gain


def wrapped(**settings: Any) -> Any:
    if settings.get("sharding_strategy") == "HYBRID_SHARD":
        settings["device_mesh"] = replicas_of_shards()
    return FullyShardedDataParallel(seeded(Stack), auto_wrap_policy={Feedforward}, use_orig_params=True, **settings)


def optimizer_of(model: nn.Module, *, flat: bool, kind: Any = torch.optim.AdamW, in_backward: bool = False) -> Any:
    """An optimizer over two groups, as trainers make it, and the result of `fuse_optimizer_steps`."""
    shapes = flatfsdp.unsharded_shapes(model)
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        groups[len(shapes[name]) < 2].append(parameter)
    optimizer = kind([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.02)
    steps = flatfsdp.fuse_optimizer_steps(optimizer) if flat else None
    if in_backward:
        flatfsdp.optimizer_in_backward(model, optimizer)
    return optimizer, steps


def state_of(model: Any, optimizer: Any) -> Tensors:
    states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return full_parameters(model) | {f"{n}.{s}": v for n, each in states.items() for s, v in each.items()}


def loss_of(model: Any, rank: int, number: int) -> Tensor:
    numbers = torch.Generator().manual_seed(10 * number + rank)
    loss: Tensor = model(torch.randn(4, WIDTH, generator=numbers)).float().square().mean()
    return loss


def train(model: Any, optimizer: Any, rank: int, steps: range, *, scaler: Any = None, clip: bool = False) -> None:
    """A usual loop that accumulates, with a schedule, and a block that is frozen in each third step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(step % 3 != 2)
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss = loss_of(model, rank, 10 * step + micro)
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            model.clip_grad_norm_(0.1)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        schedule.step()
        optimizer.zero_grad()


def both(rank: int, world: int, settings: dict[str, Any], how: dict[str, Any]) -> list[str]:
    """The names of values that differ between both ways."""
    ends = []
    for flat in (False, True):
        model = wrapped(**settings)
        chosen = {name: how[name] for name in ("kind", "in_backward") if name in how}
        optimizer, steps = optimizer_of(model, flat=flat, **chosen)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**40, growth_interval=1) if how.get("scaler") else None
        with flatfsdp.detect_nonfinite(model) if how.get("detect") else nullcontext():
            train(model, optimizer, rank, range(5), scaler=scaler, clip=bool(how.get("clip")))
        assert steps is None or 2 * steps.runs <= steps.members
        ends.append(state_of(model, optimizer))
    one, other = ends
    assert len(one) > 15
    return [name for name in {**one, **other} if name not in one or not torch.equal(one[name], other[name])]


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
LOW_GRADIENTS = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)


@pytest.mark.parametrize(
    ("world", "settings", "how"),
    [
        pytest.param(1, {}, {}, id="one rank"),
        pytest.param(2, {}, {"clip": True}, id="two ranks, clipped"),
        pytest.param(3, {"sharding_strategy": "SHARD_GRAD_OP"}, {"detect": True}, id="three ranks, SHARD_GRAD_OP"),
        pytest.param(2, {"sharding_strategy": "NO_SHARD"}, {"scaler": True}, id="NO_SHARD, scaler"),
        pytest.param(4, {"sharding_strategy": "HYBRID_SHARD"}, {}, id="HYBRID_SHARD"),
        pytest.param(2, {"cpu_offload": True}, {"scaler": True}, id="offloaded, scaler"),
        pytest.param(2, {"mixed_precision": LOW}, {"clip": True}, id="bf16, clipped"),
        pytest.param(2, {"mixed_precision": LOW_GRADIENTS}, {"kind": torch.optim.SGD}, id="bf16 gradients"),
        pytest.param(3, {}, {"in_backward": True}, id="in the backward"),
    ],
)
def test_training_ends_in_the_same_bits(run: Run, world: int, settings: Any, how: Any) -> None:
    assert run(world, both, settings, how) == [[]] * world


def places_of_states(rank: int, world: int) -> int:
    model = wrapped()
    optimizer, _ = optimizer_of(model, flat=True, in_backward=True)
    found = set()
    for number in range(4):
        loss_of(model, rank, number).backward()
        found.add(tuple(state["exp_avg"].data_ptr() for state in optimizer.state.values()))
    return len(found)


def test_in_backwards_the_runs_of_each_unit_are_found_once(pool2: Run) -> None:
    assert pool2(places_of_states) == [1, 1]  # else the states would have been copied


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved(rank: int, world: int, folder: str) -> None:
    """Save after three steps, in both ways; the values after two more."""
    for flat in (False, True):
        model = wrapped()
        optimizer, _ = optimizer_of(model, flat=flat)
        train(model, optimizer, 0, range(3))
        flatfsdp.checkpoint.save(f"{folder}/{flat}", model=model, optimizer=optimizer)
        before = state_of(model, optimizer)
        train(model, optimizer, 0, range(3, 5))
        after = state_of(model, optimizer)
        if rank == 0:
            torch.save((before, after), f"{folder}/{flat}.pt")


def loaded(rank: int, world: int, folder: str, exact: bool) -> list[str]:
    """Values that differ once one way has loaded the other's checkpoint, before a first step and after some."""
    lines = []
    for flat in (False, True):
        before, after = torch.load(f"{folder}/{not flat}.pt")
        for first in some((0, 2), 2, flat + world):
            model = wrapped()
            optimizer, steps = optimizer_of(model, flat=flat)
            train(model, optimizer, rank, range(first))
            flatfsdp.checkpoint.load(f"{folder}/{not flat}", model=model, optimizer=optimizer)
            found = state_of(model, optimizer)
            lines += [f"{flat} {first}: {name}" for name in before if not torch.equal(found[name], before[name])]
            train(model, optimizer, 0, range(3, 5))
            assert steps is None or 2 * steps.runs <= steps.members
            found = state_of(model, optimizer)
            for name in after:
                same = torch.equal if exact else torch.allclose
                if not same(found[name], after[name]):
                    lines.append(f"{flat} {first}, two steps later: {name}")
    return lines


def test_checkpoints_go_from_one_way_to_the_other_and_to_other_worlds(run: Run, tmp_path: Path) -> None:
    run(2, saved, str(tmp_path))
    for world in (2, 3):
        assert run(world, loaded, str(tmp_path), world == 2) == [[]] * world
