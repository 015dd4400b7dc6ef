"""Training loops as programs write them around FSDP1: the losses are those of one process on all ranks' rows."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed

WIDTH, ROWS, STEPS = 6, 4, 3


class Place:
    """The place of a loop: a rank, or one process with all rows, where wrapping does nothing."""

    def __init__(self, rank: int = 0, world: int = 1, *, orig: bool = True) -> None:
        self.rank, self.world, self.orig = rank, world, orig

    def wrap(self, module: nn.Module, *units: type[nn.Module]) -> Any:
        if self.world == 1:
            return module
        return FullyShardedDataParallel(module, auto_wrap_policy={*units, nn.Linear}, use_orig_params=self.orig)

    def inside(self, model: Any) -> Any:
        return model if self.world == 1 else model.module

    def rows(self, step: int, which: int = 0) -> Tensor:
        every = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + which))
        return every.chunk(self.world)[self.rank]

    def whole(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.world == 1 else FullyShardedDataParallel.summon_full_params(model)


Loop = Callable[[Place], Iterator[Tensor]]


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(len(sizes))
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def deep() -> nn.Sequential:
    return net(WIDTH, WIDTH, WIDTH, WIDTH)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# -- two models --------------------------------------------------------------------------------------------------------


def two_players(place: Place, *, toggles: bool = False) -> Iterator[Tensor]:
    generator, critic = place.wrap(deep()), place.wrap(net(WIDTH, WIDTH, 1))
    ours, theirs = sgd(generator), sgd(critic)
    for step in range(STEPS):
        critic.requires_grad_(True)
        theirs.zero_grad()
        real, fake = critic(place.rows(step, 1)), critic(generator(place.rows(step)).detach())
        yield descend(softplus(-real).mean() + softplus(fake).mean(), theirs)
        critic.requires_grad_(not toggles)
        yield descend(softplus(-critic(generator(place.rows(step)))).mean(), ours)


def two_players_with_toggles(place: Place) -> Iterator[Tensor]:
    return two_players(place, toggles=True)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = deep(), net(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.generator(x)
        if real is None:
            return softplus(-self.critic(fake)).mean()
        return softplus(-self.critic(real)).mean() + softplus(self.critic(fake.detach())).mean()


def two_players_in_one_model(place: Place) -> Iterator[Tensor]:
    model = place.wrap(Both())
    ours, theirs = sgd(place.inside(model).generator), sgd(place.inside(model).critic)
    for step in range(STEPS):
        yield descend(model(place.rows(step), place.rows(step, 1)), theirs)
        model.zero_grad()
        yield descend(model(place.rows(step)), ours)
        model.zero_grad()


def two_players_under_a_module_without_a_forward(place: Place) -> Iterator[Tensor]:
    """Both are called separately; the list among the classes to wrap is skipped."""
    pair = nn.ModuleDict({"maker": deep(), "judges": nn.ModuleList([net(WIDTH, 3, 1), net(WIDTH, 1)])})
    pair = place.wrap(pair, nn.ModuleList, nn.Sequential)
    maker, judges = pair["maker"], pair["judges"]
    ours, theirs = sgd(maker), sgd(judges)
    for step in range(STEPS):
        made = maker(place.rows(step))
        yield descend(sum((softplus(judge(made.detach())).mean() for judge in judges), torch.zeros(())), theirs)
        yield descend(softplus(-judges[step % 2](made)).mean(), ours)
        judges.zero_grad()


def a_teacher(place: Place) -> Iterator[Tensor]:
    teacher, student = place.wrap(deep()).eval(), place.wrap(net(WIDTH, WIDTH))
    optimizer = sgd(student)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = teacher(place.rows(step))
        yield descend(mse_loss(student(place.rows(step)), wanted), optimizer)


def a_frozen_judge(place: Place) -> Iterator[Tensor]:
    """Gradients pass through frozen parts."""
    judge, model = place.wrap(deep()).eval().requires_grad_(False), place.wrap(net(WIDTH, WIDTH))
    optimizer = sgd(model)
    for step in range(STEPS):
        yield descend(mse_loss(judge(model(place.rows(step))), judge(place.rows(step, 1))), optimizer)


def a_target_that_is_loaded(place: Place) -> Iterator[Tensor]:
    model, target = place.wrap(deep()), place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = target(place.rows(step, 1))
        yield descend(mse_loss(model(place.rows(step)), wanted) + model(place.rows(step, 1)).mean(), optimizer)
        target.load_state_dict(model.state_dict())


def a_criterion_with_parameters(place: Place) -> Iterator[Tensor]:
    model, criterion = place.wrap(deep()), place.wrap(net(WIDTH, 1))
    optimizer = sgd(model, criterion)
    for step in range(STEPS):
        yield descend((criterion(model(place.rows(step))) - criterion(place.rows(step, 1))).square().mean(), optimizer)


class Partly(nn.Module):
    """Wrapped in parts; the last part is not wrapped, and each rank has its own."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.first, self.second, self.last = place.wrap(deep()), place.wrap(net(WIDTH, WIDTH)), net(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(x)))
        return result


def a_model_wrapped_in_parts(place: Place) -> Iterator[Tensor]:
    model = Partly(place)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(place.rows(step)).square().mean()
        loss.backward()
        for parameter in model.last.parameters() if place.world > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= place.world
        optimizer.step()
        optimizer.zero_grad()
        yield loss


# -- several forwards, backwards or graphs in a step -------------------------------------------------------------------


def a_gradient_penalty(place: Place) -> Iterator[Tensor]:
    critic = place.wrap(net(WIDTH, WIDTH, 1))
    optimizer = sgd(critic)
    for step in range(STEPS):
        x = place.rows(step).requires_grad_(True)
        score = critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        yield descend(score.mean() + (slope.norm(dim=1) - 1).square().mean(), optimizer)


