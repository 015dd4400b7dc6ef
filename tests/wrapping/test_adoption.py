"""A part that is wrapped, maybe has trained, and becomes part of a larger model."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

X = torch.ones(2, 4)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def backbone() -> Any:
    return FullyShardedDataParallel(
        nn.Sequential(linear(), FullyShardedDataParallel(linear(), use_orig_params=True)), use_orig_params=True
    )


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(X).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_model_whose_part_has_become_one_of_another_trains_on() -> None:
    with fake_world(1):
        model = backbone()
        before = gradients(model)
        other: Any = FullyShardedDataParallel(nn.Sequential(model.module[1], linear()), use_orig_params=True)
        assert len(gradients(other)) == 4
        after = gradients(model)
        assert len(after) == len(before) == 4
        assert all(map(torch.equal, after, before))


def test_the_rest_of_a_model_goes_with_it_when_its_part_stays() -> None:
    with fake_world(2):
        model: Any = FullyShardedDataParallel(nn.Sequential(linear(), FullyShardedDataParallel(linear())))
        other = FullyShardedDataParallel(nn.Sequential(model.module[1], linear()))
        gone = weakref.ref(inspect.unit(model).flat_params[0].shard)
        gc.collect()
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()
        other(X).sum().backward()


@pytest.mark.parametrize("ran", ["never", "evaluated", "trained"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_model_is_freed_without_the_garbage_collector(ran: str, strategy: str) -> None:
    with fake_world(2):
        gc.collect()
        gc.disable()
        try:
            part = FullyShardedDataParallel(linear(), sharding_strategy=strategy)
            model = FullyShardedDataParallel(nn.Sequential(part, linear()), sharding_strategy=strategy)
            if ran != "never":
                with torch.set_grad_enabled(ran == "trained"):
                    output = model(X).sum()
            if ran == "trained":
                output.backward()
                del output
            gone = [weakref.ref(inspect.unit(each)) for each in (part, model)]
            del part, model
            assert [each() for each in gone] == [None, None]
        finally:
            gc.enable()


def test_a_part_that_copies_share_does_not_keep_a_model_from_being_copied() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = FullyShardedDataParallel(linear())

        def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.teacher(x)

    with fake_world(1):
        twin = copy.deepcopy(FullyShardedDataParallel(nn.Sequential(linear(), Shared())))
        assert len(gradients(twin)) == 2


def test_a_part_that_was_profiled_alone_opens_no_ranges_later() -> None:
    with fake_world(1):
        part = FullyShardedDataParallel(linear())
        with torch.profiler.profile():
            gradients(part)
        assert inspect.opens_ranges(part)
        model = FullyShardedDataParallel(nn.Sequential(part, linear()))
        gradients(model)
        assert not inspect.opens_ranges(part) and not inspect.opens_ranges(model)


@pytest.mark.parametrize("seed", range(12))
def test_models_that_grow_around_each_other_train_as_without_wrappers(seed: int) -> None:
    """Neighbors in a chain are wrapped in any order, and parts of models become parts of others, which all go on."""
    draw = random.Random(seed)
    with fake_world(1):
        layers: list[Any] = [linear() for _ in range(6)]
        plain = copy.deepcopy(layers)
        chain = [(each, [place]) for place, each in enumerate(layers)]
        models: list[tuple[Any, list[int]]] = []
        for _ in range(8):
            if models and draw.random() < 0.3:
                taken = [draw.choice(models), (linear(), [len(layers)])]
                layers.append(taken[1][0])
                plain.append(copy.deepcopy(taken[1][0]))
            elif len(chain) > 1:
                first = draw.randrange(len(chain))
                taken = chain[first : first + draw.randint(1, 3)]
            else:
                continue
            places = [place for _, each in taken for place in each]
            strategy = draw.choice(["FULL_SHARD", "SHARD_GRAD_OP"])
            inside = nn.Sequential(*[each for each, _ in taken])
            made = FullyShardedDataParallel(inside, use_orig_params=True, sharding_strategy=strategy), places
            if taken[-1][1][-1] < 6:
                chain[first : first + len(taken)] = [made]
            models.append(made)
            for model, places in [made, *draw.sample(models, min(2, len(models)))]:  # first before its parts, again
                expected, found = ([some[place] for place in places] for some in (plain, layers))
                for each in (*expected, *found):
                    each.zero_grad()
                for called in nn.Sequential(*expected), model:
                    called(X).square().sum().backward()
                for one, other in zip(expected, found, strict=True):
                    for name in "weight", "bias":
                        gradient = getattr(other, name).grad
                        assert gradient is not None
                        torch.testing.assert_close(gradient.flatten(), getattr(one, name).grad.flatten())
