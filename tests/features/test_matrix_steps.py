"""Optimizers that see whole matrices on shards: the bits of one process with the same gradients, at the stated cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MatrixSteps, MixedPrecision, StateDictType, checkpoint, fully_shard
from flatfsdp.errors import AgreementError, UsageError
from flatfsdp.layout import Grain, Rows, Whole
from tests.conftest import Run
from tests.fully_shard.test_pipelines import batch as pipeline_batch
from tests.fully_shard.test_pipelines import blocks, loss_of, staged
from tests.harness import inspect
from tests.harness.corners import seeded
from tests.harness.gradients import plain
from tests.harness.meshes import named_mesh, replicas_of_shards
from tests.harness.tensor_parallel import batches, sharded
from tests.harness.tensor_parallel import loss_of as loss_with
from tests.harness.thorough import spread

pytestmark = pytest.mark.distributed

Tensors = dict[str, Tensor]
STEPS = 5


class Net(nn.Module):
    """Matrices of several shapes: wide, long, one of a single row, experts of which one call may use none, without
    elements; and vectors."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width)) for _ in range(2)
        )
        self.experts = nn.Parameter(torch.randn(5, width, 7))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.row = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, *, experts: bool = True) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        y = self.row(x).square().mean() + 0 * self.nothing.sum()
        if experts:
            y = y + torch.einsum("bi,eij->bej", x, self.experts).square().mean()
        return y


def is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1


def muon(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, **({"lr": 0.05, "weight_decay": 0.1} | more))


def adafactor(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, **({"lr": 0.05} | more))


class OneProcess:
    """The same model in one process, stepped with gradients that are given to it: experts as one matrix each."""

    def __init__(self, model: nn.Module, make: Any, *, tensors: bool) -> None:
        self.model = model
        self.parts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if tensors or is_matrix(parameter):
                values = [parameter] if tensors or parameter.dim() == 2 else parameter.detach().unbind()
                if parameter.numel():
                    self.parts[name] = [nn.Parameter(each.detach().clone()) for each in values]
        self.optimizer = make([each for parts in self.parts.values() for each in parts])
        others = [p for name, p in model.named_parameters() if name not in self.parts]
        self.other = torch.optim.AdamW(others, lr=0.05)

    def step(self, gradients: dict[str, Tensor | None]) -> None:
        for name, parameter in self.model.named_parameters():
            grad = gradients[name]
            parameter.grad = None if grad is None else grad.clone()
            for i, each in enumerate(self.parts.get(name, ())):
                each.grad = None if grad is None else (grad[i] if each.dim() < grad.dim() else grad).clone()
        self.optimizer.step()
        self.other.step()

    def tensors(self) -> Tensors:
        whole = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parts in self.parts.items():
            whole[name] = torch.stack([*parts]).reshape(whole[name].shape).detach()
        return whole


def whole(model: nn.Module, value: str) -> dict[str, Tensor | None]:
    """Full parameters, or gradients, by name. Collective."""
    found: dict[str, Tensor | None] = {}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=value == "grad"):
            for name, parameter in model.named_parameters():
                each = parameter if value == "data" else parameter.grad
                found[plain(name)] = None if each is None else each.detach().clone()
        return found
    for name, parameter in model.named_parameters():
        each: Any = parameter if value == "data" else parameter.grad
        found[name] = None if each is None else each.full_tensor().detach().clone()
    return found


def wrapped(front: str, **settings: Any) -> nn.Module:
    net = seeded(Net)
    if front == "fully_shard":
        if "mesh" in settings:
            settings["mesh"] = named_mesh(*settings["mesh"])
        for block in net.blocks:
            fully_shard(block, **settings)
        return fully_shard(net, **settings)
    if settings.get("sharding_strategy") == "HYBRID_SHARD":
        settings["device_mesh"] = replicas_of_shards()
    return FullyShardedDataParallel(net, auto_wrap_policy={nn.Sequential}, use_orig_params=True, **settings)


def matrices_and_others(model: nn.Module, *, tensors: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    shapes = flatfsdp.unsharded_shapes(model)
    params: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, parameter in model.named_parameters():
        params[not (tensors or len(shapes[name]) > 1)].append(parameter)
    return params


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * number + rank))


