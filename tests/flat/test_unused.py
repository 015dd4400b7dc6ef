"""Parameters to which no rank brings a gradient have none, as in one process: no decay, no momentum, no state."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 4
Microbatch = Sequence[str]  # by rank, the terms of its loss: l, r: the output of a head; s: the trunk's spare parameter
Plan = Sequence[Sequence[Microbatch]]  # steps


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor, uses: bool = False) -> Tensor:
        y: Tensor = self.linear(x)
        return y @ self.spare if uses else y


class Net(nn.Module):
    """A trunk, a unit, and two heads of which a loss may take one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Part(), Part(), Part()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, uses: bool) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x, uses) * self.scale)
        return self.left(hidden), self.right(hidden)


def data(rank: int, step: int, micro: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def backward(model: nn.Module, x: Tensor, takes: str, share: float = 1.0) -> None:
    scaled(model, x, takes, share).backward()


def scaled(model: nn.Module, x: Tensor, takes: str, share: float = 1.0) -> Tensor:
    left, right = model(x, "s" in takes)
    loss: Tensor = left.square().mean() * ("l" in takes) if "l" in takes else torch.zeros(())
    if "r" in takes:
        loss = loss + right.square().mean()
    return loss * share


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, **options)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)


def difference(
    rank: int,
    world: int,
    plan: Plan,
    *,
    strategy: str = "FULL_SHARD",
    orig: bool = True,
    unsynced: bool = False,
    in_backward: bool = False,
    set_to_none: bool = True,
    prepare: str = "",
    make: Any = adam,
    **options: Any,
) -> str:
    """Differences between the wrapped model and one process after a step of `plan`; "" if there are none.

    `unsynced`: all microbatches but the last come under no_sync().
    """
    torch.manual_seed(0)
    alone, net = Net(), Net()
    net.load_state_dict(alone.state_dict())
    mesh = flatfsdp_mesh(world) if strategy.startswith(("HYBRID", "_HYBRID")) else None
    model = FullyShardedDataParallel(
        net,
        auto_wrap_policy={Part},
        sharding_strategy=flatfsdp.ShardingStrategy[strategy],
        use_orig_params=orig,
        device_mesh=mesh,
        **options,
    )
    kind = {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(prepare, {})
    mine, reference = make(model.parameters(), **kind), make(alone.parameters())
    if prepare == "comm hook":
        model.register_comm_hook(None, averaged)
    elif prepare == "fuse_optimizer_steps":
        flatfsdp.fuse_optimizer_steps(mine)
    if in_backward:
        flatfsdp.optimizer_in_backward(model, mine)
    scaler = flatfsdp.ShardedGradScaler("cpu", init_scale=2.0**8, enabled=prepare == "scaler")
    wrong: list[str] = []
    for step, microbatches in enumerate(plan):
        mine.zero_grad(set_to_none), reference.zero_grad(set_to_none)
        for micro, takes in enumerate(microbatches):
            last = micro == len(microbatches) - 1
            if prepare == "deferred":
                model.set_is_last_backward(last)
            elif prepare == "partial":
                model.set_requires_all_reduce(last)
            with model.no_sync() if unsynced and not last else contextlib.nullcontext():
                loss = scaler.scale(scaled(model, data(rank, step, micro), takes[rank]))
                loss.backward(create_graph=prepare == "create_graph")
            for each in range(world):
                backward(alone, data(each, step, micro), takes[each], 1 / world)
        if prepare == "create_graph":  # whose gradients are there when nothing can read the parameters any more
            with FullyShardedDataParallel.summon_full_params(model):
                pass
        expected = {name: parameter.grad is None for name, parameter in alone.named_parameters()}
        if orig and not in_backward:
            held = [(name, parameter) for name, parameter in model.named_parameters() if parameter.numel()]
            found = {name: parameter.grad is None for name, parameter in held}
            if any(found[name] is not expected[name] for name in found):
                wrong.append(f"step {step}: without: {[n for n in found if found[n] is not expected[n]]} only in one")
        if prepare == "clip":
            model.clip_grad_norm_(0.01)
            nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        if not in_backward:
            scaler.step(mine)
            scaler.update()
        reference.step()
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for name, parameter in alone.named_parameters():
                got = dict(net.named_parameters())[name]
                if not torch.allclose(got, parameter, atol=1e-5):
                    wrong.append(f"step {step}: {name}, {got.flatten()[0]:.4f} and {parameter.flatten()[0]:.4f} alone")
    return wrong[0] if wrong else ""


def averaged(state: object, full: Tensor, output: Tensor | None = None) -> None:
    """A communication hook with the computation of the engine."""
    torch.distributed.all_reduce(full)
    full /= torch.distributed.get_world_size()
    if output is not None:
        output.copy_(full.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()])


