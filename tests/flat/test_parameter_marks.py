"""Attributes and subclasses of parameters survive sharding, on what each front shows at rest and inside forwards, and
copies, loads and replacements."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Run
from tests.harness.three_fronts import FRONTS, sharded, unlike, whole_values

pytestmark = pytest.mark.distributed


class Scale(nn.Parameter):
    """A parameter class of a program."""

    def doubled(self) -> Tensor:
        return self * 2


MARKS: dict[str, dict[str, Any]] = {"d": {"no_decay": True, "rate": 0.5}, "l.weight": {"tag": {"layer": 1}}}


class Marked(nn.Module):
    """Reads the marks of its parameters in its forward."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.l = nn.Linear(6, 6, device=device)
        self.d = nn.Parameter(torch.ones(6, device=device))
        self.s = Scale(torch.ones(6, device=device))  # type: ignore[no-untyped-call]
        for name, marks in MARKS.items():
            vars(self.get_parameter(name)).update(marks)
        self.reading = True

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.d.fill_(1)
            self.s.fill_(1)

    def forward(self, x: Tensor) -> Any:
        if self.reading:
            assert not (lines := lost(self, "", listed=False)), lines
            assert torch.equal(self.s.doubled(), self.s * 2)
        return x + torch.tanh(self.l(x)) * self.s + self.d * x


def net(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Marked(device), Marked(device), nn.Linear(6, 1, device=device))


def lost(model: nn.Module, prefix: str, *, listed: bool = True) -> list[str]:
    """The marks and classes that parameters of `model` do not have, below a prefix of names."""
    lines = []
    found = dict(model.named_parameters()) if listed else {}
    for name in (*MARKS, "s"):
        holder, _, attribute = name.rpartition(".")
        parameter: Any = found[prefix + name] if listed else getattr(model.get_submodule(holder), attribute)
        for mark, value in MARKS.get(name, {}).items():
            if getattr(parameter, mark, None) != value:
                lines.append(f"{prefix}{name} has lost {mark}")
        if name == "s" and not (isinstance(parameter, Scale) and callable(getattr(parameter, "doubled", None))):
            lines.append(f"{prefix}{name} is a {type(parameter).__name__}")
        if not isinstance(parameter, nn.Parameter):
            lines.append(f"{prefix}{name} is no parameter")
    return lines


def at_rest(front: str, model: nn.Module) -> list[str]:
    """What `parameters()` lists, unless that is flat parameters."""
    return [line for place in "01" for line in lost(model, f"{place}.")] if front != "flat" else []


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def nothing(front: str, model: nn.Module) -> nn.Module:
    return model


def deep_copy(front: str, model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(front: str, model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    made: nn.Module = torch.load(buffer, weights_only=False)
    return made


def cast(front: str, model: nn.Module) -> nn.Module:
    return model.double().float()


def loaded(front: str, model: nn.Module) -> nn.Module:
    model.load_state_dict(model.state_dict())
    return model


def assigned(front: str, model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def emptied(front: str, model: nn.Module) -> nn.Module:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    return model


def replaced(front: str, model: nn.Module) -> nn.Module:
    """A new parameter in the place of one; at rest the marks are on it from the next use on."""
    if front != "flat":
        inner = model.get_submodule("0")
        inner.d = nn.Parameter(inner.d.detach().clone())
        with torch.no_grad():
            model(torch.ones(2, 6))
        step(model)
    return model


def swapped(front: str, model: nn.Module) -> nn.Module:
    if front == "fully_shard":
        parameter = model.get_parameter("0.d")
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        step(model)
    return model


def marked_later(front: str, model: nn.Module) -> nn.Module:
    """Marks that are set after sharding are seen in forwards, and survive."""
    if front != "flat":
        for inner in ("0", "1"):
            parameter: Any = model.get_parameter(f"{inner}.d")
            parameter.rate = 0.25
            parameter.rate = MARKS["d"]["rate"]
    return copy.deepcopy(model)


CHANGES = (nothing, deep_copy, pickled, cast, loaded, assigned, emptied, replaced, swapped, marked_later)


def after(rank: int, world: int, front: str, changes: tuple[Callable[[str, nn.Module], nn.Module], ...]) -> list[str]:
    lines = []
    for change in changes:
        model = sharded(front, net(), (Marked,))
        step(model)
        before = whole_values(front, model)
        model = change(front, model)
        if change not in (replaced, swapped):
            lines += [f"{change.__name__}: {line}" for line in unlike(whole_values(front, model), before)]
        lines += [f"{change.__name__}: {line}" for line in at_rest(front, model)]
        step(model)
        lines += [f"{change.__name__}, a step later: {line}" for line in at_rest(front, model)]
    return lines


@pytest.mark.parametrize("front", FRONTS)
def test_marks_survive(pool2: Run, front: str) -> None:
    for lines in pool2(after, front, CHANGES):
        assert not lines, "\n".join(lines)


def from_meta(rank: int, world: int, front: str) -> list[str]:
    model = sharded(front, net("meta"), (Marked,))
    if front == "fully_shard":
        lines = at_rest(front, model)
        model.to_empty(device="cpu")
        lines += at_rest(front, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
    else:
        lines = at_rest(front, model)
    step(model)
    return lines + at_rest(front, model)


@pytest.mark.parametrize("front", FRONTS)
def test_marks_survive_the_meta_device(pool2: Run, front: str) -> None:
    for lines in pool2(from_meta, front):
        assert not lines, "\n".join(lines)


def trains(rank: int, world: int, front: str) -> list[str]:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        found: dict[bool, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            found.setdefault(hasattr(parameter, "no_decay"), []).append(parameter)
        return [{"params": each, "weight_decay": 0.0 if mark else 0.5} for mark, each in sorted(found.items())]

    trained = []
    for model in (net(), sharded(front, net(), (Marked,))):
        optimizer = torch.optim.AdamW(groups(model), lr=0.05)
        for _ in range(3):
            step(model, optimizer)
        trained.append(model)
    plain, model = trained
    return unlike(whole_values(front, model), {name: each.detach() for name, each in plain.named_parameters()})


@pytest.mark.parametrize("front", ["original", "fully_shard"])
def test_groups_by_marks_train_as_in_one_process(pool2: Run, front: str) -> None:
    for lines in pool2(trains, front):
        assert not lines, lines
