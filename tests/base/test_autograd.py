"""Autograd features that work on a plain model: the same numbers under every strategy, and nothing left behind."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import ShardedGradScaler
from tests.conftest import Run
from tests.harness.corners import (
    ALL,
    HYBRID,
    PAIRS,
    Net,
    Program,
    Setting,
    data,
    differences,
    full_parameters,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import WIDTH, Feedforward
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed

again = partial(checkpoint, use_reentrant=False)
nested = partial(checkpoint, use_reentrant=True)


@dataclass(frozen=True)
class Corner:
    """A model, a program on it, and how closely the engine must agree (0: bit for bit)."""

    build: Callable[[], nn.Module]
    program: Program
    bound: float = 0.0
    units: tuple[type[nn.Module], ...] = (Feedforward,)
    steps: int = 2


CORNERS: dict[str, Corner] = {}


def corner(build: Callable[[], nn.Module], **options: Any) -> Callable[[Program], Program]:
    """Enter a program into the table under its name."""

    def enter(program: Program) -> Program:
        CORNERS[program.__name__] = Corner(build, program, **options)
        return program

    return enter


def job(rank: int, world: int, name: str, under: tuple[Setting, ...]) -> list[str]:
    it = CORNERS[name]
    return differences(rank, world, it.build, it.program, units=it.units, under=under, steps=it.steps, bound=it.bound)


# --- one after the other ----------------------------------------------------------------------------------------------


@corner(Net)
def forward_and_backward(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return loss, x.grad


@corner(Net, bound=1e-6)
def two_forwards_one_backward(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step))) + 3 * loss_of(model(data(rank, step, 1)))
    loss.backward()
    return loss


@corner(Net, bound=1e-6)
def two_forwards_two_backwards(model: Any, rank: int, step: int) -> Any:
    first, second = loss_of(model(data(rank, step))), loss_of(model(data(rank, step, 1)))
    first.backward()
    second.backward()
    return first, second


@corner(Net, bound=1e-6)
def two_forwards_two_backwards_crossed(model: Any, rank: int, step: int) -> Any:
    first, second = loss_of(model(data(rank, step))), loss_of(model(data(rank, step, 1)))
    second.backward()
    first.backward()
    return first, second


@corner(Net, bound=1e-6)
def two_backwards_with_a_forward_between(model: Any, rank: int, step: int) -> Any:
    first = loss_of(model(data(rank, step)))
    first.backward(retain_graph=True)
    second = loss_of(model(data(rank, step, 1)))
    first.backward()
    second.backward()
    return first, second


@corner(Net)
def retained_graph_twice(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step)))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def _two_heads(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    early = net.blocks[0](x)
    return early.square().mean(), net.head(net.blocks[2](net.blocks[1](early)))


@corner(partial(Net, _two_heads), bound=1e-6)
def two_outputs_two_backwards(model: Any, rank: int, step: int) -> Any:
    early, late = model(data(rank, step))
    early.backward(retain_graph=True)
    loss_of(late).backward()
    return early, late


@corner(partial(Net, _two_heads), bound=1e-6)
def one_of_two_outputs(model: Any, rank: int, step: int) -> Any:
    early, late = model(data(rank, step))
    (early if step % 2 else loss_of(late)).backward()
    return early, late


@corner(Net)
def a_forward_that_is_dropped(model: Any, rank: int, step: int) -> Any:
    model(data(rank, step, 2))
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss


def _twice(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[0](net.blocks[1](net.blocks[0](x)))
    return net.head(x + net.blocks[0](x))


@corner(partial(Net, _twice, depth=2))
def a_unit_several_times_in_a_forward(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss


class Onion(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: int = 2) -> Tensor:
        x = torch.tanh(self.layer(x))
        return self(x, again - 1) if again else x


@corner(lambda: nn.Sequential(Onion(), nn.Linear(WIDTH, 3)), units=(Onion,))
def a_module_that_calls_itself(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss


# --- activation checkpointing -----------------------------------------------------------------------------------------


def _step(model: Any, rank: int, step: int, *, grad_input: bool = True) -> Any:
    x = data(rank, step).requires_grad_(grad_input)
    loss = loss_of(model(x))
    loss.backward()
    return loss, x.grad


class Inside(nn.Module):
    """A block that recomputes its inner part."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Feedforward(WIDTH, 17)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.how(self.inner, x)))


