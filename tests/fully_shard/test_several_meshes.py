"""Parameters of one module on several meshes, chosen by `shard_placement_fn`, side by side with torch's `fully_shard`:
losses, gradients, norms, local shards, DTensors and optimizer states are equal bit by bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

import flatfsdp.checkpoint
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.experts import Block, Mixture, divide, loss_on
from tests.harness.meshes import adamw, named_mesh

pytestmark = pytest.mark.distributed


@lru_cache(maxsize=1)
def expert_mesh() -> DeviceMesh:
    """Of four ranks: those that divide experts, and those over which each one's share is sharded. Collective at the
    first call."""
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


def mixture(package: Any, *, divided: bool, torchs_objects: bool, split: Any = None, **options: Any) -> Any:
    """Experts on a mesh of their own, all else of their blocks on another. Of four ranks each replica of the dense part
    is over the ranks that divide the experts; of two the experts are replicated."""
    torch.manual_seed(1)
    net: Any = Mixture()
    if divided:
        mesh = expert_mesh()
        own, other = mesh, mesh["efsdp"]
        divide(net, mesh["ep"])
        info: Any = FSDPMeshInfo(other, shard_mesh_dim=0)
    else:
        own, other = named_mesh(2), named_mesh(2, 1)
        info = HSDPMeshInfo(other, shard_mesh_dim=1, replicate_mesh_dim=0)
    result = ShardPlacementResult(split, info) if torchs_objects else flatfsdp.ShardPlacementResult(split, other)
    for block in net.blocks:
        experts = set(block.experts.parameters())
        choose = _chooser(experts, result)
        package.fully_shard(block, mesh=own, shard_placement_fn=choose, **options)
    package.fully_shard(net, mesh=own, **options)
    for module in net.modules():
        if isinstance(module, package.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
            module.set_gradient_divide_factor(1.0)
    return net


def _chooser(experts: set[nn.Parameter], result: Any) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: result if parameter in experts else None


def stepped(net: Any, optimizer: Any, step: int, *, backward: Callable[[Any], None] | None = None) -> list[Any]:
    """A step; the loss, the norm of each mesh's gradients, which are clipped, and the local gradients."""
    loss = loss_on(net, step, dist.get_rank(), dist.get_world_size())
    loss.backward()
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in net.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [torch.nn.utils.clip_grad_norm_(each, 0.1) for each in by_mesh.values()]
    seen = [loss.item(), *(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item() for norm in norms)]
    seen += [p.grad.to_local().clone() for p in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def same(one: list[Any], two: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)

    return len(one) == len(two) and all(map(equal, one, two))


def beside(rank: int, world: int, divided: bool) -> list[str]:
    steps, stories = 2, []
    for package, torchs in ((flatfsdp, False), (flatfsdp, True), (theirs, True)):
        net = mixture(package, divided=divided, torchs_objects=torchs)
        optimizer = adamw(net.parameters())
        stories.append((net, optimizer, [stepped(net, optimizer, step) for step in range(steps)]))
    net, of_ours, seen = stories[0]
    torchs_net, of_torchs, expected = stories[2]
    found = [f"step {i}" for i, (a, b) in enumerate(zip(seen, expected, strict=True)) if not same(a, b)]
    if not all(map(same, stories[1][2], seen)):
        found.append("torch's objects")
    for (name, one), two in zip(net.named_parameters(), torchs_net.parameters(), strict=True):
        states = [
            [it[p][key].to_local() for key in ("exp_avg", "exp_avg_sq")]
            for it, p in ((of_ours.state, one), (of_torchs.state, two))
        ]
        if one._spec != two._spec:
            found.append(f"{name}: {one._spec}, expected {two._spec}")
        elif not (torch.equal(one.to_local(), two.to_local()) and same(*states)):
            found.append(f"{name}: another local shard, or state")
    return found + _unlike_one(net, seen)


def _unlike_one(net: Any, seen: list[list[Any]]) -> list[str]:
    """The first loss is that of one process."""
    torch.manual_seed(1)
    one = Mixture()
    world = dist.get_world_size()
    expected = loss_on(one, 0, dist.get_rank(), world).item()
    return [] if abs(seen[0][0] - expected) < 1e-6 else [f"loss {seen[0][0]}, expected {expected}"]


def test_divided_experts(pool4: Run) -> None:
    assert pool4(beside, True, timeout=60) == [[]] * 4


def by_columns(rank: int, world: int) -> list[str]:
    """Experts that are fewer than ranks are split along another dimension. Kernels add up products in another order."""
    stories, found = [], []
    for package in (flatfsdp, theirs):
        net = mixture(package, divided=True, torchs_objects=package is theirs, split=Shard(1))
        optimizer = adamw(net.parameters())
        stories.append((net, [stepped(net, optimizer, step) for step in range(2)]))
    (net, got), (torchs, expected) = stories
    for step, (one, two) in enumerate(zip(got, expected, strict=True)):
        if not all(
            torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=1e-5) for a, b in zip(one, two, strict=True)
        ):
            found.append(f"step {step}")
    for (name, a), b in zip(net.named_parameters(), torchs.parameters(), strict=True):
        if a._spec != b._spec or not torch.allclose(a.to_local(), b.to_local(), atol=1e-5):
            found.append(f"{name}: {a._spec}, expected {b._spec}")
    if net.blocks[0].experts.up.placements != (Shard(1), Shard(0)):
        found.append(f"{net.blocks[0].experts.up.placements}")
    return found