@contextmanager
def unsynced(model: Any) -> Iterator[None]:
    """Inside, backwards accumulate gradients without a reduction."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def trained(
    rank: int,
    world: int,
    front: str,
    make: Any,
    *,
    tensors: bool = False,
    bucket_bytes: int = 2**20,
    clip: bool = False,
    accumulate: bool = False,
    sees: str | None = None,
    **settings: Any,
) -> list[str]:
    """The differences to one process after some steps, of which one leaves the experts out."""
    model = wrapped(front, **settings)
    params, others = matrices_and_others(model, tensors=tensors)
    steps = flatfsdp.matrix_steps(make, params, bucket_bytes=bucket_bytes, sees=sees)
    other = torch.optim.AdamW(others, lr=0.05) if others else None
    reference = OneProcess(seeded(Net), make, tensors=tensors)
    for number in range(STEPS):
        if accumulate:
            with unsynced(model):
                model(batch(rank, number + 10), experts=number != 2).backward()
        model(batch(rank, number), experts=number != 2).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        reference.step(whole(model, "grad"))
        steps.optimizer.step()
        if other is not None:
            other.step()
        for parameter in model.parameters():
            parameter.grad = None
    expected = reference.tensors()
    found = whole(model, "data")
    assert found.keys() == expected.keys()
    assert steps.plans, "no step was taken"
    return [
        f"rank {rank}, {name}: {(value - expected[name]).abs().max()}"
        for name, value in found.items()
        if value is not None and value.numel() and not torch.equal(value, expected[name])
    ]


def by_rows(name: str, parameter: Tensor) -> Grain | None:
    return Rows() if is_matrix(parameter) else None


def whole_matrices(name: str, parameter: Tensor) -> Grain | None:
    return Whole(padding=inf) if is_matrix(parameter) else None


SETTINGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "small buckets": {"bucket_bytes": 800},
    "clipped": {"clip": True},
    "accumulated": {"accumulate": True},
    "bf16 gathers": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "rows": {"layout": by_rows},
    "whole": {"layout": whole_matrices},
    "as the optimizer prefers": {"layout": torch.optim.Muon},
}


WAYS = [None, "matrices"]  # Muon in parts; its own step on whole matrices


PLACES = [(world, sees) for world in (2, 3) for sees in WAYS]


@pytest.mark.parametrize(("place", "setting"), spread(PLACES, SETTINGS))
def test_muon_has_the_bits_of_one_process(place: tuple[int, str | None], setting: str, run: Run) -> None:
    world, sees = place
    results = run(world, trained, "wrapper", muon, sees=sees, **SETTINGS[setting])
    assert [line for each in results for line in each] == []


@pytest.mark.parametrize(("sees", "world"), spread(WAYS, [1, 2, 3]))
def test_muon_has_the_bits_of_one_process_on_dtensors(sees: str | None, world: int, run: Run) -> None:
    assert [line for each in run(world, trained, "fully_shard", muon, sees=sees) for line in each] == []


@pytest.mark.parametrize("sees", WAYS)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_muon_has_the_bits_of_one_process_with_replicas(front: str, sees: str | None, run: Run) -> None:
    settings = {"sharding_strategy": "HYBRID_SHARD"} if front == "wrapper" else {"mesh": (2, 2)}
    results = run(4, trained, front, muon, sees=sees, bucket_bytes=800, **settings)
    assert [line for each in results for line in each] == []


@pytest.mark.parametrize("sees", WAYS)
@pytest.mark.parametrize("world", [1, 4])
def test_muon_has_the_bits_of_one_process_on_one_rank_and_on_four(world: int, sees: str | None, run: Run) -> None:
    assert [line for each in run(world, trained, "wrapper", muon, sees=sees, clip=True) for line in each] == []


def _given_twice(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4, bias=False)), use_orig_params=True)
    (weight,) = model.parameters()
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        flatfsdp.matrix_steps(partial(torch.optim.Muon), [{"params": [weight]}, {"params": [weight], "lr": 0.2}])


def test_a_matrix_in_two_groups_is_refused_as_by_torch(pool2: Run) -> None:
    pool2(_given_twice)


def _changed_before_a_step(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4, bias=False)), use_orig_params=True)
    steps = flatfsdp.matrix_steps(partial(torch.optim.Muon, weight_decay=0.0), model.parameters())
    (weight,) = model.parameters()

    def drop(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert weight.grad is not None
        weight.grad.zero_()

    handle = steps.optimizer.register_step_pre_hook(drop)
    before = weight.detach().clone()
    for drops in (True, True, False):
        if not drops:
            handle.remove()
        model(torch.ones(2, 4)).sum().backward()
        steps.optimizer.step()
        steps.optimizer.zero_grad()
        assert torch.equal(weight, before) is (drops or not weight.numel())


def test_hooks_before_a_step_change_gradients(pool2: Run) -> None:
    pool2(_changed_before_a_step)


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {plain(name): dict(each) for name, each in states.items()}


def counted(rank: int, world: int, bucket_bytes: int, sees: str | None, settings: dict[str, Any]) -> tuple[Any, ...]:
    model = wrapped("wrapper", **settings)
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(muon, params, bucket_bytes=bucket_bytes, sees=sees)
    model(batch(rank, 0)).backward()
    stats = inspect.comm_stats(model)
    counts, sizes = Counter(stats.counts), Counter(stats.bytes)
    steps.optimizer.step()
    (plan,) = steps.plans
    counts, sizes = Counter(stats.counts) - counts, Counter(stats.bytes) - sizes
    each, size = (1, 2) if sees is None else (2, 4)  # momentum in bfloat16; gradient and parameter
    member = rank % plan.world
    axes = 1 + (world > plan.world > 1)
    looks = plan.world > 1
    calls = plan.exchanges + looks + axes
    assert (counts["all_to_all"], counts["scalar"], counts.total()) == (plan.exchanges, looks + axes, calls)
    assert sizes["all_to_all"] == each * size * plan.sent(member) + size * plan.returned(member)
    assert sizes["scalar"] == looks * plan.world * len(plan.matrices) + axes
    state = steps.optimizer.state
    if sees is None:
        held = sum(parameter.numel() for parameter in params)
        assert sum(value["momentum_buffer"].numel() for value in state.values()) == held
    else:
        experts = state.get(dict(model.named_parameters())[name_of(model, "experts")], {}).get("experts", {})
        has = [key for key, value in state.items() if "momentum_buffer" in value]
        assert len(has) + len(experts) == plan.owners.count(member)
    return steps.summary(), plan.owners, plan.imbalance


def name_of(model: nn.Module, ending: str) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith(ending))


def alone_in_state_dict(rank: int, world: int) -> str:
    """What it says if rank 0 alone asks for its states, and the others train."""
    model = FullyShardedDataParallel(seeded(Net), use_orig_params=True)
    optimizer = adafactor(model.parameters())
    flatfsdp.matrix_steps(optimizer)
    x = torch.randn(3, 12)
    model(x).backward()
    optimizer.step()
    with pytest.raises(AgreementError) as caught:
        optimizer.state_dict() if rank == 0 else model(x).backward()
    return str(caught.value)


def test_a_state_dict_of_one_rank_alone_is_an_error_on_all(run: Run) -> None:
    for text in run(2, alone_in_state_dict):
        assert re.search(r"rank 0.*called optimizer\.state_dict\(\) of Adafactor, whose matrices have owners", text), (
            text
        )


class Around(torch.optim.Optimizer):
    """An optimizer that holds another one, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def around(rank: int, world: int) -> list[str]:
    """The states that are saved from one that holds it, and loaded into one, that differ."""
    model = FullyShardedDataParallel(seeded(Net), use_orig_params=True)
    optimizer, other = adafactor(model.parameters()), adafactor(model.parameters())
    flatfsdp.matrix_steps(optimizer)
    flatfsdp.matrix_steps(other)
    model(torch.randn(3, 12)).backward()
    optimizer.step()
    saved = FullyShardedDataParallel.optim_state_dict(model, Around(optimizer))
    mine = FullyShardedDataParallel.optim_state_dict_to_load(model, Around(other), saved)
    other.load_state_dict(mine)
    again = FullyShardedDataParallel.optim_state_dict(model, other)
    return [
        f"{parameter}.{name}"
        for parameter, state in saved["state"].items()
        for name, value in state.items()
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][parameter][name]))
    ]