class Recomputed(nn.Module):
    """A module in a reentrant checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return nested(self.inner, x)


class Shared(nn.Module):
    """One parameter in two recomputed segments and outside of both."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.how(lambda y: torch.tanh(self.layer(y)) * self.scale, x)
        x = self.how(lambda y: torch.sin(self.layer(y)) + self.scale, x)
        return self.layer(x) * self.scale


class Repeated(nn.Module):
    """A layer in several recomputed segments, whose inputs' gradients come before its own."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(self.how(self.layer, x))
        return self.how(lambda y: self.other(self.layer(y)), x)


def _around(how: Callable[..., Any], net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = how(block, x)
    return net.head(x)


def _around_two(how: Callable[..., Any], net: Net, x: Tensor) -> Tensor:
    first, second, third = net.blocks
    return net.head(third(how(lambda y: second(torch.sin(first(y))), x)))


def _stops_early(how: Callable[..., Any], net: Net, x: Tensor) -> Tensor:
    """Nothing is saved after the first layer of the last block of the segment: the recomputation ends inside it."""
    first, second, third = net.blocks
    return net.head(how(lambda y: y + second(first(y)).sum() * 2.0, x) + third(x))


for _kind, _how in (("reentrant", nested), ("not_reentrant", again)):
    # A reentrant segment brings its gradients in a task of its own, which may add to those that came before.
    _close = 1e-6 if _how is nested else 0.0
    CORNERS[f"checkpoint_inside_a_unit_{_kind}"] = Corner(
        lambda how=_how: nn.Sequential(Inside(how), Inside(how), nn.Linear(WIDTH, 3)), _step, _close, (Inside,)
    )
    CORNERS[f"checkpoint_inside_a_unit_around_a_unit_{_kind}"] = Corner(
        lambda how=_how: nn.Sequential(Inside(how), Inside(how), nn.Linear(WIDTH, 3)),
        _step,
        _close,
        (Inside, Feedforward),
    )
    CORNERS[f"checkpoint_around_units_{_kind}"] = Corner(lambda how=_how: Net(partial(_around, how)), _step, _close)
    CORNERS[f"checkpoint_around_two_units_{_kind}"] = Corner(
        lambda how=_how: Net(partial(_around_two, how)), _step, _close
    )
    CORNERS[f"checkpoint_of_one_unit_several_times_{_kind}"] = Corner(
        lambda how=_how: nn.Sequential(nn.Linear(WIDTH, WIDTH), Repeated(how), nn.Linear(WIDTH, 3)),
        _step,
        1e-6,
        (nn.Linear,),
    )
    CORNERS[f"checkpoint_around_units_in_one_{_kind}"] = Corner(
        lambda how=_how: Net(partial(_around, how)), _step, _close, units=()
    )
    CORNERS[f"checkpoint_with_early_stop_{_kind}"] = Corner(
        lambda how=_how: Net(partial(_stops_early, how)), _step, _close
    )
    CORNERS[f"checkpoint_of_one_parameter_twice_{_kind}"] = Corner(
        lambda how=_how: nn.Sequential(Shared(how), nn.Linear(WIDTH, 3)), _step, 1e-6, (Shared,)
    )
    CORNERS[f"checkpoint_around_the_root_{_kind}"] = Corner(
        Net, lambda model, rank, step, how=_how: _step(partial(how, model), rank, step), _close
    )


@corner(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Recomputed(nn.Linear(WIDTH, WIDTH, bias=False)), nn.Tanh()),
    bound=1e-6,
    units=(nn.Linear,),
)
def a_recomputed_unit_in_two_forwards_before_any_other_gradient(model: Any, rank: int, step: int) -> Any:
    """The gradient of its input comes before that of its weight, in a graph task of its own."""
    x, y = data(rank, step).requires_grad_(), data(rank, step, 1).requires_grad_()
    loss = loss_of(model(x)) + 3 * loss_of(model(y))
    loss.backward()
    return loss, x.grad, y.grad


class Tied(nn.Module):
    """Two layers with one weight, of which the first owns it, which `call` runs or not."""

    def __init__(self, call: Callable[..., Any], *, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.sin(self.call(self.first, x))))


CORNERS["a_tied_parameter_whose_owner_does_not_run"] = Corner(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Tied(lambda layer, x: x)),
    _step,
    units=(nn.Linear,),
)
CORNERS["a_tied_parameter_whose_owner_is_recomputed"] = Corner(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Tied(again), Tied(again, bias=True)), _step, 1e-6, (nn.Linear,)
)


@corner(partial(Net, partial(_around, again)), bound=1e-6)
def checkpoint_and_two_backwards(model: Any, rank: int, step: int) -> Any:
    first, second = loss_of(model(data(rank, step))), loss_of(model(data(rank, step, 1)))
    second.backward()
    first.backward(retain_graph=True)
    first.backward()
    return first, second


# --- double backward --------------------------------------------------------------------------------------------------


@corner(Net, bound=1e-5)
def gradient_penalty_alone(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    penalty.backward()
    return penalty


@corner(Net, bound=1e-5)
def gradient_penalties_that_add_up(model: Any, rank: int, step: int) -> Any:
    """The gradient of the head comes before any of an output, and is added to an earlier one."""
    return [gradient_penalty_alone(model, rank, 2 * step + number) for number in range(2)]


@corner(Net, bound=1e-5)
def gradient_penalty_with_a_loss(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = loss_of(output) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss, x.grad


@corner(Net, bound=1e-5)
def gradient_penalty_of_another_forward(model: Any, rank: int, step: int) -> Any:
    """As a critic is trained: the loss of one forward, the penalty of the next, one backward."""
    loss = loss_of(model(data(rank, step, 1)))
    x = data(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss + slope.square().mean()).backward()
    return loss, slope


class Passing(nn.Module):
    """A layer that only batches of more than one row go through; others come out as they went in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) if x.shape[0] > 1 else x


