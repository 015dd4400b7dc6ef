"""Sums of gradients with `deterministic_sums=True`: the same bits on any number of ranks."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatfsdp
import flatfsdp.checkpoint
from flatfsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from flatfsdp.engine.cpu.groups import over_gloo
from flatfsdp.engine.features import exact_sums
from flatfsdp.layout import Grain, Preferred, Rows
from tests.conftest import Run
from tests.harness import inspect, thorough
from tests.harness.meshes import named_mesh, shared_mesh

pytestmark = pytest.mark.distributed

Owners = Callable[[int, int], list[int]]  # from the number of microbatches and of ranks, the rank of each


def aligned(count: int, world: int) -> list[int]:
    return [index * world // count for index in range(count)]


def in_turns(count: int, world: int) -> list[int]:
    return [index % world for index in range(count)]


def unevenly(count: int, world: int) -> list[int]:
    return [max(0, index - count + world) for index in range(count)]


class Net(nn.Module):
    """Layers of odd sizes, one that is used twice, one that only some microbatches use, a frozen one, one whose weight
    is that of another."""

    def __init__(
        self, recomputed: bool = False, *, width: int = 13, inner: Sequence[int] = (29, 29), out: int = 700
    ) -> None:
        """`inner`: the width inside of each block; a negative one has a LayerNorm before it."""
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *([nn.LayerNorm(width)] if size < 0 else []),
                nn.Linear(width, abs(size)),
                nn.Tanh(),
                nn.Linear(abs(size), width),
            )
            for size in inner
        )
        self.rare = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.rare.weight
        self.head = nn.Linear(width, out)
        self.recomputed = recomputed

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x))
        if rarely:
            x = x + self.rare(x)
        return self.head(self.tied(self.frozen(x)))


def wrapped(net: nn.Module, mesh: tuple[int, int] | None = None, **options: Any) -> FullyShardedDataParallel:
    if mesh is not None:
        options["device_mesh"] = shared_mesh(*mesh)
    options = {"use_orig_params": True, "auto_wrap_policy": {nn.Sequential}, "deterministic_sums": True} | options
    return FullyShardedDataParallel(net, **options)


def sharded(net: Any, **options: Any) -> Any:
    for block in net.blocks:
        flatfsdp.fully_shard(block, deterministic_sums=True, **options)
    return flatfsdp.fully_shard(net, deterministic_sums=True, **options)


def batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(4, 7, generator=generator) * 10.0 ** (index % 5 - 2)


def rounds(owners: list[int], rank: int) -> Iterator[tuple[int | None, bool]]:
    """The microbatches of this rank, with stand-ins up to the number of the others, and whether each is the last."""
    own: list[int | None] = [index for index, owner in enumerate(owners) if owner == rank]
    most = max(map(owners.count, owners))
    for number, index in enumerate(own + [None] * (most - len(own)), 1):
        yield index, number == most


def unsynchronized(model: Any, last: bool) -> AbstractContextManager[Any]:
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def clip(model: Any, most: float, *, torchs: bool = False) -> Tensor:
    if torchs:
        return nn.utils.clip_grad_norm_(model.parameters(), most)
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(most)
    norm = model.clip_grad_norm_(most)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def contents(model: Any, *optimizers: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of each parameter and of each state of optimizers, in whole, by name. Collective."""
    found: dict[str, Any] = {}
    if isinstance(model, FullyShardedDataParallel):
        found |= model.state_dict()
        for optimizer in optimizers:
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            found |= {f"{name}.{key}": value for name, each in states.items() for key, value in each.items()}
    else:
        for name, parameter in model.named_parameters():
            found[name] = parameter
            for optimizer in optimizers:
                found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    hashes = {}
    for name, value in sorted(found.items()):
        if name.startswith("tied."):
            continue  # another name of one that is there
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        content = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def digest(model: Any, *optimizers: torch.optim.Optimizer) -> str:
    """A hash of all `contents`."""
    return hashlib.sha256(str(contents(model, *optimizers)).encode()).hexdigest()


def by_rows(name: str, parameter: Tensor) -> Grain:
    return Preferred(Rows(2))


