"""Random models whose units read and write the arguments that they get: containers, tensors under two names, tensors to
fill, in place; with exceptions in between, casts, checkpoints, and one or two roots over a part that they share. Each
program sees what it sees in one process, and trains like it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import MixedPrecisionPolicy, fully_shard
from tests.conftest import Run
from tests.harness.gradients import unlike
from tests.harness.played_fronts import InPlace, Wrapper
from tests.harness.thorough import seeds
from tests.runtime.test_arguments import CASTS, FRONTS, SETTINGS, Box, Named, Planned

pytestmark = pytest.mark.distributed

WIDTH = 4
STEPS = 3


class State:
    """The arguments of one forward."""

    def __init__(self, x: Tensor, drawn: random.Random) -> None:
        self.scale, self.part = x * 0.3, x * 0.2
        items = [self.part, self.scale]
        self.items: Any = Named("a", items) if drawn.random() < 0.3 else items
        self.map: dict[str, Any] = {"scale": self.scale, "pair": (self.part, items), "text": "a"}
        self.box = Box(x * 0.4)
        self.pair = self.map["pair"]
        self.out, self.with_graph = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
        self.seen: list[Any] = []

    def passed(self) -> dict[str, Any]:
        named = ("items", "map", "box", "pair", "out", "with_graph")
        return {name: getattr(self, name) for name in named}

    def look(self) -> None:
        """See what the program would."""
        self.seen += [len(self.items), sorted(self.map), self.map.get("pair") is self.pair]
        self.seen += [index for index, each in enumerate(self.items) if each is self.scale or each is self.part]
        self.seen += [key for key, each in sorted(self.map.items()) if each is self.scale]
        self.seen.append(self.out.clone())

    def loss(self) -> Tensor:
        tensors = [*self.items, *self.map.values(), self.box.tensor, self.with_graph]
        return sum((each.float().square().mean() for each in tensors if isinstance(each, Tensor)), torch.zeros(()))


class Block(nn.Module):
    def __init__(self, drawn: random.Random, recompute: bool | None) -> None:
        super().__init__()
        self.one, self.two, self.fails = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False
        kinds = READS if recompute is not None else READS + WRITES
        self.operations = [(drawn.choice(kinds), drawn.randrange(8)) for _ in range(drawn.randint(0, 3))]
        self.recompute = recompute
        self.in_place = drawn.random() < 0.3 and recompute is None

    def forward(self, x: Tensor, **state: Any) -> Tensor:
        if self.recompute is None:
            return self.run(x, **state)
        x = x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()
        y: Tensor = checkpoint(OfInputs(self.run, state), x, use_reentrant=self.recompute)
        return y

    def run(self, x: Tensor, **state: Any) -> Tensor:
        y = self.one(x * 1).tanh() + 0.5 * x  # a copy is saved: `x` may be written to
        for operation, number in self.operations:
            y = operation(self, y, number, **state)
        if self.fails:
            raise Planned
        return x.add_(y) if self.in_place else x + y


class OfInputs:
    """A forward with these arguments."""

    def __init__(self, run: Any, state: dict[str, Any]) -> None:
        self.run, self.state = run, state

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(x, **self.state)
        return y


def read_items(block: Block, y: Tensor, number: int, *, items: Any, **_: Any) -> Tensor:
    return y + 0.1 * items[number % 2] if len(items) > 1 else y


def read_map(block: Block, y: Tensor, number: int, *, map: dict[str, Any], pair: Any, **_: Any) -> Tensor:
    found = [each for _, each in sorted(map.items()) if isinstance(each, Tensor)]
    return y + 0.1 * block.two(found[number % len(found)] + pair[0])


def read_box(block: Block, y: Tensor, number: int, *, box: Box, **_: Any) -> Tensor:
    return y + 0.1 * box.tensor


def append(block: Block, y: Tensor, number: int, *, items: Any, **_: Any) -> Tensor:
    items.append(block.two(y).tanh())
    return y


def pop(block: Block, y: Tensor, number: int, *, items: Any, **_: Any) -> Tensor:
    return y + 0.1 * items.pop(number % len(items)) if len(items) > 2 else y


def write(block: Block, y: Tensor, number: int, *, map: dict[str, Any], **_: Any) -> Tensor:
    map[f"key {number % 3}"] = block.two(y).tanh()
    return y


def rename(block: Block, y: Tensor, number: int, *, map: dict[str, Any], **_: Any) -> Tensor:
    keys = sorted(key for key, each in map.items() if isinstance(each, Tensor))
    map[f"renamed {number % 2}"] = map.pop(keys[number % len(keys)])
    return y


def pass_on(block: Block, y: Tensor, number: int, *, map: dict[str, Any], items: Any, **_: Any) -> Tensor:
    map["of the list"] = items[number % len(items)]
    return y


def write_box(block: Block, y: Tensor, number: int, *, box: Box, **_: Any) -> Tensor:
    box.tensor = y.sin()
    return y


def fill(block: Block, y: Tensor, number: int, *, out: Tensor, **_: Any) -> Tensor:
    with torch.no_grad():
        torch.add(y, number, out=out) if number % 2 and out.dtype == y.dtype else out.copy_(y + number)
    return y


def fill_with_graph(block: Block, y: Tensor, number: int, *, with_graph: Tensor, **_: Any) -> Tensor:
    with_graph[number % 2] = block.two(y).mean(0)
    return y


READS: list[Any] = [read_items, read_map, read_box]
WRITES: list[Any] = [append, pop, write, rename, pass_on, write_box, fill, fill_with_graph]


class Outer(nn.Module):
    """A unit around another one."""

    def __init__(self, inner: Block) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **state: Any) -> Tensor:
        y: Tensor = self.inner(self.linear(x), **state)
        return y


class Net(nn.Module):
    begins_with_shared = False  # the shared part gets the inputs, which need no gradients

    def __init__(self, drawn: random.Random, shared: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH)
        blocks = [Block(drawn, drawn.choice((True, False)) if recomputes else None) for _ in range(drawn.randint(1, 3))]
        self.blocks = nn.ModuleList([Outer(each) if drawn.random() < 0.4 else each for each in blocks])

    def forward(self, x: Tensor, **state: Any) -> Tensor:
        x = self.shared(x.clone() if self.begins_with_shared else self.first(x), **state)
        for block in self.blocks:
            x = block(x, **state)
        y: Tensor = self.last(x)
        return y


def build(seed: int) -> list[Net]:
    """One or two roots over one block."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    recomputes = drawn.random() < 0.3  # then all blocks only read: a recomputation reads what the last write left
    shared = Block(drawn, drawn.choice((True, False)) if recomputes else None)
    nets = [Net(drawn, shared, recomputes) for _ in range(drawn.choice((1, 1, 2)))]
    for net in nets if random.Random(f"begins {seed}").random() < 0.4 else ():
        net.begins_with_shared = True
    return nets


