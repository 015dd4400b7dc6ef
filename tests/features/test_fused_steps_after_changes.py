"""An optimizer that steps flat, and one that does not: the same numbers after any change between two steps.

Values come from the test: the fake group moves none, and gradients are set by hand.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import ConfigTypeError, UsageError
from tests.harness import inspect
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world
from tests.harness.memory import Recording
from tests.harness.thorough import spread

pytestmark = pytest.mark.single_process

optim = torch.optim


class Block(nn.Module):
    """Parameters of odd sizes, so that padding lies between them, some of several dimensions."""

    def __init__(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parts:
            x = x + each.sum()
        return x


SIZES = ((7,), (5, 9), (1,), (64,), (3, 3), (33,), (8, 2), (2,), (16,), (31,))


def local(value: Any) -> Any:
    """This rank's part of `value`, which may be a DTensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def facts(value: Tensor) -> tuple[Any, ...]:
    split = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
    return type(value), value.shape, value.stride(), value.dtype, *split


class Twin:
    """A model and its optimizer, and the same without `fuse_optimizer_steps`, with which it is compared after each.

    The parameters whose numbers are in `low` are in bfloat16. `front`: under `fully_shard`, as DTensors.
    """

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer] = optim.AdamW,
        *,
        blocks: int = 2,
        sizes: tuple[tuple[int, ...], ...] = SIZES,
        elementwise: bool = False,
        dtype: torch.dtype = torch.float32,
        low: tuple[int, ...] = (),
        front: bool = False,
        **options: Any,
    ) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block(sizes) for _ in range(blocks))).to(dtype)
            for block in model:
                for number in low:
                    block.parts[number].data = block.parts[number].data.bfloat16()
            wrapped: Any = model
            if front:
                for block in [*model, model]:
                    flatfsdp.fully_shard(block)
            else:
                wrapped = FullyShardedDataParallel(
                    model, auto_wrap_policy={Block}, use_orig_params=True, device_id=torch.device("cpu")
                )
            self.models.append(wrapped)
            self.optimizers.append(make(wrapped.parameters(), **options))
        self.steps = flatfsdp.fuse_optimizer_steps(self.optimizers[0], elementwise=elementwise)
        self.trained = 0

    def parameters(self) -> list[list[nn.Parameter]]:
        """Of both, those that have elements here."""
        return [[p for p in model.parameters() if isinstance(p, DTensor) or p.numel()] for model in self.models]

    def gradients(self) -> None:
        """A backward, and the same gradients for both."""
        self.trained += 1
        for model in self.models:
            numbers = torch.Generator().manual_seed(self.trained)
            model(torch.ones(2, dtype=next(model.parameters()).dtype)).sum().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    grad = local(parameter.grad)
                    grad.copy_(torch.randn(grad.shape, generator=numbers))

    def step(self, count: int = 1, *, change: Callable[[Any, list[nn.Parameter]], object] | None = None) -> None:
        """Train and compare. `change(optimizer, parameters)` is made to both before the step."""
        for _ in range(count):
            self.gradients()
            for optimizer, parameters in zip(self.optimizers, self.parameters(), strict=True):
                if change is not None:
                    change(optimizer, parameters)
                optimizer.step()
            self.compare()
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def compare(self) -> None:
        """Parameters, states and groups are equal, bit for bit."""
        for one, other in zip(*self.parameters(), strict=True):
            assert torch.equal(local(one), local(other))
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, (one, other), strict=True)]
            assert [*states[0]] == [*states[1]]
            for name, value in states[0].items():
                expected = states[1][name]
                assert type(value) is type(expected)
                if isinstance(value, Tensor):
                    assert facts(value) == facts(expected)
                    assert torch.equal(local(value), local(expected)), name
                else:
                    assert value == expected
        saved, expected = (optimizer.state_dict() for optimizer in self.optimizers)
        assert saved["param_groups"] == expected["param_groups"] and saved["state"].keys() == expected["state"].keys()
        for model in self.models:
            for flat in inspect.unit(model).flat_params:
                assert not any(flat.shard[gap.slice].any() for gap in flat.layout.gaps if flat.is_alone)


# --- the same numbers -------------------------------------------------------------------------------------------------

KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "lr": torch.tensor(0.01)}),
    (optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {"eps": 0.0}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 2}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {}),
)


