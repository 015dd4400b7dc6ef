"""Original parameters are the shard at any time; modules compute with private leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 5
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _Looks(nn.Module):
    """Records what its weight is, and what the user's is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.user: list[nn.Parameter] = []
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        try:
            self.user[0].sum()
            refused = False
        except UsageError:
            refused = True
        self.seen.append((weight is self.user[0], tuple(weight.shape), self.user[0].dim(), refused))
        return self.inner(x)


def looked(rank: int, world: int) -> list[Any]:
    net = _Looks()
    before = [*net.parameters()]
    before[0].no_decay = True  # type: ignore[attr-defined]
    model = FullyShardedDataParallel(net, use_orig_params=True)
    net.user = before[:1]
    hooked: list[torch.Size] = []
    before[0].register_hook(lambda grad: hooked.append(grad.shape))
    same = [all(a is b for a, b in zip(before, model.parameters(), strict=True))]
    model(torch.ones(2, 6)).sum().backward()
    same.append(all(a is b for a, b in zip(before, model.parameters(), strict=True)))
    grads = sum(each.grad.numel() for each in before if each.grad is not None)
    with FullyShardedDataParallel.summon_full_params(model):
        whole = [tuple(each.shape) for each in before]
    twin = copy.deepcopy(model)
    marked = next(twin.parameters()).no_decay
    return [same, net.seen, grads, hooked == [(6, 6)], whole, marked]


def test_the_users_parameter_is_the_shard_at_any_time(pool2: Run) -> None:
    found = pool2(looked)
    seen = [(False, (6, 6), 1, True)]
    assert [each[:2] + each[3:] for each in found] == [[[True, True], seen, True, [(6, 6), (6,)], True]] * 2
    assert sum(each[2] for each in found) == 42


def requested(rank: int, world: int) -> list[Any]:
    """Norms by both functions while units are unsharded on request, and the gradients that `zero_grad` leaves."""
    model: Any = FullyShardedDataParallel(nn.Linear(6, 6), use_orig_params=True)
    holders = list(model.parameters())
    model(torch.ones(2, 6) * (rank + 1)).sum().backward()
    expected = model.clip_grad_norm_(1e6)
    model.unshard()
    listed = [*model.parameters()]
    norms = [model.clip_grad_norm_(1e6), nn.utils.clip_grad_norm_(listed, 1e6)]
    same = [torch.equal(each, expected) for each in norms]
    model.zero_grad()
    return [not set(map(id, listed)) & set(map(id, holders)), same, [each.grad for each in holders]]


def test_gradients_are_found_while_modules_hold_leaves(pool2: Run) -> None:
    assert pool2(requested) == [[True, [True, True], [None, None]]] * 2


# -- terms over parameters, with their gradients -----------------------------------------------------------------------


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))


def loss_of(model: nn.Module, weight: nn.Parameter, bias: nn.Parameter, x: Tensor) -> Tensor:
    """With a penalty, and with a head that computes with the same weights."""
    y = model(x)
    return y.mean() + weight.square().sum() + F.linear(y, weight, bias).mean()


def whole_terms(rank: int, world: int) -> list[str]:
    alone, wrong = net(), []
    inner = copy.deepcopy(alone)
    model: Any = FullyShardedDataParallel(
        inner, auto_wrap_policy={nn.Linear}, use_orig_params=True, sharding_strategy="NO_SHARD"
    )
    head = inner[0].module
    for step in range(2):
        data = torch.randn(world, 3, WIDTH, generator=torch.Generator().manual_seed(step))
        loss_of(model, head.weight, head.bias, data[rank]).backward()
        for x in data:
            (loss_of(alone, alone[0].weight, alone[0].bias, x) / world).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for (name, expected), found in zip(alone.named_parameters(), model.parameters(), strict=True):
                if not torch.allclose(found.grad, expected.grad, rtol=1e-5, atol=1e-5):
                    wrong.append(f"{step} {name}: {(found.grad - expected.grad).abs().max():.1e}")
    return wrong


def test_a_parameter_that_is_its_own_leaf_is_used_anywhere(pool2: Run) -> None:
    assert pool2(whole_terms) == [[], []]


def refused_terms(rank: int, world: int, settings: dict[str, Any]) -> list[str]:
    """What is refused between forward and backward, after a forward, and in a backward of its own; then a step."""
    inner = net()
    model: Any = FullyShardedDataParallel(inner, auto_wrap_policy={nn.Linear}, use_orig_params=True, **settings)
    weight = inner[0].module.weight
    refused = []

    def attempt(call: Any) -> None:
        try:
            call()
        except UsageError as error:
            refused.append(str(error))

    y = model(torch.ones(2, WIDTH)).float().mean()
    attempt(lambda: weight.square().sum())
    y.backward()
    attempt(lambda: weight.square().sum().backward())
    (grad,) = torch.autograd.grad(weight.square().sum(), weight)  # of this rank's shard, and not accumulated
    assert torch.equal(grad, 2 * weight.detach())
    model(torch.ones(2, WIDTH)).float().mean().backward()
    return refused


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding_strategy": "FULL_SHARD"},
        {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": BF16},
        {"sharding_strategy": "NO_SHARD", "mixed_precision": BF16},
        {"sharding_strategy": "NO_SHARD", "cpu_offload": CPUOffload(offload_params=True)},
    ],
    ids=lambda settings: "-".join(map(str, (settings["sharding_strategy"], *list(settings)[1:]))),
)
def test_gradients_of_shards_are_refused(settings: dict[str, Any], pool2: Run) -> None:
    for refused in pool2(refused_terms, settings):
        assert len(refused) == 2, refused
        assert "square() reads parameter 'weight' of unit '0' outside the forward of its unit" in refused[0]
        assert "parameter 'weight' of unit '0' received a gradient of shape" in refused[1]


def late(rank: int, world: int) -> str:
    model: Any = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        term = model.weight.sum()
    with pytest.raises(UsageError) as found:
        term.backward()
    return str(found.value)


def test_a_graph_over_summoned_parameters_is_refused(pool2: Run) -> None:
    assert all("or inside summon_full_params()" in each for each in pool2(late))
