"""Compared with torch's `fully_shard` if more than two ranks add up, in another order than here: with sums that are
exact in any order every bit is the same, else values are within a bound; DTensors are the same in any case."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatfsdp
from flatfsdp.engine.base._dtensor import flattened
from tests.conftest import Run
from tests.fully_shard.test_beside_torchs import Case, Net, facts, sharded, train
from tests.harness.meshes import named_mesh
from tests.harness.tensor_parallel import mesh_of

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, STEPS = 8, 12, 2  # after which numbers have 12 binary places


class Whole(nn.Module):
    """Small whole numbers, which stay multiples of a power of two for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 7, bias=False)
        numbers = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=numbers).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def exactly(model: Any, place: int, *, factor: float = 4.0) -> list[Any]:
    """Steps of SGD with momentum in which nothing is rounded."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
            module.set_gradient_divide_factor(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5, foreach=False)
    got: list[Any] = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(10 * step + place)
        x = torch.randint(-2, 3, (4, WIDTH), generator=numbers).float()
        loss = model(x).sum()
        loss.backward()
        got += [loss.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return got


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


def over_an_axis(rank: int, world: int) -> list[str]:
    stories, mesh = [], named_mesh(world)
    if world == 4:  # context parallelism: the ranks of two dimensions are those of one
        mesh = flattened(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), "dp_cp")
    for package in (flatfsdp, theirs):
        model: Any = Whole()
        package.fully_shard(model.up, mesh=mesh)
        package.fully_shard(model, mesh=mesh)
        stories.append((model, exactly(model, rank)))
    return unlike(*stories)


def unlike(ours: tuple[Any, list[Any]], torchs: tuple[Any, list[Any]]) -> list[str]:
    found = [f"value {i}" for i, (a, b) in enumerate(zip(ours[1], torchs[1], strict=True)) if not torch.equal(a, b)]
    for (name, one), two in zip(ours[0].named_parameters(), torchs[0].parameters(), strict=True):
        if facts(one) != facts(two) or not torch.equal(one.to_local(), two.to_local()):
            found.append(f"{name}: {one}, {two}")
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_exact_sums_over_an_axis(world: int, run: Run) -> None:
    assert run(world, over_an_axis) == [[]] * world


def beside_tensor_parallelism(rank: int, world: int) -> list[str]:
    """Split along the dimension of tensor parallelism, and along the other one, for any memory
    order in which a kernel adds up."""
    found, mesh = [], mesh_of(2, 2)
    for choose in (None, columns):
        stories = []
        for package in (flatfsdp, theirs):
            model: Any = Whole()
            plan = {"up": ColwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            package.fully_shard(model.up, mesh=mesh["dp"], shard_placement_fn=choose)
            package.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=choose)
            stories.append((model, exactly(model, mesh["dp"].get_local_rank(), factor=2.0)))
        found += [f"{choose and 'columns'}: {each}" for each in unlike(*stories)]
        split = stories[0][0].down.weight.placements[0]
        found += [] if (split.dim == 1) is (choose is not None) else [f"{split}"]
    return found


def test_exact_sums_beside_tensor_parallelism(pool4: Run) -> None:
    assert pool4(beside_tensor_parallelism) == [[]] * 4


BOUND = 2e-3  # of three steps of AdamW, whose first is as large for a gradient that is nearly zero


def inexactly(rank: int, world: int) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case, stories = Case(clip=True), []
    for package in (flatfsdp, theirs):
        torch.manual_seed(0)
        model = sharded(Net(), package, named_mesh(world), case)
        stories.append((model, train(model, case, rank, 3)))
    (one, got), (two, expected) = stories
    found = [
        f"value {i}: {(a - b).abs().max()}"
        for i, (a, b) in enumerate(zip(got, expected, strict=True))
        if not torch.allclose(a, b, rtol=0, atol=BOUND)
    ]
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        if facts(a) != facts(b) or not torch.allclose(a.to_local(), b.to_local(), rtol=0, atol=BOUND):  # type: ignore[attr-defined]
            found.append(f"{name}: {facts(a)}, {facts(b)}")
    return found


@pytest.mark.parametrize("world", [4, 3])
def test_others_are_within_a_bound(world: int, run: Run) -> None:
    assert run(world, inexactly) == [[]] * world
