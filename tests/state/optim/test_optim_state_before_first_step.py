"""The state of an optimizer that has not stepped: its initial values, obtained without a change of the optimizer."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp.engine.state.optim.descriptions import alike
from flatfsdp.errors import FlatFSDPWarning
from tests.conftest import Run
from tests.harness.corners import Net, Setting, chosen, data, full_parameters, joined, loss_of, seeded
from tests.harness.models import Feedforward
from tests.harness.thorough import some
from tests.state.optim.test_optim_state import OPTIMIZERS, Pair, different

pytestmark = pytest.mark.distributed

STARTS = {  # initial values other than zero
    "mu_product": 1.0,
    "step_size": 0.01,
    "sum": 0.3,
    "eta": 0.01,
    "mu": 1.0,
}
MAKE = {
    **{name: make for name, make in OPTIMIZERS.items() if name != "odd"},
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def started(rank: int, world: int, optimizer: str) -> list[str]:
    lines = []
    for setting in some((Setting(orig=True), Setting(orig=False)), 2, [*MAKE].index(optimizer)):
        model = setting.wrap(seeded(Net), (Feedforward,))
        optim = MAKE[optimizer](model.parameters())
        before = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        if optim.state and optimizer != "adagrad":
            lines.append(f"{setting}: the optimizer has state now")
        for name, entry in before["state"].items():
            for state, value in entry.items():
                start = STARTS.get(state, 0.0)
                if state != "ax" and not torch.equal(value, torch.full_like(value, start)):
                    lines.append(f"{setting}: {name}: {state} is {value}, not {start}")
        loss_of(model(data(rank, 0))).backward()
        optim.step()
        after = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        if {name: {*entry} for name, entry in before["state"].items()} != {
            name: {*entry} for name, entry in after["state"].items()
        }:
            lines.append(f"{setting}: other states than after a step")
        for name, entry in after["state"].items():
            for state, value in entry.items():
                other = before["state"][name][state]
                if (other.dtype, other.shape) != (value.dtype, value.shape):
                    lines.append(f"{setting}: {name}: {state} is {other.dtype} {other.shape}")
    return lines


@pytest.mark.parametrize("optimizer", MAKE)
def test_it_is_that_of_the_first_step(optimizer: str, pool2: Run) -> None:
    assert not joined(pool2(started, optimizer))


class Noisy(torch.optim.Optimizer):
    """Draws random numbers when it lays out its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5)})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] *= 0.5
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("noise", torch.rand_like(p))
                    self.state[p]["drawn"] = random.random() < 2
                    p.add_(1.0)


def untouched(rank: int, world: int) -> list[str]:
    lines = []
    for setting in chosen(untouched):
        model = setting.wrap(seeded(Net), (Feedforward,))
        optim = Noisy(model.parameters())
        calls: list[str] = []
        handles = [
            optim.register_step_pre_hook(lambda *_: calls.append("pre")),  # noqa: B023
            optim.register_step_post_hook(lambda *_: calls.append("post")),  # noqa: B023
            register_optimizer_step_pre_hook(lambda *_: calls.append("global")),  # noqa: B023
        ]
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
        loss_of(model(data(rank, 0))).backward()
        random.seed(3)

        def facts() -> list[Any]:
            params = [p.detach().clone() for p in model.parameters()]  # noqa: B023
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]  # noqa: B023
            lr = optim.param_groups[0]["lr"].clone()  # noqa: B023
            count = (optim.steps, schedule._step_count, getattr(optim, "_opt_called", None))  # noqa: B023
            return [params, grads, lr, count, torch.get_rng_state(), random.getstate(), len(optim.state), [*calls]]  # noqa: B023

        before = facts()
        found = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        for handle in handles:
            handle.remove()
        if not all(map(alike, before, facts())):
            lines.append(f"{setting}: changed")
        if found["param_groups"][0]["lr"] != 0.5 or set(found["state"]["head.weight"]) != {"noise", "drawn"}:
            lines.append(f"{setting}: {found}")
    return lines


def test_nothing_is_touched(pool2: Run) -> None:
    """Between backward and step, with hooks and a scheduler; values that ranks draw alike."""
    assert not joined(pool2(untouched))


def between(rank: int, world: int) -> list[str]:
    """Requested between forward and backward, when parameters have no values; the backward goes on."""
    lines = []
    for setting in chosen(between):
        model, other = (setting.wrap(seeded(Net), (Feedforward,)) for _ in range(2))
        optim = torch.optim.Adam(model.parameters())
        loss = loss_of(model(data(rank, 0)))
        state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]
        loss.backward()
        loss_of(other(data(rank, 0))).backward()
        for name, parameter in full_parameters(model).items():
            if state[name]["exp_avg"].shape != parameter.shape:
                lines.append(f"{setting}: {name} {state[name]['exp_avg'].shape}")
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            if (one.grad is None) is not (two.grad is None) or (one.grad is not None and not one.grad.equal(two.grad)):
                lines.append(f"{setting}: another gradient")
    return lines


