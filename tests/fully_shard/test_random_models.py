"""The random models of the wrapper under `fully_shard`: in units of one module or of lists, of which parts run before
the root or after it, against the same models in one process."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import flatfsdp
from flatfsdp import ShardedGradScaler, fuse_optimizer_steps, optimizer_in_backward
from tests.conftest import Run
from tests.harness.front import whole
from tests.harness.gather_hooks import Around, InAnyDimension, Same, SameAround
from tests.harness.gradients import gradients_of, unlike, unlike_but_for_rounding
from tests.harness.meshes import named_mesh
from tests.harness.played_memory import assign_gradients, assign_values, drawn_memory, without_marks
from tests.harness.pool import JobFailed
from tests.harness.thorough import seeds
from tests.runtime.test_random_models import STEPS, WIDTH, How, Nest, Net, _losses, assert_documented

pytestmark = pytest.mark.distributed

LISTED = 0.25  # of units


def sharded(net: Net, how: How, drawn: random.Random) -> Any:
    """`net` in units: nested ones alone, the others in lists at times; tied parameters stay with the root."""
    shape = (2, how.world // 2) if how.strategy == "HYBRID_SHARD" else (how.world,)
    columns = drawn.random() < 0.3
    settings: dict[str, Any] = {
        "mesh": named_mesh(*shape),
        "shard_placement_fn": partial(along_columns, ranks=shape[-1]) if columns else None,
    }
    ways = [None, True, False] + [how.neighbors] * (how.neighbors is not None)
    counted = Counter(each.data_ptr() for _, each in net.units.named_parameters(remove_duplicate=False))
    waiting: list[nn.Module] = []
    for unit in net.units:
        if any(counted[parameter.data_ptr()] > 1 for parameter in unit.parameters()):
            continue
        if isinstance(unit, Nest) and drawn.random() < 0.7:
            flatfsdp.fully_shard(unit.inner, reshard_after_forward=drawn.choice(ways), **settings)
        if drawn.random() < LISTED:
            waiting.append(unit)
        else:
            flatfsdp.fully_shard(unit, reshard_after_forward=drawn.choice(ways), **settings)
    if waiting:
        flatfsdp.fully_shard(waiting, reshard_after_forward=drawn.choice(ways), **settings)
    return flatfsdp.fully_shard(net, reshard_after_forward=drawn.choice(ways), **settings)


def along_columns(parameter: torch.Tensor, ranks: int) -> Shard | None:
    """`Shard(1)`, except for tensors with gather hooks that do not take it."""
    if isinstance(parameter, Around) and not (
        isinstance(parameter, InAnyDimension) and parameter.shape[1] % ranks == 0
    ):
        return None
    return Shard(1)


def extended(net: Net, seed: int) -> Net:
    """`net`, in which at times the weights of some layers are tensors with gather hooks, of one of the kinds: with rows
    in the shard, or kept by their class, along the first dimension or any."""
    drawn = random.Random(f"hooks {seed}")
    if drawn.random() < 0.3:
        kind = drawn.choice([Same, SameAround, InAnyDimension])
        uses = Counter(each.data_ptr() for _, each in net.named_parameters(remove_duplicate=False))
        for module in net.modules():
            if type(module) is nn.Linear and uses[module.weight.data_ptr()] == 1 and drawn.random() < 0.5:
                weight = nn.Parameter(kind(module.weight.detach()), module.weight.requires_grad)
                vars(weight).update(vars(module.weight))
                module.weight = weight
    return net


def train(rank: int, world: int, seed: int, how: How) -> list[str]:
    """Parameters, and kept gradients, that differ from those of one process that runs all ranks' batches."""
    drawn = random.Random(f"front {seed}")
    model, alone = sharded(extended(drawn_memory(Net(seed, how), seed), seed), how, drawn), Net(seed, how)
    optimizer, plain = how.optimizer(model), how.optimizer(alone)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10) if how.stepping == "scaled" else None
    in_backward = how.stepping == "in the backward"
    if in_backward:
        optimizer_in_backward(model, optimizer)
    elif how.stepping == "flat":
        fuse_optimizer_steps(optimizer)
    losses = partial(_losses, seed=seed, how=how)
    encodes = drawn.random() < 0.3 and isinstance(model.units[0], flatfsdp.FSDPModule)  # it also runs alone
    for step in range(STEPS):
        if how.evaluates:
            with torch.no_grad():
                losses(model, 0, step, 0)
        if encodes:
            with torch.no_grad():
                model.units[0](torch.ones(1, WIDTH), "abc")
        came = False
        for microbatch in range(how.microbatches):
            model.set_requires_gradient_sync(microbatch == how.microbatches - 1)
            before = gradients_of(alone)
            for each in losses(model, rank, step, microbatch):
                (each if scaler is None else scaler.scale(each)).backward()
            for each in itertools.chain.from_iterable(losses(alone, of, step, microbatch) for of in range(world)):
                (each / world).backward()
            came = any(unlike(each, before[name]) for name, each in gradients_of(alone).items())
        if how.microbatches > 1 and not came and (in_backward or scaler is not None):
            return []  # gradients of earlier microbatches wait for an optimizer's step [docs/limits.md]
        if scaler is not None:
            scaler.unscale_(optimizer)
        found: list[str] = []
        if not in_backward and (came or how.microbatches == 1):
            expected = gradients_of(alone)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    grad = None if parameter.grad is None else parameter.grad.full_tensor()
                    found += wrong(f"step {step}: gradient of {name}", grad, expected[name])
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif not in_backward:
            if came or how.microbatches == 1:  # else an edit of what waits for the step is refused
                for each in model, alone:
                    assign_gradients(each, seed, step)
            optimizer.step()
        plain.step()
        for each in model, alone:
            assign_values(each, seed, step)
        found += without_marks(model)
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            found += wrong(f"step {step}: {name}", whole(parameter), other)
        if found:
            return found
        for each in optimizer, plain:
            each.zero_grad(how.to_none or in_backward)
    return []


def wrong(what: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> list[str]:
    words = unlike_but_for_rounding(found, expected, rtol=1e-3, atol=1e-4)
    return [f"{what}: {words}"] if words else []


def play(run: Run, seed: int, how: How) -> None:
    try:
        assert run(how.world, train, seed, how, timeout=60) == [[]] * how.world
    except JobFailed as error:
        assert_documented(error, seed, how)


@pytest.mark.parametrize("seed", seeds(2, 300))
def test_models_train_as_in_one_process(run: Run, seed: int) -> None:
    play(run, seed, How.drawn(seed))


# 160 has ended a worker, and 23 waited until it was reported, where units that are called again, or in several forwards
# before one backward, have parts that are recomputed reentrantly.
@pytest.mark.parametrize(("seed", "world"), [(160, 2), (23, 3)])
def test_so_they_do_where_parts_of_units_are_recomputed(run: Run, seed: int, world: int) -> None:
    play(run, seed, How.drawn(seed)._replace(world=world))


@pytest.mark.parametrize("seed", seeds(2, 300))
def test_so_they_do_where_units_return_several_tensors(run: Run, seed: int) -> None:
    play(
        run,
        seed,
        How.drawn(seed)._replace(outputs=True, reentrant=seed % 2 == 0, siblings=seed % 3 == 0, corners=False),
    )
