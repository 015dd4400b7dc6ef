"""Ranks with different numbers of batches: the numbers are those of one process on the batches that exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, comm_hooks
from flatfsdp.errors import AgreementError, ConfigTypeError, ConfigValueError, FlatFSDPError, UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.delayed import backwards_released_late
from tests.harness.meshes import shared_mesh

pytestmark = pytest.mark.distributed

WIDTH = 6


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def wrap(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options.setdefault("use_orig_params", True)
    if "mesh" in options:
        options["device_mesh"] = shared_mesh(*options.pop("mesh"))
    return FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear}, **options)


def batches(rank: int, count: int) -> Iterator[Tensor]:
    for step in range(count):
        yield torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def expected(counts: list[int], micro: int, by_all: bool) -> list[Tensor]:
    """One process, on those batches of a step that exist."""
    net = build()
    optimizer = optimizer_of(net)
    data = [list(batches(rank, count)) for rank, count in enumerate(counts)]
    for step in range(max(counts)):
        there = [own[step] for own in data if step < len(own)]
        for batch in there:
            (net(batch).square().mean() / (len(counts) if by_all else len(there))).backward()
        if (step + 1) % micro == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return list(net.parameters())


def train(
    rank: int,
    world: int,
    counts: list[int],
    options: dict[str, Any],
    micro: int = 1,
    by_all: bool = False,
    hooked: bool = False,
) -> list[int]:
    """Places of the parameters that differ."""
    model = wrap(build(), **options)
    if hooked:
        model.register_comm_hook(comm_hooks.DefaultState(model.process_group), comm_hooks.reduce_scatter_hook)
    optimizer = optimizer_of(model)
    own = 0
    with flatfsdp.join(model, divide_by_initial_world_size=by_all) as joined:
        for step, batch in enumerate(joined(batches(rank, counts[rank]))):
            own += joined.has_data
            if not joined.has_data:
                batch = batch * float("nan")
            steps = (step + 1) % micro == 0
            with nullcontext() if steps else model.no_sync():
                model(batch).square().mean().backward()
            with torch.no_grad():
                model(torch.zeros(1, WIDTH))
            if steps:
                model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert own == counts[rank]
    reference = expected(counts, micro, by_all)
    with FullyShardedDataParallel.summon_full_params(model):
        pairs = zip(model.parameters(), reference, strict=True)
        return [place for place, (a, b) in enumerate(pairs) if not torch.allclose(a, b, rtol=1e-5, atol=1e-6)]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({}, {"by_all": True}),
        ({}, {"micro": 2}),
        ({}, {"hooked": True}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {}),
        ({"sharding_strategy": "NO_SHARD"}, {"micro": 2}),
        ({"cpu_offload": True, "use_orig_params": False}, {}),
    ],
)
def test_parity_with_one_process(pool2: Run, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Also if the replacement computes NaN."""
    for counts in ([4, 2], [1, 4]):
        assert pool2(train, counts, options, **settings) == [[], []]


def test_three_ranks(pool3: Run) -> None:
    assert pool3(train, [5, 2, 3], {}) == [[], [], []]


def test_a_hybrid(pool4: Run) -> None:
    options = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    assert pool4(train, [2, 4, 1, 3], options, micro=2) == [[]] * 4


def twice(rank: int, world: int) -> list[list[tuple[int, bool]]]:
    """Loops one after the other, a rank without any batch, equal numbers, and `has_data` outside of loops."""
    model = wrap(build())
    seen = []
    with flatfsdp.join(model) as joined:
        for own in (2 - rank, 2, 0):
            given = [torch.full((1, WIDTH), float(step)) for step in range(own)]
            seen.append([(int(batch[0, 0]), joined.has_data) for batch in joined(given)])
        assert joined.has_data
        given = [torch.ones(1, WIDTH)] * rank
        seen.append([(int(batch[0, 0]), joined.has_data) for batch in joined(given, stand_in=torch.zeros(1, WIDTH))])
    assert inspect.weight(model) == 1.0
    with flatfsdp.join(model, enable=False) as joined:
        seen.append([(batch, joined.has_data) for batch in joined(range(rank))])
    return seen


def test_what_loops_are_given(pool2: Run) -> None:
    both = [(0, True), (1, True)]
    assert pool2(twice) == [
        [both, both, [], [(0, False)], []],
        [[(0, True), (0, False)], both, [], [(1, True)], [(0, True)]],
    ]


def costs(rank: int, world: int) -> list[tuple[int, int]]:
    model = wrap(build())
    figures, seen = flatfsdp.stats(model), []
    with flatfsdp.join(model) as joined:
        for batch in joined(batches(rank, 5 - rank)):
            model(batch).sum().backward()
            seen.append(figures.comm["scalar"])
            figures.reset()
    return seen


def test_a_step_has_one_exchange_and_a_bitmap(pool2: Run) -> None:
    for seen in pool2(costs):
        assert seen[3:] == [(2, 2 * 24 + 4)] * 2


# -- generation ------------------------------------------------------------------------------------------------------


