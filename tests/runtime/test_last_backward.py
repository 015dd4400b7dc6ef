"""Backwards that are not the last leave a reduction under way: every read returns the same gradients as without."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.checkpoint import load, save
from flatfsdp.engine.guards import deferred_grad as awaited
from flatfsdp.engine.models.rest import abandon
from flatfsdp.engine.models.walks import units_in
from flatfsdp.engine.runtime.model import model_of
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    HYBRID_HALVES,
    PAIRS,
    Net,
    Setting,
    chosen,
    data,
    differences,
    full_gradients,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import Feedforward
from tests.harness.thorough import is_thorough
from tests.runtime.test_schedule_api import call_ours, microbatch

pytestmark = pytest.mark.distributed

LINGER = tuple(
    Setting(strategy, orig, doubled=True, large=orig)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    for orig in (True, False)
)
LINGER_HALVES = LINGER[::3], LINGER[1:3]  # both of everything in each


def accumulate(model: Any, rank: int, step: int, *, sync: str) -> list[Tensor]:
    """Microbatches of which only the last ends with all reductions; reduced where `sync` has an s."""
    losses = []
    for micro, kind in enumerate(sync):
        call_ours(model, "set_is_last_backward", micro == len(sync) - 1)
        call_ours(model, "set_requires_gradient_sync", kind == "s")
        losses.append(microbatch(model, rank, step, micro))
    return losses


def accumulated(rank: int, world: int, sync: str, under: tuple[Setting, ...]) -> list[str]:
    program = partial(accumulate, sync=sync)
    return differences(rank, world, Net, program, under=under, steps=3, bound=2e-6)


@pytest.mark.parametrize(("sync", "under"), [("sss", PAIRS[0]), ("sns", PAIRS[3])])
def test_accumulation(sync: str, under: tuple[Setting, ...], pool2: Run) -> None:
    assert not joined(pool2(accumulated, sync, under))


def test_accumulation_under_hybrids(pool4: Run) -> None:
    assert not joined(pool4(accumulated, "sss", chosen(accumulated, HYBRID_HALVES)))


def add_up_within_replicas(model: Any, rank: int, step: int) -> list[Tensor]:
    losses = []
    for micro in range(3):
        call_ours(model, "set_is_last_backward", micro == 2)
        call_ours(model, "set_requires_all_reduce", micro == 2)
        losses.append(microbatch(model, rank, step, micro))
        if micro < 2 and isinstance(model, FullyShardedDataParallel):
            assert all(parameter.grad is None for parameter in model.parameters()), "a partial sum is no gradient"
    return losses


def added_up_within_replicas(rank: int, world: int) -> list[str]:
    return differences(rank, world, Net, add_up_within_replicas, under=HYBRID_HALVES[0], steps=2, bound=2e-6)


def test_partial_sums_of_hybrids(pool4: Run) -> None:
    assert not joined(pool4(added_up_within_replicas))


# --- between two microbatches -----------------------------------------------------------------------------------------


class Fails(Exception):
    pass


def read(model: Any) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def set_to_none(model: Any) -> None:
    model.zero_grad()


def set_to_zero(model: Any) -> None:
    model.zero_grad(set_to_none=False)


def clip(model: Any) -> Tensor:
    norm: Tensor = model.clip_grad_norm_(0.01)
    return norm


def clip_by_torch(model: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)


def replace(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()


def step(model: Any) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


def summon(model: Any) -> dict[str, Tensor]:
    return full_gradients(model)


def evaluate(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(data(0, 5))
    return found


def unshard(model: Any) -> list[Tensor]:
    model.unshard()
    found = [p.detach().clone() for p in model.parameters()]
    model.reshard()
    return found


def fail_in_forward(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise Fails

    with pytest.raises(Fails), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.module.head, "forward", fail)
        model(data(0, 5))


def fail_in_backward(model: Any) -> None:
    def fail(grad: Tensor) -> None:
        raise Fails

    output = model(data(0, 5))
    output.register_hook(fail)
    with pytest.raises(Fails):
        output.sum().backward()


def look_in_forward(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    hook = model.module.head.register_forward_pre_hook(lambda *_: seen.extend(read(model)))
    evaluate(model)
    hook.remove()
    return seen


def look_between(model: Any) -> list[Tensor]:
    loss = loss_of(model(data(0, 5)))
    seen = read(model)
    loss.backward()
    return seen


def copied(model: Any) -> list[Tensor]:
    twin = copy.deepcopy(model)
    return [p.detach() for p in twin.parameters()]


def pickled(model: Any) -> list[Tensor]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return [p.detach() for p in model.parameters()]


def parameters_copied(model: Any) -> list[Tensor]:
    twins = [copy.deepcopy(p) for p in model.parameters()]
    assert {type(p) for p in (*twins, *model.parameters())} <= {nn.Parameter, type(next(iter(model.parameters())))}
    return [p.detach() for p in twins]


def state_dict(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def backward_twice(model: Any) -> None:
    loss = loss_of(model(data(0, 5)))
    loss.backward(retain_graph=True)
    loss.backward()


def nothing(model: Any) -> None:
    return None


BETWEEN = (
    nothing,
    read,
    set_to_none,
    set_to_zero,
    clip,
    clip_by_torch,
    replace,
    step,
    summon,
    evaluate,
    unshard,
    fail_in_forward,
    fail_in_backward,
    look_in_forward,
    look_between,
    copied,
    pickled,
    parameters_copied,
    state_dict,
    backward_twice,
)


def seen_with(between: Callable[[Any], Any], setting: Setting, rank: int, *, last: bool) -> dict[str, Any]:
    """The values that a program reads by `between` after the first microbatch, and after each of two steps."""
    found: dict[str, Any] = {}
    with setting.doubles():
        model = setting.wrap(seeded(Net), (Feedforward,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            for micro in range(3):
                model.set_is_last_backward(last or micro == 2)
                microbatch(model, rank, number, micro)
                lingers = any(map(awaited.is_deferred, model.parameters()))
                assert lingers is (not inspect.is_last_backward(model)), "nothing is under way, or at the end"
                if micro == 0:
                    found[f"between, step {number}"] = between(model)
            found[f"gradients, step {number}"] = read(model)
            optimizer.step()
            optimizer.zero_grad()
        found["parameters"] = [p.detach().clone() for p in model.parameters()]
        for kind, count in inspect.memory(model).live.items():
            assert not count or kind == "shard", f"{count} bytes of {kind} are left"
    return found


def seen(rank: int, world: int, between: Callable[[Any], Any], under: tuple[Setting, ...]) -> list[str]:
    lines = []
    for setting in under:
        one, other = (seen_with(between, setting, rank, last=last) for last in (True, False))
        for key, expected in one.items():
            try:
                torch.testing.assert_close(other[key], expected, rtol=0, atol=0)
            except AssertionError as error:
                lines.append(f"{setting}, rank {rank}, {key}: {error}")
    return lines


@pytest.mark.parametrize(("number", "between"), list(enumerate(BETWEEN)))
def test_what_comes_between(number: int, between: Callable[[Any], Any], pool2: Run) -> None:
    under = LINGER if is_thorough() else LINGER_HALVES[number % 2]
    assert not joined(pool2(seen, between, under))


def saved_and_loaded(rank: int, folder: str, *, last: bool) -> list[list[Tensor]]:
    """A checkpoint is written while a reduction is under way, and loaded while one of the model that loads it is."""
    model = LINGER[0].wrap(seeded(Net), (nn.Linear,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    microbatch(model, rank, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    model.set_is_last_backward(last)
    found = []

    def look() -> None:
        found.append([p.detach().clone() for p in model.parameters()] + read(model))

    for call in (save, load):
        microbatch(model, rank, 0, 1)
        call(folder, model=model, optimizer=optimizer)
        look()
    microbatch(model, rank, 0, 2)
    optimizer.step()
    look()
    return found


def checkpoints(rank: int, world: int, folder: str) -> bool:
    one, other = (saved_and_loaded(rank, f"{folder}-{last}", last=last) for last in (True, False))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return len(one[0]) > len(list(Net().parameters()))  # there are gradients


def test_checkpoints(pool2: Run, tmp_path: Any) -> None:
    assert all(pool2(checkpoints, str(tmp_path / "saved")))


def held_elsewhere(rank: int, world: int) -> list[bool]:
    """Whether the setting is that of copies, pickles, and of a model that is wrapped again."""
    inner = LINGER[0].wrap(seeded(Net), ())
    inner.set_is_last_backward(False)
    microbatch(inner, rank, 0, 0)
    buffer = io.BytesIO()
    torch.save(inner, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(inner), torch.load(buffer, weights_only=False)]
    outer = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 2)), use_orig_params=True)
    found = []
    for model in (*twins, outer):
        microbatch(model, rank, 0, 1)
        found.append(any(map(awaited.is_deferred, model.parameters())))
    return found


def test_copies_have_the_setting(pool2: Run) -> None:
    assert all(map(all, pool2(held_elsewhere)))


def abandoned(rank: int, world: int) -> bool:
    """A reduction that is under way fails as the connections break; the model goes on."""
    model = LINGER[0].wrap(seeded(Net), ())
    model.set_is_last_backward(False)
    microbatch(model, rank, 0, 0)
    iteration = model_of(units_in(model)[-1]).iteration
    assert iteration.pending is not None
    iteration.pending.wait()

    def broken() -> None:
        raise RuntimeError("connection closed by peer")

    iteration.pending = awaited.PendingGradients([*model.parameters()], broken)
    abandon(units_in(model))
    left = any(p.grad is not None for p in model.parameters())
    microbatch(model, rank, 0, 1)
    return not left and any(p.grad is not None for p in model.parameters())


def test_one_that_fails_is_abandoned(pool2: Run) -> None:
    assert all(pool2(abandoned))