def test_one_that_holds_the_optimizer_saves_and_loads_its_states(run: Run) -> None:
    assert run(2, around) == [[], []]


@pytest.mark.parametrize("sees", WAYS)
@pytest.mark.parametrize("bucket_bytes", [800, 2**20])
def test_collectives_and_bytes_are_those_of_the_formulas(bucket_bytes: int, sees: str | None, pool3: Run) -> None:
    results = pool3(counted, bucket_bytes, sees, {})
    assert len({each[1] for each in results}) == 1
    assert all(each[2] < 1.5 for each in results)
    assert "matrices on 3 ranks" in results[0][0]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
def test_replicas_step_on_all_matrices_each_at_the_cost_of_the_formulas(strategy: str, pool4: Run) -> None:
    results = pool4(counted, 800, None, {"sharding_strategy": strategy})
    assert {*results[0][1]} == ({0, 1} if strategy == "HYBRID_SHARD" else {0})


class Counting(torch.optim.Muon):
    """One that records how many all-to-alls were begun before each of its steps."""

    begun: Any = staticmethod(lambda: 0)
    seen: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            Counting.seen.append(Counting.begun())
        return super().step(closure)


def overlapped(rank: int, world: int) -> tuple[int, list[int]]:
    model = fully_shard(seeded(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))))
    make = partial(Counting, lr=0.05)
    steps = flatfsdp.matrix_steps(make, model.parameters(), sees="matrices", bucket_bytes=world * 8 * 8 * 4)
    model(torch.ones(1, 8)).sum().backward()
    stats = inspect.comm_stats(model)
    Counting.seen, Counting.begun = [], lambda: stats.counts["all_to_all"]
    steps.optimizer.step()
    return steps.plans[0].exchanges, Counting.seen


