"""Plans with a loss: what torch's allocator reserves in steps with activations, and which modules hold these."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp.errors import ConfigValueError, UsageError

pytestmark = pytest.mark.single_process

MIB = 2**20
WIDTH, ROWS, BLOCKS = 1024, 2048, 6
INPUT = 4 * MIB  # of a block, in bfloat16


class Block(nn.Module):
    """A residual block of four times the width, recomputed in the backward if `again`."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, and a head of the root's own."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(again=again) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def wrapped(front: str, net: nn.Module, *, offload: bool = False) -> Any:
    if front == "fully_shard":
        policy: dict[str, Any] = {"mp_policy": flatfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        policy |= {"offload_policy": flatfsdp.CPUOffloadPolicy()} if offload else {}
        for block in net.blocks:  # type: ignore[union-attr]
            flatfsdp.fully_shard(block, **policy)
        return flatfsdp.fully_shard(net, **policy)
    mixed = flatfsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return flatfsdp.FullyShardedDataParallel(
        net, None, None, offload, auto_wrap_policy={Block}, use_orig_params=front == "orig", mixed_precision=mixed
    )


def loss(model: Any) -> Tensor:
    found: Tensor = model(torch.ones(1, ROWS, WIDTH, dtype=torch.bfloat16)).float().mean()
    return found


def made(front: str = "flat", *, again: bool = False, offload: bool = False) -> Any:
    with torch.device("meta"):
        net = Net(again=again)
    return wrapped(front, net, offload=offload)


@cache
def planned(front: str, *, again: bool = False, offload: bool = False) -> flatfsdp.Plan:
    with flatfsdp.dry_run(8, accelerator=True):
        model = made(front, again=again, offload=offload)
        return flatfsdp.memory_plan(model, torch.optim.AdamW(model.parameters()), loss=loss)


@pytest.mark.parametrize("front", ["flat", "orig", "fully_shard"])
def test_what_is_reserved_contains_what_is_in_use_with_activations(front: str) -> None:
    plan = planned(front)
    assert plan.in_use is not None and plan.reserved is not None
    held = plan.between_steps + BLOCKS * 5 * INPUT  # of each block: input to the norm, its output, two of four times it
    assert held < plan.in_use < plan.reserved < 1.3 * plan.in_use


def test_checkpointed_blocks_need_less() -> None:
    usual, again = planned("flat"), planned("flat", again=True)
    assert usual.in_use is not None and again.in_use is not None
    assert usual.in_use - again.in_use > (BLOCKS - 2) * 8 * INPUT


@pytest.mark.parametrize("front", ["flat", "orig", "fully_shard"])
def test_what_is_offloaded_takes_nothing_of_the_accelerator(front: str) -> None:
    """Shards, optimizer states and, in the step's peak after most of the backward, gradients."""
    usual, offloaded = planned(front), planned(front, offload=True)
    assert usual.in_use is not None and offloaded.in_use is not None
    saved = usual.in_use - offloaded.in_use
    assert usual.between_steps <= saved + MIB <= usual.between_steps + usual.grads + 2 * MIB


def test_a_loss_that_reads_values_is_reported() -> None:
    with flatfsdp.dry_run(8, accelerator=True), pytest.raises(UsageError, match=r"loss= fails .* without loss="):
        flatfsdp.memory_plan(made(), loss=lambda model: loss(model) * loss(model).item())


def test_a_plan_without_a_loss_knows_no_activations() -> None:
    with flatfsdp.dry_run(8, accelerator=True):
        plan = flatfsdp.memory_plan(made())
    assert (plan.in_use, plan.reserved, plan.needed) == (None, None, plan.peak)


def test_a_loss_needs_an_accelerator() -> None:
    with flatfsdp.dry_run(8), pytest.raises(ConfigValueError, match="accelerator=True"):
        flatfsdp.memory_plan(made(), loss=loss)


@pytest.mark.parametrize(("again", "inner"), [(False, 9), (True, 0)])
def test_activations_show_what_checkpointing_would_save_and_cost(*, again: bool, inner: int) -> None:
    with flatfsdp.dry_run(8, accelerator=True, activations=True) as found:
        assert found is not None
        loss(made(again=again)).backward()
    block = next(each for each in found.modules if each.module == "Block")
    assert (block.first, block.count) == ("blocks.0", BLOCKS)
    assert block.operations == BLOCKS * 2 * 2 * ROWS * WIDTH * 4 * WIDTH
    assert block.saves // INPUT == (BLOCKS - 1) * inner
    assert "Block" in str(found) and f"{block.share:.1%} of the forward" in str(found)


def test_advice_compares_what_is_reserved() -> None:
    with torch.device("meta"):
        net = Net()
    optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters())  # noqa: E731
    advice = flatfsdp.advise(
        net, ranks=8, optimizer=optimizer, units={"blocks": {Block}}, layouts={"flat": "flat"}, loss=loss
    )
    assert "reserved" in str(advice) and "with activations" in str(advice)
    assert advice.recommended.plan.needed == advice.recommended.plan.reserved
