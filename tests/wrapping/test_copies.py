"""Copies and pickles of wrapped models, and extensions: parameters stored as one thing and computed with as another."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FullyShardedDataParallel, MixedPrecision, set_collective_timeout
from flatfsdp.engine.flat.flat_param import FlatParamHandle
from flatfsdp.engine.watchdog import store as stores
from flatfsdp.engine.watchdog import watchdog as watch
from flatfsdp.errors import UsageError
from flatfsdp.extensions import set_extensions
from tests.conftest import Run
from tests.harness.corners import (
    ALL,
    HYBRID,
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
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(data(rank, step))).backward()
        optimizer.step()


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    lines = [] if found.keys() == expected.keys() else [f"found {sorted(found)}"]
    return lines + [name for name in expected if name in found and not torch.equal(found[name], expected[name])]


def round_trip(model: nn.Module, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def build() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.head.register_buffer("count", torch.zeros(1))
    return net


def copied(rank: int, world: int, how: str, under: tuple[Setting, ...]) -> list[str]:
    """The copy is equal, goes its own way, and trains like one that was never copied."""
    lines: list[str] = []
    for setting in under:
        model, control = (setting.wrap(seeded(build), (Feedforward,)) for _ in range(2))
        optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, control))
        for each, its in ((model, optimizer), (control, other)):
            train(each, its, rank, range(2))
        twin = round_trip(model, how)
        whole = full_parameters(model)
        lines += [f"{setting}: the copy's {name}" for name in differing(full_parameters(twin), whole)]
        if [n for n, _ in twin.named_parameters()] != [n for n, _ in model.named_parameters()]:
            lines.append(f"{setting}: the copy's names are {[n for n, _ in twin.named_parameters()]}")
        if {p.data_ptr() for p in twin.parameters() if p.numel()} & {
            p.data_ptr() for p in model.parameters() if p.numel()
        }:
            lines.append(f"{setting}: memory is shared")
        # The copy trains from here with a new optimizer, the original with its earlier one; both like the control.
        fresh = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((model, optimizer), (twin, fresh), (control, other)):
            train(each, its, rank, range(2, 4))
        expected = full_parameters(control)
        for what, each in (("original", model), ("copy", twin)):
            lines += [f"{setting}: trained {what}: {name}" for name in differing(full_parameters(each), expected)]
            lines += [f"{setting}: {what}: {line}" for line in at_rest(each)]
    return lines


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_trains_like_its_original(how: str, pool2: Run) -> None:
    assert not joined(pool2(copied, how, chosen(partial(copied, how=how))))


def test_a_copy_of_a_hybrid_model(pool4: Run) -> None:
    assert not joined(pool4(copied, "deepcopy", HYBRID[:2]))


def averaged(rank: int, world: int) -> list[str]:
    """An exponential moving average that is kept in a copy evaluates like one kept of plain weights."""
    lines = []
    for setting in (Setting("SHARD_GRAD_OP", True), Setting("SHARD_GRAD_OP", False), Setting("FULL_SHARD", False)):
        model, plain = setting.wrap(seeded(Net), (Feedforward,)), setting.wrap(seeded(Net), (Feedforward,))
        average = copy.deepcopy(model).eval()
        mean = full_parameters(plain)
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, plain))
        x = data(0, 99)
        for step in range(3):
            train(model, optimizer, rank, range(step, step + 1))
            train(plain, other, rank, range(step, step + 1))
            with torch.no_grad():
                for target, source in zip(average.parameters(), model.parameters(), strict=True):
                    target.lerp_(source, 0.5)
                for name, value in full_parameters(plain).items():
                    mean[name].lerp_(value, 0.5)
                oracle = seeded(Net)
                oracle.load_state_dict(mean)
                found, expected = average(x), oracle(x)
            if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                lines.append(f"{setting}: step {step}: off by {(found - expected).abs().max():.3g}")
    return lines


def test_an_average_kept_in_a_copy(pool2: Run) -> None:
    assert not joined(pool2(averaged))


def replaced(rank: int, world: int) -> list[str]:
    """Values that a user put in parameters' places are in a copy, before the first step and later."""
    lines = []
    for orig, how, steps in itertools.product((True, False), ("deepcopy", "pickle"), (0, 1)):
        model = Setting(orig=orig).wrap(seeded(Net), (Feedforward,))
        train(model, torch.optim.SGD(model.parameters(), lr=0.3), rank, range(steps))
        doubled = {name: 2 * value for name, value in full_parameters(model).items()}
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
        if orig:  # a new parameter takes precedence over the old one's data
            doubled["head.weight"] = torch.full((3, WIDTH), 0.5)
            model.module.head.weight = nn.Parameter(doubled["head.weight"])
        lines += [f"{orig} {how} {line}" for line in differing(full_parameters(round_trip(model, how)), doubled)]
        lines += [f"{orig} {how} original {line}" for line in differing(full_parameters(model), doubled)]
    return lines


