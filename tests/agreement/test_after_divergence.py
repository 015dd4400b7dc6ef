"""Programs that catch the error of ranks that diverged, and go on: values are never taken for those of something else.
[Note: parted streams]"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.runtime.backward import Backward
from flatfsdp.engine.schedule.backward_schedule import BackwardSchedule
from tests.agreement.test_agreement import Net, message_of, mixed_gathers, same, step, wrap
from tests.conftest import Run
from tests.harness import inspect

pytestmark = pytest.mark.distributed

SECONDS = 20.0  # that a rank may take to its error


@contextmanager
def one_more_gather(*, here: bool) -> Iterator[None]:
    """At its end a backward gathers the unit that it reached last once more, on ranks where `here` is true."""

    def ended(schedule: Any) -> list[Any]:
        return [*planned(schedule), ("ahead", (schedule.clock.sequence[-1],))]

    planned = BackwardSchedule.ended
    with patch.object(BackwardSchedule, "ended", ended if here else planned):
        yield


def values_of(model: FullyShardedDataParallel) -> list[torch.Tensor]:
    """The gradients of a step, and the whole parameters."""
    step(model)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [value.clone() for each in model.parameters() for value in (each, each.grad) if value is not None]


def new_net() -> nn.Module:
    torch.manual_seed(7)
    return Net()


def go_on(rank: int, world: int, with_other_model: str) -> tuple[str, str, float]:
    """Ranks diverge, the last one having gathered more; the errors of that, and of what they do afterwards."""
    other = wrap(new_net(), join_units_below=0)
    if with_other_model == "an old one":
        step(other)
    model = wrap(Net(), join_units_below=0)
    with one_more_gather(here=rank == world - 1):
        diverged = message_of(lambda: step(model))
    began = time.monotonic()
    again = message_of(lambda: values_of(other))
    for _ in range(2):
        assert "have diverged before" in message_of(lambda: values_of(wrap(new_net(), join_units_below=0)))
    return diverged, again, time.monotonic() - began


@pytest.mark.parametrize("with_other_model", ["an old one", "a new one"])
def test_ranks_that_issued_different_collectives_do_not_go_on_over_their_group(
    pool3: Run, with_other_model: str
) -> None:
    """One rank's first chunk was taken for what the others had issued before."""
    diverged, again, seconds = zip(*pool3(go_on, with_other_model), strict=True)
    assert same(diverged).startswith("ranks diverged at step 1: ranks 0, 1 gathered in its backward the units")
    assert max(seconds) < SECONDS
    if with_other_model == "an old one":
        assert again == diverged
    else:
        message = same(again)
        assert message.startswith("ranks that have diverged before have issued different collectives "), message
        assert ": ranks 0, 1: " in message and "; rank 2: " in message and " chunks up to byte " in message, message


def go_on_elsewhere(rank: int, world: int, gathers_more: bool) -> None:
    """Ranks diverge, and go on over a new group, or over the same one, if they have issued equally much."""
    expected = values_of(wrap(new_net()))
    fault = one_more_gather if gathers_more else mixed_gathers
    with fault(here=rank == world - 1):
        message_of(lambda: step(wrap(Net(), join_units_below=0)))
    group = dist.new_group() if gathers_more else None
    for _ in range(2):
        found = values_of(wrap(new_net(), process_group=group))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("gathers_more", [False, True])
def test_they_go_on_where_their_collectives_match(pool2: Run, gathers_more: bool) -> None:
    pool2(go_on_elsewhere, gathers_more)


def diverge_later(rank: int, world: int) -> None:
    expected = values_of(wrap(new_net()))
    model = wrap(Net(), join_units_below=0)
    for _ in range(2):
        step(model)
    with mixed_gathers(here=rank == 1):
        if rank == 0:  # what it did was expected: it waits for no other, and finds out in its next step
            step(model)
            while inspect.verdict_of(model)() is None:
                time.sleep(0.05)
        assert "gathered in its backward the units" in message_of(lambda: step(model))
    for _ in range(2):
        assert all(map(torch.equal, values_of(wrap(new_net())), expected))


def test_what_a_rank_issued_that_went_on_meets_nothing_else(pool2: Run) -> None:
    """The bitmap of gradients at the end of its backward met the next model's first comparison."""
    pool2(diverge_later)


def fail_before_the_bitmap(rank: int, world: int, strategy: str) -> str:
    model = wrap(Net(), join_units_below=0, sharding_strategy=strategy)
    for _ in range(2):
        step(model)
    if rank == 0:  # lacks no gradient: it does not wait for the bitmap
        step(model)
        while inspect.verdict_of(model)() is None:
            time.sleep(0.05)
    else:
        with patch.object(Backward, "_end_reductions", side_effect=ValueError("boom")), pytest.raises(ValueError):
            step(model)
    assert "abandoned its iteration in a backward" in message_of(lambda: step(model))
    return message_of(lambda: values_of(wrap(new_net())))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_bitmap_without_those_of_others_ends_what_goes_on_over_the_group(pool2: Run, strategy: str) -> None:
    """It met the next small collective of the others, whatever that was. Without shards, where a forward compares
    nothing, the next backward waited for it."""
    message = same(pool2(fail_before_the_bitmap, strategy))
    assert message.startswith("ranks that have diverged before have issued different collectives "), message
    more, fewer = map(int, re.findall(r"(\d+) bitmaps of gradients", message))
    assert more == fewer + 1