@corner(partial(Net, block=Passing), bound=1e-5, units=(Passing,))
def gradient_penalty_through_units_that_return_their_input(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step, 1)))
    loss.backward()
    x = data(rank, step, rows=1).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    slope.square().sum().backward()
    return loss, slope


@corner(Net, bound=1e-5)
def backward_that_is_differentiated_again(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    loss = loss_of(model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of the cycle in .grad
        loss.backward(inputs=[x], create_graph=True)
    slope, x.grad = x.grad, None
    slope.square().sum().backward()
    return loss, slope


@corner(Net)
def gradients_of_inputs_only(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    loss = loss_of(model(x.detach()))
    loss.backward()
    return loss, slope


@corner(Net)
def double_backward_then_plain_steps(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    if step == 0:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with torch.no_grad():  # never differentiated: the next forward ends it
            return slope, model(x)
    loss = loss_of(model(x))
    loss.backward()
    return loss


# --- inputs and outputs -----------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    """An output that pytree does not know."""

    value: Tensor
    more: dict[str, Any] = field(default_factory=dict)


class Wrapping(nn.Module):
    """A block that hands out its result inside something."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Feedforward(WIDTH, 18)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.block(x))


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"a": y, "n": None, "s": "text"}, lambda out: out["a"]),
    "list_of_tuples": (lambda y: [(y, 3), [y * 2]], lambda out: out[0][0] + out[1][0]),
    "namedtuple": (lambda y: Pair(y, y.sin()), lambda out: out.left * out.right),
    "dataclass": (lambda y: Box(y, {"twice": 2 * y}), lambda out: out.value + out.more["twice"]),
    "nothing_too": (lambda y: (None, y), lambda out: out[1]),
}


class Unpacking(nn.Module):
    """Two blocks with packed outputs and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        pack, self.unpack = PACKED[kind]
        self.first, self.second = Wrapping(pack), Wrapping(pack)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.unpack(self.second(self.unpack(self.first(x)))))


for _packed in PACKED:
    CORNERS[f"outputs_in_a_{_packed}"] = Corner(partial(Unpacking, _packed), _step, units=(Wrapping,))


class Viewing(nn.Module):
    """Hands out a view of its parameter, of its input, and something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table[1:], x[:, ::2], self.layer(x), self.table


class Views(nn.Module):
    """Uses all that `Viewing` hands out, after other units have run."""

    def __init__(self) -> None:
        super().__init__()
        self.viewing, self.block, self.head = Viewing(), Feedforward(WIDTH, 18), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, half, y, table = self.viewing(x)
        y = self.block(y) * 2 + table.sin() + half.sum()
        return self.head(y + rows.sum(0))


CORNERS["outputs_that_are_views"] = Corner(Views, _step, units=(Viewing, Feedforward), bound=1e-6)


def _edited(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        x += 1.0
        x.mul_(0.5)
    return net.head(x)


CORNERS["outputs_edited_in_place"] = Corner(partial(Net, _edited), _step)


class Scaled(nn.Module):
    """Autograd saves views of both parameters; the caller allocates in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.view(1, -1)


@corner(lambda: nn.Sequential(Scaled(), Scaled(), nn.Linear(WIDTH, 3)), units=(Scaled,))
def a_saved_view_across_reshard(model: Any, rank: int, step: int) -> Any:
    x = data(rank, step).requires_grad_()
    loss = loss_of(model(x))
    rubbish = [torch.full((WIDTH * WIDTH,), float("nan")) for _ in range(20)]
    loss.backward()
    del rubbish
    return loss, x.grad


@corner(Net)
def inputs_without_gradient(model: Any, rank: int, step: int) -> Any:
    return _step(model, rank, step, grad_input=False)


@corner(lambda: Net(lambda net, x, *, scale, extra: net.head(net.blocks[0](x * scale) + extra["y"][0]), depth=1))
def keyword_inputs_with_gradients(model: Any, rank: int, step: int) -> Any:
    x, y = data(rank, step).requires_grad_(), data(rank, step, 1).requires_grad_()
    loss = loss_of(model(x, scale=0.5, extra={"y": [y]}))
    loss.backward()
    return loss, x.grad, y.grad


# --- frozen and unused ------------------------------------------------------------------------------------------------


def frozen(*blocks: int, head: bool = False) -> nn.Module:
    """A net with frozen blocks (and head)."""
    net = Net()
    for i in blocks:
        net.blocks[i].requires_grad_(False)
    net.head.requires_grad_(not head)
    return net


def _through(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return net.head(torch.tanh(net.between(x)))


def frozen_between() -> nn.Module:
    """A net whose head is trained, in the root, behind a frozen layer of the root, behind trained blocks: the root's
    gradients come before the backward has read all of its parameters."""
    net = Net(_through)
    net.between = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return net


for _name, _build in {
    "between": frozen_between,
    "first": partial(frozen, 0),
    "middle": partial(frozen, 1),
    "last": partial(frozen, 2),
    "root": partial(frozen, head=True),
    "all_but_the_root": partial(frozen, 0, 1, 2),
    "all_but_one": partial(frozen, 0, 2, head=True),
}.items():
    CORNERS[f"frozen_{_name}"] = Corner(_build, partial(_step, grad_input=False))
    CORNERS[f"frozen_{_name}_with_gradients_of_inputs"] = Corner(_build, _step)


class Choosing(nn.Module):
    """Two layers of which the caller uses one or both; the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return torch.tanh(self.one(x)) + (self.two(x) if use else 0.0)


def _choose(net: Net, x: Tensor, *, use: bool) -> Tensor:
    for block in net.blocks:
        x = block(x, use)
    return net.head(x)


def _chosen(model: Any, rank: int, step: int, *, use: Callable[[int, int], bool]) -> Any:
    loss = loss_of(model(data(rank, step), use=use(rank, step)))
    loss.backward()
    return loss


for _name, _use in {
    "on_one_rank": lambda rank, step: rank != 0,
    "on_all_ranks": lambda rank, step: False,
    "in_alternate_steps": lambda rank, step: step % 2 == 0,
    "on_alternate_ranks": lambda rank, step: (rank + step) % 2 == 0,
}.items():
    CORNERS[f"parameters_unused_{_name}"] = Corner(
        lambda: Net(_choose, block=Choosing), partial(_chosen, use=_use), units=(Choosing,), steps=3
    )


class Adapted(nn.Module):
    """A frozen layer, and another one that the caller uses or not."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.beside = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return torch.tanh(self.base(x)) + (self.beside(x) if use else 0.0)


def _in_two_forwards(model: Any, rank: int, step: int, *, use: Callable[[int, int], bool]) -> Any:
    inputs = [data(rank, step, micro).requires_grad_() for micro in range(2)]
    losses = [loss_of(model(x, use=use(rank, micro))) for micro, x in enumerate(inputs)]
    (losses[0] + 3 * losses[1]).backward()
    return losses


for _name, _use in {
    "on_one_rank": lambda rank, micro: rank != 0,
    "in_the_first_on_one_rank": lambda rank, micro: rank != 0 or micro == 0,
}.items():
    CORNERS[f"two_forwards_that_use_parameters_{_name}"] = Corner(
        lambda: Net(_choose, block=Adapted), partial(_in_two_forwards, use=_use), 1e-6, (Adapted,)
    )


def _skip(net: Net, x: Tensor, *, skipped: int) -> Tensor:
    for i, block in enumerate(net.blocks):
        if i != skipped:
            x = block(x)
    return net.head(x)


@corner(partial(Net, _skip), steps=4)
def units_that_no_rank_reaches(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step), skipped=step))
    loss.backward()
    return loss


@corner(lambda: Net(lambda net, x, *, order: net.head(net.blocks[order[1]](net.blocks[order[0]](x))), depth=2), steps=4)
def another_order_in_the_next_step(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step), order=(0, 1) if step % 2 else (1, 0)))
    loss.backward()
    return loss