def generate(rank: int, world: int, strategy: str) -> tuple[list[int], list[int]]:
    """Until each rank has as many tokens as it wants; against the same model alone."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16))

    def following(net: nn.Module, tokens: list[int]) -> int:
        return int(net(torch.tensor(tokens)).sum(0).argmax())

    length = 3 + 4 * rank
    alone, tokens = [1 + rank], [1 + rank]
    net, model = build(), FullyShardedDataParallel(build(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy)
    while len(alone) < length:
        alone.append(following(net, alone))
    with torch.no_grad(), flatfsdp.join(model) as joined:
        for step in joined.until(lambda: len(tokens) == length):
            found = following(model, tokens)
            if joined.has_data:
                assert len(tokens) == step + 1
                tokens.append(found)
    return tokens, alone


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_generation_goes_on_until_all_ranks_are_done(pool2: Run, strategy: str) -> None:
    for tokens, alone in pool2(generate, strategy):
        assert tokens == alone


# -- ends of a loop --------------------------------------------------------------------------------------------------


def reported_at(job: Callable[[], object]) -> str:
    with pytest.raises(FlatFSDPError) as caught:
        job()
    assert isinstance(caught.value, (AgreementError, UsageError, ConfigTypeError, ConfigValueError))
    return str(caught.value)


def ends(rank: int, world: int, case: str) -> str:
    model = wrap(build())

    def loop() -> None:
        with flatfsdp.join(model, throw_on_early_termination=case == "early") as joined:
            for batch in joined(batches(rank, 2 * rank if case == "nothing" else 2 + rank)):
                model(batch).sum().backward()

    message = reported_at(loop)
    model(torch.ones(2, WIDTH)).sum().backward()  # all ranks have been notified, and go on
    return message


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "nothing",
            "the loop of flatfsdp.join(): rank 0 had no batch at all, so nothing can stand in while the other ranks "
            "continue. Give each rank at least one batch, or pass one of the same form on every rank: joined(batches, "
            "stand_in=batch)",
        ),
        (
            "early",
            "in step 3 of the loop of flatfsdp.join(), rank 0 had no batch left while rank 1 had one: "
            "throw_on_early_termination=True ends the loop there",
        ),
    ],
)
def test_a_loop_that_ends_with_an_error_on_all_ranks(pool2: Run, case: str, text: str) -> None:
    assert pool2(ends, case) == [text] * 2


def together(rank: int, world: int, raising: bool) -> list[float]:
    """All ranks leave their loops in the same step, and go on."""
    model = wrap(build())
    for _ in range(2):
        with pytest.raises(ValueError, match="enough") if raising else nullcontext(), flatfsdp.join(model) as joined:
            for step, batch in enumerate(joined(batches(rank, 4 - rank))):
                model(batch).sum().backward()
                if step == 1:
                    if raising:
                        raise ValueError("enough")
                    break
    model.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    return [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def after_a_break(rank: int, world: int) -> list[float]:
    """All ranks leave the loop where one has a stand-in, and train inside the context."""
    model = wrap(build())
    with flatfsdp.join(model) as joined:
        for step, _ in enumerate(joined(batches(rank, 1 + rank))):
            if step == 1:
                break
        model(torch.ones(2, WIDTH)).sum().backward()
    return [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def test_a_stand_in_counts_for_nothing_only_in_its_loop(pool2: Run) -> None:
    torch.manual_seed(0)
    net = build()
    net(torch.ones(2, WIDTH)).sum().backward()
    total = sum(float(p.grad.sum()) for p in net.parameters() if p.grad is not None)
    assert sum(map(sum, pool2(after_a_break))) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("raising", [False, True])
def test_all_ranks_may_leave_in_the_same_step(pool2: Run, raising: bool) -> None:
    torch.manual_seed(0)
    net = build()
    net(torch.ones(2, WIDTH)).sum().backward()
    total = sum(float(p.grad.sum()) for p in net.parameters() if p.grad is not None)
    found = sum(map(sum, pool2(together, raising)))
    assert found == pytest.approx(total, rel=1e-4)


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError


def goes_on(rank: int, world: int) -> list[int]:
    """The steps of a loop that fail, on one rank in a backward that autograd releases late."""
    model, failed = wrap(build()), []
    with backwards_released_late() if rank == 0 else nullcontext(), flatfsdp.join(model) as joined:
        for step, batch in enumerate(joined(batches(rank, 5))):
            output = model(batch)
            if step in (2, 3):
                output.register_hook(_fail)
            try:
                output.square().mean().backward()
            except ZeroDivisionError:
                failed.append(step)
    return failed


def test_a_loop_goes_on_after_a_backward_that_failed_on_all_ranks(pool2: Run) -> None:
    assert pool2(goes_on) == [[2, 3]] * 2


def wrong() -> list[str]:
    model = wrap(build())
    return [
        reported_at(lambda: flatfsdp.join(model, enable=1)),  # type: ignore[arg-type]
        reported_at(lambda: flatfsdp.join([model])),  # type: ignore[arg-type]
        reported_at(lambda: flatfsdp.join(model[0])),
        reported_at(lambda: flatfsdp.join(nn.Linear(1, 1))),
    ]


def refused(rank: int, world: int) -> list[str]:
    return wrong()


def test_wrong_arguments(pool2: Run) -> None:
    enable, listed, part, bare = pool2(refused)[0]
    assert enable == "join: enable: got 1 (int). Accepted: True or False."
    assert listed.startswith("join: model: got a value of type list")
    assert "that contains 1 wrapped models or is part of one" in part
    assert "that contains 0 wrapped models" in bare
