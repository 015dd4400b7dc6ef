"""Gradients of a unit whose input shows when all have come: autograd calls no Python code for each of them, and none is
lost whose way is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from tests.harness.calls import calls_of
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WIDTH = 4
X = torch.linspace(-1.0, 1.0, 2 * WIDTH).view(2, WIDTH)


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake_world(getattr(request, "param", 1)):  # of several ranks, it leaves what is reduced uninitialized
        yield


class Block(nn.Module):
    """Two layers. Lets other code use its weights later: what it computed from them, or the forward's second part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []
        self.keeps = False
        self.hook: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(x)
        if self.hook is not None and inside.requires_grad:
            inside.register_hook(self.hook)
        if self.keeps:
            self.kept = [self.down.weight.square().sum()]
        return x + self.down(inside.tanh())


def nets(**settings: Any) -> tuple[nn.Sequential, Any]:
    """A plain model, and the same one wrapped, each block a unit."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(*(Block() for _ in range(3))))
    return made[0], FullyShardedDataParallel(made[1], auto_wrap_policy={Block}, **settings)


def check(plain: nn.Module, model: Any) -> None:
    """Equal gradients, of which leaves keep none."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
            found = torch.zeros_like(one) if one.grad is None else one.grad
            torch.testing.assert_close(two.grad, found, msg=lambda text, name=name: f"{name}: {text}")
    for each in (plain, model):
        each.zero_grad()


def blocks(model: Any) -> list[Block]:
    return [each for each in model.modules() if isinstance(each, Block)]


def plain_step(model: Any) -> None:
    model(X).square().sum().backward()


def kept_in_the_loss(model: Any) -> None:
    """A gradient that comes after that of the block's input."""
    for each in blocks(model):
        each.keeps = True
    output = model(X)
    (output.square().sum() + torch.stack([blocks(model)[1].kept[0]]).tanh().sum()).backward()


STEPS = [plain_step, kept_in_the_loss]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_are_those_of_one_process(step: Callable[[Any], None]) -> None:
    plain, model = nets()
    for act in (plain_step, plain_step, step, step, plain_step):
        for each in (plain, model):
            act(each)
        check(plain, model)


def test_a_backward_that_fails_in_a_unit_leaves_no_gradients_of_it() -> None:
    plain, model = nets()
    plain_step(model)
    model.zero_grad()

    def fails(grad: Tensor) -> None:
        raise ValueError("on purpose")

    for each in blocks(model):
        each.hook = fails  # the gradients of `down` have come
    with pytest.raises(ValueError, match="on purpose"):
        plain_step(model)
    assert all(each.grad is None for block in blocks(model) for each in (block.down.weight, block.down.bias))
    for each in blocks(model):
        each.hook = None
    for each in (plain, model):
        plain_step(each)
    check(plain, model)


@pytest.mark.parametrize("original", [False, True])
def test_backward_hooks_of_modules_meet_no_gradients_of_this_rank_alone(original: bool) -> None:
    plain, model = nets(use_orig_params=original)
    seen: list[int] = []

    def hook(module: nn.Module, *_: Any) -> None:
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        seen.append(len(grads))
        for each in grads:
            each.zero_()

    for step in range(3):
        if step:  # also in a unit whose hooks were muted before
            blocks(model)[1].down.register_full_backward_hook(hook)
        for each in (plain, model):
            plain_step(each)
        check(plain, model)
    assert seen and not any(seen)


class Deep(nn.Sequential):
    """As many layers as wanted."""

    def __init__(self, layers: int) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def calls_of_a_backward(units: int, layers: int) -> int:
    model: Any = FullyShardedDataParallel(nn.Sequential(*(Deep(layers) for _ in range(units))), auto_wrap_policy={Deep})

    def step() -> int:
        loss = model(X).sum()
        return calls_of(loss.backward)

    return [step() for _ in range(6)][-1]


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_tensor_more_takes_no_call_in_a_backward() -> None:
    calls_of_a_backward(1, 1)
    small, large = (calls_of_a_backward(7, layers) - calls_of_a_backward(3, layers) for layers in (1, 6))
    assert small == large, (small, large)
