"""Steps on whole matrices with optimizers of any class: what they may do in a step, what is refused in words, and their
states in torch's state dicts."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import flatfsdp
from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.engine.guards.optimizer_hooks import wholes_of
from flatfsdp.errors import AgreementError, UsageError
from tests.conftest import Run
from tests.features.test_matrix_steps import (
    STEPS,
    OneProcess,
    adafactor,
    batch,
    full_states,
    matrices_and_others,
    muon,
    trained,
    whole,
    wrapped,
)
from tests.harness import inspect
from tests.harness.corners import seeded
from tests.harness.tensor_parallel import batches, loss_of, sharded

pytestmark = pytest.mark.distributed


class Plain(torch.optim.Optimizer):
    """The sign of the gradient, scaled by the largest element: of a whole tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def before(self) -> None:
        return

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["most"] = p.grad.abs().amax().reshape(1)
                    self.update(p, p.grad.sign() * self.state[p]["most"] * group["lr"])

    def update(self, p: Tensor, by: Tensor) -> None:
        p.sub_(by)


class Assigning(Plain):
    def update(self, p: Tensor, by: Tensor) -> None:
        p.data = p.data - by


class Transposing(Plain):
    def update(self, p: Tensor, by: Tensor) -> None:
        if p.dim() == 2:
            p.data = (p.data.t() - by.t()).contiguous().t()
        else:
            p.sub_(by)


class Reshaping(Plain):
    def update(self, p: Tensor, by: Tensor) -> None:
        p.data = p.data.reshape(-1)


@pytest.mark.parametrize("cls", [Plain, Assigning, Transposing])
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_a_step_may_give_parameters_other_memory(front: str, cls: Any, pool2: Run) -> None:
    results = pool2(trained, front, cls, tensors=True, sees="tensors", bucket_bytes=800)
    assert [line for each in results for line in each] == []


def test_a_step_may_give_parameters_on_one_rank_other_memory(pool2: Run) -> None:
    results = pool2(trained, "wrapper", Assigning, tensors=True, sees="tensors", sharding_strategy="NO_SHARD")
    assert [line for each in results for line in each] == []


class Counting(Plain):
    """One that counts its steps in its own attributes, and begins with larger ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.cache = 0, {}  # type: ignore[var-annotated]

    def before(self) -> None:
        self.count += 1
        self.cache[self.count] = "a name"
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count


def counting(rank: int, world: int) -> tuple[int, list[str]]:
    found = trained(rank, world, "wrapper", Counting, tensors=True, sees="tensors", bucket_bytes=800)
    model = wrapped("wrapper")
    steps = flatfsdp.matrix_steps(Counting(model.parameters()), sees="tensors", bucket_bytes=800)
    for number in range(2):
        model(batch(rank, number)).backward()
        steps.optimizer.step()
    made: Any = steps.optimizer
    return made.count, found


def test_values_that_a_step_replaces_are_replaced_once(pool2: Run) -> None:
    assert pool2(counting) == [(2, [])] * 2


class Around(torch.optim.Optimizer):
    """A wrapper that shares groups and hooks with the optimizer inside, as Lookahead does."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optimizer = inside
        self.param_groups, self.defaults = inside.param_groups, inside.defaults
        self.state = inside.state
        self._optimizer_step_pre_hooks = inside._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inside._optimizer_step_post_hooks

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def refused(rank: int, world: int) -> list[str]:
    model = wrapped("wrapper")
    found = []

    def refuse(call: Any) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        found.append(str(caught.value))

    refuse(lambda: flatfsdp.matrix_steps(Around(Plain(model.parameters())), sees="tensors"))
    model(batch(rank, 0)).backward()
    alone = torch.optim.Adafactor(model.parameters())
    refuse(alone.step)
    steps = flatfsdp.matrix_steps(Reshaping(model.parameters()), sees="tensors")
    refuse(steps.optimizer.step)
    flat = FullyShardedDataParallel(nn.Linear(4, 4))
    flat(torch.ones(1, 4)).sum().backward()
    refuse(torch.optim.Adafactor(flat.parameters()).step)
    # Parameters that no shard boundary cuts are whole to it.
    alike = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, sharding_strategy="NO_SHARD")
    alike(torch.ones(1, 4)).sum().backward()
    torch.optim.Adafactor(alike.parameters()).step()
    both = (alike, flatfsdp.matrix_steps(torch.optim.Adafactor(alike.parameters())).optimizer)
    assert copy.deepcopy(both)
    return found