@pytest.mark.parametrize(("foreach", "made"), spread([False, True], KINDS))
def test_numbers_and_states_are_those_of_single_steps(made: tuple[Any, dict[str, Any]], foreach: bool) -> None:
    kind, options = made
    if foreach and isinstance(options.get("lr"), Tensor):
        options = {**options, "lr": 0.01}  # torch takes no tensor here
    for world, dtype in ((1, torch.float32), (3, torch.float64)):
        with fake_world(world, rank=world - 1):
            twin = Twin(kind, **options, foreach=foreach, dtype=dtype)
            twin.step(4)
            assert 2 <= twin.steps.runs < twin.steps.members


# torch knows no Rprop, and no fused SGD and Adagrad, of DTensors: there is no reference for the flat step.
OF_DTENSORS = [each for each in KINDS if each[0] is not optim.Rprop]


@pytest.mark.parametrize(("kind", "options"), OF_DTENSORS, ids=lambda value: getattr(value, "__name__", ""))
def test_numbers_and_states_of_dtensors_are_those_of_single_steps(kind: Any, options: dict[str, Any]) -> None:
    with fake_world(3, rank=2):  # which has nothing of some
        twin = Twin(kind, **options, front=True)
        twin.step(4)
        assert twin.steps.members == 20
        assert twin.steps.runs == 6 or options.get("eps") == 0.0  # four of single parameters without elements here


@pytest.mark.parametrize(
    ("kind", "front"), [(optim.AdamW, True), *((kind, False) for kind in (optim.AdamW, optim.SGD, optim.Adagrad))]
)
def test_a_fused_optimizer_steps_flat(kind: Any, front: bool) -> None:
    sizes = ((64,), (4, 64), (128,))  # whole vectors: torch rounds the remaining elements in another way
    with fake_world(1):
        twin = Twin(kind, sizes=sizes, lr=0.1, fused=True, front=front)
        twin.step(4)
        assert (twin.steps.runs, twin.steps.members) == (2, 6)


def test_kinds_of_a_unit_are_runs_of_their_own() -> None:
    with fake_world(1):
        twin = Twin(sizes=((64,), (128,), (7,), (64,), (9,)), low=(0, 1, 3))
        assert [len(unit.flat_params) for unit in inspect.units(twin.models[0]) if unit.flat_params] == [2, 2]
        twin.step(3)
        assert (twin.steps.runs, twin.steps.members) == (4, 10)


class Vouched(optim.Optimizer):
    """A user-defined elementwise optimizer: a step count in Python, one in the group, and a new state at each step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, nothing=None, slow=p.detach().clone())
                state["step"] += 1
                state["slow"] = state["slow"] * 0.5 + p.grad
                p.add_(state["slow"], alpha=-group["lr"] / state["step"])


def test_an_optimizer_that_the_user_vouches_for_steps_flat() -> None:
    with fake_world(3, rank=1):
        with pytest.raises(UsageError, match=r"Vouched is not known.*elementwise=True"):
            Twin(Vouched)
        twin = Twin(Vouched, elementwise=True)
        twin.step(3)
        assert 2 <= twin.steps.runs < twin.steps.members
        assert twin.optimizers[0].param_groups[0]["seen"] == 3


class Wrong(Vouched):
    """It keeps one number per row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["rows"] = torch.zeros(max(1, p.numel() // 2))


def test_states_that_cannot_be_divided_are_refused() -> None:
    with fake_world(1):
        twin = Twin(Wrong, elementwise=True)
        twin.gradients()
        with pytest.raises(UsageError, match=r"keeps 'rows' \(shape \(\d+,\)\) for \d+ elements of \d+ parameters"):
            twin.optimizers[0].step()


# --- changes between two steps ----------------------------------------------------------------------------------------


def reload(optimizer: Any, parameters: Any) -> None:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer))


