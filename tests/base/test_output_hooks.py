"""Hooks on the outputs of units, of whoever registers them: the first to run is the engine's, which gathers the unit,
so that the others read whole weights. A shard of one element would broadcast, and change gradients unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from tests.conftest import Run
from tests.harness.corners import ALL, HYBRID, HYBRID_HALVES, PAIRS, Setting, data, differences, joined, loss_of, seeded
from tests.harness.front import whole
from tests.harness.gradients import unlike
from tests.harness.thorough import is_thorough, some, steps

pytestmark = pytest.mark.distributed

WIDTH = 2  # the shard of a gain is one element, which broadcasts


class Gain(nn.Module):
    """`tanh` of a layer, times a gain; its hooks multiply gradients by what they read."""

    def __init__(self, place: str = "", form: str = "plain") -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.place, self.form = place, form

    def factor(self) -> Tensor:
        """1 as long as what is read is the whole; an affine layer would not average over ranks."""
        return self.gain.detach() * self.layer.weight.detach().sum(0)

    def again(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.gain

    def forward(self, x: Tensor) -> Any:
        y = FORMS[self.form](self.again(x))
        if self.place and y.requires_grad:
            PLACES[self.place](self, y)
        return y


def _on_tensor(unit: Any, y: Tensor) -> None:
    y.register_hook(lambda grad: grad * unit.factor())


def _twice_and_removed(unit: Any, y: Tensor) -> None:
    removed = y.register_hook(lambda grad: grad * 7)
    _on_tensor(unit, y)
    removed.remove()
    y.register_hook(lambda grad: grad + 0.1 * unit.factor() * grad)


def _beside_retain_grad(unit: Any, y: Tensor) -> None:
    y.retain_grad()
    _on_tensor(unit, y)


def _before_node(unit: Any, y: Tensor) -> None:
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * unit.factor() for g in grads))


def _after_node(unit: Any, y: Tensor) -> None:
    assert y.grad_fn is not None
    scale = lambda grad: grad * unit.factor().mean() if grad is not None else None  # noqa: E731
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(map(scale, inputs)))


def _through_another_call(unit: Any, y: Tensor) -> None:
    """As implicit layers solve for gradients: through a second graph of the unit's weights, many times."""
    start = y.detach().clone().requires_grad_()
    again = unit.again(start)

    def solve(grad: Tensor) -> Tensor:
        found = grad
        for _ in range(3):
            found = grad + 0.3 * torch.autograd.grad(again, start, found, retain_graph=True)[0]
        return found

    y.register_hook(solve)