def parameters(nets: list[Any]) -> dict[str, nn.Parameter]:
    return {f"{index}.{name}": each for index, net in enumerate(nets) for name, each in net.named_parameters()}


def step(nets: list[Any], x: Tensor, weight: float, seed: str) -> list[Any]:
    """One step, backward; what the program has seen."""
    drawn = random.Random(seed)
    turns, seen = [drawn.randrange(len(nets)) for _ in range(drawn.choice((1, 1, 2)))], []
    together = drawn.random() < 0.5
    losses = []
    for turn in turns:
        net, state = nets[turn], State(x, drawn)
        blocks = [each for each in net.modules() if isinstance(each, Block)]
        if drawn.random() < 0.3:
            failing = drawn.choice(blocks)
            failing.fails = True
            with pytest.raises(Planned):
                net(x, **state.passed())
            failing.fails = False
            state.look()
            if drawn.random() < 0.5 or not together:
                state = State(x, drawn)
            else:
                state.with_graph, state.items, state.map, state.box = (
                    torch.zeros(2, WIDTH),
                    *(State(x, drawn).passed()[name] for name in ("items", "map", "box")),
                )
        if drawn.random() < 0.2:
            evaluated = State(x, drawn)
            with torch.no_grad():
                seen.append(net(x, **evaluated.passed()).float())
            evaluated.look()
            seen += evaluated.seen
        y = net(x.clone(), **state.passed())
        state.look()
        loss = (y.float().square().mean() + state.loss()) * weight
        if together:
            losses.append(loss)
        else:
            loss.backward()
            state.look()
        seen += [*state.seen, y.detach().float()]
    if together:
        sum(losses[1:], losses[0]).backward()
    return seen


