"""Programs that hold parameters' AccumulateGrad nodes, as Horovod, Apex and `_apply_optimizer_in_backward` do."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import full_parameters, joined, seeded
from tests.harness.meshes import replicas_of_shards

pytestmark = pytest.mark.distributed

WIDTH, LR = 4, 0.1


class Net(nn.Module):
    """Two units and a layer of the root's own; parameters of which a rank may have no element, or one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(WIDTH, 1)
        self.recompute: bool | None = None  # whether reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x) if self.recompute is None else checkpoint(part, x, use_reentrant=self.recompute)
        return self.last(x) * self.scale


def rows(rank: int, step: int) -> Tensor:
    made = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return made.requires_grad_()


def wrap(net: nn.Module, **options: Any) -> Any:
    options = {"use_orig_params": True, "join_units_below": 0} | options
    return FullyShardedDataParallel(net, auto_wrap_policy={nn.Sequential}, **options)


class Holder:
    """Holds nodes, and counts how often their hooks run, on which gradient."""

    def __init__(self, parameters: Any, *, hooked: bool = True) -> None:
        self.seen: dict[int, list[bool]] = {}
        self.nodes = []
        for p in parameters:
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            assert node is get_gradient_edge(p).node
            self.nodes.append(node)
            if hooked:
                node.register_hook(lambda *given, p=p: self.see(p, *given))

    def see(self, p: Tensor, before: Any, after: Any) -> None:
        final = before == () and p.grad is not None and p.grad.shape == p.shape and torch.equal(after[0], p.grad)
        self.seen.setdefault(id(p), []).append(final)

    def check(self, parameters: Any, times: int) -> list[str]:
        """A line unless each hook ran `times` times, with the final gradient."""
        expected = {id(p): [True] * times for p in parameters if p.grad is not None} if times else {}
        return [] if self.seen == expected else [f"{list(self.seen.values())}, expected {times} times"]


def gradients(model: Any) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        return {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(world: int, steps: range, scale: float = 1.0) -> dict[str, Tensor]:
    net = seeded(Net)
    for step in steps:
        for rank in range(world):
            (net(rows(rank, step)).square().sum() * scale / world).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [
        f"gradient of {name}: {found[name]}, expected {grad}"
        for name, grad in expected.items()
        if not torch.allclose(found[name].to(grad), grad, atol=1e-5)
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "another dtype": {"mixed_precision": MixedPrecision(torch.float64, torch.float32, cast_root_forward_inputs=True)},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "_HYBRID_SHARD_ZERO2": {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
}


def holding(rank: int, world: int, settings: list[str]) -> list[str]:
    wrong = []
    whens = ["before wrapping", "after wrapping", "between iterations", "between forward and backward"]
    ways = [None, "kept loss", "no_sync", True, False]  # the last two: of recomputation
    # Every setting with every moment, and each pair of a moment and a way in some setting.
    for turn, (when, name) in enumerate(itertools.product(whens, settings)):
        way = ways[(turn + turn // len(ways) + 2 * len(settings[0])) % len(ways)]
        options = dict(SETTINGS[name])
        if "HYBRID" in name:
            options["device_mesh"] = replicas_of_shards()
        net = seeded(Net)
        net.recompute = way if isinstance(way, bool) else None
        held = Holder(net.parameters()) if when == "before wrapping" else None
        model = wrap(net, **options)
        if when == "after wrapping":
            held = Holder(model.parameters())
        kept = None
        times = 0
        for step in range(3):
            if when == "between iterations" and step == 1:
                held = Holder(model.parameters())
            with model.no_sync() if way == "no_sync" and step == 1 else nullcontext():
                loss = model(rows(rank, step)).square().sum()
                if when == "between forward and backward" and step == 1:
                    held = Holder(model.parameters())
                loss.backward()
            if way == "kept loss":
                kept = loss
            del loss
            times += held is not None and not (way == "no_sync" and step == 1)
        assert held is not None
        found = [*held.check(model.parameters(), times), *differences(gradients(model), alone(world, range(3)))]
        del held, kept
        model.zero_grad()
        model(rows(rank, 0)).square().sum().backward()
        found += differences(gradients(model), alone(world, range(1)))
        wrong += [f"{name}, {when}, {way}: {each}" for each in found]
    return wrong


@pytest.mark.parametrize("settings", [["FULL_SHARD", "another dtype"], ["SHARD_GRAD_OP", "NO_SHARD"]])
def test_hooks_of_held_nodes_run_once_on_final_gradients(settings: list[str], pool2: Run) -> None:
    assert not joined(pool2(holding, settings, timeout=90))


def test_hooks_of_held_nodes_in_hybrids(pool4: Run) -> None:
    assert not joined(pool4(holding, ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], timeout=90))


def dropping(rank: int, world: int) -> list[str]:
    """Each step registers hooks again; a node that nothing holds any more is dropped with its hooks."""
    wrong = []
    for name in ("FULL_SHARD", "NO_SHARD", "another dtype"):
        model = wrap(seeded(Net), **SETTINGS[name])
        first = Holder(model.parameters())
        removed = [node.register_hook(print) for node in first.nodes]
        for handle in removed:
            handle.remove()
        for step in range(3):
            held = Holder(model.parameters())
            model(rows(rank, step)).square().sum().backward()
            wrong += [f"{name}, step {step}: {each}" for each in held.check(model.parameters(), 1)]
            if step == 0:
                first.nodes.clear()
            held.nodes.clear()
        first_ran = {len(seen) for seen in first.seen.values()}
        if not first_ran <= {1}:
            wrong.append(f"{name}: dropped hooks ran {first_ran} times")
        model(rows(rank, 0)).square().sum().backward()
        if inspect.waits_for_gradients(model):
            wrong.append(f"{name}: something is awaited still")
    return wrong


def test_nodes_that_are_dropped_are_forgotten(pool2: Run) -> None:
    assert not joined(pool2(dropping))


# --- _apply_optimizer_in_backward -------------------------------------------------------------------------------------


def applied(rank: int, world: int, name: str, when: str) -> list[str]:
    options = dict(SETTINGS[name])
    net = seeded(Net)
    if when == "before wrapping":
        _apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), {"lr": LR})
    model = wrap(net, **options)
    if when == "after wrapping":
        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": LR})
    plain = seeded(Net)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(4):
        if when == "without hooks" and step == 0:
            _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": LR}, register_hook=False)
        for sync in (False, True):
            with nullcontext() if sync else model.no_sync():
                loss = model(rows(rank, 2 * step + sync)).square().sum()
                if when == "between forward and backward" and step == 0 and not sync:
                    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": LR})
                loss.backward()
            for of in range(world):
                (plain(rows(of, 2 * step + sync)).square().sum() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    left = [n for n, p in model.named_parameters() if p.grad is not None]
    expected = dict(plain.named_parameters())
    wrong = [
        f"{n}: {p} expected {expected[n]}"
        for n, p in full_parameters(model).items()
        if not torch.allclose(p, expected[n], atol=1e-4)
    ]
    return [f"{name}, {when}: {each}" for each in (*wrong, *(f"{n} has a gradient" for n in left))]


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "without hooks", "between forward and backward"])
def test_apply_optimizer_in_backward_steps_on_sharded_gradients(when: str, pool2: Run) -> None:
    for name in ("FULL_SHARD", "NO_SHARD", "another dtype"):
        assert not joined(pool2(applied, name, when))