def test_experts_by_columns(pool4: Run) -> None:
    assert pool4(by_columns, timeout=60) == [[]] * 4


def test_replicated_experts(pool2: Run) -> None:
    assert pool2(beside, False, timeout=60) == [[]] * 2


def variants(rank: int, world: int, folder: str) -> list[str]:
    """Other settings and uses of the model: every number is that of the plain call."""
    warnings.simplefilter("ignore")
    divided, found = world == 4, []

    def made(**options: Any) -> Any:
        return mixture(flatfsdp, divided=divided, torchs_objects=False, **options)

    net = made()
    optimizer = adamw(net.parameters())
    expected = [stepped(net, optimizer, step) for step in range(3)]
    ahead = made()
    ahead.blocks[0].set_modules_to_forward_prefetch([ahead.blocks[1]])
    ahead.blocks[1].set_modules_to_backward_prefetch([ahead.blocks[0]])
    others = [
        ("prefetch lists", ahead),
        ("kept whole", made(reshard_after_forward=False)),
        ("offloaded", made(offload_policy=flatfsdp.CPUOffloadPolicy(pin_memory=False))),
    ]
    for name, other in [*others, ("fused steps", made())]:
        of_other = adamw(other.parameters())
        if name == "fused steps":
            flatfsdp.fuse_optimizer_steps(of_other)
        if not all(same(stepped(other, of_other, step), expected[step]) for step in range(2)):
            found.append(name)
    # Copies, pickles and checkpoints of the state after two steps, and a third step of each.
    net = made()
    optimizer = adamw(net.parameters())
    for step in range(2):
        stepped(net, optimizer, step)
    restored = {"a copy": copy.deepcopy((net, optimizer))}
    if not divided:
        restored["a pickle"] = pickle.loads(pickle.dumps((net, None)))
    loaded = made()
    of_loaded = adamw(loaded.parameters())
    dcp.save(_state(net, optimizer), checkpoint_id=folder)
    state = _state(loaded, of_loaded)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(loaded, of_loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    restored["a checkpoint"] = loaded, of_loaded
    for name, (other, of_other) in restored.items():
        if of_other is None:
            of_other = adamw(other.parameters())
            of_other.load_state_dict(optimizer.state_dict())
        if not same(stepped(other, of_other, 2), expected[2]):
            found.append(name)
    if divided:
        freed, *others = (_over_four(reshard_after_forward=choice) for choice in (True, 2, 4))
        numbers = stepped(freed, adamw(freed.parameters()), 0)
        for count, other in zip((2, 4), others, strict=True):  # of two: four shards stay among two ranks, two are freed
            if not same(stepped(other, adamw(other.parameters()), 0), numbers):
                found.append(f"{count} ranks")
        found += _synchronized()
    words = flatfsdp.summary(net)
    if "2 x 2, 2 x 1" not in words and "2 x 1, 1 x 2" not in words:
        found.append(words)
    return found


def _over_four(**options: Any) -> Any:
    torch.manual_seed(1)
    net: Any = Mixture()
    result = flatfsdp.ShardPlacementResult(None, named_mesh(2, 2))
    for block in net.blocks:
        choose = _chooser(set(block.experts.parameters()), result)
        flatfsdp.fully_shard(block, mesh=named_mesh(4), shard_placement_fn=choose, **options)
    return flatfsdp.fully_shard(net, mesh=named_mesh(4))


def _synchronized() -> list[str]:
    """Each rank gets the values of the first that has the same ones: of experts that of its row of the mesh."""
    mesh, rank, found = expert_mesh(), dist.get_rank(), []
    alone = named_mesh(4, 1)["shard"]
    for own, other in ((named_mesh(4), mesh["efsdp"]), (alone, named_mesh(4))):
        torch.manual_seed(1)
        net: Any = Mixture()
        expected = dict(copy.deepcopy(net).named_parameters())
        if own is not alone:
            divide(net, mesh["ep"])
        experts = {p for block in net.blocks for p in block.experts.parameters()}
        with torch.no_grad():
            for p in net.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).add_(rank // 2 if isinstance(p, DTensor) else rank)
        flatfsdp.fully_shard_by_policy(
            net,
            {Block},
            mesh=own,
            shard_placement_fn=_chooser(experts, flatfsdp.ShardPlacementResult(None, other)),
            sync_module_states=True,
        )
        for name, p in net.named_parameters():
            offset = rank if own is alone and "experts" not in name else 0  # no other rank holds these there
            if not torch.equal(p.full_tensor(), expected[name] + offset):
                found.append(f"{name}, synchronized over {own}")
    return found


def apart(rank: int, world: int, nested: bool, folder: str) -> list[str]:
    """A plain parameter of some of a module's ranks is another one on the others: each pair of ranks has its own."""
    mesh, stories, found = expert_mesh()["efsdp"], [], []
    for package in (flatfsdp, theirs):
        torch.manual_seed(1)
        net: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
        with torch.no_grad():
            net[1].weight.add_(rank % 2)
        info: Any = mesh if package is flatfsdp else FSDPMeshInfo(mesh, shard_mesh_dim=0)
        kind = flatfsdp.ShardPlacementResult if package is flatfsdp else ShardPlacementResult
        if nested:
            package.fully_shard(net[1], mesh=mesh)
            package.fully_shard(net, mesh=named_mesh(4))
        else:
            choose = _chooser({net[1].weight}, kind(None, info))
            package.fully_shard(net, mesh=named_mesh(4), shard_placement_fn=choose)
        for module in net.modules():
            if isinstance(module, package.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # all that gloo has
                module.set_gradient_divide_factor(1.0)
        optimizer, got = adamw(net.parameters()), []
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # that ranks begin with different values
            for step in range(2):
                x = torch.arange(8.0).view(2, 4) * (rank + step - 1)
                loss = net(x).square().mean()
                loss.backward()
                got.append([loss.item(), *(p.grad.to_local().clone() for p in net.parameters())])
                optimizer.step()
                optimizer.zero_grad()
        stories.append((net, got))
    (net, got), (torchs, expected) = stories
    for step, (one, two) in enumerate(zip(got, expected, strict=True)):
        if not all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, two, strict=True)):
            found.append(f"step {step}: {one}, expected {two}")
    for (name, a), b in zip(net.named_parameters(), torchs.parameters(), strict=True):
        if a._spec != b._spec or not torch.allclose(a.to_local(), b.to_local(), atol=1e-4):
            found.append(f"{name}: {a}, expected {b}")
    net(torch.ones(2, 4) * rank).sum().backward()
    squares = torch.stack([p.grad.to_local().square().sum() for p in net.parameters()]).sum()
    dist.all_reduce(squares)  # each rank has pieces that no other has
    norm = net.clip_grad_norm_(1e9)
    if not torch.allclose(norm, squares.sqrt()):
        found.append(f"norm {norm}, expected {squares.sqrt()}")
    words = f"parameter '1.weight' is sharded over ranks {rank % 2}, {rank % 2 + 2} alone.*DTensor on the mesh"
    for call in (flatfsdp.checkpoint.save, flatfsdp.checkpoint.load):
        with pytest.raises(UsageError, match=words):
            call(folder, model=net)
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_parameters_of_some_ranks_alone(nested: bool, pool4: Run, tmp_path: Path) -> None:
    assert pool4(apart, nested, str(tmp_path), timeout=60) == [[]] * 4


