"""Properties of parameters that are split by rows. The covering arrays and the random models, of which the layout is
a part, test that the numbers are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision
from flatfsdp.errors import AgreementError, UsageError
from tests.conftest import Run
from tests.harness import inspect
from tests.harness.corners import Net, data, joined, loss_of, seeded
from tests.harness.models import Feedforward

pytestmark = pytest.mark.distributed

FSDP = FullyShardedDataParallel


def wrapped(model: nn.Module, **more: Any) -> Any:
    options = {"use_orig_params": True, "layout": "rows", "auto_wrap_policy": {Feedforward}}
    return FSDP(model, **(options | more))


def of_rank(whole: Tensor, rank: int, world: int) -> Tensor:
    """Its rows, in one dimension."""
    chunks = whole.chunk(world)
    return chunks[rank].reshape(-1) if rank < len(chunks) else whole.new_empty(0)


def window(rank: int, world: int) -> list[str]:
    """Under no_sync `.grad` is this rank's rows of its own gradients."""
    lines = []
    plain = seeded(Net)
    for original in (True, False):
        plain.zero_grad()
        model = wrapped(seeded(Net), use_orig_params=original)
        with model.no_sync():
            for micro in range(2):
                for net in (model, plain):
                    loss_of(net(data(rank, 0, micro))).backward()
        names = {name: parameter.grad for name, parameter in plain.named_parameters()}
        if original:
            for name, parameter in model.named_parameters():
                expected = of_rank(names[name], rank, world)
                if parameter.grad is None or not torch.allclose(parameter.grad, expected, atol=1e-6):
                    lines.append(f"{name}: {parameter.grad}, not {expected}")
        else:
            for unit in inspect.units(model):
                for flat in unit.flat_params:
                    prefix = f"{unit.name}." if unit.name else ""
                    rows = [of_rank(names[f"{prefix}{spec.name}"], rank, world) for spec in flat.layout.params]
                    grad = flat.parameter.grad
                    for index, expected in enumerate(rows):
                        found = grad[flat.layout.span_in_shard(index, rank).slice]
                        if not torch.allclose(found, expected, atol=1e-6):
                            lines.append(f"{flat.layout.params[index].name}: {found}, not {expected}")
    return lines


@pytest.mark.parametrize("world", [2, 3])
def test_what_accumulates_is_shown_by_rows(world: int, run: Run) -> None:
    assert not joined(run(world, window))


def quantized(rank: int, world: int) -> list[str]:
    lines = []
    exact = wrapped(seeded(Net))
    for original in (True, False):
        bits = wrapped(
            seeded(Net),
            use_orig_params=original,
            mixed_precision=MixedPrecision(gather_dtype=torch.int8, reduce_bits=8),
        )
        for net in (exact, bits):
            net.zero_grad()
            loss_of(net(data(rank, 0))).backward()
        found, expected = [], []
        for net, grads in ((bits, found), (exact, expected)):
            with FSDP.summon_full_params(net, with_grads=True):
                grads += [parameter.grad for _, parameter in net.named_parameters() if parameter.dim() > 1]
        for one, other in zip(found, expected, strict=True) if original else ():
            if not (one - other).norm() <= 0.1 * other.norm() or torch.equal(one, other):
                lines.append(f"{tuple(other.shape)}: {(one - other).norm()} of {other.norm()}")
    return lines


def test_few_bits_travel_by_rows(pool3: Run) -> None:
    assert not joined(pool3(quantized))


def different(rank: int, world: int) -> None:
    wrapped(seeded(Net), layout="rows" if rank else "flat")(data(rank, 0))


def test_ranks_of_other_layouts_get_an_error(pool2: Run) -> None:
    with pytest.raises(Exception, match=r"layout[^\n]*\n?[^\n]*(flat|rows)") as caught:
        pool2(different)
    assert AgreementError.__name__ in str(caught.value)


