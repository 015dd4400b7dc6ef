"""The tests that engines pass without, by the number that the design's list gives them, and related cases.

Those that are programs of autograd stand in `test_autograd`, failures in `test_exceptions`, gradients over several
microbatches in `test_accumulation`, memory in `tests/device/test_memory_of_models`.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.comm.transport import Transport, doubled
from flatfsdp.engine.device.streams import DONE, PendingWork, Stream
from flatfsdp.engine.transports.staged import StagedTransport
from flatfsdp.errors import FlatFSDPWarning, UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HYBRID_HALVES,
    LR,
    PLAIN,
    Net,
    Setting,
    at_rest,
    chosen,
    data,
    differences,
    full_gradients,
    full_parameters,
    joined,
    loss_of,
    seeded,
)
from tests.harness.fake import fake_world
from tests.harness.models import WIDTH, Feedforward, Low, Motley
from tests.harness.thorough import is_thorough

pytestmark = pytest.mark.distributed

ORIG = tuple(setting for setting in ALL if setting.orig)


def train(model: Any, rank: int, step: int) -> Tensor:
    """The plainest program."""
    loss = loss_of(model(data(rank, step)))
    loss.backward()
    return loss.detach()


# --- 2: a parameter read again after its gradient has arrived ---------------------------------------------------------


class Detached(nn.Module):
    """The parameter is used with and without a gradient; the second use is differentiated first."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p.detach() @ self.p


refused: list[int] = []  # the steps at which autograd refused


def detached(rank: int, world: int) -> tuple[list[str], list[int], list[str]]:
    def program(model: Any, rank: int, step: int) -> Any:
        x = data(rank, step).requires_grad_()
        loss = loss_of(model(x))
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            refused.append(step)
            x.grad = None
            loss = loss_of(model(x))
            loss.backward()
        return loss, x.grad

    refused.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = differences(rank, world, lambda: nn.Sequential(Detached(), Detached()), program, units=(Detached,))
    return lines, refused, [str(each.message) for each in caught if issubclass(each.category, FlatFSDPWarning)]


def test_2_detached_use_of_a_parameter(pool2: Run) -> None:
    """Right, or, where gradients are moved as they come, refused by autograd once and right ever after; never a wrong
    gradient. [Note: slot sharing]"""
    messages = []
    for lines, steps, texts in pool2(detached):
        assert not lines
        assert set(steps) == {1}  # the first step shows that sharing pays, the second that it does not
        messages += texts  # one of the ranks with the same message reports it
    assert any("while gradients were reusing the memory of its parameters" in text for text in messages), messages


def test_2_a_parameter_whose_place_its_gradient_has_taken_is_not_read() -> None:
    setting = Setting(large=True)
    with fake_world(2), setting.doubles():
        model = setting.wrap(seeded(Net), (Feedforward,))
        block = model.blocks[1].module
        for step in range(3):
            if step == 2:  # in the second one places were taken
                # Its gradient is the last of the block's; that of `down` has come.
                block.norm.weight.register_hook(lambda grad: block.down.weight.sum() and None)
                with pytest.raises(UsageError, match=r"sum\(\) reads parameter 'down.weight' of unit 'blocks.1'"):
                    train(model, 0, step)
            else:
                train(model, 0, step)


class Peeking(nn.Module):
    """Calls `peek`, if there is one, in its backward: after the gradients of its last layer have come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.peek: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.peek is not None and hidden.requires_grad:
            peek = self.peek
            hidden.register_hook(lambda grad: peek())
        return self.last(hidden)


def peeked(rank: int, world: int, begins: int) -> tuple[list[str], list[int]]:
    """A unit's forward runs again inside its backward, from step `begins` on: errors, and the steps that refuse it."""
    torch.manual_seed(0)
    plain = nn.Sequential(Peeking(), nn.Linear(WIDTH, 1))
    model = FullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy={Peeking}, use_orig_params=True)
    lines, steps = [], []
    for step in range(5):
        x = data(rank, step)
        seen: list[Tensor] = []

        def peek(x: Tensor = x, seen: list[Tensor] = seen) -> None:
            with torch.no_grad():
                seen.append(model.module[0](x))

        model.module[0].module.peek = peek if step >= begins else None
        loss = model(x).sum()
        try:
            loss.backward()
        except UsageError as error:
            assert "runs again inside a backward, after gradients have reused the memory" in str(error)
            steps.append(step)
            model(x).sum().backward()
        if len(seen) != (step >= begins) or not all(torch.allclose(each, plain[0](x), atol=1e-6) for each in seen):
            lines.append(f"step {step}: seen {seen}")
    return lines, steps


