"""Reentrant checkpoints next to units of which ranks use some, against one process on all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness.pool import JobFailed
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

WIDTH = 6
reentrant = partial(checkpoint, use_reentrant=True)
other = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """Returns its input if its parameters are switched off, and saves nothing for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(
        self, x: Tensor, use: bool = True, inner: Callable[[Tensor], Tensor] | None = None, parted: bool = False
    ) -> Tensor:
        x = x if inner is None else inner(x)
        if parted:
            return x + reentrant(lambda x: (x @ self.weight).tanh(), x)
        return x + (x @ self.weight).tanh() if use else x + 0.0


class Net(nn.Module):
    def __init__(self, step: Callable[[Net, Tensor, bool], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.first, self.a, self.b, self.c, self.d, self.e = (Block() for _ in range(6))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.step(self, x.clone().requires_grad_(), use)


class Parted(Net):
    """Its root has two parameters."""

    def __init__(self, step: Callable[[Net, Tensor, bool], Tensor]) -> None:
        super().__init__(step)
        self.behind = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)


class Frozen(Net):
    """Two of its blocks are."""

    def __init__(self, step: Callable[[Net, Tensor, bool], Tensor]) -> None:
        super().__init__(step)
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)


class Alone(Parted):
    """A block without units inside."""

    def __init__(self, step: Callable[[Net, Tensor, bool], Tensor]) -> None:
        super().__init__(step)
        del self.first, self.a, self.b, self.c, self.d, self.e


def _around(net: Net, x: Tensor, use: bool) -> Tensor:
    """A parameter used after a checkpoint inside of its unit is ready before the unit inside has a graph."""
    x = reentrant(net.a, x)
    return x @ net.weight if use else x


def _inside(net: Net, x: Tensor, use: bool) -> Tensor:
    """A checkpoint without reentrance runs one again, on some ranks after they have passed units in it."""
    x = net.first(x)

    def segment(x: Tensor) -> Tensor:
        x = reentrant(net.a, x)
        for block in (net.b, net.c, net.d):
            x = x + (block(x, False) if use else block(x, False).detach())
        return x

    y: Tensor = other(segment, x)
    return y


def _twice(net: Net, x: Tensor, use: bool) -> Tensor:
    """A unit that is called again waits for the first of its calls, and units before that wait for it."""
    x = reentrant(net.a, net.first(x))
    x = net.b(x) if use else x + net.b(x).detach()
    for block in (net.c, net.a, net.c):
        x = reentrant(block, x)
    return x


def _with_and_without(net: Net, x: Tensor, use: bool) -> Tensor:
    """Two units are called under a checkpoint and without one, before it or after."""
    x = reentrant(net.a, net.b(net.first(x), use))
    x = net.c(x) if use else x + net.c(x).detach()
    x = net.a(x, use)
    return reentrant(net.b, net.d(x, use))


def _again_with_others(net: Net, x: Tensor, use: bool) -> Tensor:
    """A unit is called again in a segment, which ranks reach through different units in it, or through none."""
    x = net.b(net.a(net.first(x)), not use)

    def segment(x: Tensor) -> Tensor:
        x = net.c(net.a(x, use), not use)
        return net.d(x, use)

    y: Tensor = other(segment, x)
    return net.e(y, use)


def _nothing_else(net: Net, x: Tensor, use: bool) -> Tensor:
    """All gradients of a rank come in checkpoints, behind units that it passes over."""
    x = reentrant(net.a, x if use else x.detach().requires_grad_())
    x = net.b(x, use)
    for block in (net.c, net.d):
        x = block(x) if use else x + block(x).detach()
    return x


def _inside_of_each_other(net: Net, x: Tensor, use: bool) -> Tensor:
    """Two units are recomputed together, of which a rank's backward reaches one: each prefetches the next unit."""
    x = reentrant(net.b, net.e(net.a(net.first(x))))

    def segment(x: Tensor) -> Tensor:
        inner: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            inner.append(net.d(x))
            return x + inner[0].detach()

        y: Tensor = net.c(x, True, keep)
        return y + inner[0].detach() if use else y.detach() + inner[0]

    y: Tensor = reentrant(segment, x)
    return y


