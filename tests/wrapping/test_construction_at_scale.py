"""The cost of construction, lazy init and steps of large models in large worlds.

[Note: cost of construction] In calls, it is a sum of a term for the model, one for each unit and one for each
parameter: alpha + beta * units + gamma * parameters. The world is in none of them, only its groups' ranks are listed:
once for each group, and once for the first exchange.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.wrap import CustomPolicy
from tests.harness import inspect
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world
from tests.harness.meshes import adamw

pytestmark = pytest.mark.single_process

# A step's calls for each unit, torch.nn's own among them, and those of flatfsdp alone: lower them by each gain.
CALLS_PER_UNIT, OWN_CALLS_PER_UNIT = 393, 347
PACKAGE = str(Path(flatfsdp.__file__).parent)
HIDDEN, HEADS, KEYS, INNER, BLOCKS, VOCABULARY = 8192, 64, 8, 28672, 80, 128256


class Block(nn.Module):
    """The parameters of a decoder block with grouped queries and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        sizes = {"q": HIDDEN, "k": HIDDEN // HEADS * KEYS, "v": HIDDEN // HEADS * KEYS, "o": HIDDEN}
        self.attention = nn.ModuleDict({name: nn.Linear(HIDDEN, size, bias=False) for name, size in sizes.items()})
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Decoder(nn.Module):
    """A model of 70 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def leave_undefined(module: nn.Module) -> None:
    """Initialises nothing: memory that is never written to is none."""
    module.to_empty(device="cpu", recurse=False)


def test_seventy_billion_parameters_on_a_thousand_ranks_are_wrapped_within_a_second() -> None:
    """Counted in calls, of which a slow machine makes two million in a second; the rest is the pages of the shard.

    torch 2.13 makes 385,500 of them: 6,660 are the walk over all modules of a guard that is attached at lazy init
    (fast paths), as many look for a parameter on an accelerator, 2,900 ask whether a parameter is a flat one that its
    model has lost, and others are the two objects for each parameter, the shard and the leaf, with a hook."""
    with torch.device("meta"):
        model = Decoder().bfloat16()
    made: list[FullyShardedDataParallel] = []

    def wrap() -> None:
        made.append(
            FullyShardedDataParallel(
                model,
                auto_wrap_policy={Block},
                use_orig_params=True,
                param_init_fn=leave_undefined,
                check_values="off",  # reads all values
            )
        )
        inspect.begin(made[0])

    inspect.forget_kept_memory()
    with fake_world(1024, rank=512):
        assert calls_of(wrap) < 388_000
        (wrapped,) = made
        layouts = [each.layout for each in inspect.flat_params(wrapped)]
        assert sum(spec.numel for layout in layouts for spec in layout.params) == 70_553_706_496
        assert sum(layout.shard_numel for layout in layouts) == 70_553_706_496 // 1024


def wrap_and_begin(units: int, tensors: int, world: int, *, strategy: str = "FULL_SHARD") -> None:
    """Construction and lazy init of `units` units besides the root, with `tensors` parameters each."""
    body = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(tensors // 2))) for _ in range(units)]
    with fake_world(world):
        mesh = dist.init_device_mesh("cpu", (2, world // 2)) if "HYBRID" in strategy else None
        model = FullyShardedDataParallel(
            nn.Sequential(*(nn.Sequential(each) for each in body)),
            sharding_strategy=strategy,
            device_mesh=mesh,
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in body,
            use_orig_params=True,
        )
        inspect.begin(model, training=True)


def test_calls_are_in_proportion_to_units_and_parameters() -> None:
    def cost(units: int, tensors: int) -> int:
        return calls_of(lambda: wrap_and_begin(units, tensors, 8))

    cost(2, 2)  # one-time work
    base, more_units, most_units = (cost(units, 2) for units in (5, 10, 20))
    assert most_units - more_units <= 2.05 * (more_units - base)
    more_tensors, most_tensors = cost(5, 4), cost(5, 8)
    assert most_tensors - more_tensors <= 2.05 * (more_tensors - base)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_ranks_are_listed_once_for_a_group(strategy: str) -> None:
    def lists(units: int, world: int) -> int:
        with patch.object(dist, "get_process_group_ranks", wraps=dist.get_process_group_ranks) as listed:
            wrap_and_begin(units, 2, world, strategy=strategy)
        return listed.call_count

    assert lists(2, 8) == lists(9, 8) == lists(2, 1024) <= 4


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_group_that_was_destroyed_is_made_anew(strategy: str) -> None:
    with fake_world(4):

        def wrapped() -> FullyShardedDataParallel:
            return FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=strategy)

        def for_reductions(model: FullyShardedDataParallel) -> dist.ProcessGroup:
            return inspect.unit(model).reduction_group

        first, second = wrapped(), wrapped()
        assert for_reductions(first) is for_reductions(second)
        dist.destroy_process_group(for_reductions(first))
        assert for_reductions(wrapped()) is not for_reductions(first)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_step_makes_as_many_calls_in_any_world(strategy: str) -> None:
    def calls(world: int) -> int:
        with fake_world(world):
            net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(8)))
            model = FullyShardedDataParallel(net, sharding_strategy=strategy, auto_wrap_policy={nn.Linear})

            def step() -> None:
                model(torch.ones(2, 4)).sum().backward()
                model.zero_grad()

            for _ in range(3):
                step()
            return calls_of(step)

    assert calls(8) == calls(512)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_small_parameter_more_takes_few_calls_in_a_step(use_orig_params: bool) -> None:
    def calls(layers: int, *, wrapped: bool) -> int:
        with fake_world(8):
            units = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))) for _ in range(4)))
            model: nn.Module = units
            if wrapped:
                policy = CustomPolicy(lambda module: module in list(units))
                model = FullyShardedDataParallel(units, auto_wrap_policy=policy, use_orig_params=use_orig_params)

            def step() -> None:
                model(torch.ones(2, 8)).sum().backward()

            for _ in range(3):
                step()
                model.zero_grad()
            return calls_of(step)

    of_ten = calls(6, wrapped=True) - calls(1, wrapped=True)
    plain = calls(6, wrapped=False) - calls(1, wrapped=False)
    per = (of_ten - plain) / 40
    assert per < 6, per  # four of them are those of the hook that takes its gradient


def test_a_unit_more_takes_a_bounded_number_of_calls_in_a_step() -> None:
    """The host's cost of a unit, as a number that only falls: two tensors, nothing optional switched on."""

    def calls(count: int, inside: str = "") -> int:
        with fake_world(8):
            units = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(count)))
            policy = CustomPolicy(lambda module: module in list(units))
            model = FullyShardedDataParallel(units, auto_wrap_policy=policy, use_orig_params=True, join_units_below=0)

            def step() -> None:
                model(torch.ones(2, 8)).sum().backward()
                model.zero_grad()

            for _ in range(3):
                step()
            return calls_of(step, inside=inside)

    per_unit = (calls(12) - calls(4)) / 8
    assert per_unit <= CALLS_PER_UNIT, per_unit
    own = (calls(12, PACKAGE) - calls(4, PACKAGE)) / 8
    assert own <= OWN_CALLS_PER_UNIT, own


def tensors_after_steps(world: int) -> int:
    """The number of tensors of a model with 12 parameters under `fully_shard`, after steps on `world` ranks."""

    def count() -> int:
        gc.collect()
        # By type alone: a deprecated object of torch warns when its class is read.
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    before = count()
    with fake_world(world):
        mesh = dist.init_device_mesh("cpu", (world,))
        model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return count() - before


def test_tensors_of_a_parameter_are_as_many_in_any_world() -> None:
    tensors_after_steps(8)  # one-time objects
    few, many = tensors_after_steps(8), tensors_after_steps(64)
    assert few == many and few <= 12 * 34, (few, many)