def reload_copies(optimizer: Any, parameters: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def count_on(optimizer: Any, parameters: Any) -> None:
    for number in (1, 2):
        optimizer.state[parameters[number]]["step"].fill_(7)


def replace_state(optimizer: Any, parameters: Any) -> None:
    optimizer.state[parameters[1]] = {name: 0.5 * value for name, value in optimizer.state[parameters[1]].items()}


def replace_moment(optimizer: Any, parameters: Any) -> None:
    optimizer.state[parameters[2]]["exp_avg"] = torch.ones_like(parameters[2])


def edit_moment(optimizer: Any, parameters: Any) -> None:
    optimizer.state[parameters[2]]["exp_avg"].mul_(3)


def drop_state(optimizer: Any, parameters: Any) -> None:
    del optimizer.state[parameters[0]]


def drop_gradient(optimizer: Any, parameters: Any) -> None:
    parameters[1].grad = None


def own_gradients(optimizer: Any, parameters: Any) -> None:
    for each in parameters[:3]:
        each.grad = each.grad * 2


def turned_gradient(optimizer: Any, parameters: Any) -> None:
    square = next(p for p in parameters if p.shape == (3, 3))
    square.grad = square.grad.t()


def own_data(optimizer: Any, parameters: Any) -> None:
    parameters[0].data = parameters[0].data * 2


def another_group(optimizer: Any, parameters: Any) -> None:
    moved = parameters[3]
    group = optimizer.param_groups[0]
    if len(optimizer.param_groups) == 1:
        group["params"] = [p for p in group["params"] if p is not moved]
        optimizer.add_param_group({"params": [moved], "lr": 0.5})


def new_settings(optimizer: Any, parameters: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.3


def no_epsilon(optimizer: Any, parameters: Any) -> None:
    optimizer.param_groups[0]["eps"] = 0.0


def foreign_state(optimizer: Any, parameters: Any) -> None:
    optimizer.state["note"] = {"kept": 1}


CHANGES = (
    reload,
    count_on,
    replace_state,
    replace_moment,
    edit_moment,
    drop_state,
    drop_gradient,
    own_gradients,
    turned_gradient,
    own_data,
    another_group,
    new_settings,
    no_epsilon,
    foreign_state,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_what_was_changed_is_noticed(change: Any) -> None:
    with fake_world(1):
        twin = Twin()
        if change is not own_data:  # which must lie in the shard again by the next forward
            twin.step(2)
        twin.step(change=change)
        twin.step(3)
        twin.step(change=change)


def own_dtensor_gradients(optimizer: Any, parameters: Any) -> None:
    for each in parameters[:3]:
        each.grad = each.grad.clone()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        reload_copies,
        count_on,
        drop_state,
        drop_gradient,
        own_dtensor_gradients,
        edit_moment,
        another_group,
        new_settings,
    ],
    ids=lambda each: each.__name__,
)
def test_what_was_changed_of_dtensors_is_noticed(change: Any, rank: int) -> None:
    with fake_world(3, rank=rank):
        twin = Twin(front=True)
        twin.step(2)
        twin.step(change=change)
        twin.step(3)
        assert twin.steps.members == 20 and twin.steps.runs >= 2
        twin.step(change=change)


def test_dtensors_beside_others_of_their_group_step_by_themselves() -> None:
    """torch's lists have no place for both."""
    with fake_world(3):
        mesh = torch.distributed.init_device_mesh("cpu", (3,))
        others = iter([nn.Parameter(DTensor.from_local(torch.ones(2), mesh)) for _ in range(2)])
        twin = Twin(lambda parameters: optim.AdamW([*parameters, next(others)], foreach=True), front=True)

        def train_it(optimizer: Any, parameters: Any) -> None:
            other = optimizer.param_groups[0]["params"][-1]
            other.grad = torch.ones_like(other)

        twin.step(2, change=train_it)
        assert twin.steps.runs == 0


def test_a_parameter_that_is_listed_twice_is_stepped_on_twice() -> None:
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        return optim.SGD([*listed, listed[0]], lr=0.1, momentum=0.9)

    with fake_world(1), pytest.warns(UserWarning, match="duplicate parameters"):
        twin = Twin(momentum)
        twin.step(3)
        assert twin.steps.runs == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_frozen_dtensors_have_no_gradient_and_are_not_stepped_on(rank: int) -> None:
    with fake_world(3, rank=rank):
        twin = Twin(front=True)
        for step in range(4):
            for model in twin.models:
                for number, parameter in enumerate(model.parameters()):
                    parameter.requires_grad_(step % 2 != 1 or number % 3 != 0)
            twin.step()
            assert step != 1 or twin.steps.members == 13


def test_parameters_that_were_stepped_less_often_step_by_themselves_until_they_have_caught_up() -> None:
    with fake_world(1):
        twin = Twin(blocks=1)
        twin.step()
        assert (twin.steps.runs, twin.steps.members) == (1, 10)
        twin.step(change=drop_gradient)
        assert (twin.steps.runs, twin.steps.members) == (1, 8)  # the first, of one, and those after the second
        twin.step()
        assert (twin.steps.runs, twin.steps.members) == (1, 8)

        def catch_up(optimizer: Any, parameters: Any) -> None:
            optimizer.state[parameters[1]]["step"].fill_(3)
            reload(optimizer, parameters)

        twin.step(change=catch_up)
        assert (twin.steps.runs, twin.steps.members) == (1, 10)


def test_gradients_of_the_users_own_go_parameter_by_parameter_and_the_next_ones_together_again() -> None:
    def all_own(optimizer: Any, parameters: Any) -> None:
        for each in parameters:
            each.grad = each.grad.clone()

    with fake_world(1):
        twin = Twin(blocks=1)
        twin.step(change=all_own)
        assert (twin.steps.runs, twin.steps.members) == (0, 0)
        twin.step(3)
        assert (twin.steps.runs, twin.steps.members) == (1, 10)
        twin.step(change=own_gradients)
        twin.step(2)
        assert (twin.steps.runs, twin.steps.members) == (1, 10)


def test_states_lie_as_their_parameters_do_and_stay_there() -> None:
    with fake_world(1):
        twin = Twin(blocks=1)
        optimizer, (parameters, _) = twin.optimizers[0], twin.parameters()
        places = []
        for _ in range(3):
            twin.step()
            places.append([optimizer.state[p]["exp_avg"].data_ptr() for p in parameters])
        assert places == [places[0]] * 3
        distances = [p.data_ptr() - parameters[0].data_ptr() for p in parameters]
        assert [pointer - places[0][0] for pointer in places[0]] == distances


def test_frozen_parameters_and_those_of_other_models_step_as_ever() -> None:
    with fake_world(3, rank=1):
        others = [nn.Linear(3, 3), nn.Linear(3, 3)]
        others[1].load_state_dict(others[0].state_dict())
        each_with = iter(others)
        twin = Twin(lambda parameters: optim.AdamW([*parameters, *next(each_with).parameters()]))
        for step in range(3):
            for model in twin.models:
                for number, parameter in enumerate(model.parameters()):
                    parameter.requires_grad_(step != 1 or number % 3 != 0)
            for other in others:
                other.weight.grad = torch.full((3, 3), 1.0 + step)
            twin.step()
            assert torch.equal(others[0].weight, others[1].weight) and others[0].bias.grad is None
            assert (
                len(twin.optimizers[0].state[others[0].weight]) == 3 and others[0].bias not in twin.optimizers[0].state
            )


# --- the view of programs ---------------------------------------------------------------------------------------------


def test_hooks_schedulers_and_scalers_see_the_optimizer_itself() -> None:
    with fake_world(1):
        twin = Twin(fused=True, sizes=((64,), (128,)), lr=0.1)
        optimizer = twin.optimizers[0]
        everything = list(optimizer.param_groups[0]["params"])
        seen = []

        def look(found: Any, args: Any, kwargs: Any) -> None:
            seen.append((found, list(found.param_groups[0]["params"])))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        schedule = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in twin.optimizers]
        for scale, infinite in ((2.0, 0.0), (4.0, 1.0), (2.0, 0.0)):
            for each in twin.optimizers:  # as GradScaler does with an optimizer that is fused
                each.grad_scale, each.found_inf = torch.tensor(scale), torch.tensor(infinite)
            twin.step()
            for each in schedule:
                each.step()
        assert len(seen) == 6 and all(found is optimizer and params == everything for found, params in seen)
        assert optimizer.state[everything[0]]["step"].item() == 2
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_a_step_that_fails_leaves_the_optimizer_as_programs_know_it() -> None:
    with fake_world(1):
        twin = Twin()
        twin.step(2)
        twin.gradients()
        optimizer = twin.optimizers[0]
        groups, lr = optimizer.param_groups, optimizer.param_groups[0]["lr"]
        everything = list(groups[0]["params"])
        groups[0]["lr"] = "broken"
        with pytest.raises(TypeError):
            optimizer.step()
        assert optimizer.param_groups is groups and all(map(is_, groups[0]["params"], everything))
        groups[0]["lr"] = lr
        for each in (0, 1):
            twin.optimizers[each].zero_grad()
            count_on(twin.optimizers[each], twin.parameters()[each])