def _part_of_a_unit(net: Any, x: Tensor, use: bool) -> Tensor:
    """A part of a unit, which no other unit runs in, is recomputed after all gradients have come, on one rank."""

    def part(x: Tensor) -> Tensor:
        return x + (x @ net.weight).tanh()

    x = reentrant(part, x)
    return reentrant(part, x @ net.behind if use else x)


def _part_beside_a_unit(net: Any, x: Tensor, use: bool) -> Tensor:
    """The same, and a unit inside has a checkpoint, so that this one stays whole."""
    y: Tensor = reentrant(net.a, _part_of_a_unit(net, x, use))
    return y


def _used_again_behind(net: Any, x: Tensor, use: bool) -> Tensor:
    """The first part that is recomputed is, after all gradients have come."""

    def part(x: Tensor) -> Tensor:
        return x + (x @ net.weight).tanh()

    y: Tensor = part(reentrant(part, x) @ net.behind) if use else part(x @ net.behind)
    return y


def _plain_and_in_parts(net: Any, x: Tensor, use: bool) -> Tensor:
    """A parameter that parts use is read once more when these have brought its gradient, twice."""

    def part(x: Tensor) -> Tensor:
        return x + (x @ net.weight).tanh()

    x = part(x)
    for _ in range(2):
        x = reentrant(part, x) if use else part(x)
    return x @ net.behind


def _parts_around_a_gradient(net: Any, x: Tensor, use: bool) -> Tensor:
    """The same, and between the parts the other parameter's gradient comes."""

    def part(x: Tensor) -> Tensor:
        return x + (x @ net.weight).tanh()

    x = reentrant(part, part(x)) @ net.behind
    y: Tensor = reentrant(part, x) if use else part(x)
    return y


def _frozen_beside(net: Any, x: Tensor, use: bool) -> Tensor:
    """Some ranks' gradients pass a trained unit by, and reach a frozen one before another is recomputed."""
    recomputed: Tensor = reentrant(net.a, x)
    y = net.b(x)
    z = net.c(y)
    return recomputed + y + (z if use else z.detach())


def _part_beside(net: Any, x: Tensor, use: bool) -> Tensor:
    """Gradients pass a trained unit by on all ranks, and come in a part of another one when none were expected."""
    recomputed: Tensor = net.d(x, parted=True)
    y = net.b(x)
    return recomputed + y + net.c(y).detach()


def _nothing_but_parts(net: Net, x: Tensor, use: bool) -> Tensor:
    """All gradients of a rank come in parts of units, behind a unit that it passes over."""
    return net.b(net.a(net.first(x).detach().requires_grad_(), parted=True), use)


def _train(
    rank: int,
    world: int,
    step: Callable[[Net, Tensor, bool], Tensor],
    prefetch: str | None = None,
    listed: str = "",
    made: type[Net] = Net,
    begins: int = 0,
    first_none: bool = False,
) -> list[str]:
    """Parameters that differ from those of one process. `listed`: a unit, and those that it lists to be gathered
    ahead; `made`: the model; `begins`: from which step on ranks differ; `first_none`: after a backward that computes
    gradients of no parameter."""
    model: Any = FullyShardedDataParallel(
        made(step), auto_wrap_policy={Block}, backward_prefetch=prefetch, join_units_below=0, use_orig_params=True
    )
    alone = made(step)
    if listed:
        first, *others = [getattr(model.module, name) for name in listed]
        first.set_modules_to_backward_prefetch(others)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, alone)]
    if first_none:
        model.module.step = lambda net, x, use: x + step(net, x, use).detach()
        model(torch.ones(3, WIDTH), rank == 0).sum().backward()
        model.module.step = step
    for seed in range(2):
        of_ranks = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * seed + r)) for r in range(world)]
        model(of_ranks[rank], rank == 0 and seed >= begins).square().sum().backward()
        for each, x in enumerate(of_ranks):
            (alone(x, each == 0 and seed >= begins).square().sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), alone.state_dict()
    return [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)]