@pytest.mark.parametrize(("begins", "refused_at"), [(0, []), (2, [2])])
def test_2_a_forward_inside_the_backward(pool2: Run, begins: int, refused_at: list[int]) -> None:
    """Its parameters are whole, or it is refused once and whole ever after. [Note: slot sharing]"""
    for lines, steps in pool2(peeked, begins):
        assert not lines
        assert steps == refused_at


def stepped_over(rank: int, world: int) -> list[str]:
    """An old graph after the optimizer's step: refused by autograd as on a plain model, and no harm done."""
    lines = []
    for setting in chosen(stepped_over):
        with setting.doubles():
            model, other = (setting.wrap(seeded(Net), (Feedforward,)) for _ in range(2))
            optimizers = [torch.optim.SGD(each.parameters(), lr=LR) for each in (model, other)]
            first = loss_of(model(data(rank, 0)))
            first.backward(retain_graph=True)
            train(other, rank, 0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            try:
                first.backward()
                lines.append(f"{setting}: the old graph was differentiated with new weights")
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
            if not torch.equal(train(model, rank, 1), train(other, rank, 1)):
                lines.append(f"{setting}: another loss afterwards")
            found, expected = full_gradients(model), full_gradients(other)
            lines += [f"{setting}: gradient of {n}" for n in expected if not torch.equal(found[n], expected[n])]
    return lines


def test_2_old_graph_after_a_step(pool2: Run) -> None:
    assert not joined(pool2(stepped_over))


# --- 8: shards of one element and of none -----------------------------------------------------------------------------


def crumbs() -> nn.Module:
    """Units of 1, 2, 3 and 5 elements, an empty parameter, and one that lies wholly in the last rank's padding."""
    return nn.Sequential(nn.Linear(WIDTH, 1), nn.LayerNorm(1), Crumb(), nn.Linear(1, 2), nn.PReLU(), nn.LayerNorm(2))


class Crumb(nn.Module):
    """Scalars, an empty parameter, and a vector of three."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.three = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain + self.shift) * self.three.sum() + self.empty.sum()


def small(rank: int, world: int) -> list[str]:
    units = (nn.LayerNorm, Crumb, nn.Linear, nn.PReLU)
    return differences(rank, world, crumbs, train, units=units, steps=3) + differences(
        rank, world, crumbs, train, units=(), steps=3
    )


@pytest.mark.parametrize("world", [2, 3, 4] if is_thorough() else [4])
def test_8_shards_of_one_and_no_element(world: int, run: Run) -> None:
    assert not joined(run(world, small))


# --- 9: parameters keep their identity --------------------------------------------------------------------------------


def identity(rank: int, world: int) -> list[str]:
    lines = []
    for strategy in PLAIN:
        plain = seeded(Net)
        before = {name: id(p) for name, p in plain.named_parameters()}
        early = torch.optim.SGD(plain.parameters(), lr=LR)
        model = Setting(strategy).wrap(plain, (Feedforward,))
        late = torch.optim.SGD(model.parameters(), lr=LR)

        def check(when: str) -> None:
            if {name: id(p) for name, p in model.named_parameters()} != before:  # noqa: B023
                lines.append(f"{strategy}: {when}: other parameters")  # noqa: B023

        check("after wrapping")
        output = model(data(rank, 0))
        check("after forward")
        loss_of(output).backward()
        check("after backward")
        lines += list(at_rest(model))
        with FullyShardedDataParallel.summon_full_params(model):
            check("inside summon_full_params")
        check("after summon_full_params")
        early.step()
        stepped = full_parameters(model)
        start = dict(seeded(Net).named_parameters())
        if all(torch.equal(stepped[name], start[name]) for name in start):
            lines.append(f"{strategy}: the optimizer built before wrapping changed nothing")
        late.step()
        check("after steps")
    return lines


def test_9_parameters_keep_their_identity(pool2: Run) -> None:
    assert not joined(pool2(identity))


# --- 11: sums in rank order, however late a rank is -------------------------------------------------------------------


def late(rank: int, world: int) -> list[str]:
    """Bit for bit against a sum in rank order; each step, another rank dawdles in its backward."""

    def dawdle(model: Any, rank: int, step: int) -> Tensor:
        output = model(data(rank, step))
        if rank == step and isinstance(model, FullyShardedDataParallel):
            output.register_hook(lambda grad: time.sleep(0.05))
        loss = loss_of(output)
        loss.backward()
        return loss.detach()

    return differences(rank, world, Net, dawdle, steps=world)


@pytest.mark.parametrize("world", [3, 4] if is_thorough() else [3])
def test_11_sums_in_rank_order(world: int, run: Run) -> None:
    assert not joined(run(world, late))


# --- 14: copies -------------------------------------------------------------------------------------------------------


def copied(rank: int, world: int) -> list[str]:
    """The copy and the original, trained in turn, are two models."""
    lines = []
    for setting in chosen(copied):
        with setting.doubles():
            model = setting.wrap(seeded(Net), (Feedforward,))
            plain = setting.wrap(seeded(Net), (Feedforward,))
            for each in (model, plain):
                _sgd_step(each, rank, 0)
            twin = copy.deepcopy(model)
            if {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}:
                lines.append(f"{setting}: the copy shares parameters")
            _sgd_step(twin, rank, 7)
            for step in (1, 2):
                for each in (model, plain):
                    _sgd_step(each, rank, step)
            original = copy.deepcopy(plain)
            trained, expected, other = full_parameters(model), full_parameters(plain), full_parameters(twin)
            lines += [f"{setting}: {n} of the original" for n in expected if not torch.equal(trained[n], expected[n])]
            lines += [f"{setting}: {n} of the copy" for n in expected if torch.equal(other[n], expected[n])]
            for each in (original, plain):
                _sgd_step(each, rank, 3)
            again, expected = full_parameters(original), full_parameters(plain)
            lines += [f"{setting}: {n} trained in a copy" for n in expected if not torch.equal(again[n], expected[n])]
    return lines


def _sgd_step(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    train(model, rank, step)
    torch.optim.SGD(model.parameters(), lr=LR).step()


def test_14_a_copy_trains_on_its_own(pool2: Run) -> None:
    assert not joined(pool2(copied))


# --- 16: requires_grad between steps ----------------------------------------------------------------------------------


def flipped(rank: int, world: int, build: Callable[[], nn.Module], parts: tuple[str, ...]) -> list[str]:
    """Each part is frozen in some steps and trained in others."""

    def program(model: Any, rank: int, step: int) -> Tensor:
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if any(part in name for part in parts) and parameter.is_floating_point():
                parameter.requires_grad_((step + i) % 2 == 0)
        return train(model, rank, step)

    return differences(rank, world, build, program, units=(Feedforward, Low, Motley), under=ORIG, steps=4)


FLIPPED = {
    "trainable": (Net, ("blocks.1",)),
    "mixed": (lambda: nn.Sequential(Low(WIDTH), Low(WIDTH), nn.Linear(WIDTH, 3)), ("base", "up")),
    "dtypes": (lambda: nn.Sequential(Motley(WIDTH), nn.Linear(WIDTH, 3)), ("weight", "scale")),
}


def flipped_by_name(rank: int, world: int, name: str) -> list[str]:
    build, parts = FLIPPED[name]
    return flipped(rank, world, build, parts)


@pytest.mark.parametrize("name", FLIPPED)
def test_16_requires_grad_flips_between_steps(name: str, pool2: Run) -> None:
    assert not joined(pool2(flipped_by_name, name))


def _partly_frozen() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


def whole_units_flipped(rank: int, world: int, frozen: bool) -> list[str]:
    """With flat parameters, whole units are frozen and trained again; `frozen`: they were when they were wrapped."""

    def program(model: Any, rank: int, step: int) -> Tensor:
        block = model.blocks[1] if isinstance(model, nn.Module) else model
        for parameter in block.parameters():
            parameter.requires_grad_(step % 2 == 0)
        return train(model, rank, step)

    build = _partly_frozen if frozen else Net
    return differences(rank, world, build, program, under=[s for s in ALL if not s.orig], steps=4)


@pytest.mark.parametrize("frozen", [False, True])
def test_16_whole_units_flip_between_steps(frozen: bool, pool2: Run) -> None:
    assert not joined(pool2(whole_units_flipped, frozen))


# --- 17: fp16 reductions at a large world -----------------------------------------------------------------------------


class Alike(StagedTransport):
    """A double for the fake group: every rank has the same gradients as this one, added up in their own dtype."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(**inspect.arguments_of(inner))

    def all_gather_base(self, output: Tensor, shard: Tensor, stream: Stream) -> PendingWork:
        output.view(self.group.size, -1).copy_(shard.clone())
        return DONE

    def reduce_scatter_base(self, output: Tensor, full: Tensor, stream: Stream) -> PendingWork:
        own = full.view(self.group.size, -1)[self.group.rank]
        output.zero_()
        for _ in range(self.group.size):
            output.add_(own)
        return DONE


@pytest.mark.parametrize(("world", "rank"), [(64, 0), (64, 1), (48, 2)])
def test_17_fp16_reduction_of_large_gradients(world: int, rank: int) -> None:
    """Gradients near the largest fp16 number: neither their sum nor their average overflows."""
    from flatfsdp import MixedPrecision

    largest = 60000.0
    with fake_world(world, rank), doubled(Alike):
        model = FullyShardedDataParallel(
            nn.Linear(world, 1, bias=False),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float16),
            use_orig_params=True,
        )
        model(torch.full((1, world), largest)).sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None and parameter.grad.numel() == 1
        assert parameter.grad.item() == pytest.approx(largest, rel=5e-3)  # 64 roundings of fp16


