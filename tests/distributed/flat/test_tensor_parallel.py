"""Wrappers over modules that torch's tensor parallelism has split."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.tensor_parallel import batches, loss_of, seeded, sharded, step_one, step_ours


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


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("orig", [True, False])
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
            if orig and isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                if torch.allclose(parameter.grad.full_tensor(), expected.grad, atol=1e-6):
                    continue
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
