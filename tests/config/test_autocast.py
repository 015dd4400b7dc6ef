"""`torch.autocast` around a wrapped model: its cache of cast weights is independent of sharding and of
optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run
from tests.harness.models import WIDTH, Feedforward

pytestmark = pytest.mark.distributed


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Feedforward(WIDTH, 22), Feedforward(WIDTH, 22))


def _losses(model: nn.Module, between: Callable[[], None]) -> list[Tensor]:
    """An evaluation and a step, three times, all inside one context; `between` runs before each forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for step in range(3):
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            between()
            with torch.no_grad():
                losses.append(model(batch).float().square().mean())
            between()
            loss = model(batch).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _train(rank: int, world: int, orig: bool) -> tuple[list[Tensor], list[Tensor]]:
    wrapped = FullyShardedDataParallel(_model(), auto_wrap_policy={Feedforward}, use_orig_params=orig)
    # One process has to clear the cache itself, else it trains on the weights of the first forward.
    return _losses(wrapped, lambda: None), _losses(_model(), torch.clear_autocast_cache)


@pytest.mark.parametrize("orig", [False, True])
def test_a_context_over_several_steps_sees_each_steps_weights(run: Run, orig: bool) -> None:
    for found, expected in run(2, _train, orig):
        assert torch.stack(found).equal(torch.stack(expected)), (found, expected)
        # An evaluation and its step see the same weights, steps do not.
        assert len({float(loss) for loss in found}) == 3
