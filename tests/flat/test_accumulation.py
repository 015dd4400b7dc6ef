"""Gradients over several microbatches: with and without communication in any order, dropped, kept, replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel, fully_shard
from flatfsdp.engine.features.coalescing import uncoalesced
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HYBRID_HALVES,
    OFFLOADED,
    Net,
    Setting,
    at_rest,
    chain,
    chosen,
    data,
    differences,
    full_parameters,
    joined,
    loss_of,
    seeded,
    unsynced,
)
from tests.harness.models import Feedforward
from tests.harness.thorough import some, spread

pytestmark = pytest.mark.distributed


def one(model: Any, rank: int, step: int, micro: int, *, sync: bool) -> torch.Tensor:
    """One microbatch."""
    if sync:
        loss = loss_of(model(data(rank, step, micro)))
        loss.backward()
        return loss.detach()
    with unsynced(model):
        return one(model, rank, step, micro, sync=True)


def sequence(model: Any, rank: int, step: int, *, of: str) -> list[torch.Tensor]:
    """Microbatches in a row: s synced, n not; z and Z: zero_grad to None and in place; e: an evaluation in between."""
    results = []
    for micro, kind in enumerate(of):
        if kind in "sn":
            results.append(one(model, rank, step, micro, sync=kind == "s"))
        elif kind in "zZ":
            model.zero_grad(set_to_none=kind == "z")
        else:
            with torch.no_grad():
                results.append(model(data(rank, step, micro)))
    return results


def mixed(rank: int, world: int, of: str, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(sequence, of=of), under=under, bound=2e-6)


SEQUENCES = [
    "ns",
    "nns",
    "ss",
    "sns",
    "nss",
    "nsns",
    "ssnns",
    "nens",
    "nzs",
    "nZs",
    "snzs",
    "snZs",
    "nsZns",
    "nnzns",
    "sZs",
]


@pytest.mark.parametrize(("number", "of"), list(enumerate(SEQUENCES)))
def test_any_mix_of_synced_and_unsynced_microbatches(number: int, of: str, pool2: Run) -> None:
    """Sequences that are neighbors differ in one thing, and have other settings."""
    assert not joined(pool2(mixed, of, some((*ALL, *OFFLOADED), 8, number)))


@pytest.mark.parametrize("of", ["nns", "snZns"])
def test_mixes_under_hybrids(of: str, pool4: Run) -> None:
    assert not joined(pool4(mixed, of, chosen(partial(mixed, of=of), HYBRID_HALVES)))


@pytest.mark.parametrize("of", ["nns", "nZs", "nzs"])
def test_mixes_with_shards_of_no_element(of: str, pool3: Run) -> None:
    assert not joined(pool3(tiny, of))


def tiny(rank: int, world: int, of: str) -> list[str]:
    return differences(rank, world, _tiny, partial(sequence, of=of), units=(nn.LayerNorm,), bound=2e-6)


def _tiny() -> nn.Module:
    """Units with fewer elements than ranks, so that most ranks own nothing of most parameters."""
    return nn.Sequential(nn.Linear(13, 1), nn.LayerNorm(1), nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 2))


def two_optimizers(rank: int, world: int, to_none: bool) -> list[str]:
    """One optimizer drops its share of the window, the other keeps its own."""

    def program(model: Any, rank: int, step: int) -> Any:
        first = one(model, rank, step, 0, sync=False)
        parameters = dict(model.named_parameters())
        some = [p for name, p in parameters.items() if name.endswith("bias")]
        torch.optim.SGD(some, lr=0.1).zero_grad(set_to_none=to_none)
        return first, one(model, rank, step, 1, sync=True)

    return differences(rank, world, Net, program, under=[s for s in ALL if s.orig], bound=2e-6)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_part_of_a_window_is_dropped(to_none: bool, pool2: Run) -> None:
    assert not joined(pool2(two_optimizers, to_none))


def replaced(rank: int, world: int, of: str) -> list[str]:
    """The user puts gradients of his own in place of some, between the microbatches of `of`."""

    def program(model: Any, rank: int, step: int) -> Any:
        results = []
        for micro, kind in enumerate(of):
            if micro:
                for name, parameter in model.named_parameters():
                    if name.endswith("up.weight"):
                        parameter.grad = torch.full_like(parameter, 0.25 * micro)
                    elif name.endswith("down.bias"):
                        parameter.grad = None
            results.append(one(model, rank, step, micro, sync=kind == "s"))
        return results

    return differences(rank, world, Net, program, under=[s for s in ALL if s.orig], bound=2e-6)


@pytest.mark.parametrize("of", ["sss", "ns", "sns"])
def test_gradients_replaced_between_microbatches(of: str, pool2: Run) -> None:
    assert not joined(pool2(replaced, of))


@contextmanager
def without_gradients(model: Any, way: str) -> Iterator[None]:
    """Backwards reach units, and no trainable parameter."""
    net = getattr(model, "module", model)
    if way == "frozen":
        model.requires_grad_(False)
    else:
        net.route = lambda net, x: 2 * x
    yield
    net.route = chain
    model.requires_grad_(True)


def last_without(rank: int, world: int, way: str, clips: bool) -> list[str]:
    """The last microbatch of each step brings no gradient of any parameter, on no rank."""
    lines = []
    for setting in (*chosen(last_without), None):
        plain = seeded(Net)
        model: Any = fully_shard(seeded(Net)) if setting is None else setting.wrap(seeded(Net), (Feedforward,))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
        for step in range(2):
            if setting is None:
                model.set_requires_gradient_sync(False)
            one(model, rank, step, 0, sync=False)
            if setting is None:
                model.set_requires_gradient_sync(True)
            with without_gradients(model, way):
                (input_grad,) = torch.autograd.grad(
                    loss_of(model(inputs := data(rank, step, 1).requires_grad_())), inputs
                )
                loss_of(model(data(rank, step, 2).requires_grad_() + input_grad)).backward()
            for each in range(world):
                (loss_of(plain(data(each, step))) / world).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
                model.clip_grad_norm_(0.01)
            for each in optimizers:
                each.step()
                each.zero_grad()
        wrapped = full_parameters(model)
        for name, parameter in plain.named_parameters():
            if not torch.allclose(wrapped[name], parameter, rtol=1e-5, atol=1e-6):
                lines.append(f"{setting}: {name}")
    return lines


@pytest.mark.parametrize(("clips", "way"), spread([False, True], ["passed over", "frozen"]))
def test_a_last_microbatch_without_gradients(way: str, clips: bool, pool2: Run) -> None:
    assert not joined(pool2(last_without, way, clips))


def frozen_in_the_last(rank: int, world: int, of: str, dropped: bool) -> list[str]:
    """Some parameters require no gradient in the microbatch that reduces; their gradients have accumulated before."""

    def program(model: Any, rank: int, step: int) -> list[torch.Tensor]:
        results = []
        for micro, kind in enumerate(of):
            for name, parameter in model.named_parameters():
                frozen = micro and ("up" in name or "blocks.1" in name)
                parameter.requires_grad_(not frozen)
            results.append(one(model, rank, step, micro, sync=kind == "s"))
            if dropped and micro == 1:
                model.zero_grad()
        model.requires_grad_(True)
        return results

    return differences(rank, world, Net, program, under=[s for s in ALL if s.orig], bound=2e-6)


@pytest.mark.parametrize(("dropped", "of"), spread([False, True], ["ns", "nns", "snns"]))
def test_parameters_that_are_frozen_in_the_last_microbatch(of: str, dropped: bool, pool2: Run) -> None:
    assert not joined(pool2(frozen_in_the_last, of, dropped))


def edited_window(rank: int, world: int, front: bool, of: str, way: str) -> str:
    model: Any = fully_shard(seeded(Net)) if front else Setting().wrap(seeded(Net), (Feedforward,))
    for micro, kind in enumerate(of):
        model.set_requires_gradient_sync(kind == "s")
        one(model, rank, 0, micro, sync=True)
    for parameter in model.parameters():
        if way == "in place":
            parameter.grad.mul_(0.5)
        else:
            parameter.grad.data = parameter.grad.data * 0.5
    with pytest.raises(UsageError) as caught:
        one(model, rank, 0, len(of), sync=True)
    return str(caught.value)


# With a synchronized microbatch before, .grad shows that one's gradient, which is a part of the sum, too.
@pytest.mark.parametrize("way", ["in place", "other memory"])
@pytest.mark.parametrize("of", ["n", "sn"])
@pytest.mark.parametrize("front", [False, True])
def test_a_gradient_edited_inside_a_window_is_refused(front: bool, of: str, way: str, pool2: Run) -> None:
    for text in pool2(edited_window, front, of, way):
        assert "no_sync" in text and "weight" in text


def _kept(grad: Any, way: str) -> Any:
    local = plain_of(grad).detach()
    if way == "an array":
        return local.numpy()
    return {"itself": grad, "a view": local[:1]}[way] if way != "moved" else local.share_memory_()


def keeps_shown_gradients(rank: int, world: int, front: bool, way: str, of: str) -> int:
    model: Any = fully_shard(seeded(Net)) if front else Setting().wrap(seeded(Net), (Feedforward,))
    held: list[tuple[Any, Any]] = []
    results = []
    for keeps in (True, False):
        for micro, kind in enumerate(of):
            if kind == "z":
                model.zero_grad()
                continue
            model.set_requires_gradient_sync(kind == "s")
            one(model, rank, 0, micro, sync=True)
            if keeps and kind == "n":
                kept = [_kept(each.grad, way) for each in model.parameters() if each.grad is not None]
                held += [(each, torch.as_tensor(plain_of(each)).clone()) for each in kept]
        results.append([plain_of(each.grad).clone() for each in model.parameters() if each.grad is not None])
        model.zero_grad()
    assert held and all(map(torch.equal, *results))
    assert all(torch.equal(torch.as_tensor(plain_of(each)), before) for each, before in held)
    return len(held)


def plain_of(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


WAYS, WINDOWS = ("itself", "a view", "an array", "moved"), ("ns", "nns", "nzs", "nzns")


@pytest.mark.parametrize(
    ("front", "way", "of"),
    [
        pytest.param(front, way, of, id=f"{'fully_shard' if front else 'wrapper'}-{way}-{of}")
        for row, way in enumerate(WAYS)
        for column, of in enumerate(WINDOWS)
        for front in some((False, True), 2, row + column)  # all pairs of the three
    ],
)
def test_what_a_program_keeps_of_a_window_is_left_to_it(front: bool, way: str, of: str, pool2: Run) -> None:
    assert all(pool2(keeps_shown_gradients, front, way, of))


# --- communication ----------------------------------------------------------------------------------------------------


def counts(rank: int, world: int, setting: Setting, of: str) -> list[dict[str, int]]:
    """Collectives per microbatch, after a first step."""
    with setting.doubles(), uncoalesced():
        model = setting.wrap(seeded(Net), (Feedforward,))
        one(model, rank, 0, 0, sync=True)
        counted = []
        for micro, kind in enumerate(of):
            inspect.comm_stats(model).reset()
            one(model, rank, 1, micro, sync=kind == "s")
            counted.append(dict(inspect.comm_stats(model).counts))
        assert not list(at_rest(model)) or of.endswith("n")
        return counted


UNITS = 4  # three blocks and the root
# The root stays unsharded from its forward to its backward; SHARD_GRAD_OP stays so after a backward without sync, too.
# A backward that reduces ends with the bitmap of gradients.
EXPECTED: dict[str, Callable[[str, str], dict[str, int]]] = {
    "FULL_SHARD": lambda before, kind: {
        "all_gather": 2 * UNITS - 1,
        "reduce_scatter": UNITS * (kind == "s"),
        "scalar": int(kind == "s"),
    },
    "SHARD_GRAD_OP": lambda before, kind: {
        "all_gather": UNITS * (before == "s"),
        "reduce_scatter": UNITS * (kind == "s"),
        "scalar": int(kind == "s"),
    },
    "NO_SHARD": lambda before, kind: {"all_reduce": UNITS * (kind == "s"), "scalar": int(kind == "s")},
}


@pytest.mark.parametrize(("strategy", "orig"), list(itertools.product(EXPECTED, (True, False))))
def test_collectives_of_each_microbatch(strategy: str, orig: bool, pool2: Run) -> None:
    of = "nnsns"
    expected = [
        {kind: count for kind, count in EXPECTED[strategy](before, now).items() if count}
        for before, now in zip("s" + of, of, strict=False)
    ]
    assert pool2(counts, Setting(strategy, orig), of) == [expected, expected]


def outside_optimizer(rank: int, world: int) -> int:
    """An evaluation of other weights right after unsynced SHARD_GRAD_OP: unsharded parameters are gathered again."""
    model = Setting("SHARD_GRAD_OP").wrap(seeded(Net), (Feedforward,))
    one(model, rank, 0, 0, sync=False)
    with torch.no_grad():
        before = model(data(rank, 0))
        for parameter in model.parameters():
            parameter.mul_(0.5)
        after = model(data(rank, 0))
    plain = seeded(Net)
    with torch.no_grad():
        assert torch.equal(before, plain(data(rank, 0)))
        for parameter in plain.parameters():
            parameter.mul_(0.5)
        assert torch.equal(after, plain(data(rank, 0)))
    return 0


def test_kept_parameters_follow_the_shard(pool2: Run) -> None:
    assert pool2(outside_optimizer) == [0, 0]


def only_the_root(rank: int, world: int) -> str:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    with pytest.raises(UsageError) as caught, model.blocks[0].no_sync():
        pass
    assert isinstance(model.blocks[0], FullyShardedDataParallel)
    return str(caught.value)


def test_no_sync_on_a_nested_unit_is_refused(pool2: Run) -> None:
    assert "outermost" in pool2(only_the_root)[0]