# --- 19: silence ------------------------------------------------------------------------------------------------------


def silent(rank: int, world: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for setting in (*chosen(silent), *(chosen(silent, HYBRID_HALVES) if world == 4 else ())):
            with setting.doubles():
                model = setting.wrap(seeded(Net), (Feedforward,))
                for step in range(2):
                    _sgd_step(model, rank, step)
                model.clip_grad_norm_(1.0)
                full_parameters(model)
    return 0


@pytest.mark.parametrize("world", [2, 4])
def test_19_a_step_warns_of_nothing(world: int, run: Run) -> None:
    assert run(world, silent) == [0] * world


# --- tied parameters --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Blocks that share parameters with each other and with the root, in both directions."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first, self.second = Feedforward(WIDTH, WIDTH), Feedforward(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        for one, other in pairs:
            module, _, attribute = other.rpartition(".")
            setattr(self.get_submodule(module), attribute, self.get_parameter(one))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(torch.tanh(self.embedding(x)))))


TIES: dict[str, tuple[tuple[tuple[str, str], ...], tuple[type[nn.Module], ...]]] = {
    "inside a unit": ((("first.up.weight", "first.down.weight"),), (Feedforward,)),
    "inside the root": ((("embedding.weight", "head.weight"),), (Feedforward,)),
    "of two units": ((("first.up.weight", "second.up.weight"),), (Feedforward,)),
    "of a unit and the root": ((("second.up.weight", "embedding.weight"),), (Feedforward,)),
    "of the root's units": ((("embedding.weight", "head.weight"),), (Feedforward, nn.Linear)),
    "of many": (
        (
            ("first.up.weight", "second.down.weight"),
            ("second.up.weight", "first.down.weight"),
            ("first.up.bias", "second.up.bias"),
        ),
        (Feedforward,),
    ),
}


def tied(rank: int, world: int, name: str) -> list[str]:
    pairs, units = TIES[name]

    def program(model: Any, rank: int, step: int) -> Any:
        losses = [train(model, rank, step)]
        with torch.no_grad():
            losses.append(model(data(rank, step, 1)))
        return losses

    # A tied parameter's uses add up in the order in which autograd reaches them: the same in both.
    return differences(rank, world, partial(Tied, *pairs), program, units=units, steps=3)


@pytest.mark.parametrize("name", TIES)
def test_tied_parameters(name: str, pool2: Run) -> None:
    assert not joined(pool2(tied, name))


def tied_later(rank: int, world: int) -> str:
    model = Setting().wrap(seeded(Tied), (Feedforward,))
    train(model, rank, 0)
    model.second.up.weight = model.first.up.weight
    with pytest.raises(UsageError) as caught:
        train(model, rank, 1)
    return str(caught.value)


def test_a_tie_made_after_wrapping_is_refused(pool2: Run) -> None:
    for report in pool2(tied_later):
        assert "'up.weight' of unit 'second' was changed after wrapping: it was tied to 'first.up.weight'" in report
        assert "tie parameters before" in report
