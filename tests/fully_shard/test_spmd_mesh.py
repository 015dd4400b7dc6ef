"""`fully_shard(mesh=..., dp_mesh_dims=...)`: parameters that are DTensors on a mesh of all axes, side by side with
torch's `fully_shard`: losses, gradients, local shards and DTensors are equal bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

import flatfsdp
from tests.conftest import Run
from tests.harness import spmd, thorough
from tests.harness.meshes import adamw
from tests.harness.spmd import mesh_of, on_mesh, seeded, step_on_mesh, step_one

pytestmark = pytest.mark.distributed

# Shape and names of a mesh, and its data-parallel dimensions: (shard, replicate).
Case = tuple[tuple[int, ...], tuple[str, ...], Any, Any]
TWO_BY_TWO: list[Case] = [
    ((2, 2), ("dp", "tp"), "dp", None),
    ((2, 2), ("replicate", "dp"), "dp", "replicate"),
    ((2, 2), ("dp", "tp"), None, "dp"),
]
THE_OTHER_WAY_ROUND: list[Case] = [((2, 2), ("tp", "dp"), "dp", None)]
FOUR_ON_AN_AXIS: list[Case] = [
    ((2, 2), ("dp", "cp"), ("dp", "cp"), None),
    ((2, 2), ("one", "two"), None, ("one", "two")),
]
EIGHT: list[Case] = [
    ((2, 2, 2), ("replicate", "dp", "tp"), "dp", "replicate"),
    ((1, 2, 2, 2), ("cp", "dp", "replicate", "tp"), ("cp", "dp"), "replicate"),
]


def made(package: Any, case: Case, **options: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """The model on the mesh of `case` under one of the two; the mesh, and its data-parallel dimensions."""
    shape, names, shard, replicate = case
    mesh, dims = mesh_of(shape, names), package.DataParallelMeshDims(shard=shard, replicate=replicate)
    net = on_mesh(seeded(), mesh)
    for block in net.blocks:  # type: ignore[union-attr]
        package.fully_shard(block, mesh=mesh, dp_mesh_dims=dims, **options)
    package.fully_shard(net, mesh=mesh, dp_mesh_dims=dims, **options)
    for module in net.modules():
        if isinstance(module, package.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
            module.set_gradient_divide_factor(1.0)  # gradients are partial sums
    dp = tuple(name for each in (shard, replicate) if each for name in ([each] if isinstance(each, str) else each))
    return net, mesh, dp


def story(package: Any, case: Case, steps: int = thorough.steps(), **options: Any) -> tuple[Any, list[Any]]:
    net, mesh, dp = made(package, case, **options)
    optimizer = adamw(net.parameters())
    seen: list[Any] = []
    for step in range(steps):
        seen.append(step_on_mesh(net, step, mesh, dp))
        seen.append([p.grad.to_local().clone() for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return net, seen


def beside(rank: int, world: int, cases: list[Case], bound: float, **options: Any) -> list[str]:
    found = []
    for case in cases:
        (ours, losses), (torchs, expected) = story(flatfsdp, case, **options), story(theirs, case, **options)
        for place, (a, b) in enumerate(zip(losses, expected, strict=True)):
            values = [a, b] if place % 2 else [[torch.tensor(a)], [torch.tensor(b)]]
            if not all(_close(x, y, bound) for x, y in zip(*values, strict=True)):
                found.append(f"{case}, {'gradients' if place % 2 else 'loss'} of step {place // 2} differ")
        for (name, one), two in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            if one._spec != two._spec:
                found.append(f"{case}, {name}: {one._spec}, expected {two._spec}")
            elif not _close(one.to_local(), two.to_local(), bound):
                found.append(f"{case}, {name}: another local shard")
        found += [f"{case}: {line}" for line in _unlike_one(ours, losses)]
    return found


def _close(one: torch.Tensor, two: torch.Tensor, bound: float) -> bool:
    return torch.equal(one, two) if not bound else torch.allclose(one, two, rtol=0, atol=bound)


def _unlike_one(ours: Any, losses: list[Any]) -> list[str]:
    one = seeded()
    optimizer = adamw(one.parameters())
    expected = []
    for step in range(len(losses) // 2):
        expected.append(step_one(one, step))
        optimizer.step()
        optimizer.zero_grad()
    lines = [] if torch.allclose(torch.tensor(losses[::2]), torch.tensor(expected), atol=1e-5) else ["losses"]
    for (name, found), wanted in zip(ours.named_parameters(), one.parameters(), strict=True):
        if not torch.allclose(found.detach().full_tensor(), wanted.detach(), atol=1e-4):
            lines.append(name)
    return lines


def test_two_by_two(pool4: Run) -> None:
    cases = [*TWO_BY_TWO, *(THE_OTHER_WAY_ROUND if thorough.is_thorough() else ())]
    assert not [line for lines in pool4(beside, cases, 0.0, timeout=60) for line in lines]


def columns(parameter: nn.Parameter) -> Shard | None:
    """Those that torch's can split evenly."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] == spmd.WIDTH else None