def test_between_forward_and_backward(pool2: Run) -> None:
    assert not joined(pool2(between))


def resumed(rank: int, world: int, optimizer: str) -> list[str]:
    lines = []
    for setting in (Setting(orig=True), Setting(orig=False)):
        # torch casts loaded states to the dtype of the parameter, also a product that is none of its moments
        model = "one unit" if optimizer == "nadam" else "corners"
        pair, other = (Pair(setting, model, optimizer) for _ in range(2))
        pair.optim.param_groups[0]["lr"] = pair.plain_optim.param_groups[0]["lr"] = 0.03
        saved = pair.full()
        other.optim.load_state_dict(FSDP.shard_full_optim_state_dict(saved, other.model, optim=other.optim))
        for each in (pair, other):
            each.train(rank)
        lines += different(other.full()["state"], pair.full()["state"])
        lines += different(other.full()["state"], pair.expected()["state"])
    return lines


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "rmsprop"])
def test_resumed_before_the_first_step(optimizer: str, pool2: Run) -> None:
    assert not joined(pool2(resumed, optimizer))


class Around(torch.optim.Optimizer):
    """A wrapper around an optimizer, as some programs have."""

    def __init__(self, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        self.optimizer = optimizer
        vars(self).update(more)

    param_groups = property(  # type: ignore[assignment]
        lambda self: self.optimizer.param_groups, lambda self, value: setattr(self.optimizer, "param_groups", value)
    )
    state = property(  # type: ignore[assignment]
        lambda self: self.optimizer.state, lambda self, value: setattr(self.optimizer, "state", value)
    )

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def around(rank: int, world: int) -> list[str]:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    before = full_parameters(model)
    inner = torch.optim.Adam(model.parameters())
    found = FSDP.full_optim_state_dict(model, Around(inner), rank0_only=False)["state"]
    expected = FSDP.full_optim_state_dict(model, inner, rank0_only=False)["state"]
    lines = list(different(found, expected))
    if inner.state or set(found) != set(before):
        lines.append(f"state of the wrapped optimizer: {len(inner.state)}, found {set(found)}")
    return lines + [name for name, value in full_parameters(model).items() if not torch.equal(value, before[name])]


def test_an_optimizer_around_another_one(pool2: Run) -> None:
    assert not joined(pool2(around))


def text(rank: int, world: int, kind: str) -> list[str]:
    model = Setting().wrap(nn.Linear(3, 2), ())
    optim: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters())
    if kind == "module":
        optim = Around(torch.optim.Adam(model.parameters()), model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state: dict[str, Tensor] = FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]
    assert not state
    return [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("LBFGS", "missing 1 required positional argument: 'closure'"), ("module", "its attribute 'model' is a module")],
)
def test_an_optimizer_that_cannot_be_tried_reports_it(kind: str, words: str, pool2: Run) -> None:
    (line,) = (line for lines in pool2(text, kind) for line in lines)  # one of the job
    assert words in line and "before its first step cannot be determined" in line


class Averaging(torch.optim.Optimizer):
    """Keeps an average of each parameter, which begins as a copy of it, and a moment, which begins with zeros."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                if not state:
                    state["average"], state["moment"] = p.to(torch.float64), torch.zeros_like(p)
                state["moment"].add_(p.grad + 0.1 * p)
                p.sub_(group["lr"] * state["moment"])
                state["average"].lerp_(p.double(), 0.5)


def averaged(rank: int, world: int) -> list[str]:
    lines = []
    for setting in (Setting(orig=True), Setting(orig=False), Setting("NO_SHARD"), Setting(offload=True)):
        model = setting.wrap(seeded(Net), (Feedforward,))
        optim = Averaging(model.parameters())
        expected = full_parameters(model)
        found = FSDP.full_optim_state_dict(model, optim, rank0_only=False)["state"]
        for name, value in expected.items():
            if not torch.equal(found[name]["average"], value.double()):
                lines.append(f"{setting}: {name}: not its copy")
            if found[name]["moment"].any():
                lines.append(f"{setting}: {name}: a step on its values")
        if full_parameters(model).keys() != expected.keys() or optim.state:
            lines.append(f"{setting}: the trial was no trial")
    return lines


def test_a_state_that_begins_as_a_copy_of_its_parameter(pool2: Run) -> None:
    assert not joined(pool2(averaged))