def hooked(rank: int, world: int) -> list[str]:
    """An all-reduce hook is called on the sums of each mesh. Hooks that torch's refuses there work for all: one that
    scales, and one that reduces along a further dimension, which no mesh of the unit has."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "replicate", "shard"))
    outer, own = mesh["outer"].get_group(), mesh["replicate"]

    def over_all(total: torch.Tensor) -> None:
        dist.all_reduce(total, group=outer)

    def doubled(total: torch.Tensor) -> None:
        total.mul_(2)

    def gradients(mesh: Any, other: Any, factor: float, *hooks: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net: Any = Mixture()
        for block in net.blocks:
            result = flatfsdp.ShardPlacementResult(None, other)
            choose = _chooser(set(block.experts.parameters()), result)
            flatfsdp.fully_shard(block, mesh=mesh, shard_placement_fn=choose)
        flatfsdp.fully_shard(net, mesh=mesh)
        for module in (*net.blocks, net):
            module.set_gradient_divide_factor(factor)
            for hook in hooks:
                module.set_all_reduce_hook(hook)
        loss_on(net, 0, rank, world).backward()
        return [p.grad.full_tensor() for p in net.parameters()]

    expected = gradients(named_mesh(4), named_mesh(4, 1), 1.0)
    found = []
    if not all(map(torch.equal, gradients(named_mesh(4), named_mesh(4, 1), 2.0, doubled), expected)):
        found.append("scaled")
    for name, a, b in zip(
        dict(Mixture().named_parameters()),
        gradients(own, mesh["replicate", "shard"], 1.0, over_all),
        expected,
        strict=True,
    ):
        if not torch.allclose(a, b, rtol=0, atol=1e-6):
            found.append(f"{name}, summed over all: {(a - b).abs().max()}")
    return found


def test_all_reduce_hooks(pool4: Run) -> None:
    assert pool4(hooked) == [[]] * 4


def _state(net: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))


def test_variants_of_divided_experts(pool4: Run, tmp_path: Path) -> None:
    assert pool4(variants, str(tmp_path), timeout=90) == [[]] * 4


def test_variants_of_replicated_experts(pool2: Run, tmp_path: Path) -> None:
    assert pool2(variants, str(tmp_path), timeout=90) == [[]] * 2