def _through_a_new_call(unit: Any, y: Tensor) -> None:
    start = y.detach().clone()

    def solve(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            point = start.clone().requires_grad_()
            again = unit.again(point)
        return grad + 0.3 * torch.autograd.grad(again, point, grad)[0]

    y.register_hook(solve)


PLACES: dict[str, Callable[[Any, Tensor], None]] = {
    "tensor": _on_tensor,
    "removed": _twice_and_removed,
    "retain_grad": _beside_retain_grad,
    "prehook": _before_node,
    "posthook": _after_node,
    "implicit": _through_another_call,
    "anew": _through_a_new_call,
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "view": lambda y: y.view(-1, 1, WIDTH)[:, 0],
    "reshaped in place": lambda y: y.unsqueeze_(1).squeeze_(1),
    "part": lambda y: torch.cat([y, y]).chunk(2)[1],
}


class Around(nn.Module):
    """A unit that returns the tensor of the unit inside: as it is, hooked, or multiplied in place by its own gain."""

    def __init__(self, place: str, way: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(1.5, 0.5, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = Gain(place if way == "hooked inside" else "")
        self.place, self.way = place, way

    factor, again = Gain.factor, Gain.again

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.layer(x) * self.gain)
        if self.way == "edited":
            y.mul_(self.gain)
        if self.way != "hooked inside" and y.requires_grad:
            PLACES[self.place](self, y)
        return y


class Nested(nn.Module):
    """Returns its result in containers, next to others, one of them its input."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.inner = Gain(place)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x * self.gain)
        return {"a": (y, [x]), "b": y.sin()}


class _Called:
    """A unit as its caller has it."""

    def __init__(self, unit: Any) -> None:
        self.again, self.factor = unit, getattr(unit, "module", unit).factor


class Net(nn.Module):
    """Units between two layers."""

    def __init__(self, *units: nn.Module, how: Callable[..., Any] | None = None, then: str = "") -> None:
        super().__init__()
        self.first, self.units, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList(units), nn.Linear(WIDTH, 3)
        self.how, self.then = how, then

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            y = unit(x) if self.how is None else self.how(unit, x)
            if isinstance(y, dict):
                y = y["a"][0] + y["b"] + y["a"][1][0]
            elif "hooked" in self.then and y.requires_grad:
                PLACES[self.then.split()[-1]](_Called(unit), y)
            if "edited" in self.then:
                y.mul_(2.0)
            x = y
        return self.last(x)


def _program(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step, width=WIDTH).requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return loss, x.grad


def _gains(place: str, form: str, **more: Any) -> nn.Module:
    return Net(Gain(place, form), Gain(place, form), **more)


def _hooked_by_caller(place: str, form: str) -> nn.Module:
    return Net(Gain(form=form), Gain(form=form), then=f"hooked by caller {place}")


def _around(place: str, way: str) -> nn.Module:
    return Net(Around(place, way), Around(place, way))


RECOMPUTED = {"reentrant": partial(checkpoint, use_reentrant=True), "not": partial(checkpoint, use_reentrant=False)}

MODELS: dict[str, Callable[[], nn.Module]] = {}
for _place, _form in product(PLACES, FORMS):
    MODELS[f"{_place}, {_form}"] = partial(_gains, _place, _form)
    MODELS[f"{_place}, {_form}, by the caller"] = partial(_hooked_by_caller, _place, _form)
for _place in PLACES:
    MODELS[f"{_place}, then edited"] = partial(_gains, _place, "plain", then="edited")
    MODELS[f"{_place}, a view then edited"] = partial(_gains, _place, "view", then="edited")
    MODELS[f"{_place}, nested"] = lambda place=_place: Net(Nested(place), Nested(place))
    for _name, _how in RECOMPUTED.items():
        MODELS[f"{_place}, recomputed {_name}"] = partial(_gains, _place, "plain", how=_how)
    for _way in ("as it is", "edited", "hooked inside"):
        MODELS[f"{_place}, around a unit, {_way}"] = partial(_around, _place, _way)
# Of each place some ways, and of each way some places.
CHOSEN = some([*MODELS], 5)


def _job(rank: int, world: int, name: str, under: tuple[Setting, ...]) -> list[str]:
    return differences(
        rank, world, MODELS[name], _program, units=(Gain, Around, Nested), under=under, steps=steps(), bound=1e-5
    )


@pytest.mark.parametrize(("name", "turn"), list(zip(CHOSEN, cycle(range(4)))))
def test_hooks_on_outputs_read_whole_weights(name: str, turn: int, pool2: Run) -> None:
    assert not joined(pool2(_job, name, ALL if is_thorough() else PAIRS[turn], timeout=60))


IN_HYBRIDS = ["tensor, plain", "prehook, view", "implicit, part", "tensor, around a unit, edited"]


@pytest.mark.parametrize(("number", "name"), list(enumerate(IN_HYBRIDS)))
def test_so_they_do_in_hybrids(number: int, name: str, pool4: Run) -> None:
    assert not joined(pool4(_job, name, HYBRID if is_thorough() else HYBRID_HALVES[number % 2], timeout=60))


def _in_place(rank: int, world: int, name: str, reshard: bool) -> list[str]:
    """Parameters under `fully_shard` that differ from those of one process that runs all ranks' batches."""
    model, alone = seeded(MODELS[name]), seeded(MODELS[name])
    for unit in [*model.modules()][:0:-1]:
        if isinstance(unit, (Gain, Around, Nested)):
            flatfsdp.fully_shard(unit, reshard_after_forward=reshard)
    flatfsdp.fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
    for step in range(steps()):
        loss_of(model(data(rank, step, width=WIDTH))).backward()
        for of in range(world):
            (loss_of(alone(data(of, step, width=WIDTH))) / world).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    rows = zip(model.named_parameters(), alone.parameters(), strict=True)
    found = {name: unlike(whole(parameter), other, rtol=1e-4, atol=1e-6) for (name, parameter), other in rows}
    return [f"{name}: {words}" for name, words in found.items() if words]


@pytest.mark.parametrize("name", CHOSEN[::2])
def test_so_they_do_under_fully_shard(name: str, pool2: Run) -> None:
    for reshard in (True, False) if is_thorough() else (True,):
        assert not joined(pool2(_in_place, name, reshard, timeout=60))
