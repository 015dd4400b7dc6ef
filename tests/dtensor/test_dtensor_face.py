"""Parameters that are DTensors of rows at rest, as modules and optimizers hold them, against torch's `fully_shard`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.dtensor_faces import wrapped
from tests.harness.meshes import shared_mesh
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

KINDS = {nn.Embedding, nn.LayerNorm, nn.Linear}
Steps = Callable[[nn.Module, "Both"], None]


def net() -> nn.Sequential:
    """Sizes that no number of ranks divides, and one row only."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(13, 29), nn.LayerNorm(29), nn.Linear(29, 11), nn.ReLU(), nn.Linear(11, 1))


@lru_cache
def replicas() -> Any:
    """Two replicas of two shards, with the names that torch requires. Collective at the first call."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def theirs(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """`module` under torch's own."""
    for each in module:  # type: ignore[attr-defined]
        if type(each) in KINDS:
            fully_shard(each, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(13, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}


def check_equal(ours: nn.Module, torchs: nn.Module, *, grads: bool = True) -> None:
    """Local shards, specs and gradients of two models, to the bit."""
    for (name, one), (other_name, other) in zip(ours.named_parameters(), torchs.named_parameters(), strict=True):
        assert name == other_name and isinstance(one, nn.Parameter) and isinstance(one, DTensor)
        pairs = [(one, other)]
        if grads:
            assert (one.grad is None) is (other.grad is None), name
            pairs += [] if one.grad is None else [(one.grad, other.grad)]
        for mine, its in pairs:
            assert (mine.device_mesh, mine.placements) == (its.device_mesh, its.placements), name
            assert (mine.shape, mine.stride(), mine.dtype) == (its.shape, its.stride(), its.dtype), name
            assert torch.equal(mine.to_local(), its.to_local()), name
        assert one.requires_grad is other.requires_grad, name


class Both:
    """The same operations on a model of flatfsdp and on one of torch."""

    def __init__(self, rank: int, world: int, *, hybrid: bool = False, torchs: Any = None, **options: Any) -> None:
        self.rank, self.step = rank, 0
        self.mesh = replicas() if hybrid else shared_mesh(world)
        plain = net()
        self.theirs = theirs(copy.deepcopy(plain), self.mesh, **(torchs or {}))
        given = {"auto_wrap_policy": KINDS, "join_units_below": 0} | options
        self.ours = wrapped(plain, self.mesh, **given)
        self.optimizers = [self.optimizer(model) for model in self]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ours, self.theirs))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Fused: one operation for all DTensors. `test_optimizers_of_each_kind` has the others.
        return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def backward(self, *, sync: bool = True) -> None:
        """A forward and a backward of both."""
        self.step += 1
        losses = []
        for model in self:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(sync)
            with nullcontext() if sync or isinstance(model, FSDPModule) else model.no_sync():
                loss = model(batch(self.rank, self.step)).square().mean()
                loss.backward()
            losses.append(float(loss))
        assert losses[0] == losses[1]

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def train(self, steps: int = 2) -> None:
        """Steps with torch's clipping."""
        for _ in range(steps):
            self.backward()
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in self]
            assert norms[0].full_tensor() == norms[1].full_tensor()
            self.check()
            self.optimize()
            self.check()
            self.zero_grad()

    def check(self, **options: Any) -> None:
        check_equal(self.ours, self.theirs, **options)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    "bf16": (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
}


def _trains(rank: int, world: int, options: str, hybrid: bool) -> None:
    ours, torchs = OPTIONS[options]
    Both(rank, world, hybrid=hybrid, torchs=torchs, **ours).train(4)


@pytest.mark.parametrize("options", OPTIONS)
def test_shards_are_torchs_to_the_bit(pool2: Run, options: str) -> None:
    pool2(_trains, options, False)


def test_those_of_hybrids_are(pool4: Run) -> None:
    pool4(_trains, "default", True)


def _accumulates(rank: int, world: int) -> None:
    both = Both(rank, world)
    both.backward(sync=False)
    both.backward(sync=False)
    both.backward()
    both.check()  # of three microbatches
    both.backward()
    both.check()  # and one that was added to a gradient that was there
    both.optimize()
    for way in ({}, {"set_to_none": False}):
        both.zero_grad()
        both.backward(sync=False)
        assert all(parameter.grad is not None for parameter in both.ours.parameters())  # [Note: marks]
        for optimizer in both.optimizers[:1]:
            optimizer.zero_grad(**way)
        both.backward()  # in torch's, unsynchronized gradients outlive zero_grad()
        fresh = Both(rank, world)
        fresh.ours.load_state_dict(both.ours.state_dict())
        fresh.step = both.step - 1
        loss = fresh.ours(batch(rank, both.step)).square().mean()
        loss.backward()
        check_equal(both.ours, fresh.ours)
        both = Both(rank, world)


