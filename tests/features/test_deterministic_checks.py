"""What deterministic sums refuse of a model and its environment, and compare of it, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flatfsdp
from flatfsdp import FullyShardedDataParallel
from flatfsdp.engine.features.deterministic_sums import DeterministicSums
from flatfsdp.engine.models.rest import outermost_model
from flatfsdp.errors import UsageError
from tests.harness.fake import fake_world

pytestmark = pytest.mark.single_process


class Averaging(nn.Module):
    """Keeps a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


class Replacing(Averaging):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0)
        y: Tensor = self.layer(x)
        return y - self.mean


class Caching(Averaging):
    """Fills a buffer in the first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.any():
            self.mean = torch.ones(5)
        y: Tensor = self.layer(x)
        return y - self.mean


def wrapped(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(net, use_orig_params=True, deterministic_sums=True, **options)


def trained(model: nn.Module, count: int) -> None:
    for index in range(count):
        with flatfsdp.microbatch(index, of=count):
            model(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Averaging, "mean"),
        (Replacing, "mean"),
        (lambda: parametrizations.spectral_norm(nn.Linear(5, 5)), r"parametrizations.weight.0._u, .*_v"),
    ],
)
def test_a_forward_that_writes_to_buffers_is_refused(build: Any, name: str) -> None:
    with fake_world(1):
        trained(wrapped(build()), 1)  # looked at in the second forward: the first may fill caches
        with pytest.raises(UsageError, match=rf"a forward writes to buffers \({name}\), which then follow from the m"):
            trained(wrapped(build()), 2)


def test_caches_and_writes_between_steps_are_permitted() -> None:
    with fake_world(1):
        net = Caching()
        model = wrapped(net)
        trained(model, 1)
        net.mean.add_(1)
        trained(model, 3)


def test_trained_parameters_outside_of_units_are_refused() -> None:
    with fake_world(1):
        net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        model = wrapped(net, ignored_states=[net[1].weight, net[1].bias])
        with pytest.raises(UsageError, match=r"no unit holds 1.weight, 1.bias, which are trained"):
            trained(model, 1)
        for frozen in (net[1].weight, net[1].bias):
            frozen.requires_grad_(False)
        trained(wrapped(nn.Sequential(nn.Linear(5, 5), net[1]), ignored_states=[net[1].weight, net[1].bias]), 2)


def test_ranks_compare_processors_and_switches_of_kernels() -> None:
    with fake_world(1):
        model = wrapped(nn.Linear(5, 5))
        found = outermost_model(model, "").observers.find(DeterministicSums)
        assert found is not None
        before = found.description
        models = {
            line.split(": ", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        }
        assert not models or any(each in before for each in models)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", False)
            assert found.description == f"{before}, no mkldnn"
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            assert found.description == f"{before}, cudnn.benchmark, cudnn.deterministic"
