"""Units that run only if a rank's data reach them, plans of dry runs, and errors of ranks that disagree, under
`fully_shard`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp.errors import FlatFSDPError
from tests.conftest import Run
from tests.harness.front import whole
from tests.harness.meshes import named_mesh
from tests.harness.pool import JobFailed

pytestmark = pytest.mark.distributed

WIDTH = 6


class Mixture(nn.Module):
    """Each rank runs some of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 1) for _ in range(3))
        self.last = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.first(x)
        return self.last(sum((self.experts[each](x) for each in chosen), torch.zeros(WIDTH + 1)))


def built() -> Any:
    torch.manual_seed(0)
    return Mixture()


def sharded(**options: Any) -> Any:
    model = built()
    for unit in (model.first, *model.experts):
        flatfsdp.fully_shard(unit, **options)
    return flatfsdp.fully_shard(model, **options)


def mixture(rank: int, world: int) -> list[str]:
    model, alone = sharded(mesh=named_mesh(world)), built()
    flatfsdp.ensure_unit_participation(model.experts)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(3):
        uses = [[0], [0, 1], []] if step else [[0], [], []]
        batches = [
            torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + of)) for of in range(world)
        ]
        model(batches[rank], uses[rank]).square().mean().backward()
        for of in range(world):
            (alone(batches[of], uses[of]).square().mean() / world).backward()
        found = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        if found != [name for name, parameter in alone.named_parameters() if parameter.grad is None]:
            return [f"step {step}: without a gradient: {found}"]
        for each in optimizers:
            each.step()
            each.zero_grad()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    return [name for (name, one), two in pairs if not torch.allclose(whole(one), two, atol=1e-5)]


def test_ranks_run_experts_of_their_own(pool3: Run) -> None:
    assert pool3(mixture) == [[]] * 3


def gathers_of_frozen(rank: int, world: int) -> list[int]:
    model = built()
    model.first.requires_grad_(False)
    for unit in (model.first, *model.experts):
        flatfsdp.fully_shard(unit, mesh=named_mesh(world))
    flatfsdp.fully_shard(model, mesh=named_mesh(world))
    calls = []
    for keeps in (False, True):
        if keeps:
            model.keep_frozen_unsharded()
        for _ in range(3):
            figures = flatfsdp.stats(model)
            figures.reset()
            model(torch.ones(2, WIDTH), [0, 1, 2]).sum().backward()
        calls.append(figures.comm["all_gather"][1])
    return calls


def test_what_is_frozen_stays_whole(pool2: Run) -> None:
    for without, kept in pool2(gathers_of_frozen):
        assert without - kept == 4 * WIDTH * (WIDTH + 1)  # bytes of `first`


@pytest.mark.parametrize("rank", range(3))
def test_memory_is_planned_in_a_dry_run(rank: int) -> None:
    with flatfsdp.dry_run(3, rank=rank):
        model = sharded()
        with_state = flatfsdp.memory_plan(model, torch.optim.AdamW(model.parameters()), microbatches=2)
        assert with_state.comm["reduce_scatter"] == (1, 3 * with_state.params)
        plan = flatfsdp.memory_plan(model)
    pieces = [(-(-each.shape[0] // 3), each.shape[0], each[0].numel()) for each in built().parameters()]
    assert plan.params == 4 * sum(most * row for most, _, row in pieces)
    own = 4 * sum(max(0, min(most, rows - rank * most)) * row for most, rows, row in pieces)
    assert plan.grads == with_state.optimizer["exp_avg"] == own
    assert len(plan.units) == 5 and plan.buffers == 0


def disagree(rank: int, world: int) -> None:
    model = sharded(mesh=named_mesh(world))
    model(torch.ones(2, WIDTH), [0, 1] if rank else [1, 0])


def test_ranks_that_disagree_are_named(pool2: Run) -> None:
    with pytest.raises(JobFailed, match=r"(?s)rank.*experts\.[01]"):
        pool2(disagree)


def late(rank: int, world: int) -> None:
    model = sharded(mesh=named_mesh(world))
    model(torch.ones(2, WIDTH), [0]).sum().backward()
    flatfsdp.set_collective_timeout(report_after=0.4, raise_after=1)
    if rank == 1:
        time.sleep(20)
    model(torch.ones(2, WIDTH), [0]).sum().backward()


def test_who_waits_for_whom_is_reported(pool2: Run) -> None:
    with pytest.raises(JobFailed, match="rank 1: in the program's own code since a backward"):
        pool2(late)


def replicas(rank: int, world: int) -> str:
    model = sharded(mesh=named_mesh(2, 1))
    flatfsdp.check_replicas(model)
    with torch.no_grad():
        model.last.weight._local_tensor.add_(rank)
    try:
        flatfsdp.check_replicas(model)
    except FlatFSDPError as error:
        return str(error)
    return "nothing"


def test_replicas_that_differ_are_named(pool2: Run) -> None:
    for words in pool2(replicas):
        assert "last.weight" in words, words


def not_finite(rank: int, world: int) -> str:
    model = sharded(mesh=named_mesh(world))
    with flatfsdp.detect_nonfinite(model):
        try:
            (model(torch.ones(2, WIDTH), [0]) * (float("nan") if rank else 1.0)).sum().backward()
        except FlatFSDPError as error:
            return str(error)
    return "nothing"


def test_a_nan_is_found(pool2: Run) -> None:
    for words in pool2(not_finite):
        assert "rank 1" in words and ("last" in words or "nan" in words.lower()), words
