"""torch's own functions of gradient norms, given shards: the norm is that of one process with all ranks' data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm  # as programs import them

from flatfsdp import FullyShardedDataParallel, ShardedGradScaler, fuse_optimizer_steps, optimizer_in_backward
from flatfsdp.errors import NonFiniteError, UsageError
from tests.conftest import Run
from tests.harness.corners import (
    HYBRID_HALVES,
    OFFLOADED,
    PAIRS,
    Net,
    Setting,
    chosen,
    data,
    full_gradients,
    full_parameters,
    joined,
    loss_of,
    seeded,
)
from tests.harness.models import Feedforward
from tests.harness.thorough import is_thorough, some

pytestmark = pytest.mark.distributed

summon = FullyShardedDataParallel.summon_full_params
BOUND = 0.05  # less than all norms below


def trained(model: Any, rank: int) -> Any:
    model.zero_grad()
    loss_of(model(data(rank, 0))).backward()
    return model


def alone(world: int, build: Callable[[], nn.Module] = Net) -> nn.Module:
    """The model of one process, with the average gradients over all ranks' data."""
    net = seeded(build)
    for rank in range(world):
        (loss_of(net(data(rank, 0))) / world).backward()
    return net


def wrapped(setting: Setting, build: Callable[[], nn.Module] = Net) -> Any:
    return setting.wrap(seeded(build), (Feedforward,))


def unlike(model: Any, plain: nn.Module) -> list[str]:
    found = full_gradients(model)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert found.keys() == expected.keys()
    return [name for name, grad in expected.items() if not torch.allclose(found[name], grad, rtol=1e-5, atol=1e-8)]


def clip(parameters: Iterable[Tensor], p: float) -> Tensor:
    return clip_grad_norm_(parameters, BOUND, p)


def clip_in_two_calls(parameters: Iterable[Tensor], p: float) -> Tensor:
    held = list(parameters)
    norm = get_total_norm([each.grad for each in held if each.grad is not None], p)
    clip_grads_with_norm_(held, BOUND, norm)
    return norm


def clip_those_with_gradients(parameters: Iterable[Tensor], p: float) -> Tensor:
    return clip_grad_norm_((each for each in parameters if each.grad is not None), BOUND, p, foreach=True)


def clip_one_by_one(parameters: Iterable[Tensor], p: float) -> Tensor:
    return clip_grad_norm_(list(parameters), max_norm=torch.tensor(BOUND), norm_type=p, foreach=False)


WAYS = (clip, clip_in_two_calls, clip_those_with_gradients, clip_one_by_one)


def by_torch(rank: int, world: int, settings: tuple[Setting, ...], p: float) -> list[str]:
    lines = []
    for setting in settings:
        with setting.doubles():
            model, twin = wrapped(setting), wrapped(setting)
            for way in some(WAYS, 2, (p > 1) + (world > 2)):
                norm, plain = way(trained(model, rank).parameters(), p), alone(world)
                expected = way(plain.parameters(), p)
                where = f"{setting}, p={p}, {way.__name__}"
                if norm.dtype != expected.dtype or not torch.isclose(norm, expected, rtol=1e-5):
                    lines.append(f"{where}: norm {norm}, expected {expected}")
                lines += [f"{where}: {name}" for name in unlike(model, plain)]
                own = trained(twin, rank).clip_grad_norm_(BOUND, p)
                pairs = zip(twin.parameters(), model.parameters(), strict=True)
                if not torch.equal(norm, own) or not all(same(one.grad, other.grad) for one, other in pairs):
                    lines.append(f"{where}: not what model.clip_grad_norm_() does")
    return lines


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


NORMS = 1.0, 2.0, 0.5, math.inf


# Two ways each, so that each norm and each number of ranks has them all.
@pytest.mark.parametrize(
    ("world", "p"),
    [*product((2, 3, 4), NORMS)]
    if is_thorough()
    else [*product((2,), NORMS), (3, 1.0), (3, 2.0), (4, 0.5), (4, math.inf)],
)
def test_norms_are_those_of_one_process(world: int, p: float, run: Run) -> None:
    settings = chosen(by_torch, HYBRID_HALVES) if world == 4 else PAIRS[(NORMS.index(p) + world) % 4]
    assert not joined(run(world, by_torch, settings, p))


def test_norms_of_offloaded_shards(pool2: Run) -> None:
    assert not joined(pool2(by_torch, OFFLOADED, 2.0))


# -- some parameters, and parameters of several models -----------------------------------------------------------------


