"""Modules that tensor parallelism has split, side by side with torch's `fully_shard`: losses, norms, local shards and
DTensors are equal bit by bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flatfsdp.checkpoint
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import thorough
from tests.harness.meshes import adamw, named_mesh
from tests.harness.tensor_parallel import (
    Net,
    mesh_of,
    parallelized,
    seeded,
    step_one,
    step_ours,
)

pytestmark = pytest.mark.distributed

EVEN = 28  # hidden units: torch's can split them along the dimension that tensor parallelism has split, too


def columns(parameter: nn.Parameter) -> Shard | None:
    """Shards matrices along their columns, which tensor parallelism has split in some of them."""
    return Shard(1) if parameter.dim() == 2 else None


def made(package: Any, shape: tuple[int, ...], *, sequence: bool, hidden: int = 26, **options: Any) -> Any:
    """The model under tensor parallelism and one of the two."""
    mesh = mesh_of(*shape)
    net = parallelized(seeded(partial(Net, hidden=hidden)), mesh["tp"], sequence=sequence)
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]
    for block in net.blocks:
        package.fully_shard(block, mesh=dp, **options)
    package.fully_shard(net, mesh=dp, **options)
    return net


def norm_of(model: nn.Module) -> torch.Tensor:
    """The norm of all gradients, which lie on two meshes."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter.grad)  # type: ignore[arg-type]
    norms: list[Any] = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))


def beside(rank: int, world: int, shape: tuple[int, ...], sequence: bool, bound: float = 0.0, **how: Any) -> list[str]:
    steps = thorough.steps()
    stories: list[tuple[Any, list[Any]]] = []
    for package in (flatfsdp, theirs):
        model = made(package, shape, sequence=sequence, **how)
        optimizer = adamw(model.parameters())
        seen: list[Any] = []
        for step in range(steps):
            seen.append((step_ours(model, shape, step), norm_of(model).item()))
            optimizer.step()
            optimizer.zero_grad()
        stories.append((model, seen))
    (ours, text), (torchs, expected) = stories
    pairs = enumerate(zip(text, expected, strict=True))
    lines = [f"step {i}: {a}, expected {b}" for i, (a, b) in pairs if a != pytest.approx(b, rel=bound, abs=0)]
    for (name, found), wanted in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        if found._spec != wanted._spec:
            lines.append(f"{name}: {found._spec}, expected {wanted._spec}")
        elif not torch.allclose(found.to_local(), wanted.to_local(), rtol=0, atol=bound):
            lines.append(f"{name}: another local shard")
    return lines


@pytest.mark.parametrize("sequence", [True, False])
def test_two_by_two(pool4: Run, sequence: bool) -> None:
    assert not [line for lines in pool4(beside, (2, 2), sequence) for line in lines]


def by_columns(rank: int, world: int, shape: tuple[int, ...]) -> list[str]:
    """Kernels add up the products of weights in another order where these are in another order in memory."""
    found = beside(rank, world, shape, True, 1e-5, hidden=EVEN, shard_placement_fn=columns)
    model, torchs = (
        made(each, shape, sequence=True, hidden=EVEN, shard_placement_fn=columns) for each in (flatfsdp, theirs)
    )
    names = dict(torchs.named_parameters())
    found += [name for name, one in model.named_parameters() if not alike(one, names[name])]
    weight = model.blocks[0].down.weight
    if "_StridedShard(dim=1" not in str(weight.placements) or weight.to_local().is_contiguous():
        found.append(f"{weight.placements} {weight.to_local().stride()}")
    return found + _unlike_one(shape)


def _unlike_one(shape: tuple[int, ...]) -> list[str]:
    """Of sizes that torch's refuses to split, trained as in one process."""
    model, one = made(flatfsdp, shape, sequence=True, shard_placement_fn=columns), seeded()
    optimizers = [adamw(each.parameters()) for each in (model, one)]
    lines = []
    for step in range(thorough.steps()):
        found, expected = step_ours(model, shape, step), step_one(one, shape, step)
        if abs(found - expected) > 2e-6:
            lines.append(f"step {step}: loss {found}, expected {expected}")
        for each in optimizers:
            each.step()
            each.zero_grad()
    return lines


def test_columns(pool4: Run) -> None:
    assert not [line for lines in pool4(by_columns, (2, 2), timeout=60) for line in lines]


