"""Optimizers that see whole matrices on shards: the bits of one process with the same gradients, at the stated cost."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MatrixSteps, StateDictType, checkpoint, fully_shard
from flatfsdp.errors import UsageError
from flatfsdp.layout import Grain, Rows, Whole
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import seeded
from tests.harness.gradients import plain
from tests.harness.meshes import replicas_of_shards

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


def trained(
    rank: int,
    world: int,
    front: str,
    make: Any,
    *,
    tensors: bool = False,
    bucket_bytes: int = 2**20,
    clip: bool = False,
    **settings: Any,
) -> list[str]:
    """The differences to one process after some steps, of which one leaves the experts out."""
    model = wrapped(front, **settings)
    params, others = matrices_and_others(model, tensors=tensors)
    steps = flatfsdp.matrix_steps(make, params, bucket_bytes=bucket_bytes)
    other = torch.optim.AdamW(others, lr=0.05) if others else None
    reference = OneProcess(seeded(Net), make, tensors=tensors)
    for number in range(STEPS):
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
    return Whole() if is_matrix(parameter) else None


SETTINGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "small buckets": {"bucket_bytes": 800},
    "clipped": {"clip": True},
    "rows": {"layout": by_rows},
    "whole": {"layout": whole_matrices},
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_muon_has_the_bits_of_one_process(world: int, setting: str, run: Run) -> None:
    assert [line for each in run(world, trained, "wrapper", muon, **SETTINGS[setting]) for line in each] == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_muon_has_the_bits_of_one_process_on_dtensors(world: int, run: Run) -> None:
    assert [line for each in run(world, trained, "fully_shard", muon) for line in each] == []


def test_muon_has_the_bits_of_one_process_with_replicas(run: Run) -> None:
    results = run(4, trained, "wrapper", muon, sharding_strategy="HYBRID_SHARD")
    assert [line for each in results for line in each] == []


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_adafactor_has_the_bits_of_one_process(front: str, pool3: Run) -> None:
    results = pool3(trained, front, adafactor, tensors=True)
    assert [line for each in results for line in each] == []


def counted(rank: int, world: int, bucket_bytes: int) -> tuple[Any, ...]:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(muon, params, bucket_bytes=bucket_bytes)
    model(batch(rank, 0)).backward()
    stats = inspect.comm_stats(model)
    counts, sizes = Counter(stats.counts), Counter(stats.bytes)
    steps.optimizer.step()
    (plan,) = steps.plans
    counts, sizes, size = Counter(stats.counts) - counts, Counter(stats.bytes) - sizes, 4
    assert counts == {"all_to_all": plan.exchanges, "scalar": 1}
    assert sizes["all_to_all"] == 2 * size * plan.sent(rank) + size * plan.returned(rank)
    assert sizes["scalar"] == world * len(plan.matrices)
    owned = [i for i, owner in enumerate(plan.owners) if owner == rank]
    state = steps.optimizer.state
    experts = state.get(dict(model.named_parameters())[name_of(model, "experts")], {}).get("experts", {})
    has = [key for key, value in state.items() if "momentum_buffer" in value]
    assert len(has) + len(experts) == len(owned)
    return steps.summary(), plan.owners, sum(m.numel for m in plan.matrices), plan.imbalance


def name_of(model: nn.Module, ending: str) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith(ending))


@pytest.mark.parametrize("bucket_bytes", [800, 2**20])
def test_collectives_and_bytes_are_those_of_the_formulas(bucket_bytes: int, pool3: Run) -> None:
    results = pool3(counted, bucket_bytes)
    assert len({each[1] for each in results}) == 1
    assert all(each[3] < 1.5 for each in results)
    assert "matrices on 3 ranks" in results[0][0]


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
    model(batch(rank, 0)).backward()
    steps.optimizer.step()
    refuse(steps.remove)
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
        "states of whole matrices already",
    ]
    for found in pool2(refused):
        assert len(found) == len(expected)
        for text, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, text), (pattern, text)


def other_owners(rank: int, world: int) -> tuple[Any, ...]:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(muon, params, owners=dict.fromkeys(params, 1), cost=lambda shape: 1)
    model(batch(rank, 0)).backward()
    steps.optimizer.step()
    assert isinstance(steps, MatrixSteps)
    return steps.plans[0].owners, len(steps.optimizer.state)


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


def saved(rank: int, world: int, path: str, layout: Any) -> tuple[Tensors, Tensors]:
    """States after steps that a state dict interrupts, and those of steps that none does."""
    results = []
    for interrupted in (True, False):
        model = wrapped("wrapper", layout=layout)
        steps = flatfsdp.matrix_steps(muon, matrices_and_others(model, tensors=False)[0])
        stepped(model, steps.optimizer, rank, range(2))
        if interrupted:
            momenta(model, steps.optimizer)
        stepped(model, steps.optimizer, rank, range(2, 4))
        results.append(momenta(model, steps.optimizer))
    checkpoint.save(path, model=model, optimizer=steps.optimizer)
    return results[0], results[1]


def loaded(rank: int, world: int, path: str, layout: Any) -> tuple[Tensors, Tensors, list[str]]:
    """States as loaded, the same after a step took them to their owners, and differences to one process."""
    model = wrapped("wrapper", layout=layout)
    steps = flatfsdp.matrix_steps(muon, matrices_and_others(model, tensors=False)[0])
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


@pytest.mark.parametrize("layouts", [("flat", "flat"), (whole_matrices, by_rows)])
def test_states_are_saved_by_name_and_loaded_on_other_ranks(layouts: Any, tmp_path: Path, run: Run) -> None:
    interrupted, straight = run(3, saved, str(tmp_path / "x"), layouts[0])[0]
    assert {*straight} == {"experts", "row.weight", *(f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (0, 2))}
    assert all(torch.equal(interrupted[name], value) for name, value in straight.items())
    for found, _, unlike in run(2, loaded, str(tmp_path / "x"), layouts[1]):
        assert unlike == []
        assert all(torch.equal(found[name], value) for name, value in straight.items())