def test_accumulation(pool2: Run) -> None:
    pool2(_accumulates)


def _edits_a_list(rank: int, world: int) -> None:
    both = Both(rank, world)
    both.backward(sync=False)
    grads = [parameter.grad for parameter in both.ours.parameters()]
    assert all(type(each) is DTensor for each in pickle.loads(pickle.dumps(copy.deepcopy(grads))))
    torch._foreach_mul_(grads, 0.5)
    with pytest.raises(UsageError, match="was edited after a backward under no_sync"):
        both.backward()


def test_a_list_of_gradients_that_is_edited_before_they_are_synchronized(pool2: Run) -> None:
    pool2(_edits_a_list)


WRITES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "one by one": lambda model, _: [each.mul_(0.5) for each in model.parameters()],
    "local tensors": lambda model, _: [each._local_tensor.mul_(0.5) for each in model.parameters()],
    "copy": lambda model, _: [each.copy_(each * 0.5) for each in model.parameters()],
    "init": lambda model, _: [nn.init.constant_(each, 0.25) for each in model.parameters()],
    "a step": lambda model, optimizer: (
        [setattr(each, "grad", each * 0.5) for each in model.parameters()],
        torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step(),
        optimizer.zero_grad(),
    ),
    "a fused step": lambda model, optimizer: (
        [setattr(each, "grad", each * 0.5) for each in model.parameters()],
        torch.optim.AdamW(model.parameters(), lr=1.0, fused=True).step(),
        optimizer.zero_grad(),
    ),
    "a state dict": lambda model, _: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    "assigned": lambda model, _: model.load_state_dict(
        {k: v.detach() * 0.5 for k, v in model.state_dict().items()}, assign=True
    ),
    "swapped": lambda model, _: [
        torch.utils.swap_tensors(each, nn.Parameter(each.detach() * 0.5)) for each in model.parameters()
    ],
    "registered": lambda model, _: [
        setattr(module, name, nn.Parameter(value.detach() * 0.5))
        for module in model.modules()
        for name, value in list(module._parameters.items())
        if value is not None
    ],
}


def _writes(rank: int, world: int, way: str, kept: bool) -> None:
    options = {"reshard_after_forward": False, "auto_wrap_policy": None} if kept else {}
    both = Both(rank, world, torchs={"reshard_after_forward": False} if kept else {}, **options)
    both.train(1)
    with torch.no_grad():
        both.ours(batch(rank, 0))  # may leave it unsharded
        for model, optimizer in zip(both, both.optimizers, strict=True):
            is_ours = isinstance(model, FullyShardedDataParallel)
            # Torch does not notice these: the same by a way that it does.
            known = way if is_ours or way not in ("swapped", "registered") else "one by one"
            WRITES[known](model.module if is_ours else model, optimizer)
    both.backward()
    both.check()
    both.optimizers = [both.optimizer(model) for model in both]
    both.train(2)


@pytest.mark.parametrize(
    ("way", "kept"), [*((way, True) for way in WRITES), *((way, False) for way in some([*WRITES], 2))]
)
def test_writes_are_noticed(pool2: Run, way: str, kept: bool) -> None:
    pool2(_writes, way, kept)


def _steps_in_kernels(rank: int, world: int) -> None:
    both = Both(rank, world, reshard_after_forward=False, auto_wrap_policy=None)
    for kind in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        both.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, **kind) for model in both]
        both.train(3)


def test_optimizers_of_each_kind(pool2: Run) -> None:
    pool2(_steps_in_kernels)


def _flags(rank: int, world: int) -> None:
    both = Both(rank, world)
    for round in range(4):
        for model in both:
            weight = dict(model.named_parameters())["2.weight"]
            weight.requires_grad_(round % 2 == 1)
        both.train(2)


def test_parameters_frozen_and_thawed(pool2: Run) -> None:
    pool2(_flags)