def test_the_next_bucket_is_on_its_way_while_one_is_computed(pool2: Run) -> None:
    # Before step k, k + 2 of the 3 buckets were sent to owners, and k of them were sent back.
    assert pool2(overlapped) == [(6, [2, 4, 5])] * 2


def with_settings(rank: int, world: int) -> list[str]:
    found = []
    for settings in ({"nesterov": False}, {"lr": torch.tensor(0.05)}, {"adjust_lr_fn": "match_rms_adamw"}):
        found += trained(rank, world, "wrapper", partial(muon, **settings))
    return found


def test_settings_of_muon_give_the_bits_of_one_process(pool2: Run) -> None:
    assert [line for each in pool2(with_settings) for line in each] == []


def in_a_pipeline(rank: int, world: int) -> list[str]:
    """The differences to torch's Muon on whole matrices, with the gradients of each stage."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ((number, module),) = staged(mesh, blocks(), "Schedule1F1B", flatfsdp).items()
    group: Any = mesh.get_group("pp")
    stage = pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=group)
    schedule = pipelining.Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
    params: dict[str, Any] = {name: each for name, each in module.named_parameters() if each.dim() == 2}
    steps = flatfsdp.matrix_steps(muon, params.values())
    alone = {name: nn.Parameter(each.full_tensor().detach().clone()) for name, each in params.items()}
    reference = muon([*alone.values()])
    for step in range(3):
        inputs, target = pipeline_batch(step, mesh["dp"].get_local_rank())
        schedule.step(*[inputs] * (number == 0), **{"target": target} if number else {})
        for name, each in params.items():
            alone[name].grad = each.grad.full_tensor()
        steps.optimizer.step()
        reference.step()
        module.zero_grad()
    return [name for name, each in params.items() if not torch.equal(each.full_tensor(), alone[name])]


def test_stages_of_a_pipeline_take_steps_of_their_own(pool4: Run) -> None:
    assert pool4(in_a_pipeline, timeout=60) == [[]] * 4


def lacking(rank: int, world: int) -> None:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(muon, params)
    model(batch(rank, 0)).backward()
    if rank:
        for parameter in params:
            parameter.grad = None
    steps.optimizer.step()


def test_a_gradient_on_some_ranks_only_is_an_error_on_all(pool2: Run) -> None:
    with pytest.raises(Exception, match=r"rank 0 has a gradient of parameter .*, but rank 1.*has none") as caught:
        pool2(lacking)
    assert {*caught.value.errors} == {0, 1}  # type: ignore[attr-defined]


class Failing(torch.optim.Muon):
    """One that fails on a rank, once."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            Failing.fails = False
            raise ValueError("a step of its own")
        return super().step(closure)