def test_a_closure_steps_on_each_parameter_and_the_next_step_on_runs_again() -> None:
    with fake_world(1):
        twin = Twin()
        twin.step(2)
        for optimizer, parameters in zip(twin.optimizers, twin.parameters(), strict=True):

            def closure(parameters: list[nn.Parameter] = parameters) -> float:
                for each in parameters:
                    each.grad = torch.ones_like(each)
                return 1.0

            optimizer.step(closure)
            optimizer.zero_grad()
        twin.compare()
        twin.step(2)
        assert twin.steps.runs == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_is_a_plain_optimizer_with_states_of_its_own(duplicate: Any) -> None:
    with fake_world(1):
        twin = Twin()
        twin.step(2)
        copied = duplicate(twin.optimizers[0])
        params = copied.param_groups[0]["params"]
        for each in params:
            each.grad = torch.ones_like(each)
        copied.step()
        assert [copied.state[each]["step"].item() for each in params] == [3.0] * 20
        twin.compare()


def test_a_gradient_that_is_none_on_a_rank_without_its_rows() -> None:
    with fake_world(2, rank=1):
        model = flatfsdp.fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 6)))
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        steps = flatfsdp.fuse_optimizer_steps(optimizer)
        for members in (4, 4, 3, 4):
            model(torch.ones(2, 4)).sum().backward()
            if members == 3:
                model[0].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            assert steps.members == members