class Partly(nn.Module):
    """One part is unused, another one is used by the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused, self.on_first = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        x = self.used(x)
        return self.on_first(x) if first else x


def _unused(rank: int, world: int) -> list[str]:
    model = wrapped(Partly(), shared_mesh(world))
    model(torch.ones(2, 3) + rank, rank == 0).sum().backward()
    found = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(isinstance(p.grad, DTensor) for n, p in model.named_parameters() if n not in found)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.full_tensor() > 0
    return found


def test_unused_parameters_have_no_gradient(pool2: Run) -> None:
    for found in pool2(_unused):
        assert found == ["unused.weight", "unused.bias"]


def _lives(rank: int, world: int) -> None:
    both = Both(rank, world)
    both.train(1)
    both.backward()
    model = both.ours
    gone = [weakref.ref(each.to_local().untyped_storage()) for each in (next(model.parameters()),)]
    kept = weakref.ref(model)
    del model, both
    gc.collect()  # torch's own, which has cycles
    both = Both(rank, world)
    both.train(1)
    gc.disable()
    try:
        model, both.ours, both.optimizers = both.ours, None, []
        refs = [weakref.ref(module) for module in model.modules()]
        del model
        assert not any(ref() is not None for ref in (*refs, kept, *gone))
    finally:
        gc.enable()


def test_a_deleted_model_is_gone(pool2: Run) -> None:
    pool2(_lives)


def _places(rank: int, world: int) -> None:
    model = wrapped(net(), shared_mesh(world), auto_wrap_policy=KINDS, join_units_below=0)
    names = list(dict(model.named_parameters()))
    holders = dict(model.named_parameters())
    memory = [(p.to_local().untyped_storage().data_ptr(), p.to_local().storage_offset()) for p in holders.values()]
    assert len(set(memory)) == len(memory) and all(address for address, _ in memory)
    seen = []
    model.module[2].module.register_forward_hook(lambda module, *_: seen.append(module.weight))
    for _ in range(2):
        model(batch(rank, 1)).sum().backward()
        assert list(dict(model.named_parameters())) == names
        assert all(now is holders[name] for name, now in model.named_parameters())
    assert not any(isinstance(each, DTensor) for each in seen) and seen[0] is seen[1]


def test_the_same_objects_at_rest_in_their_order(pool2: Run) -> None:
    pool2(_places)


def _moves(rank: int, world: int) -> None:
    model = wrapped(net(), shared_mesh(world), auto_wrap_policy=KINDS, join_units_below=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(model.parameters())
    model(batch(rank, 1)).sum().backward()
    before = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    model.double()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.to_local().dtype == parameter.grad.dtype == torch.float64
        assert torch.equal(parameter.detach().full_tensor(), before[name].double())
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    optimizer.step()
    optimizer.zero_grad()
    loss = model(batch(rank, 2)).sum()
    loss.backward()
    assert loss.dtype == torch.float64
    changed = [not torch.equal(p.detach().full_tensor(), before[n].double()) for n, p in model.named_parameters()]
    assert all(changed)


def test_another_dtype(pool2: Run) -> None:
    pool2(_moves)


def _refused(rank: int, world: int) -> list[str]:
    mesh = shared_mesh(world)
    texts = []
    for value in (torch.ones(11, 28), distribute_tensor(torch.ones(11, 28), mesh), torch.ones(3)):
        model = wrapped(net(), mesh)
        model.module[2].weight = nn.Parameter(value)
        with pytest.raises(UsageError) as caught:
            model(batch(rank, 1))
        texts.append(str(caught.value))
    model = wrapped(net(), mesh)
    model.module[2].weight = nn.Parameter(torch.ones(11, 29))  # whole: each rank takes its part
    model(batch(rank, 1)).sum().backward()
    assert torch.equal(model.module[2].weight.detach().full_tensor(), torch.ones(11, 29))
    return texts


def test_what_is_split_otherwise_is_refused(pool2: Run) -> None:
    for text in pool2(_refused):
        assert all("'2.weight' was replaced by" in each and "distribute_tensor(" in each for each in text)


def _optimizer_states(rank: int, world: int) -> None:
    mesh = shared_mesh(world)
    options = {"auto_wrap_policy": KINDS, "join_units_below": 0}
    model = wrapped(net(), mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    flat = FullyShardedDataParallel(net(), use_orig_params=True, **options)
    other = torch.optim.AdamW(flat.parameters(), lr=0.05)
    for each, steps in ((model, optimizer), (flat, other)):
        for step in range(2):
            each(batch(rank, step)).square().mean().backward()
            steps.step()
            steps.zero_grad()
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    expected = FullyShardedDataParallel.optim_state_dict(flat, other)
    assert saved["state"].keys() == expected["state"].keys() and len(saved["state"]) == 7
    for name, states in saved["state"].items():
        for state, value in states.items():
            assert torch.equal(value, expected["state"][name][state]), (name, state)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.05)
    fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, expected))
    for parameter in model.parameters():
        for state, value in fresh.state[parameter].items():
            was = optimizer.state[parameter][state]
            assert isinstance(value, DTensor) is isinstance(was, DTensor), state
            if isinstance(value, DTensor):
                assert value.placements == parameter.placements and value.shape == parameter.shape
                value, was = value.to_local(), was.to_local()
            assert torch.equal(value, was), state
    loaded = wrapped(net(), mesh, **options)
    loaded.load_state_dict(flat.state_dict())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local()), name


def test_states_of_optimizers_by_name(pool2: Run) -> None:
    pool2(_optimizer_states)


def _hooks(rank: int, world: int) -> tuple[list[str], str]:
    mesh, seen = shared_mesh(world), []
    model = wrapped(net(), mesh, auto_wrap_policy=KINDS, join_units_below=0)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append(f"{name} {type(p.grad).__name__}")
        )
    model(batch(rank, 1)).sum().backward()
    model.module[2].weight.register_hook(lambda grad: grad)
    with pytest.raises(UsageError) as caught:
        model(batch(rank, 1)).sum().backward()
    return sorted(seen), str(caught.value)


def test_hooks_of_users(pool2: Run) -> None:
    names = [name for name, _ in net().named_parameters()]
    for seen, text in pool2(_hooks):
        assert seen == sorted(f"{name} DTensor" for name in names)
        assert text.startswith("the DTensor of unit '2' has a hook of register_hook()")


class Recurrent(nn.Module):
    """Weights that a module has in a list, and tied ones, in one unit and across units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.lstm = nn.Embedding(13, 6), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def _recurrent(rank: int, world: int, across: bool) -> None:
    plain = Recurrent()
    units: dict[str, Any] = {"auto_wrap_policy": {nn.Embedding, nn.LSTM}} if across else {}
    model = wrapped(copy.deepcopy(plain), shared_mesh(world), join_units_below=0, **units)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss = each(torch.arange(12).view(3, 4) + step % 2).square().mean()  # alike on all ranks
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["embed.weight"]
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(parameters[name].detach().full_tensor(), expected.detach())


