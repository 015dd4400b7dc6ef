"""torch's clip_grad_norm_ for shards: next to other models, in graphs, and where torch hides them from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.base import _torch
from flatfsdp.engine.features.clip import serve_torchs_norms
from flatfsdp.engine.models import param_registry
from flatfsdp.errors import FlatFSDPWarning
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


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
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finally:
            gc.enable()
    assert float(norm) > 0


def test_a_torch_that_wraps_it_in_another_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args, **kwargs: None)
    with pytest.raises(AttributeError):
        _torch.implementation_of(nn.utils.clip_grad_norm_)
    with pytest.warns(
        FlatFSDPWarning, match=r"cannot be made to see the shards of other ranks.* Call model\.clip_grad"
    ):
        serve_torchs_norms.__wrapped__()


def test_compiled_code_clips_other_parameters() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Linear(2, 2))  # from here on torch's function looks for shards
        clips = torch.compile(lambda given: nn.utils.clip_grad_norm_(given, 1.0), backend="eager")
        parameter = nn.Parameter(torch.zeros(4))
        for _ in range(2):
            parameter.grad = torch.ones(4)
            assert float(clips([parameter])) == 2.0
            assert torch.allclose(parameter.grad, torch.full((4,), 0.5))
        assert model.module is not None, "it was alive"


@pytest.mark.parametrize("before", [False, True])
def test_compiled_code_clips_shards(before: bool) -> None:
    """`before`: code that was compiled while no model was alive."""
    clips = torch.compile(lambda given: nn.utils.clip_grad_norm_(given, 1.0), backend="eager")
    with fake_world(1):
        if before:
            FullyShardedDataParallel(nn.Linear(2, 2))
            parameter = nn.Parameter(torch.zeros(4))
            parameter.grad = torch.ones(4)
            clips([parameter])
        model = FullyShardedDataParallel(nn.Linear(4, 1, bias=False), use_orig_params=True)
        model(torch.ones(1, 4)).sum().backward()
        assert float(clips(list(model.parameters()))) == 2.0
        (weight,) = model.parameters()
        assert weight.grad is not None and torch.allclose(weight.grad, torch.full((1, 4), 0.5))
