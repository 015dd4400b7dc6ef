"""Gradients whose DTensors are reused for the next ones: never if a program holds one, and no memory without them."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from flatfsdp import fully_shard, fuse_optimizer_steps, optimizer_in_backward
from flatfsdp.errors import UsageError
from tests.harness.inspect import kept_gradient_bytes

pytestmark = pytest.mark.single_process


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def model_of() -> Any:
    return fully_shard(plain_model())


def backward(model: nn.Module, factor: float = 1.0) -> list[Any]:
    """Its gradients, which are another multiple for each `factor`."""
    (model(torch.ones(2, 6)).sum() * factor).backward()
    return grads_of(model)


def grads_of(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def ids(model: nn.Module) -> list[int]:
    return list(map(id, grads_of(model)))


def values(grads: list[Any]) -> list[Tensor]:
    return [grad.to_local().clone() for grad in grads]


def are_multiples(factor: float, once: list[Tensor], grads: list[Any]) -> bool:
    return all(map(torch.equal, [factor * each for each in once], values(grads)))


def drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


# -- not held by the program -------------------------------------------------------------------------------------------


def test_the_same_dtensors_show_the_next_gradients() -> None:
    model = model_of()
    once = values(backward(model))
    first, memory = ids(model), memory_of(model)
    drop(model)
    assert are_multiples(4.0, once, backward(model, 4.0))
    assert ids(model) == first and memory_of(model).isdisjoint(memory)


def test_so_do_those_that_are_dropped_between_forward_and_backward() -> None:
    model = model_of()
    once = values(backward(model))
    first = ids(model)
    loss = model(torch.ones(2, 6)).sum()
    model.zero_grad()
    loss.backward()
    assert ids(model) == first and are_multiples(1.0, once, grads_of(model))


def test_a_step_leaves_them_to_the_next_one() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    fuse_optimizer_steps(optimizer)
    found = []
    for _ in range(4):
        backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(ids(model))
        optimizer.zero_grad()
    assert found[1:] == found[:-1]


def test_what_was_done_to_the_last_gradients_does_not_show_in_the_next() -> None:
    model = model_of()
    once = values(backward(model))
    for grad in grads_of(model):
        grad.mul_(3.0).add_(1.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    drop(model)
    assert are_multiples(1.0, once, backward(model))


# -- held by the program -----------------------------------------------------------------------------------------------


def in_graph(grad: Any) -> Any:
    x = torch.ones(grad.shape, requires_grad=True)
    return (DTensor.from_local(x, grad.device_mesh, grad.placements) * grad).sum()


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda grad: grad,
    "in a container": lambda grad: {"step": [grad]},
    "in a graph": in_graph,
    "in a closure": lambda grad: lambda: grad,
    "weakly": weakref.ref,
}


@pytest.mark.parametrize("way", WAYS)
def test_others_are_made(way: str) -> None:
    model = model_of()
    once = values(backward(model))
    held, alive = WAYS[way](model[1].bias.grad), weakref.ref(model[1].bias.grad)
    drop(model)
    assert are_multiples(2.0, once, backward(model, 2.0))
    assert alive() is None or id(alive()) not in ids(model)
    if way == "in a graph":
        (found,) = torch.autograd.grad(held.to_local(), [leaf_of(held)])
        assert torch.equal(found, once[3])
    elif way != "weakly":
        grad: Any = {"itself": lambda: held, "in a container": lambda: held["step"][0], "in a closure": held}[way]()
        assert torch.equal(grad.to_local(), once[3]) and grad is alive()


def leaf_of(result: Any) -> Tensor:
    node, leaf = result.grad_fn, None
    while node is not None and leaf is None:
        leaf = getattr(node, "variable", None)
        node = next((each for each, _ in node.next_functions if each is not None), None)
    assert leaf is not None
    return leaf


LOCALS: dict[str, Callable[[Any], Any]] = {
    "its local tensor": lambda grad: grad._local_tensor,
    "what to_local gives": lambda grad: grad.to_local(),
    "a detached one": lambda grad: grad.detach(),
    "its data": lambda grad: grad.data,
    "a part": lambda grad: grad.to_local()[:4],
    "an array": lambda grad: grad.to_local().numpy(),
    "a memoryview": lambda grad: memoryview(grad.to_local().numpy()),
    "its storage": lambda grad: grad.to_local().untyped_storage(),
    "by DLPack": lambda grad: torch.from_dlpack(grad.to_local()),
    "in shared memory": lambda grad: grad.to_local().share_memory_(),
    "the whole": lambda grad: grad.full_tensor(),
}


def read(held: Any) -> Tensor:
    if isinstance(held, DTensor):
        return held.to_local().clone()
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held).clone()
    return held.clone() if isinstance(held, Tensor) else torch.tensor(bytearray(held))


@pytest.mark.parametrize("way", LOCALS)
def test_memory_that_somebody_has_is_left_alone(way: str) -> None:
    model = model_of()
    once = values(backward(model))
    held = LOCALS[way](model[1].weight.grad)
    before = read(held)
    for factor in (2.0, 4.0):
        drop(model)
        assert are_multiples(factor, once, backward(model, factor))
        assert torch.equal(read(held), before)


def test_those_that_a_hook_keeps_are_left_alone() -> None:
    model = model_of()
    backward(model)
    drop(model)
    kept: list[Any] = []
    handles = [each.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad)) for each in model.parameters()]
    for factor in (1.0, 2.0, 4.0):
        backward(model, factor)
        drop(model)
    for handle in handles:
        handle.remove()
    backward(model, 5.0)
    found, many = values(kept), len(handles)
    assert len(found) == 3 * many
    for first, second, third in zip(found[:many], found[many : 2 * many], found[2 * many :], strict=True):
        assert torch.equal(2.0 * first, second) and torch.equal(4.0 * first, third)


def test_hooks_run_from_the_backward_on_that_follows_their_registration() -> None:
    model, seen = model_of(), []
    for _ in range(3):  # until the engine no longer looks for hooks
        backward(model)
        drop(model)
    first, *_, last = model.parameters()
    handle = last.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    for _ in range(2):
        backward(model)
        drop(model)
    handle.remove()
    backward(model)
    drop(model)
    assert [each is last for each in seen] == [True, True]
    first.register_hook(lambda grad: None)
    with pytest.raises(UsageError, match="has a hook of register_hook"):
        backward(model)


def test_a_fused_optimizer_drops_gradients_or_fills_them_with_zeros() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = fuse_optimizer_steps(optimizer)
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(not each.any() for each in values(grads_of(model)))
    optimizer.zero_grad()
    assert grads_of(model) == [None] * len(grads_of(model))
    assert "zero_grad" not in vars(copy.deepcopy(optimizer))
    steps.remove()
    backward(model)
    optimizer.zero_grad()
    assert grads_of(model) == [None] * len(grads_of(model)) and "zero_grad" not in vars(optimizer)


def test_an_average_that_began_as_a_gradient_is_left_alone() -> None:
    model, other = model_of(), plain_model()
    average: dict[Any, list[Any]] = {model: [], other: []}
    for each, kept in average.items():
        for factor in (1.0, 4.0, 2.0):
            grads = backward(each, factor)
            if kept:
                for one, grad in zip(kept, grads, strict=True):
                    one.lerp_(grad, 0.5)
            else:
                kept += grads
            each.zero_grad()
    for one, expected in zip(average[model], average[other], strict=True):
        assert torch.equal(one.to_local(), expected)


def test_one_that_another_parameter_took_is_left_alone() -> None:
    model, other = model_of(), model_of()
    once = values(backward(model))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.grad, mine.grad = mine.grad, None
    assert are_multiples(2.0, once, backward(model, 2.0)) and are_multiples(1.0, once, grads_of(other))


def test_gradients_add_up_where_they_were_not_dropped() -> None:
    model = model_of()
    once = values(backward(model))
    first = ids(model)
    assert are_multiples(3.0, once, backward(model, 2.0)) and ids(model) == first
    model.zero_grad(set_to_none=False)
    assert are_multiples(2.0, once, backward(model, 2.0)) and ids(model) == first
    model[0].weight.grad = None
    found = values(backward(model, 1.0))
    assert torch.equal(found[0], once[0]) and torch.equal(found[1], 3.0 * once[1])


def test_gradients_add_up_that_were_accumulated_without_synchronization() -> None:
    model = model_of()
    once = values(backward(model))
    for _ in range(2):
        drop(model)
        model.set_requires_gradient_sync(False)
        backward(model, 2.0)
        model.set_requires_gradient_sync(True)
        assert are_multiples(4.0, once, backward(model, 2.0))


def test_one_that_was_made_to_require_a_gradient_is_not_used_again() -> None:
    model = model_of()
    backward(model)[1].requires_grad_()
    drop(model)
    assert not any(grad.requires_grad for grad in backward(model))


def test_attributes_of_the_last_gradients_are_not_those_of_the_next() -> None:
    model = model_of()
    backward(model)[2].step = 1
    drop(model)
    assert not any(hasattr(grad, "step") for grad in backward(model))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda local: local.t_(),
    "with a dimension more": lambda local: local.unsqueeze_(0),
    "folded": lambda local: local.resize_(3, 12),
    "elsewhere": lambda local: local.set_(torch.zeros(6, 6)),
    "with other data": lambda local: setattr(local, "data", torch.zeros(6, 6)),
    "to be trained": lambda local: local.requires_grad_(),
    "in shared memory": lambda local: None if local.share_memory_() is local else local,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("early", (False, True), ids=("before it is dropped", "between forward and backward"))
def test_one_whose_local_tensor_was_changed_in_place_is_not_used_again(change: str, early: bool) -> None:
    model = model_of()
    once = values(backward(model))
    with torch.no_grad():  # to_local() is the local tensor itself here
        CHANGES[change](model[0].weight.grad.to_local())
    if early:
        loss = model(torch.ones(2, 6)).sum()
        model.zero_grad()
        loss.backward()
    else:
        drop(model)
        backward(model)
    assert are_multiples(1.0, once, grads_of(model))
    drop(model)
    assert are_multiples(2.0, once, backward(model, 2.0))
    assert not any(grad.to_local().requires_grad for grad in grads_of(model))


# -- the model changes -------------------------------------------------------------------------------------------------


def test_gradients_follow_a_dtype() -> None:
    model = model_of()
    backward(model)
    drop(model)
    model.double()
    (model(torch.ones(2, 6, dtype=torch.float64)).sum()).backward()
    assert {grad.dtype for grad in grads_of(model)} == {torch.float64}
    assert {grad.to_local().dtype for grad in grads_of(model)} == {torch.float64}


def test_gradients_of_others_are_trained_come_to_those() -> None:
    model = model_of()
    once = values(backward(model))
    drop(model)
    model[1].weight.requires_grad_(False)
    assert backward(model, 2.0)[2] is None
    drop(model)
    model[1].weight.requires_grad_(True)
    assert are_multiples(4.0, once, backward(model, 4.0))


def test_state_that_is_loaded_between_steps_leaves_them() -> None:
    model = model_of()
    state = copy.deepcopy(model.state_dict())
    once = values(backward(model))
    for assign in (False, True):
        drop(model)
        model.load_state_dict(copy.deepcopy(state), assign=assign)
        assert are_multiples(1.0, once, backward(model))


def test_copies_have_gradients_of_their_own() -> None:
    model = model_of()
    once = values(backward(model))
    drop(model)
    twin = copy.deepcopy(model)
    assert are_multiples(2.0, once, backward(model, 2.0)) and are_multiples(4.0, once, backward(twin, 4.0))
    assert are_multiples(2.0, once, grads_of(model)) and set(ids(model)).isdisjoint(ids(twin))
    copied = copy.deepcopy(grads_of(model))
    drop(model)
    backward(model, 5.0)
    assert are_multiples(2.0, once, copied)


def test_steps_in_a_backward_take_the_gradients_of_that() -> None:
    model, other = model_of(), model_of()
    optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for factor in (1.0, 2.0, 3.0):
        backward(model, factor)
        backward(other, factor)
        optimizer.step()
        optimizer.zero_grad()
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), expected.to_local())


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(model: nn.Module) -> set[int]:
    return {grad.to_local().untyped_storage().data_ptr() for grad in grads_of(model)}


def held_by(model: nn.Module) -> list[Any]:
    """The memory of its gradients, weakly."""
    return [weakref.ref(grad._local_tensor) for grad in grads_of(model)]


def test_no_memory_is_kept_in_a_forward() -> None:
    model = model_of()
    backward(model)
    drop(model)
    before, left = kept_gradient_bytes(model), list[int]()
    handle = model[0].register_forward_hook(lambda *_: left.append(kept_gradient_bytes(model)))
    backward(model)
    handle.remove()
    assert before and left == [0] and kept_gradient_bytes(model) == before


def test_no_memory_is_kept_in_a_backward_of_what_was_dropped_before_it() -> None:
    model = model_of()
    backward(model)
    left = list[int]()
    output = model(torch.ones(2, 6))
    model.zero_grad()
    handle = model[0].weight.register_hook(lambda _: left.append(kept_gradient_bytes(model)))
    output.sum().backward()
    handle.remove()
    assert left == [0] and kept_gradient_bytes(model)


def test_memory_of_large_ones_goes_where_they_are_dropped() -> None:
    model = fully_shard(nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    held = [*held_by(model), *map(weakref.ref, grads_of(model))]
    drop(model)
    assert all(each() is None for each in held)


def test_a_model_that_is_deleted_leaves_nothing() -> None:
    model = model_of()
    held = [*map(weakref.ref, backward(model)), *held_by(model)]
    grad = model[0].weight.grad
    before = grad.to_local().clone()
    del model
    gc.collect()
    assert [each() is not None for each in held].count(True) == 2 and torch.equal(grad.to_local(), before)
    del grad
    assert all(each() is None for each in held)


# -- anything in any order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    """Everything that programs keep of gradients keeps its values, and gradients are those of an unsharded model."""
    dice = random.Random(seed)
    model, expected = model_of(), plain_model()
    held: list[tuple[Any, Tensor]] = []
    ways = [way for name, way in LOCALS.items() if name != "in shared memory"]  # which takes it from arrays
    ways.append(WAYS["itself"])

    def keep() -> None:
        grad = dice.choice(grads_of(model))
        if grad is not None:
            kept = dice.choice(ways)(grad)
            held.append((kept, read(kept)))

    def train() -> None:
        factor = dice.choice((1.0, 2.0, 0.5))
        for each in (model, expected):
            backward(each, factor)
        assert all(map(torch.equal, values(grads_of(model)), grads_of(expected)))

    def train_dropping_late() -> None:
        losses = [each(torch.ones(2, 6)).sum() for each in (model, expected)]
        drop_all()
        for loss in losses:
            loss.backward()

    def drop_some() -> None:
        chosen = dice.sample(range(6), dice.randint(1, 6))
        for each in (model, expected):
            for i, parameter in enumerate(each.parameters()):
                if i in chosen:
                    parameter.grad = None

    def drop_all() -> None:
        for each in (model, expected):
            each.zero_grad()

    def scale() -> None:
        # References to the memory of gradients would change with them, as for any tensor.
        held.clear()
        for each in (model, expected):
            for grad in grads_of(each):
                if grad is not None:
                    grad.mul_(0.5)

    def move() -> None:
        held.clear()  # arrays would lose their memory
        grad = dice.choice(grads_of(model))
        if grad is not None:
            grad.to_local().detach().share_memory_()

    def forget() -> None:
        if held:
            held.pop(dice.randrange(len(held)))

    def add_up() -> None:
        held.clear()
        train()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 6))

    for _ in range(60):
        dice.choice((keep, keep, train_dropping_late, drop_some, drop_all, scale, move, forget, add_up, evaluate))()
        for kept, before in held:
            assert torch.equal(read(kept), before)
        for grad, other in zip(grads_of(model), grads_of(expected), strict=True):
            assert (grad is None) == (other is None)
            assert grad is None or torch.equal(grad.to_local(), other)


def test_on_one_rank_a_replicated_gradient_is_one_of_the_parameter() -> None:
    """Older versions of torch make such gradients of penalties: on one rank all placements are the same."""
    model = model_of()
    expected = [grad + 1.0 for grad in (each.to_local() for each in backward(model))]
    model.zero_grad()
    for parameter in model.parameters():
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        parameter.grad = DTensor.from_local(torch.ones(parameter.shape), mesh, [Replicate()])
    for found, value in zip(backward(model), expected, strict=True):
        assert torch.equal(found.to_local(), value)
