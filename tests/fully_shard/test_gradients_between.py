"""Between a forward and its backward, modules hold unsharded parameters: gradients of earlier backwards are read and
dropped through these, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flatfsdp
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.gradients import unlike

pytestmark = pytest.mark.distributed

WIDTH = 4


def net() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.LayerNorm(WIDTH))


def of_a_part(model: Any) -> None:
    model[1].zero_grad()


def around(model: Any) -> None:
    nn.Sequential(model).zero_grad()


def to_zero(model: Any) -> None:
    model[1].zero_grad(set_to_none=False)


def by_hand(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def scaled(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


EDITS = (of_a_part, around, to_zero, by_hand, scaled)


def played(rank: int, world: int, edit: Callable[[Any], None]) -> list[str]:
    """Gradients that differ from those of one process on the data of all ranks."""
    found = []
    for reshard in (None, False, True):
        model, alone = net(), net()
        for layer in (model[0], model[1][1]):
            flatfsdp.fully_shard(layer, reshard_after_forward=reshard)
        flatfsdp.fully_shard(model, reshard_after_forward=reshard)
        x = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(of)) for of in range(world)]
        model(x[rank]).square().mean().backward()
        loss = model(x[rank]).sin().mean()
        edit(model)
        loss.backward()
        for each in x:
            (alone(each).square().mean() / world).backward()
        edit(alone)
        for each in x:
            (alone(each).sin().mean() / world).backward()
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            grad: Any = parameter.grad
            if words := unlike(None if grad is None else grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6):
                found.append(f"{reshard}: {name}: {words}")
    return found


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_is_done_to_gradients_reaches_the_dtensors(edit: Callable[[Any], None], pool2: Run) -> None:
    assert pool2(played, edit, timeout=60) == [[], []]


def refused(rank: int, world: int) -> list[str]:
    model = flatfsdp.fully_shard(net(), reshard_after_forward=False)
    loss = model(torch.ones(3, WIDTH)).square().mean()
    words = []
    whole, mesh = torch.zeros(WIDTH, WIDTH), dist.init_device_mesh("cpu", (world,))
    of_columns, whole_everywhere = (distribute_tensor(whole, mesh, [how]) for how in (Shard(1), Replicate()))
    for given in (whole, torch.zeros(WIDTH, WIDTH // world), of_columns, whole_everywhere):
        with pytest.raises(UsageError) as error:
            model[0].weight.grad = given
        words.append(str(error.value))
    model[0].weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
    loss.backward()
    return words


def test_gradients_of_another_kind_are_refused_where_they_are_assigned(pool2: Run) -> None:
    of_whole, of_shard, of_columns, whole_everywhere = pool2(refused, timeout=60)[0]
    wanted = "Expected the gradient of it, a DTensor of shape (4, 4) with placements (Shard(dim=0),) on "
    assert f"replaced by a tensor of shape (4, 4). {wanted}" in of_whole
    assert f"replaced by a tensor of shape (4, 2). {wanted}" in of_shard
    assert "replaced by a DTensor of shape (4, 4) with placements (Shard(dim=1),) on " in of_columns
    assert "replaced by a DTensor of shape (4, 4) with placements (Replicate(),) on " in whole_everywhere