def of_a_part(rank: int, world: int, orig: bool) -> list[str]:
    """Only the head's parameters, of which one rank has none; and a single parameter."""
    lines = []
    for part in ("head", "bias", "all but one"):
        model, plain = trained(wrapped(Setting(orig=orig)), rank), alone(world)
        nets: tuple[Any, Any] = (model, plain)
        if part == "head" and orig:
            norms = [clip_grad_norm_(net.head.parameters(), BOUND) for net in nets]
        elif part == "bias" and orig:
            norms = [clip_grad_norm_(net.head.bias, BOUND) for net in nets]
        else:  # one unit: flat or not, modules inside of it hold its parameters
            norms = [clip_grad_norm_(net.blocks[1].parameters(), BOUND) for net in nets]
        if not torch.isclose(*norms):
            lines.append(f"{part}: norm {norms}")
        lines += [f"{part}: {name}" for name in unlike(model, plain)]
    return lines


@pytest.mark.parametrize("orig", [True, False])
def test_parts_of_a_model(orig: bool, run: Run) -> None:
    assert not joined(run(3, of_a_part, orig))


class One(nn.Module):
    """A single element: other ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def without_elements(rank: int, world: int) -> list[float]:
    model = trained(wrapped(Setting(), One), rank)
    norm = clip(model.parameters(), 2.0)
    return [float(norm), *(float(abs(p.grad).sum()) for p in model.parameters() if p.grad is not None)]


def test_ranks_without_elements_take_part(run: Run) -> None:
    expected = float(clip(alone(3, One).parameters(), 2.0))
    for rank, norms in enumerate(run(3, without_elements)):
        assert norms == pytest.approx([expected, BOUND] if rank == 0 else [expected], rel=1e-5)


def of_several(rank: int, world: int) -> list[str]:
    """Two models and a plain one, whose gradients the program averages, in one call: clipped by their joint norm."""
    lines = []
    for way in WAYS:
        models = [wrapped(Setting(orig=True)), wrapped(Setting("SHARD_GRAD_OP", orig=False)), alone(world)]
        nets = [alone(world) for _ in models]
        for model in models[:2]:
            trained(model, rank)
        norm, expected = (way((p for each in those for p in each.parameters()), 2.0) for those in (models, nets))
        if not torch.isclose(norm, expected):
            lines.append(f"{way.__name__}: norm {norm}, expected {expected}")
        for index, (model, net) in enumerate(zip(models[:2], nets, strict=False)):
            lines += [f"{way.__name__}: model {index}: {name}" for name in unlike(model, net)]
        pairs = zip(models[2].parameters(), nets[2].parameters(), strict=True)
        lines += [f"{way.__name__}: the plain one" for p, q in pairs if not torch.allclose(p.grad, q.grad)]
    return lines


def test_parameters_of_several_models(pool2: Run) -> None:
    assert not joined(pool2(of_several))


def plain_beside(rank: int, world: int) -> list[float]:
    """A model that is not wrapped, on one rank after the other, while another model is wrapped."""
    model = trained(wrapped(Setting()), rank)
    for _ in range(rank):
        torch.distributed.barrier()
    net = seeded(Net)
    loss_of(net(data(rank, 5))).backward()
    norms = [get_total_norm([p.grad for p in net.parameters()]), clip(net.parameters(), 2.0)]
    assert clip(seeded(Net).parameters(), 2.0) == get_total_norm([]) == 0.0  # nor are no gradients those of shards
    for _ in range(world - rank):
        torch.distributed.barrier()
    del model
    return [float(norm) for norm in norms]


def test_other_parameters_keep_their_own_norm(pool2: Run) -> None:
    expected = []
    for rank in range(2):
        net = seeded(Net)
        loss_of(net(data(rank, 5))).backward()
        expected.append([float(clip_grad_norm_(net.parameters(), math.inf))] * 2)
    for found, norms in zip(pool2(plain_beside), expected, strict=True):
        assert found == pytest.approx(norms, rel=1e-5)


# -- together with other things ----------------------------------------------------------------------------------------


def scaled(rank: int, world: int) -> list[str]:
    model, plain = wrapped(Setting()), alone(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model(data(rank, 0)))).backward()
    scaler.unscale_(optimizer)
    norms = [clip(net.parameters(), 2.0) for net in (model, plain)]
    scaler.step(optimizer)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found = full_parameters(model)
    wrong = [name for name, p in plain.named_parameters() if not torch.allclose(found[name], p)]
    return wrong if torch.isclose(*norms) else [*wrong, f"norm {norms}"]


def test_after_a_scaler(pool2: Run) -> None:
    assert not joined(pool2(scaled))


def with_fused_steps(rank: int, world: int, orig: bool) -> list[str]:
    model, plain = wrapped(Setting(orig=orig)), seeded(Net)
    optimizer, other = (torch.optim.AdamW(net.parameters(), lr=0.1) for net in (model, plain))
    fuse_optimizer_steps(optimizer)
    lines = []
    for step in range(3):
        loss_of(model(data(rank, step))).backward()
        for each in range(world):
            (loss_of(plain(data(each, step))) / world).backward()
        norms = [clip_grad_norm_(each.param_groups[0]["params"], BOUND) for each in (optimizer, other)]
        if not torch.isclose(*norms, rtol=1e-4):
            lines.append(f"step {step}: norm {norms}")
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    found = full_parameters(model)
    return lines + [name for name, p in plain.named_parameters() if not torch.allclose(found[name], p, atol=1e-4)]


@pytest.mark.parametrize("orig", [True, False])
def test_with_fused_steps(orig: bool, pool2: Run) -> None:
    assert not joined(pool2(with_fused_steps, orig))


def left_unreduced(rank: int, world: int) -> list[str]:
    """The last backward of a step reaches no parameter: the clip reduces what the others have left."""
    model, plain = wrapped(Setting()), alone(world)
    with model.no_sync():
        trained(model, rank)
    x = data(rank, 0).requires_grad_()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    norms = [clip(net.parameters(), 2.0) for net in (model, plain)]
    return unlike(model, plain) if torch.isclose(*norms) else [f"norm {norms}"]


def test_gradients_that_the_last_backward_left(pool2: Run) -> None:
    assert not joined(pool2(left_unreduced))


def in_summon(rank: int, world: int) -> list[str]:
    """Gradients are whole there, and every rank clips all of them."""
    model, plain = trained(wrapped(Setting()), rank), alone(world)
    expected = clip(plain.parameters(), 2.0)
    with summon(model, with_grads=True):
        norm = clip(model.parameters(), 2.0)
    return unlike(model, plain) if torch.isclose(norm, expected) else [f"norm {norm}, expected {expected}"]


def test_whole_gradients(pool2: Run) -> None:
    assert not joined(pool2(in_summon))


# -- refused -----------------------------------------------------------------------------------------------------------


def said(act: Callable[[], object], kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def refused(rank: int, world: int, orig: bool) -> list[str]:
    model = wrapped(Setting(orig=orig))
    with model.no_sync():
        trained(model, rank)
    texts = [
        said(lambda: clip(model.parameters(), 2.0)),
        said(lambda: clip_in_two_calls(model.parameters(), 2.0)),
        said(lambda: model.clip_grad_norm_(BOUND)),
    ]
    trained(model, rank)
    texts.append(said(lambda: get_total_norm(model.parameters())))
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda given: clip([given], 2.0))
    texts.append(said(lambda: trained(model, rank)))
    model = trained(wrapped(Setting(orig=orig)), rank)
    with summon(model, with_grads=orig):
        texts.append(said(lambda: model.clip_grad_norm_(BOUND)))
    return texts


@pytest.mark.parametrize("orig", [True, False])
def test_what_has_no_sum_over_ranks_is_refused(orig: bool, pool2: Run) -> None:
    for texts in pool2(refused, orig):
        *windows, parameters, hooks, summoned = texts
        assert "was called inside a backward, as by a hook on a gradient" in hooks
        assert all("accumulated under no_sync(), and no backward has reduced them" in each for each in windows)
        assert parameters.startswith("get_total_norm: got parameters of unit ")
        assert "leave summon_full_params() first" in summoned


def not_finite(rank: int, world: int) -> list[Any]:
    model = trained(wrapped(Setting()), rank)
    if rank == world - 1:
        next(p for p in model.parameters() if p.grad is not None and p.grad.numel()).grad[...] = math.inf
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    text = said(lambda: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True), NonFiniteError)
    stays = all(same(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    return [text, stays, float(clip(model.parameters(), 2.0))]


def test_norms_that_are_not_finite(pool2: Run) -> None:
    results = pool2(not_finite)
    assert results[0] == results[1]
    text, stays, norm = results[0]
    assert "on rank 1" in text and stays and norm == math.inf


def while_stepping(rank: int, world: int) -> str:
    model = wrapped(Setting())
    optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained(model, rank)
    return said(lambda: clip(model.parameters(), 2.0))


def test_gradients_that_are_gone(pool2: Run) -> None:
    for text in pool2(while_stepping):
        assert "SGD steps during backwards" in text