def test_what_would_step_on_parts_is_refused_in_words(pool2: Run) -> None:
    expected = [
        "this Around holds another optimizer, 'optimizer', which would step on this rank's parts. Pass that one",
        r"Adafactor looks at whole tensors.*(ranks have parts|1-D tensor of all elements) of parameter .*matrix_steps",
        r"a step made parameter .* a tensor of shape \(\d+,\)",
        r"Adafactor looks at whole tensors.*or wrap with use_orig_params=True",
    ]
    for found in pool2(refused):
        for text, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, text) or "failed, and others" in text, (pattern, text)


def states_of_others(rank: int, world: int, late: bool) -> str:
    """Rank 1 has states of one element too many."""
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    optimizer = flatfsdp.matrix_steps(muon, params).optimizer
    model(batch(rank, 0)).backward()
    if late:
        optimizer.step()
    for each in params:
        more = 1 if rank == 1 else 0
        if each.numel():
            found = torch.zeros(each.numel() + more)
            optimizer.state[each]["momentum_buffer"] = found if more else found.view(each.shape)
    with pytest.raises((UsageError, AgreementError)) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("late", [True, False])
def test_states_of_another_ranks_parts_are_refused_on_all(late: bool, pool2: Run) -> None:
    for text in pool2(states_of_others, late):
        assert re.search("or of another rank: 'momentum_buffer' of parameter .* has shape", text), text


def with_torchs_state_dict(rank: int, world: int, make: Any, sees: str | None, folder: str) -> tuple[str, ...]:
    """One matrix, so that only its owner has a state."""
    model = fully_shard(seeded(lambda: nn.Sequential(nn.Linear(5, 6, bias=False))))
    optimizer = flatfsdp.matrix_steps(make, model.parameters(), sees=sees).optimizer
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]
    own = optimizer.state_dict()
    torch.save(own, f"{folder}/{rank}.pt")
    again = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    assert again["state"].keys() == own["state"].keys()
    dcp.save({"optimizer": own}, checkpoint_id=f"{folder}/dcp")
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    dcp.load({"optimizer": own}, checkpoint_id=f"{folder}/dcp")
    optimizer.load_state_dict(own)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return tuple(sorted(found))


@pytest.mark.parametrize(("make", "sees"), [(muon, None), (muon, "matrices"), (adafactor, None)])
def test_states_are_in_torchs_state_dicts(make: Any, sees: str | None, tmp_path: Any, pool2: Run) -> None:
    first, second = pool2(with_torchs_state_dict, make, sees, str(tmp_path))
    assert first == second and first


def owning_nothing(rank: int, world: int, folder: str) -> list[str]:
    """State dicts have each rank's parts, also where it owns no matrix."""
    model = FullyShardedDataParallel(seeded(lambda: nn.Linear(5, 6, bias=False)), use_orig_params=True)
    optimizer = flatfsdp.matrix_steps(partial(torch.optim.Muon), model.parameters(), sees="matrices").optimizer
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), f"{folder}/{rank}.pt")
    again = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    optimizer.load_state_dict(again)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return [key for each in again["state"].values() for key in each]


def test_a_rank_that_owns_no_matrix_has_its_own_state_dict(tmp_path: Any, pool2: Run) -> None:
    assert pool2(owning_nothing, str(tmp_path)) == [["momentum_buffer"]] * 2


def failing_to_begin(rank: int, world: int, setting: str) -> None:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    optimizer = flatfsdp.matrix_steps(muon, params, bucket_bytes=800).optimizer
    model(batch(rank, 0)).backward()
    before = optimizer.param_groups[0][setting]
    if rank == 1:
        optimizer.param_groups[0][setting] = "no number"
    kind, pattern = (TypeError, "") if rank == 1 else (AgreementError, "rank 1: TypeError.*Load a checkpoint")
    with pytest.raises(kind, match=pattern):
        optimizer.step()
    optimizer.param_groups[0][setting] = before
    optimizer.zero_grad()
    model(batch(rank, 1)).backward()
    optimizer.step()


@pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
def test_what_fails_on_the_elements_of_one_rank_is_an_error_on_all(setting: str, pool2: Run) -> None:
    pool2(failing_to_begin, setting, timeout=60)


def failing_with_tensor_parallelism(rank: int, world: int) -> None:
    """One of two ranks that have parts of the same matrices fails."""
    model = sharded((1, 2), sequence=False)
    params = [each for name, each in model.named_parameters() if "blocks" in name and "weight" in name]
    shapes = flatfsdp.unsharded_shapes(model)
    names = {id(each): name for name, each in model.named_parameters()}
    optimizer = flatfsdp.matrix_steps(muon, [p for p in params if len(shapes[names[id(p)]]) == 2]).optimizer
    tokens, classes, place = batches((1, 2), 0)
    loss_of(model, tokens[place], classes[place]).backward()
    if rank == 1:
        optimizer.param_groups[0]["momentum"] = "no number"
    kind, pattern = (TypeError, "") if rank == 1 else (AgreementError, "rank 1: TypeError")
    with pytest.raises(kind, match=pattern):
        optimizer.step()


def test_a_failure_is_reported_to_ranks_with_other_parts_of_the_matrix(pool2: Run) -> None:
    pool2(failing_with_tensor_parallelism, timeout=60)


def of_two_dtypes(rank: int, world: int) -> tuple[int, int]:
    """The bytes of a step, as stated and as counted."""
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 10, bias=False).bfloat16())
    net.forward = lambda x: net[1](net[0](x).bfloat16())  # type: ignore[method-assign]
    model = FullyShardedDataParallel(net, use_orig_params=True)
    steps = flatfsdp.matrix_steps(muon, model.parameters(), sees="matrices")
    model(torch.ones(2, 6)).float().sum().backward()
    before = inspect.comm_stats(model).bytes["all_to_all"]
    steps.optimizer.step()
    stated = re.findall(r"sends ([\d,]+) bytes to owners, ([\d,]+) back", steps.summary())
    assert len(stated) == 2
    found = sum(int(each.replace(",", "")) for line in stated for each in line)
    return found, inspect.comm_stats(model).bytes["all_to_all"] - before


def test_the_stated_bytes_of_matrices_of_two_dtypes_are_sent(pool2: Run) -> None:
    results = pool2(of_two_dtypes)
    assert all(stated == counted for stated, counted in results) and any(counted for _, counted in results)


def without_a_gradient_of_its_own(rank: int, world: int) -> list[str]:
    """A matrix whose owner has no elements of it, so neither a gradient."""
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    shapes = flatfsdp.unsharded_shapes(model)
    first = next(each for name, each in model.named_parameters() if len(shapes[name]) == 2 and shapes[name].numel())
    reference = OneProcess(seeded(type(model.module)), muon, tensors=False)  # type: ignore[attr-defined]
    steps = flatfsdp.matrix_steps(muon, params, owners={first: world - 1}, sees="matrices")
    for number in range(STEPS):
        model(batch(rank, number)).backward()
        reference.step(whole(model, "grad"))
        steps.optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    (plan,) = steps.plans
    index = next(i for i, matrix in enumerate(plan.matrices) if matrix.asked == world - 1)
    assert plan.owners[index] == world - 1 and plan.matrices[index].span_of(world - 1).is_empty
    expected = reference.tensors()
    found = whole(model, "data")
    return [name for name in reference.parts if not torch.equal(found[name], expected[name])]  # type: ignore[arg-type]


def test_an_owner_without_elements_of_a_matrix_steps_on_it(pool3: Run) -> None:
    assert pool3(without_a_gradient_of_its_own) == [[]] * 3


