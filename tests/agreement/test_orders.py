"""Ranks out of order, as their users see it: an error in words on every rank within seconds, whichever mechanism finds
it. Here in the first iteration; `test_orders_in_later_iterations.py` has the same faults in a later one."""

from __future__ import annotations

import copy
import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import AgreementError
from flatfsdp.wrap import ModuleWrapPolicy
from tests.conftest import Run
from tests.harness.thorough import seeds, spread

pytestmark = pytest.mark.distributed

FRONTS = ("wrapper", "fully_shard")
SECONDS = 20.0  # that a rank may take to its error; an idle machine needs less than one
Tree = tuple[Any, ...]  # a call of a unit, with the calls inside of it


class Cell(nn.Module):
    """A unit that calls itself, and that may cut the graph off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.itself: tuple[nn.Module, ...] = ()  # no submodule

    def forward(self, x: torch.Tensor, tree: Tree = (), cut: bool = False) -> torch.Tensor:
        for each in tree:
            x = self.itself[0](x, each)
        y = torch.tanh(self.linear(x))
        return y.detach() if cut else y


class Tied(nn.Module):
    """A unit with the weight of another one, which it may call."""

    def __init__(self, owner: Cell) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.weight = owner.linear.weight

    def forward(self, x: torch.Tensor, inside: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        x = torch.tanh(x @ self.weight + self.bias)
        return inside(x) if inside is not None else x


class Net(nn.Module):
    """Units of one size, called as asked."""

    def __init__(self, front: str) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(3))
        # Units of fully_shard share no parameters.
        self.tied = Tied(self.cells[0] if front == "wrapper" else Cell())
        self.out = nn.Linear(4, 1)

    def forward(
        self,
        x: torch.Tensor,
        trees: Tree = ((), ()),
        order: tuple[int, ...] = (0, 1, 2),
        cut: bool = False,
        nested: bool | None = None,
    ) -> torch.Tensor:
        first = x
        x = x + self.cells[1](first, cut=cut)
        for tree in trees:
            x = self.cells[0](x, tree)
        for index in order:
            x = self.cells[index](x)
        x = x + self.cells[1](first)
        if nested is not None:
            x = self.tied(x, self.tied) if nested else self.tied(self.tied(x))
        return self.out(x)


def shard(front: str, net: Net) -> nn.Module:
    """`net` as a model of that front, whose cells can call themselves."""
    cells: list[nn.Module] = [*net.cells]
    if front == "wrapper":
        model: nn.Module = FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({Cell, Tied}), use_orig_params=True
        )
        wrapped = {id(each.module): each for each in model.modules() if isinstance(each, FullyShardedDataParallel)}
        cells = [wrapped[id(cell)] for cell in cells]
    else:
        model = net
        for each in (*net.cells, net.tied, net):
            flatfsdp.fully_shard(each)
    for inner, unit in zip([each for each in model.modules() if isinstance(each, Cell)], cells, strict=True):
        inner.itself = (unit,)
    return model


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What rank 0 does, and what the last one does.
    "calls inside of other ones": ({"trees": (((),), ())}, {"trees": ((), ((),))}),
    "other trees": ({"trees": (((), ((), ())), ())}, {"trees": ((), (((), ()), ()))}),
    "one call more": ({"trees": ((((),),),)}, {"trees": (((),),)}),
    "units swapped": ({"order": (0, 1, 2)}, {"order": (0, 2, 1)}),
    "a unit skipped": ({"order": (0, 1, 2)}, {"order": (0, 2)}),
    "a graph cut off": ({"cut": False}, {"cut": True}),
    "a tied unit inside of itself": ({"nested": True}, {"nested": False}),
    "roots swapped": ({}, {}),
    "backwards swapped": ({}, {}),
}
OF_TWO = ("roots swapped", "backwards swapped")  # models


def step(model: nn.Module, **how: Any) -> None:
    model(torch.ones(2, 4), **how).sum().backward()


def commit(rank: int, world: int, models: list[nn.Module], fault: str) -> None:
    """A step in which ranks do different things, and two more that nobody should reach unharmed."""
    odd = rank == world - 1
    if fault == "roots swapped":
        for _ in range(2):
            for model in reversed(models) if odd else models:
                step(model)
        return
    if fault == "backwards swapped":
        outputs = [model(torch.ones(2, 4)).sum() for model in models]
        for output in reversed(outputs) if odd else outputs:
            output.backward()
        return
    for _ in range(3):
        step(models[0], **FAULTS[fault][odd])


def first_iteration(rank: int, world: int, fault: str, front: str) -> tuple[str, float]:
    torch.manual_seed(0)
    models = [shard(front, Net(front)) for _ in range(1 + (fault in OF_TWO))]
    began = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        commit(rank, world, models, fault)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(("front", "fault"), spread(FRONTS, FAULTS))
def test_every_rank_ends_in_words(pool3: Run, fault: str, front: str) -> None:
    results = pool3(first_iteration, fault, front)
    messages = {message for message, _ in results}
    assert len(messages) == 1
    assert "rank 2" in messages.pop()
    assert max(seconds for _, seconds in results) < SECONDS


class Adapted(nn.Module):
    """A unit that a rank may do without in its output, though it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        y = self.adapter(x)
        return self.out(x + y if uses else x)


