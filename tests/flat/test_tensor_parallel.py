"""Wrappers over modules that torch's tensor parallelism has split."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import AgreementError, UsageError
from tests.conftest import Run
from tests.harness import thorough
from tests.harness.tensor_parallel import Net, batches, loss_of, seeded, sharded, step_one, step_ours

pytestmark = pytest.mark.distributed


def trained(rank: int, world: int, shape: tuple[int, ...], steps: int, options: dict[str, Any]) -> list[str]:
    """AdamW under tensor parallelism and a wrapper, against one process."""
    model, one = sharded(shape, **options), seeded()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, one)]
    lines = []
    for step in range(steps):
        found, expected = step_ours(model, shape, step), step_one(one, shape, step)
        if abs(found - expected) > 2e-6:
            lines.append(f"step {step}: loss {found}, expected {expected}")
        norms = [model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)]
        if not torch.allclose(*norms, rtol=1e-5):
            lines.append(f"step {step}: norm {norms[0]}, expected {norms[1]}")
        for each in optimizers:
            each.step()
            each.zero_grad()
    return lines


@pytest.mark.parametrize(
    ("orig", "sequence"), thorough.some([(True, True), (True, False), (False, False), (False, True)], 2)
)
def test_training_is_that_of_one_process(pool4: Run, orig: bool, sequence: bool) -> None:
    options = {"use_orig_params": orig, "sequence": sequence}
    assert not [line for lines in pool4(trained, (2, 2), 3, options) for line in lines]


def summoned(rank: int, world: int, orig: bool) -> list[str]:
    """Inside summon_full_params() modules have DTensors, which can be written to, replaced and computed with."""
    shape = (2, 2)
    model = sharded(shape, use_orig_params=orig)
    tokens, classes, place = batches(shape, 0)
    outside = loss_of(model, tokens[place], classes[place])
    outside.backward()
    one = seeded()
    step_one(one, shape, 0)
    lines = []
    with FullyShardedDataParallel.summon_full_params(model, writeback=True, with_grads=orig):
        with torch.no_grad():
            inside = loss_of(model, tokens[place], classes[place])
        if not torch.allclose(inside, outside, rtol=1e-6):
            lines.append(f"a forward inside: {inside}, outside {outside}")
        for name, parameter in model.module.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "")
            expected = one.get_parameter(name)
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(whole, expected):
                lines.append(f"{name} is another one")
            if orig and isinstance(parameter, DTensor):
                grad: Any = parameter.grad
                if not torch.allclose(grad.full_tensor(), expected.grad, atol=1e-6):  # type: ignore[arg-type]
                    lines.append(f"{name} has another gradient")
        with torch.no_grad():
            model.module.head.weight.mul_(2)
        model.module.embedding.weight = nn.Parameter(model.module.embedding.weight.detach() + 1)
    with FullyShardedDataParallel.state_dict_type(model, "FULL"):
        values = model.state_dict()
    if not torch.equal(values["head.weight"], 2 * one.get_parameter("head.weight")):
        lines.append("what was written is lost")
    if not torch.equal(values["embedding.weight"], 1 + one.get_parameter("embedding.weight")):
        lines.append("what was put in a parameter's place is lost")
    loss_of(model, tokens[place], classes[place]).backward()
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_summoned_parameters_are_what_modules_compute_with(pool4: Run, orig: bool) -> None:
    assert not [line for lines in pool4(summoned, orig) for line in lines]


def copied(rank: int, world: int) -> list[str]:
    """A copy trains like its original, and a pickle is refused."""
    shape = (2, 2)
    model = sharded(shape)
    step_ours(model, shape, 0)
    model.zero_grad()
    losses = []
    for each in (model, copy.deepcopy(model)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(1, 3):
            step_ours(each, shape, step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(step_ours(each, shape, 3))
    with pytest.raises(UsageError, match=r"with DTensors \(.*\) cannot be pickled"):
        pickle.dumps(model)
    return [] if losses[0] == losses[1] else [f"losses {losses}"]


def test_copies_train_alike(pool4: Run) -> None:
    assert not [line for lines in pool4(copied) for line in lines]


SETTINGS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "rows": {"layout": "rows", "sequence": False},
    "synchronized": {"sync_module_states": True, "build": "unlike"},
    "checkpoints": {"build": "checkpoints"},
    "no_sync": {"accumulates": True},
    "unjoined": {"join_units_below": 0},
}


def unlike() -> nn.Module:
    """Ranks other than the first of data parallelism begin with other values."""
    net = Net()
    if dist.get_rank() > 1:
        for parameter in net.parameters():
            nn.init.ones_(parameter)
    return net


def recomputed() -> nn.Module:
    net = Net()
    for block in net.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return net


def under_settings(rank: int, world: int, names: list[str], turns: tuple[bool, ...]) -> list[str]:
    """Two steps under each of some settings, against one process."""
    shape, lines = (2, 2), []
    for number, name in enumerate(names):
        options = dict(SETTINGS[name])
        accumulates = options.pop("accumulates", False)
        options["build"] = {"unlike": unlike, "checkpoints": recomputed}.get(options.get("build", ""), Net)
        for turn in turns:
            orig = turn == (number % 2 == 0)
            model, one = sharded(shape, use_orig_params=orig, **options), seeded()
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, one)]
            for step in range(2):
                if accumulates:
                    with model.no_sync():
                        step_ours(model, shape, 7 + step)
                    step_one(one, shape, 7 + step)
                found, expected = step_ours(model, shape, step), step_one(one, shape, step)
                norms = [float(model.clip_grad_norm_(9.0)), float(norm_of(one))]
                if abs(found - expected) > 2e-6 or abs(norms[0] - norms[1]) > 1e-5:
                    lines.append(f"{name} {orig} step {step}: loss {found}, expected {expected}, norms {norms}")
                for each in optimizers:
                    each.step()
                    each.zero_grad()
    return lines


def norm_of(one: nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])


@pytest.mark.parametrize("names", [list(SETTINGS)[:4], list(SETTINGS)[4:]], ids=" ".join)
def test_settings_train_alike(pool4: Run, names: list[str]) -> None:
    """With original parameters and without in turn, or both."""
    assert not [line for lines in pool4(under_settings, names, thorough.some((True, False), 2)) for line in lines]


def in_low_precision(rank: int, world: int) -> list[str]:
    """bfloat16 computes, float32 steps: near to one process, and gradients are in float32."""
    shape = (2, 2)
    model = sharded(shape, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    one = seeded()
    found, expected = step_ours(model, shape, 0), step_one(one, shape, 0)
    lines = [] if abs(found - expected) < 0.02 else [f"loss {found}, expected {expected}"]
    norms = [float(model.clip_grad_norm_(9.0)), float(norm_of(one))]
    if abs(norms[0] - norms[1]) > 0.02 * norms[1]:
        lines.append(f"norms {norms}")
    return lines + [
        f"a gradient of {p.grad.dtype}"
        for p in model.parameters()
        if p.grad is not None and p.grad.dtype != torch.float32
    ]


def test_low_precision(pool4: Run) -> None:
    assert not [line for lines in pool4(in_low_precision) for line in lines]


def three_dimensions(rank: int, world: int) -> list[str]:
    return trained(rank, world, (2, 2, 2), 2, {})


@pytest.mark.skipif(not thorough.is_thorough(), reason="eight ranks; --thorough")
def test_hybrids_beside_tensor_parallelism(run: Run) -> None:
    assert not [line for lines in run(8, three_dimensions, timeout=120) for line in lines]


def another_model(rank: int, world: int) -> str:
    """Rank 3 has one block more."""
    shape = (2, 2)
    model = sharded(shape, build=functools.partial(Net, blocks=2, hidden=26 if rank != 3 else 28), sequence=False)
    try:
        step_ours(model, shape, 0)
    except AgreementError as error:
        return str(error)
    return "no error"


def test_a_rank_with_another_model_is_named(pool4: Run) -> None:
    for text in pool4(another_model):
        assert (
            "unit 'blocks.0', parameter up.weight: ranks 0, 1, 2: float32 (26, 12) as a DTensor (tp of 2: S(0))" in text
        )
        assert "; rank 3: float32 (28, 12) as a DTensor" in text
