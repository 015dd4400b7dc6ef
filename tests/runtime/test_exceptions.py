"""Exceptions that a program catches on all ranks at the same point: as if the failed step had not been."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from flatfsdp.engine.features.coalescing import uncoalesced
from flatfsdp.engine.state.owned_interval import OwnedInterval
from flatfsdp.errors import FlatFSDPWarning
from tests.conftest import Run
from tests.harness.corners import (
    ALL,
    HALVES,
    Net,
    Setting,
    at_rest,
    data,
    differences,
    full_gradients,
    joined,
    loss_of,
    seeded,
    unsynced,
)
from tests.harness.delayed import backwards_released_late
from tests.harness.models import WIDTH
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed


class Bang(Exception):
    """The exception that the traps raise."""


armed: str | None = None  # the trap that goes off


def trap(name: str) -> None:
    if armed == name:
        raise Bang(name)


class BackwardTrap(torch.autograd.Function):
    """Identity with a trap in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        trap("backward inside a unit")
        return grads[0]


class Trapped(nn.Module):
    """A block with traps between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.one(x))
        if armed == "second forward of a unit" and torch._C._current_graph_task_id() != -1:
            raise Bang("in recomputation")
        trap("forward of a unit")
        return x + self.two(BackwardTrap.apply(inner))


def _route(net: Net, x: Tensor, *, how: Callable[..., Any] | None = None) -> Tensor:
    trap("before all units")
    for i, block in enumerate(net.blocks):
        x = how(block, x) if how and i == 1 else block(x)
        if i == 1:
            trap("between units")
            if x.requires_grad:
                x.register_hook(_hook("backward between units"))
    return net.head(x)


def _hook(name: str) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        trap(name)

    return hook


def build() -> nn.Module:
    net = Net(_route, block=Trapped)
    net.blocks[1].two.weight.register_hook(_hook("hook of a parameter"))
    return net


PLACES = [
    "before all units",
    "forward of a unit",
    "between units",
    "between forward and backward",
    "backward of the loss",
    "backward between units",
    "backward inside a unit",
    "hook of a parameter",
]


def run(model: Any, x: Tensor, *, fails: str | None = None, **more: Any) -> Tensor:
    """Forward and backward with one trap armed."""
    global armed
    armed = fails
    try:
        output = model(x, **more)
        output.register_hook(_hook("backward of the loss"))
        loss = loss_of(output)
        trap("between forward and backward")
        loss.backward()
        return loss
    finally:
        armed = None


def fail(model: Any, x: Tensor, place: str, **more: Any) -> None:
    """The bad step: each `.grad` must be unchanged, as an object and in value."""
    before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    with pytest.raises(Bang):
        run(model, x, fails=place, **more)
    for parameter, grad, value in before:
        assert parameter.grad is grad
        assert value is None or torch.equal(grad, value)


def program(model: Any, rank: int, step: int, *, place: str, earlier: bool, twice: bool = False, **more: Any) -> Any:
    results = [run(model, data(rank, step, 1))] if earlier else []
    if isinstance(model, FullyShardedDataParallel):
        fail(model, data(rank, step, 2), place, **more)
        if twice:
            fail(model, data(rank, step, 3), place, **more)
    return [*results, run(model, data(rank, step), **more)]


def caught(rank: int, world: int, place: str) -> list[str]:
    """Under settings that are others at the next place."""
    first, second = (some(half, 2, PLACES.index(place)) for half in HALVES)
    twice = partial(program, place=place, earlier=False, twice=True)
    with uncoalesced():  # reductions are under way when a backward fails
        lines = differences(rank, world, build, twice, units=(Trapped,), under=first, steps=3)
    once = partial(program, place=place, earlier=True)
    return lines + differences(rank, world, build, once, units=(Trapped,), under=second, bound=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_a_failed_step_leaves_no_trace(place: str, pool2: Run) -> None:
    assert not joined(pool2(caught, place))


def caught_before_release(rank: int, world: int, late: int, place: str) -> list[str]:
    once = partial(program, place=place, earlier=False)
    with backwards_released_late() if rank < late else nullcontext():
        return differences(rank, world, build, once, units=(Trapped,), under=HALVES[1][:2])


@pytest.mark.parametrize(("late", "place"), [(1, "backward between units"), (1, "hook of a parameter")])
def test_so_it_is_before_autograd_has_released_the_backward(late: int, place: str, pool2: Run) -> None:
    """As on accelerators: a rank began its next forward, and reported only then that it had failed."""
    assert not joined(pool2(caught_before_release, late, place))


def recomputed(rank: int, world: int, reentrant: bool) -> list[str]:
    how = partial(checkpoint, use_reentrant=reentrant)
    step = partial(program, place="second forward of a unit", earlier=True, how=how)
    return differences(rank, world, build, step, units=(Trapped,), bound=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_failed_recomputation_leaves_no_trace(reentrant: bool, pool2: Run) -> None:
    assert not joined(pool2(recomputed, reentrant))


def _fallback(net: Net, x: Tensor) -> Tensor:
    global armed
    first, second, third = net.blocks
    armed = "forward of a unit"
    try:
        x = first(x)
    except Bang:
        armed = None
        x = first(0.5 * x)
    return net.head(third(second(x)))


def caught_inside(rank: int, world: int) -> list[str]:
    def step(model: Any, rank: int, step: int) -> Tensor:
        loss = loss_of(model(data(rank, step)))
        loss.backward()
        return loss

    return differences(rank, world, lambda: Net(_fallback, block=Trapped), step, units=(Trapped,))


def test_an_exception_caught_inside_the_model(pool2: Run) -> None:
    assert not joined(pool2(caught_inside))


def fail_between(rank: int, world: int, *, wide: bool) -> None:
    mixed = MixedPrecision(param_dtype=torch.float64) if wide else None
    torch.manual_seed(0)
    alone, net = build(), build()
    net.load_state_dict(alone.state_dict())
    model = FullyShardedDataParallel(net, auto_wrap_policy={Trapped}, mixed_precision=mixed, use_orig_params=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for _ in range(3):
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            optimizer.zero_grad()
            first = each(x)
            if each is model:
                with pytest.raises(Bang):
                    run(model, x, fails="between units")
            (first.float().square().mean() + each(x + 1).float().square().mean()).backward()
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wide", [False, True])
def test_a_forward_that_fails_between_two_that_go_backward_together(wide: bool, pool2: Run) -> None:
    pool2(fail_between, wide=wide)


def _through_a_failure(net: Net, x: Tensor, *, where: str = "", late: bool = False) -> Tensor:
    """A backward inside of the forward fails at its beginning, or its end, and is caught there."""
    global armed
    first, *others = net.blocks
    for block, at in ((first, "begin"), *zip(others, ("", "end"), strict=True)):
        if where and where == at:
            armed = "backward inside a unit"
            with backwards_released_late(_held) if late else nullcontext(), pytest.raises(Bang):
                first(x.detach().requires_grad_()).sum().backward()
            armed = None
        x = block(x)
    return net.head(x)


_held: list[object] = []


def caught_inside_a_forward(rank: int, world: int, where: str, late: int) -> list[str]:
    def step(model: Any, rank: int, step: int) -> Tensor:
        more: dict[str, Any] = {"where": where, "late": rank < late} if hasattr(model, "no_sync") else {}
        loss = loss_of(model(data(rank, step), **more))
        loss.backward()
        return loss

    try:
        return differences(
            rank, world, lambda: Net(_through_a_failure, block=Trapped), step, units=(Trapped,), under=HALVES[0][:2]
        )
    finally:
        _held.clear()


@pytest.mark.parametrize(("where", "late"), [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)])
def test_a_backward_that_fails_inside_a_forward_that_goes_on(where: str, late: int, pool2: Run) -> None:
    """All ranks abandoned it, and none met the others there: they waited for each other in different places."""
    assert not joined(pool2(caught_inside_a_forward, where, late))


def failed_forward_in_window(rank: int, world: int) -> list[str]:
    def step(model: Any, rank: int, step: int) -> Any:
        with unsynced(model):
            first = run(model, data(rank, step, 1))
            if isinstance(model, FullyShardedDataParallel):
                with pytest.raises(Bang):
                    run(model, data(rank, step, 2), fails="between units")
        return first, run(model, data(rank, step))

    return differences(rank, world, build, step, units=(Trapped,), bound=1e-6)


def test_a_failed_forward_keeps_the_window(pool2: Run) -> None:
    assert not joined(pool2(failed_forward_in_window))


def failed_backward_in_window(rank: int, world: int) -> tuple[list[str], list[str]]:
    messages: list[str] = []

    def step(model: Any, rank: int, step: int) -> Any:
        if isinstance(model, FullyShardedDataParallel):
            with warnings.catch_warnings(record=True) as caught, model.no_sync():
                warnings.simplefilter("always", FlatFSDPWarning)
                run(model, data(rank, step, 1))
                with pytest.raises(Bang):
                    run(model, data(rank, step, 2), fails="backward inside a unit")
            messages.extend(str(w.message) for w in caught if issubclass(w.category, FlatFSDPWarning))
        return run(model, data(rank, step))

    return differences(rank, world, build, step, units=(Trapped,), under=ALL), messages


def test_a_failed_backward_drops_the_window_and_reports_it(pool2: Run) -> None:
    results = pool2(failed_backward_in_window)
    assert not joined([lines for lines, _ in results])
    messages = [text for _, texts in results for text in texts]
    assert all("dropped" in text for text in messages) and len(messages) == 2 * len(ALL)  # on one rank each time


def memory_after(rank: int, world: int, place: str, under: tuple[Setting, ...]) -> list[str]:
    lines = []
    for setting in under:
        with setting.doubles():
            model = setting.wrap(seeded(build), (Trapped,))
            run(model, data(rank, 0))
            fail(model, data(rank, 1), place)
            if "backward" in place:
                # Pending work may only be waited for at a point that all ranks reach: the next forward.
                with torch.no_grad():
                    model(data(rank, 2))
            lines += [f"{setting}: {line}" for line in at_rest(model)]
    return lines


@pytest.mark.parametrize(
    ("place", "half"), [("forward of a unit", 0), ("between units", 1), ("backward inside a unit", 0)]
)
def test_a_failed_step_holds_no_memory(place: str, half: int, pool2: Run) -> None:
    assert not joined(pool2(memory_after, place, HALVES[half]))


def next_thing(rank: int, world: int, place: str) -> list[str]:
    """First operations after a failure, other than a forward."""
    lines = []
    for setting in (Setting("FULL_SHARD", True), Setting("SHARD_GRAD_OP", False, True)):
        with setting.doubles():
            model, other = (setting.wrap(seeded(build), (Trapped,)) for _ in range(2))
            for each in (model, other):
                run(each, data(rank, 0))
            fail(model, data(rank, 1), place)
            if not torch.equal(model.clip_grad_norm_(0.1), other.clip_grad_norm_(0.1)):
                lines.append(f"{setting}: another norm")
            fail(model, data(rank, 1), place)
            found, expected = full_gradients(model), full_gradients(other)
            lines += [f"{setting}: {name}" for name in expected if not torch.equal(found[name], expected[name])]
            lines += at_rest(model)
    return lines


@pytest.mark.parametrize("place", ["between units", "backward between units"])
def test_clipping_and_summoning_after_a_failure(place: str, pool2: Run) -> None:
    assert not joined(pool2(next_thing, place))


def saved_after(rank: int, world: int, place: str, turn: int, thorough: bool) -> list[str]:
    """An emergency checkpoint, and other reads of a model between steps. Each is requested under a setting of three
    in turn, or under all of them."""
    lines = []
    asked: dict[str, Callable[[FullyShardedDataParallel], Any]] = {
        "state_dict": lambda model: list(model.state_dict().values()),
        "load_state_dict": lambda model: model.load_state_dict(model.state_dict()) and None,
        "local": lambda model: local_state(model),
        "a unit's": lambda model: list(next(iter(model.module.children())).state_dict().values()),
        "deepcopy": lambda model: [each.clone() for each in copy.deepcopy(model).parameters()],
        "reshard": lambda model: model.reshard(),
    }
    settings = Setting("FULL_SHARD", True), Setting("SHARD_GRAD_OP", False, True), Setting("NO_SHARD", True)
    for number, (name, ask) in enumerate(asked.items()):
        for setting in settings if thorough else [settings[(number + turn) % 3]]:
            with setting.doubles():
                model, other = (setting.wrap(seeded(build), (Trapped,)) for _ in range(2))
                for each in (model, other):
                    run(each, data(rank, 0))
                fail(model, data(rank, 1), place)
                if not all(map(torch.equal, ask(model) or (), ask(other) or ())):
                    lines.append(f"{setting}: {name}")
                lines += at_rest(model)
    return lines


def local_state(model: FullyShardedDataParallel) -> list[Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return [each.local for each in model.state_dict().values() if isinstance(each, OwnedInterval)]


@pytest.mark.parametrize(
    ("turn", "place"), list(enumerate(["between units", "backward between units", "backward inside a unit"]))
)
def test_saving_and_copying_after_a_failure(turn: int, place: str, pool2: Run) -> None:
    assert not joined(pool2(saved_after, place, turn, is_thorough()))
