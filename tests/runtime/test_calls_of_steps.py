"""Python calls that the engine adds to a training step: how many of each unit, and how many of the step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.guards import optimizer_hooks
from flatfsdp.engine.models.walks import units_in
from tests.harness import inspect
from tests.harness.calls import calls_by_file, calls_of
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process

WIDTH = 6
FEW, MANY = 3, 5  # units


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_collected() -> None:
    """The collector runs before each count: it need not go through what earlier tests have left, nor may models of
    these look at optimizers."""
    optimizer_hooks.looking.clear()
    gc.collect()
    gc.freeze()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Small(nn.Module):
    """A block of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


def network(blocks: int, block: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[block() for _ in range(blocks)])


def calls_after_some(step: Callable[[], object]) -> int:
    for _ in range(6):  # one-time work, and checks of the first steps
        step()
    return calls_of(step)


@lru_cache
def calls_of_a_plain_step(blocks: int, clips: bool, block: type[nn.Module]) -> int:
    model = network(blocks, block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return calls_after_some(step)


def calls_of_a_step(blocks: int, clips: bool, block: type[nn.Module] = Block, **options: Any) -> int:
    """Calls that a wrapped model's step adds to one of the same model alone, while no other one is alive."""
    plain = calls_of_a_plain_step(blocks, clips, block)
    model = FullyShardedDataParallel(network(blocks, block), auto_wrap_policy={block}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        if clips:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return calls_after_some(step) - plain


# For each unit, and for each step in addition: they may become fewer, and more only for a reason.
MOST = {  # of a step one asks whether a profiler runs, which must not record the last collective
    ("FULL_SHARD", False): (160, 373),
    ("FULL_SHARD", True): (171, 400),
    ("SHARD_GRAD_OP", False): (149, 373),
    ("NO_SHARD", False): (170, 372),  # four of them give the reduced gradients their shapes
    ("NO_SHARD", True): (179, 366),
}
MOST_OF_TWO_TENSORS = 164


@pytest.mark.parametrize(("strategy", "clips"), MOST)
def test_calls_of_units_and_steps(strategy: str, clips: bool) -> None:
    with fake_world(2):
        _, few, many = (  # the first does the one-time work
            calls_of_a_step(blocks, clips, sharding_strategy=strategy, use_orig_params=True)
            for blocks in (1, FEW, MANY)
        )
    of_a_unit = (many - few) / (MANY - FEW)
    of_a_step = few - FEW * of_a_unit
    most_of_a_unit, most_of_a_step = MOST[strategy, clips]
    assert of_a_unit <= most_of_a_unit and of_a_step <= most_of_a_step, (of_a_unit, of_a_step)


def test_a_unit_of_two_tensors_takes_few_calls_in_a_step() -> None:
    with fake_world(8):
        few, many = (calls_of_a_step(blocks, False, Small, use_orig_params=True) for blocks in (FEW, MANY))
    of_a_unit = (many - few) / (MANY - FEW)
    assert of_a_unit <= MOST_OF_TWO_TENSORS, of_a_unit


# Of a unit of four tensors in a step, without its optimizer's: flat, in rows, and as DTensors.
MOST_OF_FRONTS = {"flat": 172, "rows": 202, "fully_shard": 207}
MOST_OF_A_FUSED_STEP = 230  # of fully_shard, the optimizer's calls included


def net_of(front: str, blocks: int) -> Any:
    net = network(blocks, Block)
    if front == "fully_shard":
        for module in [*net[1:], net]:
            flatfsdp.fully_shard(module)
    elif front != "none":
        kind: Any = front
        return FullyShardedDataParallel(net, auto_wrap_policy={Block}, use_orig_params=True, layout=kind)
    return net


@lru_cache
def calls_under(front: str, blocks: int, *, fused: bool = False) -> int:
    net = net_of(front, blocks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if fused:
        flatfsdp.fuse_optimizer_steps(optimizer)

    def step() -> None:
        net(torch.ones(2, WIDTH)).sum().backward()
        if fused:
            optimizer.step()
        optimizer.zero_grad()

    return calls_after_some(step)


def of_a_unit(front: str, **how: bool) -> float:
    with fake_world(2):
        _, few, many = (calls_under(front, blocks, **how) for blocks in (1, FEW, MANY))
        _, plainly, plainly_many = (calls_under("none", blocks) for blocks in (1, FEW, MANY))
    return (many - few - plainly_many + plainly) / (MANY - FEW)


def test_rows_and_dtensors_take_at_most_a_quarter_more_calls() -> None:
    found = {front: of_a_unit(front) for front in MOST_OF_FRONTS}
    assert all(found[front] <= most for front, most in MOST_OF_FRONTS.items()), found
    assert max(found.values()) <= 1.25 * found["flat"], found
    assert (fused := of_a_unit("fully_shard", fused=True)) <= MOST_OF_A_FUSED_STEP, fused


ENGINE = Path(flatfsdp.__file__).parent / "engine"
# Files for features only: the calls of a step into them while all features are off, for any number of units.
OFF = {
    "features/": 9,  # seven of these look for hooks of users on gradients
    "runtime/turns.py": 2,
    "guards/deferred_grad.py": 0,
}
OF_GUARDS = 5  # calls of a unit: before a forward, what users may have assigned instead of its parameters is looked for


@lru_cache
def files_of_a_step(blocks: int, *, observed: bool = True) -> Counter[str]:
    """Calls by file of the engine, without any feature that users switch on."""
    net = network(blocks, Block)
    with fake_world(2):
        model = FullyShardedDataParallel(net, auto_wrap_policy={Block}, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if not observed:
            inspect.drop_observers(model, all_of_them=True)

        def step() -> None:
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step()
        return calls_by_file(step)


@pytest.mark.parametrize("path", OFF)
def test_a_feature_that_is_off_takes_no_calls_of_a_unit(path: str) -> None:
    files_of_a_step(1)  # does the one-time work
    few, many = (
        sum(count for file, count in files_of_a_step(blocks).items() if file.startswith(f"{ENGINE}/{path}"))
        for blocks in (FEW, MANY)
    )
    assert few == many <= OFF[path], (few, many)
    assert ENGINE.joinpath(path).exists()


def test_what_is_attached_takes_no_calls_of_a_unit_except_for_guards() -> None:
    attached, none = (
        [sum(files_of_a_step(blocks, observed=observed).values()) for blocks in (1, FEW, MANY)][1:]
        for observed in (True, False)
    )
    of_guards = OF_GUARDS * (MANY - FEW)
    assert attached[1] - attached[0] == none[1] - none[0] + of_guards, (attached, none)


@pytest.mark.parametrize("front", MOST_OF_FRONTS)
def test_objects_that_every_unit_reads_get_no_dictionary(front: str) -> None:
    """`vars(unit)`, or a cached property, makes one: CPython 3.11 then looks up all attributes of that object in
    general ways, some 30 times the instructions, a tenth of those of a step of a small unit."""
    with fake_world(2):
        net = net_of(front, FEW)
        for _ in range(2):
            net(torch.ones(2, WIDTH)).sum().backward()
        units = units_in(net)
        of_units = [*units, *(each for unit in units for kind in unit.kinds for each in kind)]
        assert len(of_units) > len(units)
        read = {"phase", "state", "mode", "expected"}
        slow = {
            type(each).__name__
            for each in of_units
            for found in gc.get_referents(each)
            if type(found) is dict and not read.isdisjoint(found)
        }
    assert not slow, slow


def test_a_checkpoint_more_takes_as_many_calls_in_a_deep_model() -> None:
    class Deep(nn.Module):
        def __init__(self, blocks: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def calls(blocks: int) -> int:
        model = FullyShardedDataParallel(Deep(blocks), auto_wrap_policy={Block}, use_orig_params=True)

        def step() -> None:
            model(torch.ones(2, WIDTH)).sum().backward()

        for _ in range(4):
            step()
            model.zero_grad()
        return calls_of(step)

    with fake_world(2):
        few, some, many = (calls(blocks) for blocks in (4, 8, 24))
    assert (many - some) / 16 <= (some - few) / 4 + 1, (few, some, many)


def calls_of_a_frozen_step(operations: int) -> int:
    """Calls of a backward through a frozen model, and as many operations before it."""
    with fake_world(4):
        model = FullyShardedDataParallel(network(FEW, Small).requires_grad_(False), auto_wrap_policy={Small})

        def step() -> None:
            x = torch.ones(2, WIDTH, requires_grad=True)
            for _ in range(operations):
                x = torch.sin(x)
            model(x).sum().backward()

        return calls_after_some(step)


def test_the_graph_of_a_frozen_model_is_not_walked() -> None:
    assert calls_of_a_frozen_step(100) == calls_of_a_frozen_step(200)