def _detached(net: Net, x: Tensor) -> Tensor:
    first, second, third = net.blocks
    return net.head(third(x + second(x).detach()) + first(x) * (first(x).detach() > 0))


CORNERS["a_unit_whose_output_is_detached"] = Corner(partial(Net, _detached), _step)


# --- modes ------------------------------------------------------------------------------------------------------------


@corner(Net)
def forwards_without_gradients_in_between(model: Any, rank: int, step: int) -> Any:
    with torch.no_grad():
        before = model(data(rank, step, 1))
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    with torch.inference_mode():
        after = model(data(rank, step, 1)).clone()
    return before, loss, torch.tensor(after.tolist())


@corner(Net)
def a_forward_without_gradients_before_the_backward(model: Any, rank: int, step: int) -> Any:
    loss = loss_of(model(data(rank, step)))
    with torch.no_grad() if step % 2 else torch.inference_mode():
        other = torch.tensor(model(data(rank, step, 1)).tolist())
    loss.backward()
    return loss, other


@corner(Net)
def inference_then_training(model: Any, rank: int, step: int) -> Any:
    with torch.inference_mode():
        other = torch.tensor(model(data(rank, step, 1)).tolist())
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return other, loss


@corner(Net)
def evaluation_then_training(model: Any, rank: int, step: int) -> Any:
    model.eval()
    with torch.no_grad():
        score = loss_of(model(data(rank, step, 1)))
    model.train()
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return score, loss