def train(
    rank: int,
    world: int,
    wrap: Callable[..., Any],
    count: int,
    owners: Owners,
    accumulates: bool,
    clips: bool | str = False,
    recomputed: bool = False,
    steps: int = thorough.steps(),
    copied: bool = False,
) -> str:
    torch.manual_seed(0)
    model = wrap(Net(recomputed))
    if copied:
        with flatfsdp.microbatch(rank, of=world):
            model(batch(9, 9), rarely=True).sum().backward()
        model.zero_grad()
        model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for step in range(steps):
        for index, last in rounds(owners(count, world), rank):
            with unsynchronized(model, last or not accumulates), flatfsdp.microbatch(index, of=count):
                x = batch(step, index or 0)
                model(x, rarely=index is not None and index % 4 == 1).square().mean().backward()
        if clips:
            norm = clip(model, 0.5, torchs=clips == "torch's")
            assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer)


@cache
def on_one(run: Run, wrap: Callable[..., Any], count: int, **kwargs: Any) -> str:
    """The hash of one rank, which runs all microbatches: computed once for all tests that compare with it."""
    (found,) = run(1, train, wrap, count, aligned, True, **kwargs)
    return found


WRAPS = {
    "originals": wrapped,
    "flat": partial(wrapped, use_orig_params=False),
    "rows": partial(wrapped, layout="rows"),
    "SHARD_GRAD_OP": partial(wrapped, sharding_strategy="SHARD_GRAD_OP"),
    "NO_SHARD": partial(wrapped, sharding_strategy="NO_SHARD"),
    "large units": partial(wrapped, join_units_below=0),
    "one unit": partial(wrapped, auto_wrap_policy=None),
    "prefetch": partial(wrapped, forward_prefetch=True, backward_prefetch=None, join_units_below=0),
    "grains": partial(wrapped, layout=by_rows),
    "whole matrices": partial(wrapped, layout=torch.optim.Muon),
    "offloaded": partial(wrapped, cpu_offload=CPUOffload(offload_params=True)),
    "fully_shard": sharded,
}


