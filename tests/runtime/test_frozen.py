"""The time at which units with frozen parameters are freed in a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfsdp
from flatfsdp import FullyShardedDataParallel as FSDP
from tests.harness import inspect
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class WithLeaf(nn.Module):
    """Its frozen part passes gradients on to a leaf that the forward makes, as `enable_input_require_grads()` does."""

    def __init__(self, makes_leaf: bool, trained: bool, recompute: bool) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(trained)
        self.makes_leaf, self.recompute = makes_leaf, recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x.clone().requires_grad_(self.makes_leaf)).tanh()
        return checkpoint(self.head, x, use_reentrant=True) if self.recompute else self.head(x)  # type: ignore[no-any-return]


def wrapped(module: nn.Module, front: str) -> Any:
    return FSDP(module) if front == "wrapper" else flatfsdp.fully_shard(module, reshard_after_forward=True)


# The frozen part is read when the gradients of the others have come, or a reentrant checkpoint has.
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
@pytest.mark.parametrize(("trained", "recompute"), [(True, False), (True, True), (False, True)])
def test_they_stay_for_the_gradient_of_a_leaf_inside(trained: bool, recompute: bool, front: str) -> None:
    with fake_world(2):
        model = wrapped(WithLeaf(True, trained, recompute), front)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        assert not inspect.memory(model).live.get("unsharded")


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_without_one_they_are_freed_before_the_reduction(front: str) -> None:
    with fake_world(2):
        model = wrapped(WithLeaf(False, True, False), front)
        with inspect.events(model).listening() as seen:
            model(torch.ones(2, 4)).sum().backward()
        kinds = [event.kind for event in seen]
        assert kinds.index("grads") < kinds.index("reshard", kinds.index("grads")) < kinds.index("reduce")