@corner(lambda: Net(lambda net, x: net.head(net.blocks[1](x + _without(net.blocks[0], x))), depth=2))
def a_unit_without_gradients_inside_a_forward(model: Any, rank: int, step: int) -> Any:
    return _step(model, rank, step)


def _without(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return block(x)


# Programs whose names are neighbors, which differ in one thing, are tried under different settings: each under
# FULL_SHARD, and every other one under another strategy, too.
SOME = PAIRS[0], ALL[1:2], PAIRS[2], ALL[1:2], PAIRS[1], ALL[:1], PAIRS[3], ALL[:1]


@pytest.mark.parametrize(("name", "turn"), list(zip(sorted(CORNERS), cycle(range(len(SOME))))))
def test_like_one_process(name: str, turn: int, pool2: Run) -> None:
    assert not joined(pool2(job, name, ALL if is_thorough() else SOME[turn], timeout=60))


IN_HYBRIDS = "two_forwards_two_backwards", "gradient_penalty_with_a_loss", "checkpoint_around_two_units_reentrant"


@pytest.mark.parametrize(("number", "name"), list(enumerate(IN_HYBRIDS)))
def test_hybrid_like_one_process(number: int, name: str, pool4: Run) -> None:
    under = some(HYBRID, 2, number)
    found = pool4(job, name, tuple(Setting(s.strategy, s.orig, s.doubled) for s in under))
    assert not joined([[line for line in lines if "differs by a norm" not in line or _far(line)] for lines in found])


def _far(line: str) -> bool:
    """Whether a difference is more than the rounding of another order of sums."""
    apart, size = line.split("a norm of ")[1].split(" of ")
    return float(apart) > 1e-5 * float(size)


def steps_after_graphs(rank: int, world: int, orig: bool, scaled: bool) -> list[str]:
    """Parameters after steps right after backwards with `create_graph`, where they differ from those without."""
    trained = []
    for graph in (False, True):
        model = Setting("FULL_SHARD", orig).wrap(seeded(Net), (Feedforward,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns of the cycle in .grad
                scaler.scale(loss_of(model(data(rank, step)))).backward(create_graph=graph)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        trained.append(full_parameters(model))
    before, (plain, graphed) = dict(seeded(Net).named_parameters()), trained
    lines = [f"{name} differs" for name in plain if not torch.equal(plain[name], graphed[name])]
    return lines + [f"{name} was not stepped" for name in plain if torch.equal(plain[name], before[name])]


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_optimizer_steps_after_a_backward_with_a_graph(orig: bool, scaled: bool, pool2: Run) -> None:
    assert not joined(pool2(steps_after_graphs, orig, scaled))
