"""Side by side with torch's `fully_shard`: the same program gives the same losses, local shards and DTensors, bit by
bit where at most two ranks add up."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import flatfsdp
from tests.conftest import Run
from tests.harness.meshes import adamw, named_mesh
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

D, WORDS = 6, 11


class Block(nn.Module):
    """Odd sizes; the last rows of `up` are on the first ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D + 1), nn.Linear(2 * D + 1, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS, bias=not tied)
        self.one_row = nn.Parameter(torch.ones(1, D))
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) * self.one_row
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(x))).clone()  # no view, of which torch's warns


@dataclass(frozen=True)
class Case:
    """The settings by which the model is sharded and trained."""

    reshard: bool | int | None = None
    dtype: torch.dtype | None = None
    micro: str = "s"  # microbatches: with s ones that reduce
    clip: bool = False
    offload: bool = False
    tied: bool = False
    frozen: bool = False
    as_list: bool = True
    columns: bool = False  # matrices are split along their last dimension


ROWS = Case()


def columns(parameter: nn.Parameter) -> Shard | None:
    """Those that torch's can split evenly over two ranks."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def sharded(model: Net, api: Any, mesh: DeviceMesh | None, case: Case) -> Net:
    policy = api.MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32) if case.dtype else None
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    settings |= {"mp_policy": policy} if policy else {}
    settings |= {"shard_placement_fn": columns} if case.columns else {}
    settings |= {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)} if case.offload else {}
    for block in model.blocks:
        api.fully_shard(block, **settings)
    if case.tied:
        api.fully_shard([model.words, model.norm, model.head], **settings)
    elif case.as_list:
        api.fully_shard(model.words, **settings)
        api.fully_shard([model.norm, model.head], **settings)
    assert api.fully_shard(model, **settings) is model
    return model


def train(model: Net, case: Case, rank: int, steps: int) -> list[Any]:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(steps):
        for kind in case.micro:
            model.set_requires_gradient_sync(kind == "s")  # type: ignore[operator]
            batch = torch.randint(0, WORDS, (3, 4), generator=generator)
            loss = F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())
            loss.backward()
            seen.append(loss.detach())
        if case.clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        seen += [state["exp_avg"].to_local(), state["exp_avg_sq"].to_local()]
    return seen


def facts(parameter: Any) -> tuple[Any, ...]:
    return (parameter.shape, parameter.stride(), parameter.dtype, parameter.device_mesh, parameter.placements)


def same(one: torch.Tensor, two: torch.Tensor, case: Case) -> bool:
    """Bit by bit; but for matrices in another order of memory, of which a kernel adds products up in another order."""
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5) if case.columns else torch.equal(one, two)


def differences(ours: nn.Module, other: nn.Module, case: Case = ROWS) -> list[str]:
    """Lines that describe the differences between the parameters of two models."""
    found = []
    for (name, one), (its, two) in zip(ours.named_parameters(), other.named_parameters(), strict=True):
        if name != its or facts(one) != facts(two) or one.requires_grad is not two.requires_grad:
            found.append(f"{name}: {facts(one)}, {its}: {facts(two)}")
        elif not same(one._local_tensor, two._local_tensor, case):
            found.append(f"{name}: {(one._local_tensor - two._local_tensor).abs().max()}")
    return found


def beside_torchs(rank: int, world: int, shape: tuple[int, ...], case: Case) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Net(tied=case.tied)
    if case.frozen:
        model.blocks[1].up.weight.requires_grad_(False)
        model.words.requires_grad_(False)
    mesh = named_mesh(*shape)
    one = sharded(copy.deepcopy(model), flatfsdp, mesh, case)
    two = sharded(model, theirs, mesh, case)
    found = differences(one, two)  # nothing was computed
    for number, (a, b) in enumerate(zip(train(one, case, rank, 3), train(two, case, rank, 3), strict=True)):
        if not same(a, b, case):
            found.append(f"value {number}: {a} and {b}")
    found += differences(one, two, case)
    dicts = one.state_dict(), two.state_dict()
    if [*dicts[0]] != [*dicts[1]] or any(
        not same(dicts[0][k]._local_tensor, dicts[1][k]._local_tensor, case) for k in dicts[0]
    ):
        found.append("state dicts")
    return found


CASES = {
    "default": Case(),
    "clip": Case(clip=True),
    "reshard": Case(reshard=True, frozen=True),
    "no-reshard": Case(reshard=False, micro="ns"),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16-accumulated": Case(dtype=torch.bfloat16, micro="nns", reshard=True),
    "tied-accumulated": Case(tied=True, micro="ss"),
    "columns": Case(columns=True, clip=True, micro="ns"),
    "columns-bf16": Case(columns=True, dtype=torch.bfloat16, tied=True),
    "root-only": Case(as_list=False, frozen=True, micro="ns"),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, pool2: Run) -> None:
    assert not [each for found in pool2(beside_torchs, (2,), CASES[name]) for each in found]


@pytest.mark.parametrize("name", ["clip", "bf16-accumulated"])
def test_hybrids(name: str, pool4: Run) -> None:
    assert not [each for found in pool4(beside_torchs, (2, 2), CASES[name]) for each in found]


# -- methods -----------------------------------------------------------------------------------------------------------


def doubled(total: torch.Tensor) -> None:
    total.mul_(2)


def factors(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
    model.blocks[0].set_gradient_divide_factor(4.0)
    model.norm.set_reduce_scatter_divide_factor(0.5)


def hooks(model: Any) -> None:
    for module in (model.blocks[1], model.head):
        module.set_all_reduce_hook(doubled)


def not_gathered_again(model: Any) -> None:
    """The table of an embedding is not read in its backward."""
    model.set_reshard_after_forward(True)
    model.words.set_unshard_in_backward(False)


def kept(model: Any) -> None:
    model.set_reshard_after_forward(True)
    model.blocks[2].set_reshard_after_forward(False, recurse=False)


METHODS: list[Callable[[Any], None]] = [factors, hooks, not_gathered_again, kept]


def controlled(rank: int, world: int, shape: tuple[int, ...]) -> list[str]:
    warnings.simplefilter("ignore")
    found: list[str] = []
    for change in METHODS:
        torch.manual_seed(0)
        model = Net()
        one, two = (sharded(copy.deepcopy(model), api, named_mesh(*shape), ROWS) for api in (flatfsdp, theirs))
        for each in (one, two):
            change(each)
        if not all(map(torch.equal, train(one, ROWS, rank, 2), train(two, ROWS, rank, 2))):
            found.append(f"{change.__name__}: a value")
        found += [f"{change.__name__}: {each}" for each in differences(one, two)]
    return found


def test_methods(pool2: Run) -> None:
    assert pool2(controlled, (2,)) == [[], []]


@pytest.mark.skipif(not is_thorough(), reason="more ranks; --thorough")
def test_methods_of_hybrids(pool4: Run) -> None:
    assert pool4(controlled, (2, 2)) == [[]] * 4


class Branches(nn.Module):
    """Both ranks use the first layer, one the second, none the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return y if dist.get_rank() else y + self.layers[1](x)


