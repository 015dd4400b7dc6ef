"""What deterministic sums refuse of a model and its environment, and compare of it, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import flatfsdp
from flatfsdp import FullyShardedDataParallel, MixedPrecision, errors
from flatfsdp.engine.features.deterministic_sums import DeterministicSums
from flatfsdp.engine.models.rest import outermost_model
from flatfsdp.errors import FlatFSDPWarning, UsageError
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


class Normalizing(Averaging):
    """By a function that writes to buffers without counting it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.layer(x), self.mean, self.variance, training=True)


class Rolling(Averaging):
    """Replaces a buffer by the same values in another order."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.roll(self.mean, 1) if self.mean.any() else torch.arange(5.0)
        return self.layer(x) - self.mean  # type: ignore[no-any-return]


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
        (Normalizing, "mean, variance"),
        (Rolling, "mean"),
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


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)])
def test_norms_that_update_statistics_are_refused_before_they_do(norm: nn.Module) -> None:
    with fake_world(1), pytest.raises(UsageError, match="'1' updates statistics of the batches"):
        trained(wrapped(nn.Sequential(nn.Linear(5, 5), norm)), 1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of these kinds
@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.tensor(math.nan),
        lambda: torch.zeros(0),
        lambda: torch.ones(3, dtype=torch.bool),
    ],
    ids=["quantized", "sparse", "rows", "conjugate", "NaN", "empty", "bool"],
)
def test_buffers_of_any_kind_that_nobody_writes_to_are_permitted(build: Callable[[], Tensor]) -> None:
    with fake_world(1):
        net = nn.Sequential(nn.Linear(5, 5))
        net.register_buffer("held", build())
        trained(wrapped(net), 3)


def test_buffers_that_are_cast_for_forwards_are_permitted() -> None:
    with fake_world(1):
        net = Averaging()
        net.forward = lambda x: net.layer(x) - net.mean  # type: ignore[method-assign]
        precision = MixedPrecision(reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        trained(wrapped(net, mixed_precision=precision), 3)


def test_norms_that_only_read_their_statistics_are_permitted() -> None:
    with fake_world(1):
        trained(wrapped(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval())), 3)
        trained(wrapped(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, track_running_stats=False))), 3)


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
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(torch.backends.mkldnn, "enabled", False)
            assert found.description == f"{before}, mkldnn.enabled=False"
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            assert found.description == f"{before}, cudnn.benchmark=True, cudnn.deterministic=True"
        with sdpa_kernel(SDPBackend.MATH):
            assert "cuda.flash_sdp_enabled=False, cuda.mem_efficient_sdp_enabled=False" in found.description
        precisions = torch.backends.mkldnn.matmul
        try:  # that of CPUs only: to ask for that of all is an error then
            precisions.fp32_precision = "bf16"
            assert found.description == f"{before}, mkldnn.matmul.fp32_precision=bf16"
        finally:
            precisions.fp32_precision = "none"
        assert found.description == before


def test_a_switch_that_is_set_later_is_refused() -> None:
    with fake_world(1):
        model = wrapped(nn.Linear(5, 5))
        trained(model, 1)
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=True),
            pytest.raises(UsageError, match=r"cudnn.benchmark=True, and did so with torch .* in its first micro"),
        ):
            trained(model, 1)
        trained(model, 1)


def test_a_switch_may_be_set_for_all_forwards() -> None:
    """And not for their backwards, or for evaluations."""
    with fake_world(1):
        model = wrapped(nn.Linear(5, 5))
        with torch.no_grad():
            model(torch.ones(2, 5))
        for index in range(2):
            with flatfsdp.microbatch(index, of=2):
                with sdpa_kernel(SDPBackend.MATH):
                    out = model(torch.ones(2, 5))
                out.sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 5))


@pytest.mark.parametrize("how", ["inside", "in place", "around"])
def test_kernels_that_are_made_are_said_not_to_be_compared(how: str) -> None:
    net = nn.Sequential(nn.Linear(5, 5))
    if how == "inside":
        net[0] = torch.compile(net[0], backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        net[0].compile(backend="eager")
    with fake_world(1):
        model = wrapped(net)
        called: Any = torch.compile(model, backend="eager") if how == "around" else model
        with (
            patch.object(errors, "_warned", set()),
            pytest.warns(FlatFSDPWarning, match=r"torch.compile makes kernels of this model, which ranks do not comp"),
            flatfsdp.microbatch(0, of=1),
        ):
            called(torch.ones(2, 5)).sum().backward()