def failing(rank: int, world: int, front: str) -> bool:
    model = wrapped(front)
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(partial(Failing, lr=0.05), params, sees="matrices", bucket_bytes=800)
    Failing.fails = rank == 1
    model(batch(rank, 0)).backward()
    pattern, kind = ("^a step of its own", ValueError) if rank == 1 else ("rank 1: ValueError: a step", AgreementError)
    with pytest.raises(kind, match=pattern):
        steps.optimizer.step()
    steps.optimizer.step()
    model.zero_grad()
    model(batch(rank, 1)).backward()
    steps.optimizer.step()
    return all(value is None or bool(value.isfinite().all()) for value in whole(model, "data").values())


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_a_failed_step_of_one_owner_is_an_error_on_all_ranks_which_go_on(front: str, pool3: Run) -> None:
    assert all(pool3(failing, front))


def with_tensor_parallelism(rank: int, world: int, shape: tuple[int, ...], sequence: bool) -> tuple[list[str], str]:
    """The differences of matrices that tensor parallelism splits to those of one process; and a refusal."""
    model = sharded(shape, sequence=sequence)

    def wholes(value: str) -> Tensors:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=value == "grad"):
            found = {
                plain(name): each if value == "data" else each.grad
                for name, each in model.named_parameters()
                if "blocks" in name and "weight" in name and "norm" not in name
            }
            return {
                name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
                for name, each in found.items()
            }

    names = wholes("data").keys()
    params = [each for name, each in model.named_parameters() if plain(name) in names]
    with pytest.raises(UsageError) as caught:
        flatfsdp.matrix_steps(muon, params, sees="matrices")
    steps = flatfsdp.matrix_steps(muon, params, bucket_bytes=400)
    alone = {name: nn.Parameter(each) for name, each in wholes("data").items()}
    reference = muon([*alone.values()])
    for step in range(3):
        tokens, classes, place = batches(shape, step)
        loss_with(model, tokens[place], classes[place]).backward()
        for name, each in wholes("grad").items():
            alone[name].grad = each
        steps.optimizer.step()
        reference.step()
        model.zero_grad()
    found = wholes("data")
    return [name for name, each in alone.items() if not torch.equal(found[name], each)], str(caught.value)


@pytest.mark.parametrize(("sequence", "shape"), spread([True, False], [(1, 2), (2, 2)]))
def test_a_matrix_that_tensor_parallelism_splits_is_one_matrix(shape: Any, sequence: bool, run: Run) -> None:
    for unlike, refusal in run(shape[0] * shape[1], with_tensor_parallelism, shape, sequence):
        assert unlike == []
        assert re.search("is a part of a tensor that tensor parallelism has split.*element-wise optimizer", refusal)


def refused(rank: int, world: int) -> list[str]:
    model = wrapped("wrapper")
    params, others = matrices_and_others(model, tensors=False)
    found = []

    def refuse(call: Any) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        found.append(str(caught.value))

    refuse(lambda: flatfsdp.matrix_steps(muon, others))
    refuse(lambda: flatfsdp.matrix_steps(torch.optim.AdamW(params)))
    steps = flatfsdp.matrix_steps(muon, params)
    refuse(lambda: flatfsdp.matrix_steps(steps.optimizer))
    refuse(lambda: flatfsdp.optimizer_in_backward(model, steps.optimizer))
    refuse(lambda: steps.optimizer.step(lambda: 0.0))
    flat = FullyShardedDataParallel(nn.Linear(4, 4))
    refuse(lambda: flatfsdp.matrix_steps(muon, flat.parameters()))
    low = FullyShardedDataParallel(nn.Linear(4, 4, bias=False).bfloat16(), use_orig_params=True)
    refuse(lambda: flatfsdp.matrix_steps(partial(muon, nesterov=False), low.parameters()))
    return found


def test_what_cannot_be_stepped_on_is_refused_in_words(pool2: Run) -> None:
    expected = [
        "its shape is .*Give it to another optimizer",
        "it is not known what torch.optim.adamw.AdamW has to see completely",
        "steps on whole matrices already",
        "exchange parts",
        "with a closure",
        "holds a flat parameter",
        "nesterov=False divides the momentum of bfloat16 parameters",
    ]
    for found in pool2(refused):
        assert len(found) == len(expected)
        for text, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, text), (pattern, text)