def flatfsdp_mesh(world: int) -> Any:
    from tests.harness.meshes import shared_mesh

    return shared_mesh(2, world // 2)


def same(*takes: str) -> Plan:
    """Steps in which both ranks do the same."""
    return [[(each, each)] for each in takes]


ONE_OUTPUT = same("l", "l", "l")
PLANS = {
    "one output": ONE_OUTPUT,
    "in turn": same("l", "r", "l", "r", "lr", "lrs", "l", "r", "l", "r"),
    "one rank brings it": [[("l", "lrs")], [("l", "lrs")], [("lr", "l")], [("l", "l")], [("lrs", "l")], [("ls", "r")]],
    "then nobody": [*same("lrs", "lrs"), [("lrs", "l")], [("lr", "lr")], [("lr", "lrs")], *same("lrs")],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_what_no_loss_reaches_has_no_gradient(pool2: Run, plan: str, strategy: str) -> None:
    assert pool2(difference, PLANS[plan], strategy=strategy) == ["", ""]


def test_replicas_of_shards(pool4: Run) -> None:
    plan = [[("l", "l", "l", "lr")], [("l", "l", "l", "lr")], [("l", "l", "l", "l")], [("ls", "l", "r", "r")]]
    assert pool4(difference, plan, strategy="HYBRID_SHARD") == [""] * 4


FEW = [[("lr", "lr")], [("l", "lrs")], [("l", "l")], [("l", "l")]]
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "offloaded": {"cpu_offload": flatfsdp.CPUOffload(offload_params=True)},
    "foreach": {"prepare": "foreach"},
    "fused": {"prepare": "fused"},
    "fuse_optimizer_steps": {"prepare": "fuse_optimizer_steps"},
    "comm hook": {"prepare": "comm hook"},
    "clipped": {"prepare": "clip"},
    "kept whole": {"backward_prefetch": None},
    "scaler": {"prepare": "scaler"},
    "create_graph": {"prepare": "create_graph"},
    "gradients in another dtype": {
        "mixed_precision": flatfsdp.MixedPrecision(reduce_dtype=torch.float64, keep_low_precision_grads=True),
        "make": momentum,
    },
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_to_train(pool2: Run, way: str) -> None:
    assert pool2(difference, FEW, **OTHER_WAYS[way]) == ["", ""]


def test_partial_sums_over_replicas(pool4: Run) -> None:
    plan = [[("l", "l", "l", "r"), ("l", "l", "l", "l")], [("ls", "l", "l", "l"), ("l", "l", "l", "l")]]
    assert pool4(difference, [*plan, *plan, plan[0][1:]], strategy="HYBRID_SHARD", prepare="partial") == [""] * 4


def test_reductions_that_outlast_the_backward(pool2: Run) -> None:
    assert pool2(difference, WINDOWS, prepare="deferred") == ["", ""]


WINDOWS = [[("l", "l"), ("r", "l")], [("l", "l"), ("l", "l")], [("ls", "l"), ("l", "l")], [("l", "l"), ("l", "r")]]


@pytest.mark.parametrize("unsynced", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_microbatches_count_together(pool2: Run, unsynced: bool, set_to_none: bool) -> None:
    assert pool2(difference, WINDOWS, unsynced=unsynced, set_to_none=set_to_none) == ["", ""]


def test_a_unit_that_steps_in_the_backward_leaves_them_out(pool2: Run) -> None:
    assert pool2(difference, PLANS["then nobody"], in_backward=True) == ["", ""]
    assert pool2(difference, PLANS["one output"], in_backward=True) == ["", ""]


def test_a_flat_parameter_has_no_gradient_where_none_of_its_parameters_has(pool2: Run) -> None:
    # Of the trunk only the spare parameter is without: with the others it is one, whose gradient is 0 there.
    assert pool2(nones_of_flats) == [[False, False, False, True]] * 2


def nones_of_flats(rank: int, world: int) -> list[bool]:
    model = FullyShardedDataParallel(Net(), auto_wrap_policy={Part}, use_orig_params=False)
    backward(model, data(rank, 0, 0), "l")
    return [parameter.grad is None for parameter in model.parameters()]


def exchanges(rank: int, world: int, plan: Plan) -> list[int]:
    """By backward."""
    net = Net()
    for head in net.left, net.right:
        head.spare.requires_grad_(False)
    model = FullyShardedDataParallel(net, auto_wrap_policy={Part}, use_orig_params=True)
    figures, seen = flatfsdp.stats(model), []
    for step, (takes,) in enumerate(plan):
        figures.reset()
        backward(model, data(rank, step, 0), takes[rank])
        seen.append(figures.comm["scalar"][0])
    return seen


def test_each_backward_ends_with_one_bitmap(pool2: Run) -> None:
    """From the first one on, whatever ranks lack or have lacked."""
    later = [*same("lrs", "lrs"), [("lrs", "l")], [("lrs", "l")]]
    for steps in same(*["lrs"] * 4), same(*["l"] * 4), [[("lrs", "l")]] * 4, later:
        for seen in pool2(exchanges, steps):
            assert seen[1:] == [1] * 3
    for seen in pool2(exchanges, same(*["l", "r"] * 5)):
        assert seen[5:] == [1] * 5


def test_replicas_exchange_one_bitmap_per_axis(pool4: Run) -> None:
    for seen in pool4(bytes_of_bitmaps):
        assert seen == [(2, 2 * 10)] * 2


def bytes_of_bitmaps(rank: int, world: int) -> list[tuple[int, int]]:
    model = FullyShardedDataParallel(
        Net(), auto_wrap_policy={Part}, sharding_strategy="HYBRID_SHARD", device_mesh=flatfsdp_mesh(world)
    )
    figures, seen = flatfsdp.stats(model), []
    for step in range(4):
        figures.reset()
        backward(model, data(rank, step, 0), "l" if rank else "lrs")
        seen.append(figures.comm["scalar"])
    return seen[2:]


def test_a_model_that_is_gone_has_taken_part(pool2: Run) -> None:
    # Rank 0 lacks no gradient, so it does not wait, and drops its model before the other one comes to the bitmap.
    assert pool2(gone_before_the_bitmap) == [[], ["0.weight", "1.weight"]]


def gone_before_the_bitmap(rank: int, world: int) -> list[str]:
    net = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, use_orig_params=True)
    for uses in 2, (2, 1)[rank]:
        model.zero_grad()
        outputs = [each(data(rank, 0, 0)).sum() for each in net]
        loss = torch.stack(outputs[:uses]).sum()
        if rank == 1:
            time.sleep(0.5)
        loss.backward()
    if rank == 0:
        del model, net, loss, outputs
        gc.collect()
        return []
    return sorted(name for name, parameter in model.named_parameters() if parameter.grad is not None)


def penalized(rank: int, world: int) -> list[str]:
    """A gradient that comes only in the backward of a gradient, on one rank."""
    torch.manual_seed(0)
    net = Net()
    model = FullyShardedDataParallel(net, auto_wrap_policy={Part}, use_orig_params=True)
    missing = []
    for step in range(3):
        model.zero_grad()
        left, right = model(data(rank, step, 0), False)
        left.square().mean().backward(create_graph=True)
        (right.square().mean() if rank == 0 else right.sum() * 0 + left.mean()).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            missing += [name for name, parameter in net.named_parameters() if parameter.grad is None]
    return missing


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True:UserWarning")
def test_what_only_the_second_backward_uses_has_its_gradient(pool2: Run) -> None:
    spares = [f"{name}.spare" for name in ("trunk", "left", "right")] * 3
    assert pool2(penalized) == [spares, spares]