@pytest.mark.parametrize(
    "step",
    [_around, _inside, _twice, _nothing_else, _nothing_but_parts, _with_and_without, _again_with_others],
)
def test_ranks_that_use_other_units_beside_it_are_not_waited_for(
    step: Callable[[Net, Tensor, bool], Tensor], pool2: Run
) -> None:
    assert pool2(_train, step) == [[], []]


# Model 930010 under `fully_shard`: the unit, of which nothing shows that its backward is over, was freed before. Model
# 5305: it was not, and it was reduced before, and once more. Model 33261: a part's gradient was taken for the one that
# comes when all parts are through.
@pytest.mark.parametrize(
    ("step", "made"),
    [
        (_part_of_a_unit, Parted),
        (_part_beside_a_unit, Parted),
        (_used_again_behind, Parted),
        (_used_again_behind, Alone),
        (_parts_around_a_gradient, Parted),
        (_parts_around_a_gradient, Alone),
    ],
)
def test_a_unit_is_whole_until_its_parts_have_been_recomputed(
    step: Callable[[Net, Tensor, bool], Tensor], made: type[Net], pool2: Run
) -> None:
    assert pool2(_train, step, made=made) == [[], []]


@pytest.mark.parametrize("step", [_frozen_beside, _part_beside])
def test_a_rank_without_gradients_takes_part_where_a_checkpoint_follows(
    step: Callable[[Net, Tensor, bool], Tensor], pool2: Run
) -> None:
    assert pool2(_train, step, made=Frozen) == [[], []]


def test_gradients_that_only_a_part_brings_are_foreseen_after_a_backward_without_any(pool2: Run) -> None:
    """A rank reported before that none would come to it, and all were refused."""
    assert pool2(_train, _nothing_but_parts, first_none=True) == [[], []]


# Models 9207 and 9210: gradients had taken the places of parameters, as no step before had shown that they are read.
@pytest.mark.parametrize("made", [Parted, Alone])
def test_gradients_that_come_again_leave_the_places_to_the_parameters(made: type[Net], pool2: Run) -> None:
    assert pool2(_train, _plain_and_in_parts, made=made, begins=1) == [[], []]


# Program 161780 of the simulation: ranks gathered in different orders, which the first backwards compare.
@pytest.mark.parametrize("listed", ["ca", "da"])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_MID"])
def test_units_recomputed_together_gather_ahead_in_one_order(prefetch: str, listed: str, pool2: Run) -> None:
    assert pool2(_train, _inside_of_each_other, prefetch, listed) == [[], []]


def _two_forwards(rank: int, world: int, before: Sequence[int] = ()) -> list[str]:
    """As `_train`, where a part of a unit is recomputed on one rank, in the first of two forwards alone, after steps in
    which none is, of as many forwards as `before` has."""

    def step(net: Net, x: Tensor, parted: bool) -> Tensor:
        return net.b(net.a(x, parted=parted))

    model: Any = FullyShardedDataParallel(Net(step), auto_wrap_policy={Block}, join_units_below=0, use_orig_params=True)
    alone = Net(step)
    inputs = torch.randn(world, 2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for step_of, forwards in enumerate((*before, 2)):
        for net, ranks in ((model, [rank]), (alone, range(world))):
            for each in ranks:
                parted = each == 0 and step_of == len(before)
                losses = [net(inputs[each, i], parted and i == 0).square().sum() for i in range(forwards)]
                (sum(losses) * (1 if net is model else 1 / world)).backward()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), alone.state_dict()
    return [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)]


def test_gradients_that_come_late_in_an_earlier_forward_are_reduced_with_the_others(pool2: Run) -> None:
    """Though nothing has shown yet that they do."""
    assert pool2(_two_forwards) == [[], []]


# On one rank only: the other would not reduce it once more.
@pytest.mark.parametrize("before", [(1, 1), *([(2,), (2, 2, 2)] if is_thorough() else [])])
def test_they_are_refused_where_steps_before_have_shown_none(before: Sequence[int], pool2: Run) -> None:
    with pytest.raises(JobFailed) as found:
        pool2(_two_forwards, before)
    words = str(found.value)
    assert "unit 'a': a part of it that was recomputed by a reentrant checkpoint brought a gradient after" in words
    assert "The unit ran in several forwards before this backward" in words and "use_reentrant=False" in words