def refused(rank: int, world: int) -> list[str]:
    texts = []

    def report(model: Any, *, step: bool = True) -> None:
        with pytest.raises(UsageError) as caught:
            model(rows(rank, 0)).sum().backward()
        texts.append(str(caught.value))

    net = seeded(Net)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": LR})
    report(wrap(net, use_orig_params=False))

    model = wrap(seeded(Net), use_orig_params=False)
    model(rows(rank, 0)).sum().backward()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": LR})
    report(model)

    net = seeded(Net)
    held = Holder([net.last.weight])
    report(wrap(net, use_orig_params=False))

    model = wrap(seeded(Net), use_orig_params=False)
    held = Holder(model.parameters(), hooked=False)
    model(rows(rank, 0)).sum().backward()  # holding a node without a hook does no harm
    held.nodes[0].register_hook(print)
    report(model)

    model = wrap(seeded(Net))
    held = Holder(model.parameters(), hooked=False)
    held.nodes[-1].register_prehook(print)  # of one element, which one rank has
    report(model)

    model = wrap(seeded(Net))
    model(rows(rank, 0))
    weight = model.module.parts[0].module[0].weight
    with pytest.raises(UsageError) as caught:
        weight.expand_as(weight).sum()
    texts.append(str(caught.value))
    return texts


@pytest.mark.filterwarnings("ignore::flatfsdp.errors.FlatFSDPWarning")
def test_what_would_never_run_is_refused(pool2: Run) -> None:
    for text in pool2(refused):
        before, after, leaf, flat, earlier, expanded = text
        for each in (before, after):
            assert "_apply_optimizer_in_backward() was called on parameters that were flattened" in each
        assert "'last.weight' of unit <root> has a hook on its AccumulateGrad node" in leaf
        assert "the flat parameter of unit <root> has a hook on its AccumulateGrad node" in flat
        assert all("flatfsdp.optimizer_in_backward(model, optimizer)" in each for each in (before, after, leaf, flat))
        assert "'last.bias' of unit <root> has a hook of register_prehook()" in earlier
        assert "sum() computes with the result of expand_as() or view_as() of parameter '0.weight' of unit" in expanded
    assert flatfsdp.optimizer_in_backward