def steps(rank: int, world: int) -> list[str]:
    """The elements that a rank holds of a unit are one run, though padding follows the rows of most parameters."""
    model, apart = (wrapped(seeded(_narrowing)) for _ in range(2))
    fused, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, apart))
    flat = flatfsdp.fuse_optimizer_steps(fused)
    for step in range(3):
        for net, optimizer in ((model, fused), (apart, plain)):
            net(data(rank, step, width=5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with_elements = sum(parameter.numel() > 0 for parameter in model.parameters())
    expected = (1, with_elements) if with_elements > 1 else (0, 0)
    lines = [] if (flat.runs, flat.members) == expected else [f"{flat.runs} runs of {flat.members}, not {expected}"]
    for (name, one), other in zip(model.named_parameters(), apart.parameters(), strict=True):
        if not torch.equal(one, other):
            lines.append(name)
    return lines


def _narrowing() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(2, 1))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_flat_steps_compute_the_same(world: int, run: Run) -> None:
    assert not joined(run(world, steps))


def stamped(rank: int, world: int) -> list[str]:
    """One rank's pieces are those of a layout."""
    states = []
    for layout in ("flat", "rows"):
        model = wrapped(seeded(Net), layout=layout)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(data(rank, 0))).backward()
        optimizer.step()
        states.append(optimizer.state_dict())
    try:
        optimizer.load_state_dict(states[0])
    except UsageError as error:
        return [] if "of a different layout" in str(error) else [str(error)]
    return ["nobody refused"]


def test_an_optimizers_own_state_is_that_of_a_layout(pool2: Run) -> None:
    assert not joined(pool2(stamped))


def beside(rank: int, world: int) -> list[str]:
    """Units of both layouts, small enough to travel together."""
    model, plain = seeded(Net), seeded(Net)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = FSDP(block, use_orig_params=True, layout=("rows", "flat")[place % 2])
    sharded = FSDP(model, use_orig_params=True, layout="rows")
    figures = flatfsdp.stats(sharded)
    for step in range(3):
        for net in (sharded, plain):
            net.zero_grad()
        figures.reset()
        loss_of(sharded(data(rank, step))).backward()
        for of in range(world):
            (loss_of(plain(data(of, step))) / world).backward()
        with FSDP.summon_full_params(sharded, with_grads=True):
            for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
                if one.grad is None or not torch.allclose(one.grad, other.grad, atol=1e-6):
                    return [f"step {step}: gradient of {name}"]
    calls, _ = figures.comm["reduce_scatter"]
    return [] if calls < figures.units else [f"{calls} reductions of {figures.units} units"]


def test_units_of_both_layouts_share_their_collectives(pool3: Run) -> None:
    assert not joined(pool3(beside))


def filled(rank: int, world: int, layout: str) -> list[str]:
    """User code that fills flat parameters fills their padding, too; that is no gradient."""
    block = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))  # of 47 elements
    model = FSDP(nn.Sequential(FSDP(block, layout=layout), nn.Linear(2, 1)), layout=layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    for _ in range(3):
        model.zero_grad()
        model(data(rank, 0, width=6)).sum().backward()
    lines = []
    for unit in inspect.units(model):
        for flat in unit.flat_params:
            padding = torch.ones(flat.layout.shard_numel, dtype=torch.bool)
            for owned in flat.layout.owned(rank):
                padding[owned.in_shard.slice] = False
            assert flat.parameter.grad is not None
            if flat.parameter.grad[padding].any():
                lines.append(f"{unit.label}: {flat.parameter.grad[padding]}")
    return lines


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_padding_has_no_gradient_whatever_was_written_there(layout: str, pool2: Run) -> None:
    assert not joined(pool2(filled, layout))


class Nothing(nn.Module):
    """A root whose own parameters have no elements, and a unit with elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.a.sum() + self.b.sum()


def nothing(rank: int, world: int) -> list[str]:
    model = wrapped(Nothing(), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(data(rank, step, width=2)).sum().backward()
        optimizer.step()
    with FSDP.summon_full_params(model):
        return [f"{name}: {p.shape}" for name, p in model.named_parameters() if 0 in p.shape and p.dim() != 2]


def test_a_unit_without_elements(pool2: Run) -> None:
    assert not joined(pool2(nothing))