def unused(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model, found, grads = Branches(), [], []
    for package in (flatfsdp, theirs):
        net: Any = copy.deepcopy(model)
        package.fully_shard(net, mesh=named_mesh(2))
        net.set_reduce_scatter_unused_params(True)
        net(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        grads.append([p.grad for p in net.parameters()])
    ours, torchs = grads
    if not all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours[:4], torchs[:4], strict=True)):
        found.append("what a rank used")
    if ours[4:] != [None, None] or any(b is None or b.to_local().any() for b in torchs[4:]):
        found.append(f"what no rank used: {ours[4:]}, {torchs[4:]}")
    return found


def test_what_no_rank_used_has_no_gradient_where_torchs_has_zeros(pool2: Run) -> None:
    assert pool2(unused) == [[], []]


# -- lists -------------------------------------------------------------------------------------------------------------


def chunked_loss(model: Net, batch: torch.Tensor) -> torch.Tensor:
    """The head is called separately, on parts of the model's output."""
    hidden = model(batch)
    parts = [
        F.cross_entropy(model.head(part), words)
        for part, words in zip(hidden.flatten(0, 1).chunk(3), batch.flatten().chunk(3), strict=True)
    ]
    total = parts[0] + parts[1] + parts[2]
    total.backward()
    return total.detach()


class Headless(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.hidden(x)).clone()


def chunks(rank: int, world: int, reshard: bool | None) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, case, found = Headless(), Case(reshard=reshard), []
    one, two = sharded(copy.deepcopy(model), flatfsdp, named_mesh(2), case), sharded(model, theirs, named_mesh(2), case)
    steps: list[Callable[[], Any]] = []
    for each in (one, two):
        optimizer = adamw(each.parameters())
        steps.append(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))  # type: ignore[misc]
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(3):
        batch = torch.randint(0, WORDS, (3, 4), generator=generator)
        if not torch.equal(chunked_loss(one, batch), chunked_loss(two, batch)):
            found.append("a loss")
        for step in steps:
            step()
    found += [each for each in differences(one, two)]
    return found


@pytest.mark.parametrize("reshard", [None, True])
def test_an_entry_of_a_list_is_called_by_itself(reshard: bool | None, pool2: Run) -> None:
    found = [each for rank in pool2(chunks, reshard) for each in rank]
    assert not found


def exposed(rank: int, world: int) -> list[bool]:
    torch.manual_seed(0)
    model = sharded(Headless(), flatfsdp, named_mesh(2), Case(reshard=True))
    batch = torch.ones(2, 3, dtype=torch.long)
    hidden = model(batch)
    seen = [isinstance(model.norm.weight, DTensor)]  # of the list only the norm ran, and the root's forward has ended
    output = model.head(hidden)
    seen.append(isinstance(model.norm.weight, DTensor))  # it is kept for the backward
    output.sum().backward()
    seen.append(isinstance(model.norm.weight, DTensor))
    whole = sharded(Net(), flatfsdp, named_mesh(2), Case(reshard=True))
    whole(batch)
    return [*seen, isinstance(whole.norm.weight, DTensor)]


def test_a_list_is_freed_when_all_of_it_ran(pool2: Run) -> None:
    assert pool2(exposed) == [[True, False, True, True]] * 2