def test_remove_ends_it() -> None:
    with fake_world(1):
        twin = Twin()
        twin.step(2)
        twin.steps.remove()
        twin.step(2)
        assert twin.steps.runs == 0
        flatfsdp.fuse_optimizer_steps(twin.optimizers[0])
        twin.step(2)


def test_flat_parameters_step_as_they_are() -> None:
    with fake_world(2):
        model: Any = FullyShardedDataParallel(Block(SIZES), use_orig_params=False, device_id=torch.device("cpu"))
        optimizer = optim.AdamW(model.parameters())
        steps = flatfsdp.fuse_optimizer_steps(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert steps.runs == 0 and list(optimizer.state) == [model._flat_param]


def test_what_cannot_step_flat_is_refused() -> None:
    wrong: Any = "AdamW"
    with fake_world(1):
        with pytest.raises(ConfigTypeError, match="fuse_optimizer_steps: optimizer"):
            flatfsdp.fuse_optimizer_steps(wrong)
        parameters = list(FullyShardedDataParallel(Block(SIZES), use_orig_params=True).parameters())
        with pytest.raises(ConfigTypeError, match="fuse_optimizer_steps: elementwise"):
            flatfsdp.fuse_optimizer_steps(optim.SGD(parameters), elementwise=wrong)
        with pytest.raises(UsageError, match=r"Adafactor is not known to be element-wise"):
            flatfsdp.fuse_optimizer_steps(optim.Adafactor(parameters))
        with pytest.raises(UsageError, match="differentiable=True"):
            flatfsdp.fuse_optimizer_steps(optim.AdamW(parameters, differentiable=True))
        optimizer = optim.AdamW(parameters)
        flatfsdp.fuse_optimizer_steps(optimizer)
        with pytest.raises(UsageError, match="is already fused"):
            flatfsdp.fuse_optimizer_steps(optimizer)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", [False, True])
def test_a_step_takes_few_calls_for_each_parameter(front: bool) -> None:
    calls = {}
    with fake_world(2):
        for count in (50, 100):
            twin = Twin(blocks=2, sizes=((8,),) * count, front=front)
            twin.step(2)
            twin.gradients()
            calls[count] = [calls_of(optimizer.step) for optimizer in twin.optimizers]
    flat, single = ((calls[100][each] - calls[50][each]) / 100 for each in (0, 1))
    assert flat <= 1, f"{flat} calls of Python functions for each parameter; {single} without fuse_optimizer_steps"
    assert single > 3


def bytes_of_states(flat: bool, make: Callable[[Any], Any]) -> tuple[int, int]:
    """The bytes that an optimizer's first two steps leave allocated, and their peak."""
    with fake_world(1), Recording() as recording:
        model: Any = FullyShardedDataParallel(
            Block(((32, 32),) * 20), use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = make(model.parameters())
        if flat:
            flatfsdp.fuse_optimizer_steps(optimizer)
        model(torch.ones(2)).sum().backward()
        recording.mark("before")
        optimizer.step()
        optimizer.step()
        gc.collect()
        recording.mark("after")
    usage = recording.between("before", "after")
    return usage.end - usage.start, usage.peak - usage.start


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adagrad], ids=["AdamW", "states from before"])
def test_states_take_the_memory_that_they_took(make: Any) -> None:
    (single, _), (flat, peak) = (bytes_of_states(each, make) for each in (False, True))
    assert abs(flat - single) <= 4 * (20 + 1) * 2  # step counts: of each parameter, and of the run
    assert peak - max(flat, 0) <= 20 * 32 * 32 * 4 * 4  # temporaries as long as the run