def one_graph(rank: int, world: int) -> tuple[str, float]:
    """One backward through two models, of which the last rank reduces units in another order: sums of the one would be
    added to those of the other."""
    torch.manual_seed(0)
    nets: list[nn.Module] = [nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))), Adapted()]
    encoder, decoder = (
        FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, join_units_below=0
        )
        for net in nets
    )
    began = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        decoder(encoder(torch.ones(2, 4)), rank < world - 1).sum().backward()
    return str(caught.value), time.monotonic() - began


def test_two_models_in_one_graph_reduce_in_another_order(pool2: Run) -> None:
    """Each model issued the same on all ranks, and nothing else compared the order of both."""
    results = pool2(one_graph)
    assert len({message for message, _ in results}) == 1
    words = r", and reduced 'out', 'adapter' of Adapted \(model \d+ over ranks 0, 1\), then '1', '0' of Sequential \("
    assert re.search(words, results[0][0]), results[0][0]
    assert max(seconds for _, seconds in results) < SECONDS


class Cut(nn.Module):
    """Two units, of which a backward reaches the second only if it is `cut`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, cut: bool = False) -> torch.Tensor:
        y = self.first(x)
        return self.second(y.detach() if cut else y)


def lacking_the_last(rank: int, world: int) -> list[tuple[Any, Any]]:
    """One backward through two models, which does not reach the last unit on one rank: all reduce in one order."""
    torch.manual_seed(0)
    alone = [Cut(), Cut()]
    models = [
        FullyShardedDataParallel(
            copy.deepcopy(net), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, join_units_below=0
        )
        for net in alone
    ]
    found = []
    for _ in range(3):
        for each in range(world):
            one, other = (
                net(torch.full((2, 4), each + 1.0), cut) for net, cut in zip(alone, (each > 0, False), strict=True)
            )
            ((one.sum() * other.sum()) / world).backward()
        one, other = (
            model(torch.full((2, 4), rank + 1.0), cut) for model, cut in zip(models, (rank > 0, False), strict=True)
        )
        (one.sum() * other.sum()).backward()
    for net, model in zip(alone, models, strict=True):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            pairs = zip(net.parameters(), model.parameters(), strict=True)
            found += [(a.grad.tolist(), b.grad.tolist()) for a, b in pairs if a.grad is not None and b.grad is not None]
    return found


def test_a_rank_may_lack_the_last_unit_of_two_models_in_one_graph(pool2: Run) -> None:
    for found in pool2(lacking_the_last):
        assert len(found) == 4
        for expected, grad in found:
            assert torch.allclose(torch.tensor(expected), torch.tensor(grad), rtol=1e-4)


def in_the_same_structure(rank: int, world: int, front: str) -> None:
    """Trees that are equal on all ranks, and others in every step."""
    model = shard(front, Net(front))
    for trees in ((((),), ()), ((), ((),)), ((((),), ()), ((), ()))) * 2:
        step(model, trees=trees, nested=True)


@pytest.mark.parametrize("front", FRONTS)
def test_ranks_may_agree_on_another_structure_in_every_step(pool2: Run, front: str) -> None:
    pool2(in_the_same_structure, front)


def in_turns(rank: int, world: int, front: str) -> list[float]:
    """Two models, called in an order that changes with the step, alike on all ranks, and a third one in between; on
    one rank models live longer."""
    torch.manual_seed(0)
    first, second = (shard(front, Net(front)) for _ in range(2))
    kept = []
    losses = []
    for index in range(6):
        order = [first, second] if index % 3 else [second, first]
        if index % 2:
            for model in order:
                step(model)
        else:
            outputs = [model(torch.ones(2, 4)).sum() for model in order]
            (outputs[0] * outputs[1]).backward()
        with torch.no_grad():
            losses.append(float(first(torch.ones(2, 4)).sum()))
        third = shard(front, Net(front))
        step(third)
        kept += [third] * rank
    return losses


@pytest.mark.parametrize("front", FRONTS)
def test_models_may_be_called_in_any_order_that_ranks_share(pool2: Run, front: str) -> None:
    losses = pool2(in_turns, front)
    assert losses[0] == losses[1]


# --- drawn at random --------------------------------------------------------------------------------------------------


def tree(drawn: random.Random, depth: int = 2) -> Tree:
    """Calls of a unit inside of its own, at most `depth` of them one inside another."""
    return tuple(tree(drawn, depth - 1) for _ in range(drawn.choice((0, 1, 1, 2)))) if depth else ()


def trees(drawn: random.Random) -> Tree:
    return tuple(tree(drawn) for _ in range(drawn.randint(1, 2)))


def several(rank: int, world: int, front: str, seed: int) -> list[tuple[float, float]]:
    """The losses of several models that are called in a drawn order, some more than once, in drawn trees, with joint or
    separate backwards, beside those of one process."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    alone = [Net(front).double() for _ in range(drawn.randint(2, 3))]
    models = [shard(front, copy.deepcopy(net)) for net in alone]
    for cell in itertools.chain.from_iterable(net.cells for net in alone):
        cell.itself = (cell,)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (*models, *alone)]
    losses = []
    for _ in range(4):
        order = drawn.choices(range(len(models)), k=drawn.randint(1, 4))
        how = [{"trees": trees(drawn), "order": tuple(drawn.sample(range(3), 3)), "nested": True} for _ in order]
        joint = drawn.random() < 0.5
        evaluated = drawn.choice(range(len(models)))

        def results(nets: list[Any], of: int, order: list[int] = order, how: list[Any] = how) -> Any:
            x = torch.full((2, 4), 0.1 * (1 + of), dtype=torch.float64)
            return (nets[index](x, **each).sum() for index, each in zip(order, how, strict=True))

        def run(nets: list[Any], of: int, joint: bool = joint, results: Any = results) -> list[float]:
            outputs = [sum(results(nets, of))] if joint else results(nets, of)
            found = []
            for output in outputs:
                (output / (1 if nets is models else world)).backward()
                found.append(float(output))
            return found

        mine = run(models, rank)
        losses += list(zip(mine, [run(alone, of) for of in range(world)][rank], strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            x = torch.ones(2, 4, dtype=torch.float64)
            losses.append((float(models[evaluated](x).sum()), float(alone[evaluated](x).sum())))
    return losses


@pytest.mark.parametrize(("front", "seed"), spread(FRONTS, seeds(2, 60)))
def test_several_models_whose_units_call_themselves_are_as_in_one_process(pool2: Run, seed: int, front: str) -> None:
    for losses in pool2(several, front, seed):
        for found, expected in losses:
            assert found == pytest.approx(expected, rel=1e-9)


def in_drawn_structures(rank: int, world: int, front: str, seed: int) -> tuple[str, float]:
    drawn = random.Random(seed)
    those = others = trees(drawn)
    while those == others:
        others = trees(drawn)
    torch.manual_seed(0)
    model = shard(front, Net(front))
    began = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        for _ in range(2):
            step(model, trees=those if rank < world - 1 else others)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(("front", "seed"), spread(FRONTS, seeds(2, 60)))
def test_units_that_call_themselves_in_another_structure_end_in_words(pool3: Run, seed: int, front: str) -> None:
    results = pool3(in_drawn_structures, front, seed)
    assert len({message for message, _ in results}) == 1
    assert "rank 2" in results[0][0]
    assert max(seconds for _, seconds in results) < SECONDS