# All pairs of a way to shard, of how gradients accumulate, and of the number of ranks.
PAIRS = [
    (name, accumulates, world)
    for number, (name, accumulates) in enumerate(product(WRAPS, (True, False)))
    for world in (2, 3)
    if thorough.is_thorough() or (number // 2 + accumulates + world) % 2 == 0
]


@pytest.mark.parametrize(("name", "accumulates", "world"), PAIRS)
def test_one_hash(run: Run, name: str, accumulates: bool, world: int) -> None:
    """All ways to shard have the hash of one rank."""
    owners = aligned if world == 3 else in_turns if accumulates else unevenly
    expected = on_one(run, wrapped, 7, clips=True)
    assert on_one(run, WRAPS[name], 7, clips=True) == expected
    assert {*run(world, train, WRAPS[name], 7, owners, accumulates, clips=True)} == {expected}


@pytest.mark.parametrize("name", ["originals", "flat", "fully_shard"])
def test_torchs_clipping(run: Run, name: str) -> None:
    expected = on_one(run, wrapped, 7, clips=True)
    assert {*run(2, train, WRAPS[name], 7, in_turns, True, clips="torch's")} == {expected}
    assert {*run(3, train, WRAPS[name], 7, aligned, False, clips="torch's")} == {expected}


def test_copies(run: Run) -> None:
    expected = on_one(run, wrapped, 7, clips=True)
    for name in ("originals", "fully_shard"):
        assert {*run(2, train, WRAPS[name], 7, in_turns, False, clips=True, copied=True)} == {expected}


def test_many_ranks(run: Run) -> None:
    """12 steps on 4 ranks; with --thorough 50, also on 6 and 8."""
    worlds, steps = ((4, 6, 8), 50) if thorough.is_thorough() else ((4,), 12)
    expected = on_one(run, wrapped, 12, clips=True, steps=steps)
    for world in worlds:
        assert {*run(world, train, wrapped, 12, in_turns, False, clips=True, steps=steps)} == {expected}


HYBRIDS = [*product(("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), (True, False), (True, False))]


@pytest.mark.parametrize(
    ("strategy", "accumulates", "orig"), HYBRIDS if thorough.is_thorough() else [HYBRIDS[at] for at in (0, 3, 5, 6)]
)
def test_hybrids(run: Run, strategy: str, accumulates: bool, orig: bool) -> None:
    expected = on_one(run, wrapped, 7, clips=True)
    hybrid = partial(wrapped, mesh=(2, 2), sharding_strategy=strategy, use_orig_params=orig)
    owners = in_turns if orig else unevenly
    assert {*run(4, train, hybrid, 7, owners, accumulates, clips=True)} == {expected}


def sharded_on_mesh(net: Net) -> Net:
    return sharded(net, mesh=named_mesh(2, 2))


@pytest.mark.parametrize("accumulates", [True, False], ids=["no_sync", "reduced each time"])
def test_hybrids_of_fully_shard(run: Run, accumulates: bool) -> None:
    expected = on_one(run, wrapped, 7, clips=True)
    assert {*run(4, train, sharded_on_mesh, 7, in_turns, accumulates, clips=True)} == {expected}
    assert {*run(4, train, sharded_on_mesh, 7, aligned, accumulates, clips="torch's")} == {expected}


def with_one_outside(rank: int, world: int) -> float:
    """The norm with gradients of a parameter that is no part of the model."""
    torch.manual_seed(0)
    model, other = wrapped(nn.Linear(7, 301), auto_wrap_policy=None), nn.Parameter(torch.randn(301, 5))
    other.grad = other.detach().clone()
    with flatfsdp.microbatch(0 if rank == 0 else None, of=1):
        model(batch(0, 0)).square().mean().backward()
    found = nn.utils.get_total_norm([p.grad for p in [*model.parameters(), other] if p.grad is not None])
    assert found > nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(found)


def test_norm_with_parameters_outside(run: Run) -> None:
    (expected,) = run(1, with_one_outside)
    for world in (2, 3):
        assert run(world, with_one_outside) == [expected] * world


def norms(rank: int, world: int, together: int = exact_sums.IN_CACHES) -> list[float]:
    """`together`: how many elements a rank adds up at once."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(37, 71), auto_wrap_policy=None)
    with flatfsdp.microbatch(0 if rank == 0 else None, of=1):
        (model(torch.randn(4, 37, generator=torch.Generator().manual_seed(0))) ** 3).mean().backward()
    with patch.object(exact_sums, "IN_CACHES", together):
        return [float(model.clip_grad_norm_(1e9, p)) for p in (1, 2, float("inf"))]


def test_norms_of_all_orders(run: Run) -> None:
    (expected,) = run(1, norms)
    for world in (2, 3):
        assert run(world, norms) == [expected] * world
    assert run(3, norms, 100) == [expected] * 3


def reduced_again(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model = wrapped(nn.Linear(5, 3), auto_wrap_policy=None)
    model.reduce_accumulated_gradients()
    with flatfsdp.microbatch(rank, of=world):
        model(torch.ones(2, 5)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for _ in range(2):
        model.reduce_accumulated_gradients()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    model.zero_grad()
    model.reduce_accumulated_gradients()
    return same


def test_reduced_when_nothing_is_left(run: Run) -> None:
    assert run(2, reduced_again) == [True, True]


def by_matrices(rank: int, world: int, wants: Any, owners: Owners, accumulates: bool) -> str:
    """With an optimizer of whole matrices for these, and AdamW for the others."""
    torch.manual_seed(0)
    model = wrapped(Net())
    shapes = flatfsdp.unsharded_shapes(model)
    trained = [(p, len(shapes[name])) for name, p in model.named_parameters() if p.requires_grad]
    first = flatfsdp.matrix_steps(partial(wants, lr=0.02), [p for p, dims in trained if dims == 2])
    optimizer = torch.optim.AdamW([p for p, dims in trained if dims != 2])
    for step in range(3):
        for index, last in rounds(owners(7, world), rank):
            with unsynchronized(model, last or not accumulates), flatfsdp.microbatch(index, of=7):
                model(batch(step, index or 0), rarely=index == 1).square().mean().backward()
        model.clip_grad_norm_(0.5)
        for each in (first.optimizer, optimizer):
            each.step()
            each.zero_grad()
    return digest(model, first.optimizer, optimizer)


@pytest.mark.parametrize("wants", [torch.optim.Muon, torch.optim.Adafactor])
def test_norms_of_matrices(run: Run, wants: Any) -> None:
    """Muon's, and the root mean squares of Adafactor."""
    (expected,) = run(1, by_matrices, wants, in_turns, True)
    assert {*run(2, by_matrices, wants, in_turns, True)} == {expected}
    assert {*run(3, by_matrices, wants, aligned, False)} == {expected}


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
in_bf16 = partial(wrapped, mixed_precision=BF16)
sharded_in_bf16 = partial(sharded, mp_policy=BF16)


@pytest.mark.parametrize(("wrap", "accumulates"), [(in_bf16, True), (in_bf16, False), (sharded_in_bf16, True)])
def test_bf16_and_recomputation(run: Run, wrap: Any, accumulates: bool) -> None:
    expected = on_one(run, wrap, 5, recomputed=True)
    assert {*run(2, train, wrap, 5, in_turns, accumulates, recomputed=True)} == {expected}
    assert {*run(3, train, wrap, 5, aligned, accumulates, recomputed=True)} == {expected}


def through_messages(rank: int, world: int, *args: Any, play: Callable[..., str] = train, **kwargs: Any) -> str:
    """`play` without shared memory, which these ranks may have used before."""
    before = inspect.issued_by_group()
    with over_gloo():
        found = play(rank, world, *args, **kwargs)
    issued = {*inspect.issued_by_group().items()} - {*before.items()}
    assert not issued, f"exchanged through shared memory: {issued}"
    return found


@pytest.mark.parametrize("name", ["originals", "NO_SHARD", "fully_shard"])
def test_messages(run: Run, name: str) -> None:
    expected = on_one(run, WRAPS[name], 7)
    assert {*run(3, through_messages, WRAPS[name], 7, in_turns, True)} == {expected}
    assert {*run(2, through_messages, WRAPS[name], 7, unevenly, False)} == {expected}


def test_hybrids_through_messages(run: Run) -> None:
    hybrid = partial(wrapped, mesh=(2, 2), sharding_strategy="HYBRID_SHARD")
    assert {*run(4, through_messages, hybrid, 7, unevenly, True)} == {on_one(run, wrapped, 7)}


def stepped_in_backward(
    rank: int, world: int, wrap: Callable[..., Any], count: int, owners: Owners, accumulates: bool, steps: int = 3
) -> str:
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    flatfsdp.optimizer_in_backward(model, optimizer)
    for step in range(steps):
        for index, last in rounds(owners(count, world), rank):
            with unsynchronized(model, last or not accumulates), flatfsdp.microbatch(index, of=count):
                model(batch(step, index or 0), rarely=index is not None and index % 4 == 1).square().mean().backward()
    return digest(model, optimizer)


@pytest.mark.parametrize("accumulates", [True, False], ids=["no_sync", "reduced each time"])
def test_optimizer_in_backward(run: Run, accumulates: bool) -> None:
    expected = on_one(run, wrapped, 7, steps=3)  # it begins in the second backward
    assert {*run(2, stepped_in_backward, wrapped, 7, in_turns, accumulates)} == {expected}


def gradients(rank: int, world: int, count: int, deterministic: bool, spread: float, accumulates: bool) -> list[Tensor]:
    """Whole gradients of one step, by rank 0's microbatches if `deterministic` is False."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(5, 3), deterministic_sums=deterministic)
    for index, last in rounds(in_turns(count, world), rank):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(index or 0)) * 10.0 ** (
            spread * ((index or 0) % 7 - 3)
        )
        context = flatfsdp.microbatch(index, of=count) if deterministic else nullcontext()
        with unsynchronized(model, last or not accumulates), context:
            (model(x).sum() / (1 if deterministic else count / world)).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("spread", [0, 4, 10])
def test_close_to_plain_sums(run: Run, spread: float) -> None:
    """The mean is that of other sums, from 1e-30 to 1e30: a tree rounds less than a sum one after the other."""
    plain = run(2, gradients, 8, False, spread, True)[0]
    summed = run(2, gradients, 8, True, spread, True)[0]
    for one, other in zip(plain, summed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))


def test_plain_sums_differ(run: Run) -> None:
    """What the other tests compare would differ between ranks without this mode."""
    on_three, on_one = (run(world, gradients, 6, False, 1, True)[0] for world in (3, 1))
    assert not all(map(torch.equal, on_three, on_one))


def followed(rank: int, world: int, deterministic: bool) -> tuple[list[float], list[Tensor]]:
    """The losses of 20 steps, and the whole weights after them."""
    torch.manual_seed(0)
    model = wrapped(Net(), deterministic_sums=deterministic)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    losses = []
    for step in range(20):
        for index, last in rounds(aligned(4, world), rank):
            context = flatfsdp.microbatch(index, of=4) if deterministic else nullcontext()
            with unsynchronized(model, last), context:
                loss = model(batch(step, index or 0), rarely=True).square().mean()
                (loss if deterministic else loss * world / 4).backward()
            losses.append(float(loss))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def test_losses_and_weights_stay_close_to_those_without_the_mode(run: Run) -> None:
    for (losses, weights), (plain, others) in zip(run(2, followed, True), run(2, followed, False), strict=True):
        assert all(abs(one - other) <= 1e-5 * abs(other) for one, other in zip(losses, plain, strict=True))
        for one, other in zip(weights, others, strict=True):
            assert float((one - other).abs().max()) <= 1e-5


def of_columns(rank: int, world: int, deterministic: bool) -> list[Tensor]:
    """What each microbatch adds, and the whole gradient: each column has magnitudes of its own, from 1e-30 to 1e30."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(61, 1, bias=False), deterministic_sums=deterministic)
    terms = torch.randn(12, 61, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-30, 31)
    for index, last in rounds(in_turns(12, world), rank):
        with unsynchronized(model, last), flatfsdp.microbatch(index, of=12):
            model(terms[index or 0][None]).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        (weight,) = model.parameters()
        assert weight.grad is not None
        return [terms, weight.grad[0].clone()]


def test_sums_from_1e_30_to_1e30_are_within_the_bound_of_a_tree(run: Run) -> None:
    """Each of log2(n) sums, and the division by n, rounds by at most half a unit in the last place."""
    for terms, found in run(3, of_columns, True):
        exact, magnitude = terms.double().mean(0), terms.double().abs().mean(0)
        bound = (math.log2(len(terms)) + 2) * torch.finfo(torch.float32).eps / 2 * magnitude
        assert ((found.double() - exact).abs() <= bound).all()


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare, self.other = (nn.Parameter(torch.ones(5)) for _ in range(3))

    def forward(self, x: Tensor, *, rarely: bool) -> Tensor:
        y: Tensor = self.used * x + (self.rare * x if rarely else self.other * -x)
        return torch.view_as_real(y)[..., 0] if y.is_complex() else -y


def signs_of_zeros(rank: int, world: int, owners: list[int], accumulates: bool, dtype: Any) -> list[list[bool]]:
    """Of gradients; if they are complex, of their imaginary parts."""
    model = wrapped(Scales().to(dtype), auto_wrap_policy=None)
    x = torch.full((5,), complex(-1, 0) if dtype.is_complex else 0.0, dtype=dtype)
    for index, last in rounds(owners, rank):
        with unsynchronized(model, last or not accumulates), flatfsdp.microbatch(index, of=len(owners)):
            model(x, rarely=index in (0, 3)).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [(grad.imag if grad.is_complex() else grad).signbit().tolist() for grad in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_what_is_missing_changes_no_bit(dtype: torch.dtype, run: Run) -> None:
    """Sums of zeros with a sign keep it where some microbatches have no gradient."""
    expected = [[True] * 5, [True] * 5, [False] * 5]
    for accumulates in (True, False):
        assert run(1, signs_of_zeros, aligned(4, 1), accumulates, dtype) == [expected]
        for owners in (in_turns(4, 2), aligned(4, 2), unevenly(4, 2)):
            assert run(2, signs_of_zeros, owners, accumulates, dtype) == [expected] * 2


def of_wide_gradients(rank: int, world: int, owners: list[int]) -> Tensor:
    """The mean of 1 and a little more than half of what float32 has next to it."""
    precision = MixedPrecision(reduce_dtype=torch.float32)
    model = wrapped(Scales().double(), auto_wrap_policy=None, mixed_precision=precision)
    for index, last in rounds(owners, rank):
        x = torch.full((5,), -1.0 if index == 0 else -(2.0**-24) * (1 + 2.0**-26), dtype=torch.float64)
        with unsynchronized(model, last), flatfsdp.microbatch(index, of=2):
            model(x, rarely=False).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        grad = model.module.used.grad
        return torch.empty(0) if grad is None else grad.clone()


def test_gradients_wider_than_their_sum_are_rounded_before_it(run: Run) -> None:
    for world in (1, 2):
        for found in run(world, of_wide_gradients, aligned(2, world)):
            assert found.tolist() == [0.5] * 5


def poisoned(rank: int, world: int, value: float) -> list[bool]:
    model = wrapped(nn.Linear(5, 3))
    for index, last in rounds([0, 1, 0], rank):
        x = torch.full((2, 5), value if index is None or index == 2 else 1.0)
        with unsynchronized(model, last), flatfsdp.microbatch(index, of=3):
            (model(x) * (0.0 if index is None else 1.0)).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        grads = [parameter.grad for parameter in model.parameters()]
    return [bool(grad.isfinite().all()) for grad in grads if grad is not None]


def named(rank: int, world: int, factors: Sequence[float]) -> str:
    """What `detect_nonfinite` says when the gradient of each microbatch is multiplied by its factor."""
    model = wrapped(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)), auto_wrap_policy=None)
    with flatfsdp.detect_nonfinite(model), pytest.raises(flatfsdp.errors.NonFiniteError) as caught:
        for index, last in rounds([0, 1, 0, 1], rank):
            with unsynchronized(model, last), flatfsdp.microbatch(index, of=4):
                y = model(torch.ones(2, 5))
                y.register_hook(partial(torch.mul, 1.0 if index is None else factors[index]))
                y.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1, 1, math.nan, 1), r"nan in .*gradient of .*before its reduction"),
        ((1, 1, -math.inf, 1), r"inf in .*gradient of .*before its reduction"),
        ((5e37,) * 4, r"inf in the reduced gradient of '1\."),  # 1e38 for two samples, and 2e38 for each rank
        ((math.inf, 1, 1, -math.inf), r"inf in .*gradient of .*before its reduction"),
    ],
    ids=["nan", "inf", "overflow between ranks", "inf of both signs"],
)
def test_what_is_not_finite_is_named(run: Run, factors: Sequence[float], words: str) -> None:
    for text in run(2, named, factors):
        assert re.search(words, text), text


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_infinity_arrives(run: Run, value: float) -> None:
    """Also one that comes from an overflow, of the sum over two samples."""
    assert run(2, poisoned, value) == [[False, True]] * 2