def test_columns(pool4: Run) -> None:
    """Kernels add up products in another order."""
    cases = [TWO_BY_TWO[0]]
    assert not [line for lines in pool4(beside, cases, 1e-5, shard_placement_fn=columns, timeout=60) for line in lines]


def test_four_ranks_on_an_axis(pool4: Run) -> None:
    """gloo adds in another order."""
    cases = thorough.some(FOUR_ON_AN_AXIS, 2)
    assert not [line for lines in pool4(beside, cases, 1e-5, timeout=60) for line in lines]


@pytest.mark.skipif(not thorough.is_thorough(), reason="eight ranks; --thorough")
def test_two_by_two_by_two(run: Run) -> None:
    assert not [line for lines in run(8, beside, EIGHT, 0.0, timeout=120) for line in lines]


def variants(rank: int, world: int) -> list[str]:
    """Other settings and uses of such parameters: the numbers are those of the plain call."""
    case = TWO_BY_TWO[0]
    _, expected = story(flatfsdp, case, 2)
    found = []
    for options in ({"reshard_after_forward": False}, {"offload_policy": flatfsdp.CPUOffloadPolicy(pin_memory=False)}):
        if not _same(story(flatfsdp, case, 2, **options)[1], expected):
            found.append(str(options))
    net, mesh, dp = made(flatfsdp, case)
    twin = copy.deepcopy(net)
    with torch.device("meta"):
        empty = on_mesh(spmd.Net(), mesh)
    dims = theirs.DataParallelMeshDims(shard="dp")  # torch's own
    for block in empty.blocks:  # type: ignore[union-attr]
        flatfsdp.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    flatfsdp.fully_shard(empty, mesh=mesh, dp_mesh_dims=dims)
    empty.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    for module in (*empty.modules(), *twin.modules()):
        if isinstance(module, flatfsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
            module.set_gradient_divide_factor(1.0)
    for name, each in (("copy", twin), ("from meta", empty)):
        loss = step_on_mesh(each, 0, mesh, dp)
        if not _same([loss, [p.grad.to_local() for p in each.parameters()]], expected[:2]):  # type: ignore[union-attr]
            found.append(name)
    return found


def _same(one: list[Any], two: list[Any]) -> bool:
    grads = zip(one[1::2], two[1::2], strict=True)
    return one[::2] == two[::2] and all(map(torch.equal, *pair) for pair in grads)


def test_variants(pool4: Run) -> None:
    assert pool4(variants, timeout=60) == [[]] * 4


def over_some_ranks(rank: int, world: int) -> list[str]:
    """A number of ranks among which parameters stay between forward and backward, which torch's refuses here."""
    case, found = FOUR_ON_AN_AXIS[0], []
    net, seen = story(flatfsdp, case, reshard_after_forward=2)
    _, expected = story(flatfsdp, case, reshard_after_forward=True)
    if not _same(seen, expected):
        found.append("numbers differ from those of reshard_after_forward=True")
    if not flatfsdp.stats(net).bytes_at_peak.get("post_forward_shard"):
        found.append(f"{flatfsdp.stats(net).bytes_at_peak}")
    return found + _unlike_one(net, seen)


def test_a_number_of_ranks(pool4: Run) -> None:
    assert pool4(over_some_ranks, timeout=60) == [[]] * 4


def sharded_among_replicated(rank: int, world: int) -> list[str]:
    """The module's own mesh has replicas alone, and `shard_placement_fn` has weights sharded over them: refused by
    torch's."""
    case = TWO_BY_TWO[2]
    dims = theirs.DataParallelMeshDims(shard="dp")
    mesh = mesh_of(*case[:2])
    info = FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    result = flatfsdp.ShardPlacementResult(None, info)
    net, seen = story(flatfsdp, case, shard_placement_fn=lambda p: result if p.dim() == 2 else None)
    found = _unlike_one(net, seen)
    for name, parameter in net.named_parameters():
        along = parameter.placements[0]
        if (parameter.dim() == 2) is along.is_replicate():
            found.append(f"{name}: {parameter.placements}")
    return found


def test_sharded_among_replicated(pool4: Run) -> None:
    assert pool4(sharded_among_replicated, timeout=60) == [[]] * 4
