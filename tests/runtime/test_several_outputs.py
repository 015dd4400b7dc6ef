"""Units with frozen parameters that return several tensors, of which the ranks' losses use different ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FullyShardedDataParallel
from tests.conftest import Run

pytestmark = pytest.mark.distributed

WIDTH = 6


Uses = tuple[list[int], ...]


class Linear(nn.Linear):
    """A unit."""


class Passing(nn.Module):
    """A frozen unit that also returns its input: an output that is reached when its own backward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.frozen(x), x


class Outlasting(nn.Module):
    """A unit with an output that reads frozen parameters and that the input has no part in: where that is a leaf, its
    gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.inner = Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = self.frozen(self.inner(torch.ones_like(x)))
        return self.frozen(x), own


class Viewed(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :]


class Written(nn.Module):
    """Writes to a view that a unit returned: autograd derives that from its base again, past hooks on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Viewed(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        y += 1
        return y, x


class Net(nn.Module):
    """One of them between trained units, or in front."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Identity() if kind is Outlasting else Linear(WIDTH, WIDTH)
        self.several = kind()
        self.last = Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, beside = self.several(self.first(x))
        return self.last(y), beside


def _train(rank: int, world: int, kind: Callable[[], nn.Module], uses: Uses, strategy: str) -> bool:
    """Whether ranks train like one process. `uses`: by rank, which outputs its loss uses."""

    def loss(net: nn.Module, of: int) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(of)).requires_grad_()
        outputs = net(x)
        return torch.stack([outputs[i].square().mean() for i in uses[of]]).sum()

    model = FullyShardedDataParallel(
        Net(kind), auto_wrap_policy={Linear, kind}, sharding_strategy=strategy, join_units_below=0
    )
    alone = Net(kind)
    optimizer, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
    for _ in range(3):
        loss(model, rank).backward()
        for of in range(world):
            (loss(alone, of) / world).backward()
        for each in optimizer, plain:
            each.step()
            each.zero_grad()
    found, expected = model.state_dict(), alone.state_dict()
    return all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("kind", "uses"), [(Passing, ([0], [1])), (Outlasting, ([0, 1], [0]))])
def test_a_frozen_unit_is_gathered_once_whatever_a_loss_uses(
    kind: Callable[[], nn.Module], uses: Uses, strategy: str, pool2: Run
) -> None:
    assert all(pool2(_train, kind, uses, strategy))


@pytest.mark.parametrize("uses", [([0], [0]), ([0, 1], [0])])
def test_a_view_that_a_unit_returned_may_be_written_to(uses: Uses, pool2: Run) -> None:
    assert all(pool2(_train, Written, uses, "FULL_SHARD"))