def adversarial_inputs(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        x = place.rows(step)
        for _ in range(2):
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(model(x).square().sum(), x)
            x = x + 0.1 * slope.sign()
        yield descend(model(x.detach()).square().mean(), optimizer)


def sharpness_aware(place: Place) -> Iterator[Tensor]:
    """Two steps: up where the loss is steep, then down from there."""
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        model(place.rows(step)).square().mean().backward()
        climbed = {}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    climbed[parameter] = parameter.grad.sign() * 0.05
                    parameter.add_(climbed[parameter])
        optimizer.zero_grad()
        loss = model(place.rows(step)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter, by in climbed.items():
                parameter.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def gradients_of_outputs_kept(place: Place) -> Iterator[Tensor]:
    """Large batches: outputs without a graph first, then their gradients into a second forward."""
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            output = model(place.rows(step))
        output.requires_grad_(True)
        loss = output.square().mean()
        loss.backward()
        model(place.rows(step)).backward(output.grad)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def two_backwards_of_a_graph(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        output = model(place.rows(step))
        loss = output.square().mean()
        loss.backward(retain_graph=True)
        yield loss
        yield descend(output.abs().mean(), optimizer)


def a_graph_over_several_forwards(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        first, second = model(place.rows(step)), model(place.rows(step, 1))
        yield descend((first - second).square().mean() + model(first).mean(), optimizer)


def an_evaluation_before_the_backward(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        output = model(place.rows(step))
        with torch.no_grad():
            wanted = model.eval()(place.rows(step, 1))
        model.train()
        yield descend(mse_loss(output, wanted), optimizer)


def a_recurrence_that_is_cut(place: Place) -> Iterator[Tensor]:
    torch.manual_seed(0)
    cell = place.wrap(nn.GRUCell(WIDTH, WIDTH), nn.GRUCell)
    optimizer = sgd(cell)
    state = torch.zeros_like(place.rows(0))
    for step in range(STEPS):
        loss = torch.zeros(())
        for part in range(3):
            state = cell(place.rows(step, part), state)
            loss = loss + state.square().mean()
        state = state.detach()
        yield descend(loss, optimizer)


def a_closure(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):

        def loss(step: int = step) -> Tensor:
            optimizer.zero_grad()
            found: Tensor = model(place.rows(step)).square().mean()
            found.backward()
            return found

        yield optimizer.step(loss)  # type: ignore[arg-type, misc]


# -- parts of a model --------------------------------------------------------------------------------------------------


def features_that_a_hook_took(place: Place) -> Iterator[Tensor]:
    """A loss of tensors that the model does not return; in every other step of nothing else."""
    model = place.wrap(deep())
    optimizer = sgd(model)
    taken: list[Tensor] = []
    place.inside(model)[2].register_forward_hook(lambda module, args, output: taken.append(output))
    for step in range(2 * STEPS):
        loss = model(place.rows(step)).square().mean()
        feature = taken.pop().abs().mean()
        yield descend(feature if step % 2 else loss + feature, optimizer)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = deep(), nn.ModuleList(net(WIDTH, size) for size in (1, 2, 3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        result: Tensor = self.heads[task](self.body(x))
        return result


def a_task_at_a_time(place: Place) -> Iterator[Tensor]:
    model = place.wrap(Heads())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2 * STEPS):
        yield descend(model(place.rows(step), step % 3).square().mean(), optimizer)


def layers_that_thaw(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    place.inside(model)[0].requires_grad_(False)
    optimizer = sgd(model)
    for step in range(STEPS):
        place.inside(model)[0].requires_grad_(step > 0)
        yield descend(model(place.rows(step)).square().mean(), optimizer)


# -- values and gradients by hand --------------------------------------------------------------------------------------


def weights_that_are_clipped(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        yield descend(model(place.rows(step)).square().mean(), optimizer)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def steps_by_hand(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    for step in range(STEPS):
        loss = model(place.rows(step)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
        yield loss


def gradients_that_are_divided(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(place.rows(step)).square().mean()
        (64 * loss).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.div_(64)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield loss


def whole_weights_that_are_changed(place: Place) -> Iterator[Tensor]:
    model = place.wrap(deep())
    optimizer = sgd(model)
    for step in range(STEPS):
        yield descend(model(place.rows(step)).square().mean(), optimizer)
        with place.whole(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter @ parameter.t() / 4 if parameter.dim() == 2 else parameter * 0.9)


def an_average_between_forward_and_backward(place: Place) -> Iterator[Tensor]:
    model, average = place.wrap(deep()), place.wrap(deep()).requires_grad_(False)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = (model(place.rows(step)) - average(place.rows(step)) + 1).square().mean()
        loss.backward()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


LOOPS: dict[str, Loop] = {
    name: loop for name, loop in list(globals().items()) if inspect.isgeneratorfunction(loop) or "toggles" in name
}


def losses(rank: int, world: int, orig: bool) -> dict[str, list[float]]:
    """Of every other loop; with --thorough, of all."""
    place = Place(rank, world, orig=orig)
    return {name: [loss.item() for loss in loop(place)] for name, loop in some([*LOOPS.items()], 2, orig)}


@pytest.mark.parametrize("orig", [True, False])
def test_like_one_process(pool2: Run, orig: bool) -> None:
    first, second = pool2(losses, orig)
    for name in first:
        expected = [loss.item() for loss in LOOPS[name](Place())]
        assert [sum(pair) / 2 for pair in zip(first[name], second[name], strict=True)] == pytest.approx(
            expected, rel=1e-4, abs=1e-5
        ), name
