"""Edits of `.grad` after a backward under no_sync, also of its `.data`: other than to drop it they are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.errors import UsageError
from tests.conftest import Run
from tests.harness.three_fronts import FRONTS, sharded

pytestmark = pytest.mark.distributed

Edit = Callable[[Any], object]

EDITS: dict[str, Edit] = {
    "in place": lambda grad: grad.mul_(0.5),
    "data in place": lambda grad: grad.data.mul_(0.5),
    "new data": lambda grad: setattr(grad, "data", grad.data * 0.5),
    "detached": lambda grad: grad.detach().mul_(0.5),
}
DROPS: dict[str, Edit] = {
    "in place": lambda grad: grad.zero_(),
    "data in place": lambda grad: grad.data.zero_(),
    "new data": lambda grad: setattr(grad, "data", grad.data * 0),
}
LOOKS: dict[str, Edit] = {
    "the same data": lambda grad: setattr(grad, "data", grad.data),
    "copies": lambda grad: (copy.deepcopy(grad), pickle.dumps(grad), repr(grad), grad.data.norm()),
}


def gradients_after(front: str, options: dict[str, Any], rank: int, edit: Edit | None, *, window: bool) -> list[Any]:
    """This rank's gradients after two microbatches, the first of which is without synchronization; or of the second."""
    torch.manual_seed(0)
    model: Any = sharded(front, nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), **options)
    for sync in (False, True) if window else (True,):
        model.set_requires_gradient_sync(sync)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank + 10 * sync))
        model(x).square().mean().backward()
        if edit is not None and not sync:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    edit(parameter.grad)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert not any("InWindow" in type(each).__name__ for each in grads)
    return [each.to_local() if hasattr(each, "to_local") else each for each in grads]


def unnoticed(rank: int, world: int, front: str, options: dict[str, Any]) -> list[str]:
    """The edits that have another effect than they should."""
    found = []
    for name, edit in EDITS.items():
        try:
            gradients_after(front, options, rank, edit, window=True)
            found.append(f"edit: {name}")
        except UsageError as error:
            found += [] if "was edited after a backward under no_sync()" in str(error) else [str(error)]
    for window, edits in ((False, DROPS), (True, LOOKS)):
        expected = gradients_after(front, options, rank, None, window=window)
        for name, edit in edits.items():
            grads = gradients_after(front, options, rank, edit, window=True)
            if len(grads) != len(expected) or not all(map(torch.equal, grads, expected)):
                found.append(f"{'a look' if window else 'a drop'}: {name}")
    return found


CASES = [*((front, {}) for front in FRONTS), *((front, {"sharding_strategy": "NO_SHARD"}) for front in FRONTS[:2])]


@pytest.mark.parametrize(("front", "options"), CASES)
def test_edits_of_unreduced_gradients(front: str, options: dict[str, Any], pool2: Run) -> None:
    assert pool2(unnoticed, front, options) == [[], []]
