"""The oracles against each other, against DDP, FSDP1 and the plain FSDP: the basis of the engine's parity tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness import parity
from tests.harness.corners import Net, Setting, data, differences, loss_of
from tests.harness.models import CASES
from tests.harness.reference import Recipe, concatenated, sequential

pytestmark = pytest.mark.distributed

FSDP1 = parity.FSDP("torch.distributed.fsdp")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CONCATENABLE = [name for name, case in CASES.items() if case.concatenable]
# FSDP1 flattens only parameters of one dtype that have a dimension, and all ranks use the same units.
FLATTENABLE = [name for name in CASES if name not in ("dtypes", "nested")]
OF_FSDP1 = [name for name in FLATTENABLE if name != "reached"]
ONE_DTYPE_ALL_USED = ["mlp", "transformer", "tied", "nested"]


@pytest.mark.parametrize("case", CASES)
def test_cases_are_deterministic_and_differ_by_rank(case: str) -> None:
    first, second = sequential(Recipe(case, steps=2), 2), sequential(Recipe(case, steps=2), 2)
    assert not parity.compare(first, second, mode="bit")
    losses = torch.stack([rank for step in first.losses for micro in step for rank in micro])
    assert losses.unique().numel() == 4
    made = [[grad for grad in gradients.values() if grad is not None] for gradients in first.gradients]
    assert all(grad.isfinite().all() for grads in made for grad in grads) and any(grad.any() for grad in made[0])


@pytest.mark.parametrize("case", CONCATENABLE)
def test_ranks_in_sequence_agree_with_one_batch(case: str) -> None:
    recipe = Recipe(case, micro=2)
    found = sequential(recipe, 3)
    differences = parity.compare(found, concatenated(recipe, 3), mode="close", bound=1e-2 if case == "dtypes" else 1e-5)
    assert not differences


def test_one_rank_is_plain_training() -> None:
    for case in CASES:
        recipe = Recipe(case, micro=2)
        one, plain = sequential(recipe, 1), concatenated(recipe, 1)
        plain.buffers = one.buffers
        assert not parity.compare(one, plain, mode="bit")


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("conv", compute=BF16),
        Recipe("mlp", reduce=FP16),
        Recipe("mlp", reduce=BF16),
        Recipe("mlp", compute=BF16, reduce=FP32, micro=2),
        Recipe("conv", compute=BF16, buffers=BF16, nested=False),
    ],
)
def test_every_dtype_of_a_recipe_shows_in_the_numbers(recipe: Recipe) -> None:
    exact = dataclasses.replace(recipe, compute=None, reduce=None, buffers=None)
    found, expected = sequential(recipe, 2), sequential(exact, 2)
    assert parity.compare(found, expected, mode="bit")
    found.buffers = expected.buffers  # those keep the dtype of the buffers
    assert not parity.compare(found, expected, mode="close", bound=0.25)


def test_accumulating_wider_is_seen() -> None:
    recipe = Recipe("mlp", compute=BF16, micro=4)
    wide = dataclasses.replace(recipe, accumulated=FP32)
    assert parity.compare(sequential(recipe, 2), sequential(wide, 2), mode="bit")


def test_fp16_sums_do_not_overflow_where_their_average_does_not() -> None:
    world = 64
    recipe = Recipe("mlp", steps=1, reduce=FP16)
    story = sequential(recipe, world)
    exact = sequential(dataclasses.replace(recipe, reduce=None), world)
    assert not parity.compare(story, exact, mode="close", bound=1e-2)


def test_replica_groups_add_up_first() -> None:
    flat, hybrid = sequential(Recipe("mlp"), 4), sequential(Recipe("mlp", replicas=2), 4)
    assert parity.compare(flat, hybrid, mode="bit")
    assert not parity.compare(flat, hybrid, mode="close", bound=1e-5)


def test_what_no_rank_reaches_has_no_gradient_and_stays() -> None:
    recipe = Recipe("reached", optimizer="adamw")
    story, start = sequential(recipe, 2), dict(recipe.model.build().named_parameters())
    ways = {name: [gradients[name] is not None for gradients in story.gradients] for name in start}
    assert ways["spare"] == [False] * 3 and torch.equal(story.parameters["spare"], start["spare"])
    assert ways["head.weight"] == [True] * 3
    assert any(0 < sum(ways[name]) < 3 for name in ways)


def test_what_has_gradients_together_has_zeros_where_none_came() -> None:
    recipe, names = Recipe("unused", steps=1), frozenset({"0.first", "0.inner.up.weight"})
    story, start = sequential(recipe, 2, (names, frozenset({"0.last"}))), dict(recipe.model.build().named_parameters())
    (gradients,) = story.gradients
    spare = gradients["0.first"]
    assert spare is not None and not spare.any() and gradients["0.last"] is None
    assert torch.equal(story.parameters["0.last"], start["0.last"])
    assert not torch.equal(story.parameters["0.first"], start["0.first"])


def test_comparison_names_what_differs() -> None:
    story, other = sequential(Recipe("mlp", steps=1), 2), sequential(Recipe("mlp", steps=1), 2)
    name = "3.bias"
    other.gradients[0][name][1] = torch.nan
    other.parameters[name] = other.parameters[name].double()
    expected = [
        "step 0: gradient of 3.bias: 1 of 3 elements differ, by a norm of nan",
        "at the end: parameter 3.bias: found torch.float64 (3,), expected torch.float32 (3,)",
    ]
    assert parity.compare(other, story, mode="bit") == expected
    found = parity.compare(other, story, mode="close")
    assert len(found) == 2
    assert found[0].startswith("step 0: gradient of 3.bias: 1 of 3 elements differ, by a norm of nan, more than 1e-05")
    other.gradients[0][name], story.gradients[0]["3.weight"] = torch.zeros(3), None
    story.gradients[0][name] = None
    found = parity.compare(other, story, mode="close")
    assert "step 0: gradient of 3.bias: zeros, expected None" in found
    assert any(line.startswith("step 0: gradient of 3.weight: a gradient of norm") for line in found)
    del other.parameters[name]
    lines = parity.compare(other, story, mode="bit")
    assert any(line.startswith("at the end: parameter: found the names") for line in lines)


@pytest.mark.parametrize("case", FLATTENABLE)
def test_ddp_on_two_ranks_is_the_sequence(case: str) -> None:
    options: dict[str, Any] = {"find_unused_parameters": True} if case in ("unused", "reached") else {}
    parity.check(2, Recipe(case), engine=parity.DDP(), **options)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", ONE_DTYPE_ALL_USED)
def test_plain_fsdp_is_the_sequence(case: str, world: int) -> None:
    parity.check(world, Recipe(case), engine=parity.Plain())


# Trainable and frozen parameters together FSDP1 flattens only with use_orig_params=True.
@pytest.mark.parametrize(
    ("case", "use_orig_params"),
    [(case, True) for case in OF_FSDP1] + [(case, False) for case in OF_FSDP1 if "frozen" not in case],
)
def test_fsdp1_on_two_ranks_is_the_sequence(case: str, use_orig_params: bool) -> None:
    parity.check(2, Recipe(case), engine=FSDP1, context=parity.deprecations_allowed, use_orig_params=use_orig_params)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("mlp", compute=BF16),
        Recipe("mlp", compute=BF16, reduce=FP32, optimizer="adamw"),
        Recipe("conv", compute=BF16, reduce=FP32),
        Recipe("transformer", micro=2),
        Recipe("transformer", micro=2, accumulate="communicate"),
    ],
)
def test_fsdp1_with_a_recipe_is_the_sequence(recipe: Recipe) -> None:
    parity.check(2, recipe, engine=FSDP1, context=parity.deprecations_allowed, use_orig_params=True)


def test_fsdp1_agrees_with_one_batch() -> None:
    options: dict[str, Any] = {"use_orig_params": True, "context": parity.deprecations_allowed, "mode": "close"}
    parity.check(2, Recipe("transformer", clip=0.5), engine=FSDP1, oracle="concatenated", **options)
    options |= {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    parity.check(4, Recipe("mlp", replicas=2), engine=FSDP1, **options)


def wrong_on_one_rank(model: Any, rank: int, step: int) -> torch.Tensor:
    """Under the engine, rank 1 changes its pieces of gradients: the first is missing, the others are doubled."""
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    if isinstance(model, FullyShardedDataParallel) and rank == 1:
        grads = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if len(grads) > 4:  # original parameters
            grads.pop(0).grad = None
        for parameter in grads:
            parameter.grad.mul_(2)  # type: ignore[union-attr]
    return loss


def found_by_corners(rank: int, world: int, orig: bool) -> list[str]:
    return differences(rank, world, Net, wrong_on_one_rank, under=[Setting(orig=orig)], steps=1)


@pytest.mark.parametrize("orig", [True, False], ids=["original", "flat"])
def test_wrong_gradients_of_one_rank_are_found_there(orig: bool, run: Run) -> None:
    """Each rank compares its own pieces; the parameters at the end are compared as a whole by all."""
    right, wrong = run(2, found_by_corners, orig)
    assert right and not [line for line in right if "at the end: " not in line]
    assert [line for line in wrong if "step 0: " in line and "differs by a norm" in line]
    assert orig == any("gradient of" in line and "None, expected a gradient" in line for line in wrong)