def with_other_owners(rank: int, world: int) -> str:
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    steps = flatfsdp.matrix_steps(muon, params, owners={params[0]: rank})
    model(batch(rank, 0)).backward()
    with pytest.raises(AgreementError) as caught:
        steps.optimizer.step()
    return str(caught.value)


def test_other_owners_on_another_rank_are_refused(pool2: Run) -> None:
    for text in pool2(with_other_owners):
        assert len({*re.findall(r"step\(\) of Muon on \d+ whole matrices \(plan (\w+)\)", text)}) == 2, text


def with_rows_of_experts(rank: int, world: int) -> tuple[list[str], list[tuple[Any, int, int]]]:
    """The differences to one process of steps that state dicts interrupt, of parameters and of the states of rows, of
    which each expert has its own; and where this rank's ones are among those of all, for moves to other ranks."""
    model = wrapped("wrapper")
    params, _ = matrices_and_others(model, tensors=False)
    experts = next(each for name, each in model.named_parameters() if name.endswith("experts"))
    optimizer = flatfsdp.matrix_steps(adafactor, params, sees="matrices").optimizer
    wholes, spans = wholes_of(optimizer), []
    assert wholes is not None
    reference = OneProcess(seeded(type(model.module)), adafactor, tensors=False)  # type: ignore[attr-defined]
    unlike = []
    for number in range(3):
        model(batch(rank, number)).backward()
        reference.step(whole(model, "grad"))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        held = wholes.held(experts) or ([], {})
        spans = [(each.spec.shape, each.span.start, each.span.stop) for each in held[0] if each.spec.name == "row_var"]
        rows = full_states(model, optimizer)["experts"]["row_var"]
        own = [reference.optimizer.state[each]["row_var"] for each in reference.parts["experts"]]
        unlike += [] if torch.equal(rows, torch.stack(own)) else [f"rows in step {number}"]
        if number == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found, expected = whole(model, "data"), reference.tensors()
    unlike += [name for name in reference.parts if not torch.equal(found[name], expected[name])]  # type: ignore[arg-type]
    return unlike, spans


def test_states_of_rows_of_experts_are_saved_as_one(pool3: Run) -> None:
    results = pool3(with_rows_of_experts)
    assert [unlike for unlike, _ in results] == [[]] * 3
    spans = sorted(span for _, spans in results for span in spans)
    assert spans == [((5, 12, 1), 12 * expert, 12 * expert + 12) for expert in range(5)]


class Routed(nn.Module):
    """Experts of their own, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x).square().mean()


def with_other_experts(rank: int, world: int, front: str, sees: str | None) -> list[str]:
    """The differences to one process where each rank uses an expert of its own, and nobody the last one; the owner of
    each is a rank that does not use it."""
    net = seeded(Routed)
    model: Any = fully_shard(net) if front == "fully_shard" else FullyShardedDataParallel(net, use_orig_params=True)
    params = [*model.parameters()]
    owners = {each: (index + 1) % world for index, each in enumerate(params)}
    steps = flatfsdp.matrix_steps(muon, params, owners=owners, sees=sees)
    alone = [nn.Parameter(each.detach().clone()) for each in seeded(Routed).parameters()]
    reference = muon(alone)
    for number in range(STEPS):
        model(torch.full((2, 6), 0.1 * (number + rank + 1)), rank).backward()
        gradients = whole(model, "grad")
        used = [name for name, each in gradients.items() if each is not None]
        assert used == [f"experts.{index}.weight" for index in range(world)], used
        for parameter, grad in zip(alone, gradients.values(), strict=True):
            parameter.grad = grad
        reference.step()
        steps.optimizer.step()
        for parameter in params:
            parameter.grad = None
    (plan,) = steps.plans
    assert plan.owners == tuple(owners.values())
    found = zip(alone, whole(model, "data").items(), strict=True)
    return [name for one, (name, value) in found if value is None or not torch.equal(value, one)]


@pytest.mark.parametrize("sees", [None, "matrices"])
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_owners_take_part_in_steps_on_experts_that_only_others_use(front: str, sees: Any, pool3: Run) -> None:
    assert pool3(with_other_experts, front, sees) == [[]] * 3