def between(rank: int, world: int, folder: str, **how: Any) -> list[str]:
    """One package loads the model and optimizer that the other has saved after two steps, and goes on alike."""
    shape, found, bound = (2, 2), [], 1e-6 if how else 0.0
    warnings.simplefilter("ignore")
    for saves, loads in ((flatfsdp, theirs), (theirs, flatfsdp)):
        where = f"{folder}/{saves.__name__}"
        model, optimizer = trained(saves, shape, 2, **how)
        dcp.save(state_of(model, optimizer), checkpoint_id=where)
        other, others = trained(loads, shape, 1, **how)
        state = state_of(other, others)
        dcp.load(state, checkpoint_id=where)
        set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for step in (2, 3):
            bits = step == 2 or not how
            for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
                of_one, of_two = optimizer.state[one], others.state[two]
                pairs = [(one, two), *((of_one[key], of_two[key]) for key in ("exp_avg", "exp_avg_sq", "step"))]
                found += [f"{saves.__name__}, {name}" for pair in pairs if bits and not alike(*pair)]
            losses = [step_ours(each, shape, step) for each in (model, other)]
            for each in (optimizer, others):
                each.step()
                each.zero_grad()
            found += [f"{saves.__name__}: losses {losses}"] * (abs(losses[0] - losses[1]) > bound)
    return found


def alike(one: Any, two: Any) -> bool:
    if isinstance(one, DTensor) and isinstance(two, DTensor):
        return one._spec == two._spec and torch.equal(one.to_local(), two.to_local())
    return torch.equal(one, two)


