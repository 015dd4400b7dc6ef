"""The forecast, in a process that builds no model, of the memory and the communication of a run's ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.arguments import FSDPArguments, Task, TrainingArguments
from flatfsdp.trainer.memory_estimate import forecast, on_meta
from flatfsdp.trainer.model.fronts import without_reductions
from flatfsdp.trainer.model.sharding import shard
from flatfsdp.trainer.optimizers import make_optimizer
from tests.conftest import Run
from tests.harness.models import Feedforward, Transformer
from tests.harness.thorough import some

pytestmark = pytest.mark.distributed


def mlp() -> nn.Module:
    return nn.Sequential(*(Feedforward(96, 1500) for _ in range(4)), nn.Linear(96, 5))


def tied() -> nn.Module:
    return Transformer(tied=True, depth=3)


def many() -> nn.Module:
    return nn.Sequential(*(Feedforward(16, 19) for _ in range(12)), nn.LayerNorm(16))


@dataclass(frozen=True)
class Job:
    """A model, a batch, and the arguments of a run."""

    model: Callable[[], nn.Module]
    world: int
    fsdp: dict[str, Any]
    training: dict[str, Any]

    def batch(self) -> Tensor:
        if self.model is tied:
            return torch.randint(Transformer.vocabulary, (2, Transformer.length))
        return torch.randn(2, 96 if self.model is mlp else 16)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"fsdp": FSDPArguments(**self.fsdp), "training": TrainingArguments(device="cpu", **self.training)}


def lived(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Three steps of a run; figures of the last, under the names of a forecast."""
    fsdp, training = job.arguments["fsdp"], job.arguments["training"]
    torch.manual_seed(0)
    model = shard(job.model(), fsdp, device=torch.device("cpu"))
    optimizer = make_optimizer(model, training)
    figures = flatfsdp.stats(model)
    for _ in range(3):
        figures.reset()
        for place in reversed(range(training.accumulate)):
            with without_reductions(model) if place else nullcontext():
                model(job.batch()).float().square().mean().backward()
        if training.clip is not None:
            model.clip_grad_norm_(training.clip)
        found = {
            "grads": figures.bytes_grads,
            "unsharded_peak": figures.bytes_unsharded_peak,
            "at_peak": figures.bytes_at_peak,
            "comm": figures.comm,
            "residuals": figures.bytes_residuals,
        }
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, int] = {}
    for values in optimizer.state.values():
        for name, value in values.items():
            state[name] = state.get(name, 0) + getattr(value, "_local_tensor", value).nbytes
    return found | {"params": figures.bytes_params, "optimizer": state, "units": figures.units}


BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
JOBS = [
    Job(mlp, 1, {}, {"accumulate": 2}),
    Job(tied, 1, BF16, {}),
    Job(many, 1, {"use_orig_params": False}, {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}),
    Job(mlp, 2, BF16, {"accumulate": 2, "clip": 1.0}),
    Job(tied, 2, {"strategy": "shard_grad_op", "activation_checkpointing": True}, {}),
    Job(tied, 2, {"front": "fully_shard", "activation_checkpointing": True} | BF16, {"accumulate": 2, "clip": 1.0}),
    Job(many, 2, {"front": "fully_shard", "cpu_offload": True}, {}),
    Job(many, 2, {"forward_prefetch": True}, {"accumulate": 2}),
    Job(mlp, 2, {"gather_dtype": "int8", "reduce_bits": 4} | BF16, {}),
    Job(many, 2, {"gather_dtype": "fp8", "reduce_bits": 8, "use_orig_params": False}, {"accumulate": 2}),
    Job(many, 4, {"strategy": "hybrid_shard", "replicas": 2, "reduce_bits": 4, "reduce_error_feedback": True}, {}),
    Job(mlp, 2, {"reduce_bits": 8, "reduce_error_feedback": True}, {"optimizer_in_backward": True}),
    Job(mlp, 4, {"strategy": "hybrid_shard", "replicas": 2, "activation_checkpointing": True}, {"accumulate": 2}),
    Job(tied, 4, {"use_orig_params": False}, {"optimizer": "sgd", "clip": 0.1}),
    Job(many, 4, {"strategy": "hybrid_shard_zero2", "replicas": 2} | BF16, {"optimizer_in_backward": True}),
]


# `inspection/test_plan.py` tests the plan for ranks; here, that a run's arguments reach it.
@pytest.mark.parametrize("job", some(JOBS, 2), ids=lambda job: f"{job.model.__name__}-{job.world}")
def test_a_forecast_comes_true(run: Run, job: Job) -> None:
    foretold = forecast(job.model, ranks=job.world, **job.arguments).plan
    found = run(job.world, lived, job)[0]
    units = found.pop("units")
    assert {name: getattr(foretold, name) for name in found} == found
    assert len(foretold.units) == units


class ByValue(nn.Module):
    """Whose forward depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.square().mean() if y.sum() > 0 else y.mean()


def test_activations_that_depend_on_values_are_left_out_with_the_reason() -> None:
    task = Task(model=ByValue, train_data=[torch.ones(4) for _ in range(8)])
    arguments: dict[str, Any] = {"fsdp": FSDPArguments(units="none"), "training": TrainingArguments(device="cuda")}
    found = forecast(ByValue, ranks=8, task=task, **arguments)
    assert found.plan == forecast(ByValue, ranks=8, **arguments).plan
    assert "activations: memory_plan(): the forward or backward of loss= fails on tensors" in found.render()


def test_a_model_that_is_there_is_foretold_without_a_change() -> None:
    model = tied()
    arguments: dict[str, Any] = {"fsdp": FSDPArguments(), "training": TrainingArguments(device="cpu"), "ranks": 8}
    assert forecast(lambda: on_meta(model), **arguments) == forecast(tied, **arguments)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_forecast_refuses_what_the_run_refuses() -> None:
    """In a dry run, flat parameters have another class: Muon would be planned without any matrix."""
    arguments: dict[str, Any] = {"fsdp": FSDPArguments(use_orig_params=False)}
    arguments["training"] = TrainingArguments(device="cpu", optimizer="muon")
    with pytest.raises(ConfigValueError, match="muon steps on matrices, but the model has flat parameters"):
        forecast(mlp, ranks=2, **arguments)