def other_owners(rank: int, world: int) -> tuple[Any, ...]:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    owners = dict.fromkeys(params, 1)
    steps = flatfsdp.matrix_steps(muon, params, owners=owners, cost=lambda shape: 1, sees="matrices")
    model(batch(rank, 0)).backward()
    steps.optimizer.step()
    assert isinstance(steps, MatrixSteps)
    return steps.plans[0].owners, sum(map(bool, steps.optimizer.state.values()))


def test_owners_can_be_chosen(pool2: Run) -> None:
    first, second = pool2(other_owners)
    assert {*first[0]} == {1}
    assert first[1] == 0 < second[1]


# -- states by name ----------------------------------------------------------------------------------------------------


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Whole states by name. Collective."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {plain(name): each["momentum_buffer"] for name, each in states.items()}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for number in numbers:
        model(batch(rank, number), experts=number != 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(rank: int, world: int, path: str, layout: Any, sees: str | None) -> tuple[Tensors, Tensors]:
    """States after steps that a state dict interrupts, and those of steps that none does."""
    results = []
    for interrupted in (True, False):
        model = wrapped("wrapper", layout=layout)
        steps = flatfsdp.matrix_steps(muon, matrices_and_others(model, tensors=False)[0], sees=sees)
        stepped(model, steps.optimizer, rank, range(2))
        if interrupted:
            momenta(model, steps.optimizer)
        stepped(model, steps.optimizer, rank, range(2, 4))
        results.append(momenta(model, steps.optimizer))
    checkpoint.save(path, model=model, optimizer=steps.optimizer)
    return results[0], results[1]


def loaded(rank: int, world: int, path: str, layout: Any, sees: str | None) -> tuple[Tensors, Tensors, list[str]]:
    """States as loaded, the same after a step took them to their owners, and differences to one process."""
    model = wrapped("wrapper", layout=layout)
    steps = flatfsdp.matrix_steps(muon, matrices_and_others(model, tensors=False)[0], sees=sees)
    stepped(model, steps.optimizer, rank, range(1))
    checkpoint.load(path, model=model, optimizer=steps.optimizer)
    found = momenta(model, steps.optimizer)
    one = seeded(Net)
    values = whole(model, "data")
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.copy_(values[name])
    reference = OneProcess(one, muon, tensors=False)
    for name, parts in reference.parts.items():
        buffers = found[name].unbind() if found[name].dim() > 2 else [found[name]]
        for part, buffer in zip(parts, buffers, strict=True):
            reference.optimizer.state[part]["momentum_buffer"] = buffer.clone()
    model(batch(rank, 7)).backward()
    reference.step(whole(model, "grad"))
    steps.optimizer.step()
    expected, values = reference.tensors(), whole(model, "data")
    unlike = [name for name in reference.parts if not torch.equal(values[name], expected[name])]
    after = momenta(model, steps.optimizer)
    for name, parts in reference.parts.items():
        buffers = torch.stack([reference.optimizer.state[part]["momentum_buffer"] for part in parts])
        unlike += [f"momentum of {name}"] * (not torch.equal(after[name], buffers.reshape(after[name].shape)))
    return found, after, unlike


@pytest.mark.parametrize(
    ("layouts", "ways"),
    spread(
        [("flat", "flat"), (whole_matrices, by_rows)],
        [(None, None), ("matrices", "matrices"), ("matrices", None), (None, "matrices")],
    ),
)
def test_states_are_saved_by_name_and_loaded_on_other_ranks(layouts: Any, ways: Any, tmp_path: Path, run: Run) -> None:
    interrupted, straight = run(4, saved, str(tmp_path / "x"), layouts[0], ways[0])[0]
    assert {*straight} == {"experts", "row.weight", *(f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (0, 2))}
    assert all(torch.equal(interrupted[name], value) for name, value in straight.items())
    for found, _, unlike in run(3, loaded, str(tmp_path / "x"), layouts[1], ways[1]):
        assert unlike == []
        assert all(torch.equal(found[name], value) for name, value in straight.items())