def test_a_copy_has_the_values_that_were_put_in_parameters_places(pool2: Run) -> None:
    assert not joined(pool2(replaced))


def between_forward_and_backward(rank: int, world: int, how: str) -> list[str]:
    """The copy is one of the model at rest, and the backward goes on."""
    lines = []
    for setting in Setting(), Setting("SHARD_GRAD_OP"), Setting("SHARD_GRAD_OP", orig=False):
        model, other = (setting.wrap(seeded(Net), (Feedforward,)) for _ in range(2))
        losses = [loss_of(each(data(rank, 0))) for each in (model, other)]
        copied = round_trip(model, how)
        for loss in losses:
            loss.backward()
        lines += differing(full_gradients(model), full_gradients(other))
        lines += differing(full_parameters(copied), full_parameters(model))
        loss_of(copied(data(rank, 0))).backward()
        lines += differing(full_gradients(copied), full_gradients(other))
    return lines


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_between_forward_and_backward(how: str, pool2: Run) -> None:
    assert not joined(pool2(between_forward_and_backward, how))


def in_a_window(rank: int, world: int, orig: bool) -> list[str]:
    """Refused while gradients are unsharded; possible again after the backward that synchronises them."""
    model = Setting(orig=orig).wrap(seeded(Net), (Feedforward,))
    with model.no_sync():
        loss_of(model(data(rank, 0))).backward()
    texts = []
    for how in ("deepcopy", "pickle"):
        with pytest.raises(UsageError) as info:
            round_trip(model, how)
        texts.append(str(info.value))
    loss_of(model(data(rank, 0, 1))).backward()
    return texts + differing(full_parameters(round_trip(model, "deepcopy")), full_parameters(model))


@pytest.mark.parametrize("orig", [True, False])
def test_no_copy_while_gradients_accumulate(orig: bool, pool2: Run) -> None:
    for texts in pool2(in_a_window, orig):
        assert len(texts) == 2 and all("accumulate under no_sync()" in text for text in texts)