def shard(front: str, nets: list[Net], units: set[type], strategies: list[str], settings: dict[str, Any]) -> list[Any]:
    """The models, whose shared part is a unit."""
    if front == "wrapper":
        hybrid = "HYBRID_SHARD" if "HYBRID_SHARD" in strategies else "FULL_SHARD"
        shared = Wrapper.shard(nets[0].shared, None, hybrid, settings)
        for net in nets:
            net.shared = shared
        return [Wrapper.shard(net, units, each, settings) for net, each in zip(nets, strategies, strict=True)]
    mixed = settings["mixed_precision"]
    policy = MixedPrecisionPolicy() if mixed is None else MixedPrecisionPolicy(mixed.param_dtype)
    fully_shard(nets[0].shared, mp_policy=policy)
    for net, strategy in zip(nets, strategies, strict=True):
        for module in reversed([*net.blocks.modules()]):
            if type(module) in units:
                fully_shard(module, mp_policy=policy)
        fully_shard(net, mp_policy=policy, reshard_after_forward=strategy == "FULL_SHARD")
        InPlace.at_rest(net)
    return [*nets]


def play(rank: int, world: int, seed: int) -> list[str]:
    drawn = random.Random(f"how {seed}")
    front, casts = drawn.choice([*FRONTS]), drawn.choice([*CASTS])
    units = drawn.choice(({Block}, {Block, Outer}, {Outer}))
    original = drawn.random() < 0.7
    settings = {**SETTINGS, "mixed_precision": CASTS[casts], "use_orig_params": original or front == "fully_shard"}
    settings["backward_prefetch"] = drawn.choice(("BACKWARD_PRE", "BACKWARD_POST", None))
    alone, nets = build(seed), build(seed)
    strategies = [drawn.choice(("FULL_SHARD", "SHARD_GRAD_OP")) for _ in nets]
    if world == 4 and front == "wrapper":  # the replicas' groups each meet for the order of the roots
        strategies = ["HYBRID_SHARD" for _ in nets]
    models = shard(front, nets, units, strategies, settings)
    one, many = (
        torch.optim.SGD(list(dict.fromkeys(parameters(each).values())), lr=0.05, momentum=0.5)
        for each in (alone, models)
    )
    wrong = []
    for number in range(STEPS):
        batch = torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(number))
        one.zero_grad()
        many.zero_grad()
        key = f"{seed} {number}"
        expected = [step(alone, mine, 1 / world, key) for mine in batch.chunk(world)][rank]
        seen = step(models, batch.chunk(world)[rank], 1.0, key)
        one.step()
        many.step()
        for index, (found, other) in enumerate(zip(seen, expected, strict=True)):
            if isinstance(other, Tensor):
                if unlikeness := unlike(found.float(), other, rtol=1e-3, atol=1e-5):
                    wrong.append(f"step {number}: seen {index}: {unlikeness}")
            elif found != other:
                wrong.append(f"step {number}: seen {index}: {found}, expected {other}")
    for model, net in zip(models, alone, strict=True):
        shown = FRONTS[front].shown(model, False)
        for (name, value, _), each in zip(shown, net.parameters(), strict=True):
            if unlikeness := unlike(value, each.detach(), rtol=1e-3, atol=1e-5):
                wrong.append(f"{name}: {unlikeness}")
    return [f"{front}, {casts}, units {[u.__name__ for u in units]}: {each}" for each in wrong]


@pytest.mark.parametrize("seed", sorted({*seeds(4, 400), 37, 52}))
def test_arguments_that_units_write(run: Run, seed: int) -> None:
    for wrong in run(4 if seed % 4 == 3 else 2, play, seed):
        assert not wrong, "\n".join(wrong)