def stopped(rank: int, world: int, wrap: Any, folder: str, first: int, last: int) -> str:
    """Steps `first` to `last`, from a checkpoint if `first` is not 0, and to one."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    if first:
        flatfsdp.checkpoint.load(f"{folder}/{first}", model=model, optimizer=optimizer)
    for step in range(first, last):
        for index, is_last in rounds(in_turns(5, world), rank):
            with unsynchronized(model, is_last), flatfsdp.microbatch(index, of=5):
                model(batch(step, index or 0), rarely=index == 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flatfsdp.checkpoint.save(f"{folder}/{last}", model=model, optimizer=optimizer)
    return digest(model, optimizer)


@pytest.mark.parametrize("wrap", [wrapped, sharded])
def test_resumed_on_fewer_ranks(run: Run, tmp_path: Path, wrap: Any) -> None:
    run(3, stopped, wrap, str(tmp_path / "with"), 0, 2)
    resumed = run(2, stopped, wrap, str(tmp_path / "with"), 2, 4)
    assert {*resumed} == {*run(1, stopped, wrap, str(tmp_path / "without"), 0, 4)}


def reduced_later(rank: int, world: int) -> bool:
    expected = gradients(rank, world, 4, True, 0, True)
    torch.manual_seed(0)
    model = wrapped(nn.Linear(5, 3))
    with model.no_sync():
        for index in (rank, rank + 2):
            with flatfsdp.microbatch(index, of=4):
                model(torch.randn(4, 5, generator=torch.Generator().manual_seed(index))).sum().backward()
    model.reduce_accumulated_gradients()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_reduced_without_a_backward(run: Run) -> None:
    assert run(2, reduced_later) == [True, True]


def test_memory_plan() -> None:
    figures = []
    for chosen in (False, True):
        with flatfsdp.dry_run(4):
            model = wrapped(nn.Linear(64, 64), deterministic_sums=chosen)
            figures.append(flatfsdp.memory_plan(model, torch.optim.SGD(model.parameters()), microbatches=4))
    plain, summed = figures
    assert summed.params == plain.params
    assert summed.comm["reduce_scatter"][0] == plain.comm["reduce_scatter"][0]


def held_and_sent(rank: int, world: int, deterministic: bool, owners: list[int]) -> tuple[float, float]:
    """How many whole gradients a rank holds at most, and how many it sends, in a step under no_sync()."""
    model = wrapped(nn.Linear(64, 64, bias=False), deterministic_sums=deterministic)
    stats, size = flatfsdp.stats(model), 64 * 64 * 4
    for index, last in rounds(owners, rank):
        context = flatfsdp.microbatch(index, of=len(owners)) if deterministic else nullcontext()
        with unsynchronized(model, last), context:
            model(torch.ones(2, 64)).sum().backward()
    return stats.bytes_at_peak["slots"] / size, stats.comm["reduce_scatter"][1] / size


@pytest.mark.parametrize(
    ("owners", "held", "sent"),
    [
        (aligned(16, 2), 3, 1),  # with the last one: blocks of four, of two, and of one and what is added to it
        (in_turns(16, 2), 8, 8),
        ([1, *[0] * 7, *[1] * 8], 4, 3),  # from the second one on; with the last: blocks of 1, 2, 2 and 2
    ],
    ids=["aligned", "in turns", "consecutive"],
)
def test_memory_and_bytes_are_those_of_the_blocks(run: Run, owners: list[int], held: int, sent: int) -> None:
    assert run(2, held_and_sent, False, owners)[0] == (1, 1)
    found, bytes_sent = run(2, held_and_sent, True, owners)[0]
    assert found <= held and bytes_sent == sent


def kept_and_buffered(rank: int, world: int, owners: list[int], each_time: bool) -> dict[str, float]:
    """In whole gradients, at the peak of a step through messages: the sums that are kept, and the buffers of a sum."""
    with over_gloo():
        model = wrapped(nn.Linear(64, 64, bias=False), deterministic_sums=True)
        stats = flatfsdp.stats(model)
        for index, last in rounds(owners, rank):
            with unsynchronized(model, last or each_time), flatfsdp.microbatch(index, of=len(owners)):
                model(torch.ones(2, 64)).sum().backward()
    return {key: stats.bytes_at_peak.get(key, 0) / (64 * 64 * 4) for key in ("partial", "exchange")}


@pytest.mark.parametrize("world", [2, 4])
def test_memory_is_that_of_the_formulas_on_the_page(run: Run, world: int) -> None:
    """Of `same_bits.md`, for four microbatches on each rank."""
    received, sent = (world - 1) / world, (world - 1) / world if world > 2 else 0.0  # for each block
    for owners, kept, blocks in ((aligned(4 * world, world), 2, 1), (in_turns(4 * world, world), 2 / world, 4)):
        for found in run(world, kept_and_buffered, owners, True):
            assert found == {"partial": kept, "exchange": received + sent}
        for found in run(world, kept_and_buffered, owners, False):
            assert found["partial"] == 0 and found["exchange"] in (0, blocks * (received + sent)), found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.fails = nn.Linear(5, 3), nn.Linear(5, 3), False

    def forward(self, x: Tensor, *, with_unused: bool) -> Tensor:
        y = self.used(x)
        if self.fails:
            y.register_hook(lambda grad: 1 / 0)
        return y + self.unused(x) if with_unused else y * 1


def begun_again(rank: int, world: int, how: str) -> bool:
    """A step of which two microbatches ran begins again, with other gradients than if nothing had been dropped."""
    torch.manual_seed(0)
    model = wrapped(Two(), auto_wrap_policy=None)

    def run_one(index: int, *, with_unused: bool) -> None:
        with flatfsdp.microbatch(index, of=4):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(index))
            out = model(x, with_unused=with_unused).sum()
            out.backward()

    def step(first: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Tensor | None]:
        with first():
            run_one(rank, with_unused=False)
        run_one(rank + 2, with_unused=False)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]

    expected = step()
    model.zero_grad()
    first = model.no_sync if "no_sync" in how else nullcontext
    with first():
        run_one(rank + 2, with_unused=True)
    if how.startswith("optimizer"):
        torch.optim.SGD(model.parameters()).zero_grad()
    elif how.startswith("model"):
        model.zero_grad()
    else:
        model.module.fails = True
        with pytest.raises(ZeroDivisionError), first():
            run_one(rank, with_unused=False)
        model.module.fails = False
    found = step(first)
    return all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.filterwarnings("ignore:a backward failed")
@pytest.mark.parametrize("how", ["optimizer, no_sync", "model, no_sync", "model", "failure, no_sync", "failure"])
def test_begun_again(run: Run, how: str) -> None:
    """`zero_grad()` drops what has run of a step, and so does a backward that fails."""
    assert run(2, begun_again, how) == [True, True]
