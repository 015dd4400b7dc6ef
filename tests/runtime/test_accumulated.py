"""Accumulated gradients are reduced without a backward, as a pipeline's schedule does: like one process."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import (
    ALL,
    HYBRID_HALVES,
    OFFLOADED,
    Net,
    Setting,
    chosen,
    data,
    differences,
    joined,
    loss_of,
    seeded,
    unsynced,
)
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed


def pipelined(model: Any, rank: int, step: int, *, of: str) -> list[torch.Tensor]:
    """f: a forward; b: the backward of the oldest that has none; s: a synchronized step; z: gradients to None; e: an
    evaluation; r: accumulated gradients are reduced."""
    results: list[torch.Tensor] = []
    waiting: deque[torch.Tensor] = deque()
    for micro, kind in enumerate(of):
        with unsynced(model):
            if kind == "f":
                waiting.append(loss_of(model(data(rank, step, micro))))
                results.append(waiting[-1].detach())
            elif kind == "b":
                waiting.popleft().backward()
            elif kind == "e":
                with torch.no_grad():
                    results.append(model(data(rank, step, micro)))
        if kind == "s":
            loss_of(model(data(rank, step, micro))).backward()
        elif kind == "z":
            model.zero_grad()
        elif kind == "r" and isinstance(model, FullyShardedDataParallel):
            model.reduce_accumulated_gradients()
    return results


def accumulated(rank: int, world: int, of: str, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(pipelined, of=of), under=under, bound=2e-6)


# The last: a stage of 1F1B with three microbatches in flight.
SEQUENCES = [
    "r",
    "fbr",
    "fbfbr",
    "fbrfbr",
    "sfbr",
    "fbrs",
    "fbrr",
    "fbzr",
    "fbefbr",
    "ffbb",
    "fffbfbbr",
    "fbfrb",
    "fbrfbs",
]


@pytest.mark.parametrize(("number", "of"), list(enumerate(SEQUENCES)))
def test_like_one_process(number: int, of: str, pool2: Run) -> None:
    """Sequences that are neighbors have other settings."""
    of = of if of[-1] in "rs" else of + "r"
    assert not joined(pool2(accumulated, of, some((*ALL, *OFFLOADED), 8, number)))


def test_under_hybrids(pool4: Run) -> None:
    assert not joined(pool4(accumulated, "ffbfbbr", chosen(accumulated, HYBRID_HALVES)))


def with_parts(model: Any, rank: int, step: int) -> None:
    """The head is used by rank 0 alone, the last block by none."""
    for micro in range(2):
        with unsynced(model):
            net = getattr(model, "module", model)
            net.route = (lambda net, x: net.head(net.blocks[0](x))) if rank == 0 else (lambda net, x: net.blocks[0](x))
            loss_of(model(data(rank, step, micro))).backward()
    if isinstance(model, FullyShardedDataParallel):
        model.reduce_accumulated_gradients()


def partly(rank: int, world: int) -> list[str]:
    return differences(rank, world, Net, with_parts, bound=2e-6)


def test_what_no_rank_used_has_no_gradient(pool2: Run) -> None:
    assert not joined(pool2(partly))


def partial_sums(rank: int, world: int) -> list[str]:
    """Along the shard axis after each microbatch, along the other at the end."""

    def program(model: Any, rank: int, step: int) -> None:
        sharded = isinstance(model, FullyShardedDataParallel)
        if sharded:
            model.set_requires_all_reduce(False)
        for micro in range(2):
            loss_of(model(data(rank, step, micro))).backward()
        if sharded:
            model.set_requires_all_reduce(True)
            model.reduce_accumulated_gradients()

    return differences(rank, world, Net, program, under=chosen(program, HYBRID_HALVES), bound=2e-6)


def test_partial_sums_go_on(pool4: Run) -> None:
    assert not joined(pool4(partial_sums))


def _look(seen: list[bool], parameter: torch.Tensor) -> None:
    seen.append(parameter.grad is not None)


def hooked_late(rank: int, world: int, under: tuple[Setting, ...]) -> list[int]:
    """Hooks that are registered after the last backward see the reduced gradients."""
    counts = []
    for setting in under:
        model = setting.wrap(seeded(Net), {torch.nn.Linear})
        with model.no_sync():
            loss_of(model(data(rank, 0))).backward()
        seen: list[bool] = []
        record = partial(_look, seen)
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(record)
        model.reduce_accumulated_gradients()
        graded = [each.grad is not None for each in model.parameters()]
        assert all(seen), (setting, seen)
        counts.append(sum(graded) - len(seen))
    return counts


def test_hooks_that_were_registered_after_the_last_backward_run(pool2: Run) -> None:
    under = tuple(
        Setting(strategy=strategy, orig=orig) for strategy in ("FULL_SHARD", "NO_SHARD") for orig in (True, False)
    )
    assert pool2(hooked_late, under) == [[0] * 4] * 2


def refusals(rank: int, world: int) -> dict[str, str]:
    model = Setting().wrap(seeded(Net), {torch.nn.Linear})
    found = {}

    def attempt(name: str, of: Any = model) -> None:
        try:
            of.reduce_accumulated_gradients()
        except UsageError as error:
            found[name] = str(error)

    with model.no_sync():
        attempt("no_sync")
    attempt("nested", model.module.head)
    model.module.route = lambda net, x: [attempt("forward"), net.head(x)][1]
    loss = loss_of(model(data(rank, 0)))
    loss.register_hook(lambda grad: attempt("backward"))
    loss.backward()
    return found


def test_where_it_is_refused(pool2: Run) -> None:
    for found in pool2(refusals):
        assert found.keys() == {"no_sync", "nested", "forward", "backward"}, found
        assert "inside no_sync()" in found["no_sync"]
        assert "call it on the outermost" in found["nested"]


def stepped(rank: int, world: int) -> int:
    """Reduced gradients leave nothing in the window: their memory is freed."""
    model = Setting().wrap(seeded(Net), ())
    with model.no_sync():
        loss_of(model(data(rank, 0))).backward()
    model.reduce_accumulated_gradients()
    live = inspect.memory(model).live
    return sum(count for kind, count in live.items() if kind != "shard")


def test_the_windows_memory_is_freed(pool2: Run) -> None:
    assert pool2(stepped) == [0, 0]