@pytest.mark.parametrize("across", [False, True])
def test_recurrent_modules_and_ties(pool2: Run, across: bool) -> None:
    pool2(_recurrent, across)


def _offloads(rank: int, world: int) -> None:
    both = Both(rank, world, cpu_offload=True)
    both.train(3)
    both.backward(sync=False)
    both.backward()
    both.check()


def test_offloaded_shards(pool2: Run) -> None:
    pool2(_offloads)


def _evaluates(rank: int, world: int) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    model = wrapped(net(), shared_mesh(world), auto_wrap_policy=KINDS, join_units_below=0, mixed_precision=policy)
    loss = model(batch(rank, 1)).square().mean()
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert all(p.grad.dtype == p.grad.to_local().dtype == torch.float32 for p in model.parameters())
    model.eval()
    assert torch.equal(model(batch(rank, 1)), net()(batch(rank, 1)))
    model.train()
    model(batch(rank, 1)).square().mean().backward()


def test_full_precision_in_evaluation(pool2: Run) -> None:
    pool2(_evaluates)


def _summons(rank: int, world: int) -> None:
    model = wrapped(net(), shared_mesh(world), auto_wrap_policy=KINDS, join_units_below=0)
    model(batch(rank, 1)).square().mean().backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            assert not isinstance(parameter, DTensor)
            assert torch.equal(parameter.grad, grads[name])
            parameter.data.mul_(2)
            parameter.grad.mul_(2)
    for (name, parameter), was in zip(model.named_parameters(), net().parameters(), strict=True):
        assert torch.equal(parameter.detach().full_tensor(), 2 * was)
        assert torch.equal(parameter.grad.full_tensor(), 2 * grads[name])


def _drops_summoned_gradients(rank: int, world: int) -> None:
    """Dropped and given gradients are so on every rank, also without rows of a parameter."""
    model = wrapped(net(), shared_mesh(world), auto_wrap_policy=KINDS, join_units_below=0)
    model(batch(rank, 1)).square().mean().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(each.grad.full_tensor(), torch.ones(each.shape)) for each in model.parameters())


def test_summoned_gradients_are_dropped_and_given_on_every_rank(pool2: Run) -> None:
    pool2(_drops_summoned_gradients)


def test_summoned_parameters(pool2: Run) -> None:
    pool2(_summons)


def _columns(rank: int, world: int) -> None:
    """A parameter whose second dimension is the slowest in memory."""
    plain = nn.Linear(5, 6)
    whole = torch.arange(30.0).view(6, 5)
    plain.weight = nn.Parameter(whole.t().contiguous().t())
    expected = copy.deepcopy(plain)
    model = wrapped(plain, shared_mesh(world))
    weight = model.module.weight
    assert weight.placements == (Shard(1),) and weight.stride() == (5, 1)
    assert torch.equal(weight.to_local(), whole.chunk(world, 1)[rank])
    for each in (model, expected):
        each(torch.ones(2, 5)).square().mean().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected.weight.grad)


def test_other_dimensions(pool2: Run) -> None:
    pool2(_columns)