def shared_optimizer(rank: int, world: int) -> list[str]:
    """Model and optimizer copied together stay together."""
    lines = []
    for setting in chosen(shared_optimizer):
        model = setting.wrap(seeded(Net), (Feedforward,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, rank, range(1))
        both = copy.deepcopy({"model": model, "optimizer": optimizer})
        train(both["model"], both["optimizer"], rank, range(1, 3))
        train(model, optimizer, rank, range(1, 3))
        lines += [f"{setting}: {n}" for n in differing(full_parameters(both["model"]), full_parameters(model))]
    return lines


def test_a_model_copied_with_its_optimizer(pool2: Run) -> None:
    assert not joined(pool2(shared_optimizer))


def loaded_late(rank: int, world: int) -> list[str]:
    """The report of rank 0 while rank 1 of its group does not load its pickle, which it does in the end."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return []
    pickled = pickle.dumps(FullyShardedDataParallel(seeded(Net), process_group=group))
    notes, messages = stores.StoreClient(), []

    def note(sentence: str) -> None:
        messages.append(sentence)
        notes.post("loaded_late", "posted")

    if rank == 0:
        set_collective_timeout(report_after=0.1)
        with patch.object(watch, "print_immediately", note), patch.object(stores, "PERIOD", 0.02):
            pickle.loads(pickled)
        set_collective_timeout()
    else:
        assert notes.wait(lambda: notes.read("loaded_late"), 10.0)
        pickle.loads(pickled)
    return messages[:1]


def test_a_rank_that_does_not_unpickle_is_named(pool3: Run) -> None:
    (report,), *others = pool3(loaded_late)
    assert others == [[], []]
    lines = report.splitlines()
    assert lines[0].startswith("[flatfsdp, rank 0] blocked for")
    assert lines[1].startswith("    rank 0: loads a pickled model over ranks 0, 1, for ")
    assert lines[-1].startswith("    ranks 1, 2: ") or "    rank 1: " in report


# --- extensions -------------------------------------------------------------------------------------------------------


class Halved:
    """Stores matrices transposed and halved, and records that in its state."""

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.detach().t().contiguous() / 2, "halved") if tensor.dim() == 2 else (tensor, None)

    def post_unflatten_transform(self, tensor: Tensor, state: Any) -> Tensor:
        assert state == "halved"
        return tensor.t() * 2


@contextmanager
def halving() -> Iterator[None]:
    set_extensions(Halved())
    try:
        yield
    finally:
        set_extensions(None)


class Recomputed(Feedforward):
    """Recomputes its own inside in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def extended(rank: int, world: int) -> list[str]:
    lines = []
    for setting in chosen(extended):
        for block in (Feedforward, Recomputed):
            model = seeded(lambda block=block: Net(block=lambda: block(WIDTH, 9)))  # type: ignore[misc]
            plain = copy.deepcopy(model)
            with halving():
                wrapped = setting.wrap(model, (block,))
            # Two forwards before one backward, and two more under no gradient.
            for step in range(2):
                results = []
                for each in (wrapped, plain):
                    each.zero_grad()
                    with torch.no_grad():
                        each(data(0, step))
                    loss = loss_of(each(data(0, step))) + loss_of(each(data(0, step, 1)))
                    loss.backward()
                    results.append(loss.detach())
                if not torch.equal(*results):
                    lines.append(f"{setting}: another loss in step {step}")
                torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
                with torch.no_grad():
                    for p in plain.parameters():
                        # The stored half has twice the gradient, and its double twice the step.
                        p.sub_(p.grad, alpha=0.4 if p.dim() == 2 else 0.1)
            twin = copy.deepcopy(wrapped)
            with torch.no_grad():
                if not torch.equal(wrapped(data(0, 9)), twin(data(0, 9))):
                    lines.append(f"{setting}: the copy computes something else")
            whole = full_parameters(wrapped)
            for name, p in plain.named_parameters():
                expected = p.t() / 2 if p.dim() == 2 else p
                if not torch.allclose(whole[name], expected, rtol=1e-5, atol=1e-6):
                    lines.append(f"{setting}: {name} is off")
    return lines


def test_extensions_transform_what_modules_see(pool2: Run) -> None:
    assert not joined(pool2(extended))


def seen_outside(rank: int, world: int) -> list[str]:
    """Losses over the weight that a module has while it is unsharded outside of its forward, unlike those of the plain
    module: on request, and, where the unit stays whole, after its forward."""
    lines = []
    x = torch.ones(2, WIDTH)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        plain = seeded(lambda: nn.Linear(WIDTH, WIDTH))
        for original in (False, True):
            with halving():
                model = FullyShardedDataParallel(
                    nn.Sequential(copy.deepcopy(plain)),
                    auto_wrap_policy={nn.Linear},
                    sharding_strategy=strategy,
                    use_orig_params=original,
                )
            linear: Any = model.module[0]
            linear.unshard()
            if not torch.equal(linear.module.weight.detach(), plain.weight):
                lines.append(f"{strategy}, {original}: another weight after unshard()")
            loss = model(x).sum()
            if strategy != "FULL_SHARD" and not original:  # modules keep the leaves of a flat parameter
                loss = loss + nn.functional.linear(x, linear.module.weight).square().sum()
                plain.zero_grad()
                (plain(x).sum() + nn.functional.linear(x, plain.weight).square().sum()).backward()
                loss.backward()
                with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                    grad = linear.module.weight.grad
                if not torch.allclose(grad.t() / 2, plain.weight.grad):
                    lines.append(f"{strategy}: another gradient of a loss over the weight")
    return lines


def test_modules_see_the_transform_outside_of_their_forwards(pool2: Run) -> None:
    assert not joined(pool2(seen_outside))


def test_extensions_and_bit_equal_training_without_state(pool2: Run) -> None:
    assert not joined(pool2(untouched))


class Untouched:
    """Leaves everything as it is."""

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def post_unflatten_transform(self, tensor: Tensor, state: Any) -> Tensor:
        raise AssertionError("called without a state")


def untouched(rank: int, world: int) -> list[str]:
    def program(model: Any, rank: int, step: int) -> Tensor:
        loss = loss_of(model(data(rank, step)))
        loss.backward()
        return loss

    set_extensions(Untouched())
    try:
        return differences(rank, world, Net, program, under=ALL[:2])
    finally:
        set_extensions(None)


def undone(rank: int, world: int, fails_at: str) -> list[str]:
    """A constructor fails with two units made and transformed, before or after it transforms the third, the root."""
    net, plain = seeded(Net), seeded(Net)
    flatten, calls = FlatParamHandle.flatten, itertools.count()

    def root(*args: Any, **kwargs: Any) -> FlatParamHandle:
        return flatten(*args, **kwargs) if next(calls) < len(plain.blocks) else 1 / 0  # type: ignore[return-value]

    def bad(module: nn.Module) -> None:
        raise ZeroDivisionError

    if fails_at == "initialisation":
        net.head.to("meta")
    identities = [id(p) for p in net.head.parameters()]
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16), "param_init_fn": bad}
    how = patch.object(FlatParamHandle, "flatten", root) if fails_at == "flattening" else nullcontext()
    with halving(), how, pytest.raises(ZeroDivisionError):
        FullyShardedDataParallel(net, auto_wrap_policy={Feedforward}, use_orig_params=True, **options)
    lines = [] if [id(p) for p in net.head.parameters()] == identities else ["the head has other parameters"]
    if fails_at == "initialisation":
        net.head.to_empty(device="cpu")
        net.head.load_state_dict(plain.head.state_dict())
    return lines + [n for n, p in net.named_parameters() if not torch.equal(p, plain.get_parameter(n))]


@pytest.mark.parametrize("fails_at", ["initialisation", "flattening"])
def test_a_failed_constructor_undoes_extensions(fails_at: str, pool2: Run) -> None:
    assert not joined(pool2(undone, fails_at))
