"""torch's clip_grad_norm_ as `as_torch` replaces it, next to other models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.features.clip import clips_over_ranks
from flatfsdp.engine.runtime import param_registry
from tests.harness.fake import fake_world


def garbage() -> None:
    """A model in a cycle, which is there until it is collected."""
    model: Any = FullyShardedDataParallel(nn.Linear(2, 2))
    model.itself = [model]


class CollectedWhileAsked:
    """The live models, where a collection follows the last of them."""

    def __init__(self, roots: Any) -> None:
        self._roots = roots

    def __iter__(self) -> Iterator[Any]:
        yield from self._roots
        gc.collect()


def test_models_that_are_collected_meanwhile_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True)
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1.0)  # fake collectives may leave any value
        gc.disable()
        try:
            for _ in range(3):
                garbage()
            monkeypatch.setattr(param_registry, "models", CollectedWhileAsked(param_registry.models))
            norm = clips_over_ranks(torch.nn.utils.clip_grad_norm_)(model.parameters(), 1.0)
        finally:
            gc.enable()
    assert float(norm) > 0