def trained(package: Any, shape: tuple[int, ...], steps: int, **how: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = made(package, shape, sequence=True, **how)
    optimizer = adamw(model.parameters())
    for step in range(steps):
        step_ours(model, shape, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def test_checkpoints_between_ours_and_torchs(pool4: Run, tmp_path: Path) -> None:
    assert pool4(between, str(tmp_path), timeout=90) == [[]] * 4


def uneven(rank: int, world: int, folder: str) -> list[str]:
    """Sizes that neither dimension divides, saved by torch's functions, by other numbers of ranks."""
    model, optimizer = trained(flatfsdp, (2, 2), 2)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    names = [name for name, _ in model.named_parameters()]
    whole = {name: whole_of(value) for name, value in model.named_parameters()}
    momenta = {name: whole_of(optimizer.state[value]["exp_avg"]) for name, value in model.named_parameters()}
    found = []
    for what, mesh in (("two", mesh_of(2, 2)["dp"]), ("four", named_mesh(4)), ("2x2", None), ("1x4", mesh_of(1, 4))):
        if mesh is None or mesh.ndim == 2:
            other = made(flatfsdp, (2, 2) if mesh is None else (1, 4), sequence=True)
        else:
            other = seeded()
            flatfsdp.fully_shard([*other.blocks], mesh=mesh)  # type: ignore[union-attr]
            flatfsdp.fully_shard(other, mesh=mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        others = adamw(other.parameters())
        state = state_of(other, others)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for name, value in other.named_parameters():
            of_both = (value, whole), (others.state[value]["exp_avg"], momenta)
            found += [f"{what}: {name}" for one, expected in of_both if not torch.equal(whole_of(one), expected[name])]
    one: Any = {"model": {name: torch.full_like(value, -1) for name, value in whole.items()}}
    one["optimizer"] = {"state": {name: {"exp_avg": torch.zeros_like(whole[name])} for name in names}}
    dcp.load(one, checkpoint_id=folder, no_dist=True)
    for name in names:
        pairs = (one["model"][name], whole[name]), (one["optimizer"]["state"][name]["exp_avg"], momenta[name])
        found += [f"one process: {name}" for a, b in pairs if not torch.equal(a, b)]
    return found


def whole_of(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return full


def test_checkpoints_of_uneven_sizes(pool4: Run, tmp_path: Path) -> None:
    """By torch's arithmetic of placements, which of two ranks of data parallelism is right with any size."""
    assert pool4(uneven, str(tmp_path), timeout=90) == [[]] * 4


def of_columns(rank: int, world: int, folder: str) -> list[str]:
    """Of both libraries, and flatfsdp's own on meshes of other shapes."""
    found = between(rank, world, f"{folder}/dcp", hidden=EVEN, shard_placement_fn=columns)
    model, optimizer = trained(flatfsdp, (2, 2), 2, shard_placement_fn=columns)
    last = f"{folder}/first"
    flatfsdp.checkpoint.save(last, model=model, optimizer=optimizer)
    shapes = [((1, 4), columns)] if thorough.is_thorough() else []
    for number, (shape, choose) in enumerate([((2, 2), None), *shapes, ((4, 1), columns), ((2, 2), columns)]):
        other = made(flatfsdp, shape, sequence=True, shard_placement_fn=choose)
        others = adamw(other.parameters())
        flatfsdp.checkpoint.load(last, model=other, optimizer=others)
        last = f"{folder}/{number}"
        flatfsdp.checkpoint.save(last, model=other, optimizer=others)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        states = [(optimizer.state[one][key], others.state[two][key]) for key in ("exp_avg", "exp_avg_sq", "step")]
        found += [name for pair in ((one, two), *states) if not alike(*pair)]
    return found


def test_checkpoints_of_columns(pool4: Run, tmp_path: Path) -> None:
    assert pool4(of_columns, str(tmp_path), timeout=90) == [[]] * 4


def copied(rank: int, world: int, choose: Any) -> list[str]:
    """Copies train alike, and so does a model from the meta device that is assigned their values. Pickles are
    refused."""
    shape, steps = (2, 2), range(thorough.steps())
    mesh = mesh_of(*shape)
    model = made(flatfsdp, shape, sequence=True, shard_placement_fn=choose)
    optimizer = adamw(model.parameters())
    step_ours(model, shape, 0)
    optimizer.step()
    optimizer.zero_grad()
    twin, its = copy.deepcopy((model, optimizer))
    with torch.device("meta"):
        empty = parallelized(Net(), mesh["tp"], sequence=True)
    for block in empty.blocks:
        flatfsdp.fully_shard(block, mesh=mesh["dp"], shard_placement_fn=choose)
    flatfsdp.fully_shard(empty, mesh=mesh["dp"], shard_placement_fn=choose)
    empty.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    others = adamw(empty.parameters())
    others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(UsageError, match=r"with DTensors \(.*\) cannot be pickled"):
        pickle.dumps(model)
    losses = []
    for each, one in ((model, optimizer), (twin, its), (empty, others)):
        losses.append([])
        for step in steps:
            losses[-1].append(step_ours(each, shape, step))
            one.step()
            one.zero_grad()
    return [f"{each}, expected {losses[0]}" for each in losses[1:] if each != losses[0]]


@pytest.mark.parametrize("choose", [None, columns], ids=["rows", "columns"])
def test_copies(choose: Any, pool4: Run) -> None:
    assert not [line for lines in pool4(copied, choose) for line in lines]


def begins(rank: int, world: int, other: str) -> list[str]:
    """The warnings of a first step where ranks hold different values along a dimension of the mesh."""
    mesh = mesh_of(2, 2)
    net = seeded()
    if mesh[other].get_local_rank():
        with torch.no_grad():
            net.get_parameter("blocks.0.up.weight").add_(1)
    net = parallelized(net, mesh["tp"], sequence=True, source=None)  # each rank takes its own
    for block in net.blocks:
        flatfsdp.fully_shard(block, mesh=mesh["dp"])
    flatfsdp.fully_shard(net, mesh=mesh["dp"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_ours(net, (2, 2), 0)
    return [str(each.message) for each in caught if "begin with different values" in str(each.message)]


def test_values_are_compared_along_data_parallelism(pool4: Run) -> None:
    assert pool4(begins, "tp") == [[]] * 4
    first, *_ = pool4(begins, "dp")
    assert "different values of 1 of" in first[0] and "blocks.0.up.weight" in first[0]


def test_hybrid_two_by_two_by_two(run: Run) -> None:
    assert not [line for lines in run(8, beside, (2, 2, 2), True, timeout=120) for line in lines]


def over_some_ranks(rank: int, world: int, shape: tuple[int, ...]) -> list[str]:
    """A number of ranks among which parameters stay between forward and backward, which torch's refuses of DTensors."""
    stories, found = [], []
    choose = columns if shape[1] > 1 else None  # rows that both dimensions split are refused: 17 are, over 4 x 2
    for choice in (True, 2):
        model = made(flatfsdp, shape, sequence=True, reshard_after_forward=choice, shard_placement_fn=choose)
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(3):
            losses.append(step_ours(model, shape, step))
            optimizer.step()
            optimizer.zero_grad()
        stories.append((losses, [p.to_local() for p in model.parameters()]))
    (freed, expected), (kept, shards) = stories
    if freed != kept or not all(map(torch.equal, shards, expected)):
        found.append(f"losses {kept}, expected {freed}")
    if not flatfsdp.stats(model).bytes_at_peak.get("post_forward_shard"):
        found.append(f"{flatfsdp.stats(model).bytes_at_peak}")
    one = seeded()
    optimizer = adamw(one.parameters())
    for step in range(3):
        expected_loss = step_one(one, shape, step)
        if abs(kept[step] - expected_loss) > 2e-6:
            found.append(f"step {step}: loss {kept[step]}, expected {expected_loss}")
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_number_of_ranks(pool4: Run) -> None:
    assert pool4(over_some_ranks, (4, 1), timeout=60) == [[]] * 4


@pytest.mark.skipif(not thorough.is_thorough(), reason="eight ranks; --thorough")
def test_a_number_of_ranks_beside_tensor_parallelism(run: Run) -> None:
    assert run(8, over_some_ranks, (4, 2), timeout=120) == [[]] * 8


def on_three_dimensions(rank: int, world: int, shape: tuple[int, ...]) -> list[str]:
    """Parameters that lie on more dimensions than the two that torch's takes, trained as in one process."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "a", "b", "c"))
    beside, place, count = mesh["a", "b", "c"], mesh["dp"].get_local_rank(), shape[0]

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))

    one, net = build(), build()
    for layer, placements in ((net[0], [Shard(0), Shard(1), Shard(0)]), (net[2], [Shard(1), Shard(0), Replicate()])):
        for name, parameter in list(layer.named_parameters()):
            spread = [Shard(0), Replicate(), Replicate()] if parameter.dim() == 1 else placements
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), beside, spread)))
        flatfsdp.fully_shard(layer, mesh=mesh["dp"])
    flatfsdp.fully_shard(net, mesh=mesh["dp"])
    found = [f"{name}: {p.placements}" for name, p in net.named_parameters() if len(p.placements) != 4]
    # Of local shards: torch takes seconds to find where an operation on DTensors of four dimensions may be computed.
    shards = [nn.Parameter(p.detach().to_local()) for p in net.parameters()]
    optimizers = [adamw(each) for each in (one.parameters(), shards)]
    for step in range(3):
        x = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(step))
        expected = one(x).square().sum() / count
        loss = net(distribute_tensor(x[place], beside, [Replicate()] * 3)).square().sum()
        expected.backward()
        loss.backward()
        for shard, (name, p) in zip(shards, net.named_parameters(), strict=True):
            shard.grad = p.grad.to_local()  # type: ignore[union-attr]
            if p.grad.placements != p.placements:  # type: ignore[union-attr]
                found.append(f"step {step}: {name}.grad: {p.grad.placements}, expected {p.placements}")  # type: ignore[union-attr]
        for each, optimizer in zip((one, net), optimizers, strict=True):
            optimizer.step()
            each.zero_grad()
        mean = loss.full_tensor().detach() / count
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        if not torch.allclose(mean, expected, rtol=1e-5):
            found.append(f"step {step}: loss {mean}, expected {expected}")
    for (name, p), wanted in zip(net.named_parameters(), one.parameters(), strict=True):
        if not torch.allclose(p.detach().full_tensor(), wanted, rtol=0, atol=1e-5):
            found.append(name)
    return found


def test_three_dimensions_beside_data_parallelism(pool4: Run) -> None:
    for shape in thorough.some([(2, 2, 1, 1), (1, 2, 2, 1)], 2):
        assert pool4(on_three_dimensions, shape, timeout=60) == [[]] * 4


@pytest.mark.skipif(not thorough.is_thorough(), reason="eight ranks; --thorough")
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2)], ids=str)
def test_three_dimensions_of_two_ranks(shape: tuple[int, ...], run: Run) -> None:
    assert run(8, on_three_dimensions, shape, timeout=120) == [[]] * 8
