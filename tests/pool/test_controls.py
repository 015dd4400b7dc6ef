"""Training is the same under every schedule; and ranks that set different ones are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.errors import AgreementError
from tests.conftest import Run
from tests.harness.models import Feedforward
from tests.pool.corners import ALL, HYBRID, Net, Setting, data, differences, joined, loss_of, seeded


def say(model: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method that plain models lack."""
    if isinstance(model, FullyShardedDataParallel):
        getattr(model, method)(*args, **kwargs)


def microbatch(model: Any, rank: int, step: int, micro: int) -> torch.Tensor:
    loss = loss_of(model(data(rank, step, micro)))
    loss.backward()
    return loss.detach()


def accumulate(model: Any, rank: int, step: int, *, keep: bool, sync: str, parts: bool) -> list[torch.Tensor]:
    """Microbatches, reduced where `sync` has an s; in `parts`, only some units do without."""
    losses = []
    for micro, kind in enumerate(sync):
        last = micro == len(sync) - 1
        if keep:
            say(model, "set_reshard_after_backward", last)
        say(model.blocks[1] if parts else model, "set_requires_gradient_sync", kind == "s")
        losses.append(microbatch(model, rank, step, micro))
    return losses


def accumulated(rank: int, world: int, keep: bool, sync: str, parts: bool, under: tuple[Setting, ...]) -> list[str]:
    program = partial(accumulate, keep=keep, sync=sync, parts=parts)
    return differences(rank, world, Net, program, under=under, steps=3, bound=2e-6)


@pytest.mark.parametrize("parts", [False, True], ids=["all", "parts"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("sync", ["nns", "sns", "ss"])
def test_accumulation(keep: bool, sync: str, parts: bool, pool2: Run) -> None:
    assert not joined(pool2(accumulated, keep, sync, parts, ALL, timeout=40))


def test_accumulation_under_hybrids(pool4: Run) -> None:
    assert not joined(pool4(accumulated, True, "nns", True, HYBRID, timeout=40))


def kept_for_evaluation(model: Any, rank: int, step: int, *, root: bool) -> list[torch.Tensor]:
    """Evaluations between training steps, without a gather each; the root resharded or not."""
    say(model, "set_reshard_after_forward", False)
    with torch.no_grad():
        evaluated = [model(data(rank, step, micro)) for micro in range(2)]
    say(model, "set_reshard_after_forward", True)
    say(model, "set_reshard_after_forward", root, recurse=False)
    return [*evaluated, microbatch(model, rank, step, 0)]


def evaluations(rank: int, world: int, root: bool, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, partial(kept_for_evaluation, root=root), under=under, steps=3)


@pytest.mark.parametrize("root", [False, True])
def test_evaluations_between_steps(root: bool, pool2: Run) -> None:
    assert not joined(pool2(evaluations, root, ALL, timeout=40))


def tiny() -> nn.Module:
    """Units with fewer elements than ranks: on most ranks an optimizer has nothing of them to write."""
    return nn.Sequential(nn.Linear(13, 1), nn.LayerNorm(1), nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 2))


def kept_for_good(rank: int, world: int) -> list[torch.Tensor]:
    """Losses where nothing is ever resharded after a backward."""
    model = Setting().wrap(seeded(tiny), (nn.LayerNorm,))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = loss_of(model(torch.ones(2, 13)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_what_is_kept_follows_an_optimizer_that_writes_on_some_ranks_only(pool3: Run) -> None:
    plain = seeded(tiny)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    expected = []
    for _ in range(4):
        loss = loss_of(plain(torch.ones(2, 13)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for losses in pool3(kept_for_good):
        torch.testing.assert_close(losses, expected)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def embedded(rank: int, world: int) -> list[str]:
    def program(model: Any, rank: int, step: int) -> torch.Tensor:
        say(model.embedding, "set_unshard_in_backward", False)
        loss = loss_of(model(torch.arange(5) + rank))
        loss.backward()
        return loss.detach()

    return differences(rank, world, Embedded, program, units=(nn.Embedding,))


def test_an_embedding_needs_no_gather_in_backward(pool2: Run) -> None:
    assert not joined(pool2(embedded, timeout=40))


def listed(model: Any, rank: int, step: int) -> list[torch.Tensor]:
    """Units gathered ahead by lists that change from step to step: good ones, and ones that miss."""
    blocks = model.blocks
    say(blocks[0], "set_modules_to_forward_prefetch", [blocks[1 + step % 2], blocks[2]])
    say(blocks[2], "set_modules_to_forward_prefetch", [blocks[0]] * (step % 2))
    say(blocks[2], "set_modules_to_backward_prefetch", [blocks[0], blocks[1]][step % 2 :])
    say(blocks[0], "set_modules_to_backward_prefetch", [blocks[2]])
    return [microbatch(model, rank, step, 0)]


def lists(rank: int, world: int, under: tuple[Setting, ...]) -> list[str]:
    return differences(rank, world, Net, listed, under=under, steps=3)


def test_lists_of_what_is_gathered_ahead(pool2: Run) -> None:
    assert not joined(pool2(lists, ALL, timeout=40))


def listing_differently(rank: int, world: int) -> str:
    model = Setting().wrap(seeded(Net), (Feedforward,))
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1 + rank]])
    with pytest.raises(AgreementError) as caught:
        microbatch(model, rank, 0, 0)
    return str(caught.value)


def test_ranks_that_list_different_units_are_told(pool2: Run) -> None:
    for said in pool2(listing_differently, timeout=40):
        assert "in unit 'blocks.0', schedule: rank 0: prefetch in forward of 'blocks.1'; rank 1: " in said


DIFFERENT = {
    "set_requires_gradient_sync": "reduce=False in all units",
    "set_reshard_after_forward": "reshard_after_forward=False in all units",
    "set_reshard_after_backward": "reshard_after_backward=False in all units",
}


def differing(rank: int, world: int, method: str, early: bool) -> str:
    """The ranks' settings differ, and differ from what each did before: all notice by themselves."""
    model = Setting().wrap(seeded(Net), (Feedforward,))
    if not early:
        microbatch(model, rank, 0, 0)
        model.set_unshard_in_backward(rank == 0)
    getattr(model, method)(rank == 1)
    with pytest.raises(AgreementError) as caught:
        microbatch(model, rank, 1, 0)
    return str(caught.value)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("method", DIFFERENT)
def test_ranks_that_set_different_schedules_are_told(method: str, early: bool, pool2: Run) -> None:
    for said in pool2(differing, method, early, timeout=40):
        assert "rank 0" in said and "rank 1" in said
        assert (DIFFERENT[method].removesuffix(" in all units") if early else DIFFERENT[method]) in said
