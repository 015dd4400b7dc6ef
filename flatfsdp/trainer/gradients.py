"""The gradients of one step, and the loss of an evaluation.

[Note: loss weights] A step's loss is the sum of all its tokens' losses divided by their number, over all ranks and
microbatches, however they are spread; the objective decides what counts as a token. The number comes with the samples,
so gradients are those of that mean without being scaled afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import FullyShardedDataParallel, collective_region
from flatfsdp.trainer.data_loading import Microbatch, Step
from flatfsdp.trainer.launch import RankContext
from flatfsdp.trainer.objectives import Objective, evaluating
from flatfsdp.trainer.preemption import StopRequest


def weight_of(microbatch: Microbatch, objective: Objective) -> int:
    """What `microbatch` counts; 0 for a stand-in, which a rank runs because the others run something."""
    return int(objective.weight(microbatch.inputs)) if microbatch.ids else 0


def loss_of(
    microbatch: Microbatch, objective: Objective, model: FullyShardedDataParallel, world: RankContext
) -> Tensor:
    """The sum of its losses, fp32; 0 of a stand-in, with gradients of 0."""
    loss = objective.loss(model, on_device(microbatch.inputs, world.device))
    return loss if microbatch.ids else loss * 0.0


def add_gradients(
    model: FullyShardedDataParallel,
    step: Step,
    objective: Objective,
    *,
    world: RankContext,
    scale: Callable[[Tensor], Tensor],
) -> Tensor:
    """Forward and backward of a step's microbatches, all but the last under `no_sync`. Collective.

    Args:
        scale: applied to each loss before its backward; a gradient scaler's.

    Returns:
        The sum of this rank's losses, an fp64 scalar on the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    # The engine averages gradients over ranks; this is a mean over tokens.
    share = world.size / max(step.weight, 1)
    for number, microbatch in enumerate(step.microbatches, 1):
        with nullcontext() if number == len(step.microbatches) else model.no_sync():
            loss = loss_of(microbatch, objective, model, world)
            scale(loss * share).backward()
            total += loss.detach()
    return total


def on_device(inputs: Any, device: torch.device) -> Any:
    """`inputs` with all tensors in dicts, lists and tuples on `device`; of other things with a method `to`, too."""
    if isinstance(inputs, Mapping):
        return {key: on_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(on_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(on_device(value, device) for value in inputs)
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    return inputs.to(device) if callable(getattr(inputs, "to", None)) else inputs


def evaluate(
    model: FullyShardedDataParallel,
    batches: Iterable[Microbatch],
    objective: Objective,
    *,
    world: RankContext,
    stop: StopRequest,
) -> tuple[dict[str, float], int]:
    """Mean loss over the tokens of all ranks' `batches`, equally many on each, and the number of these tokens.

    Collective; the same on all ranks. Its modules are left in the modes, training or not, that they were in.

    Returns:
        The two, and 0; or nothing, and who asked some rank to stop meanwhile ([Note: stopping]).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    asked: Callable[[], int] | None = None
    with evaluating(model), torch.no_grad():
        for microbatch in batches:
            if asked is not None and (stopped_by := asked()):
                return {}, stopped_by
            asked = _asked_by_anyone(stop, world)
            sums[0] += loss_of(microbatch, objective, model, world)
            sums[1] += weight_of(microbatch, objective)
    with collective_region():
        dist.all_reduce(sums)
    loss, weight = sums.tolist()
    return {"eval_loss": loss / max(weight, 1.0), "eval_tokens": int(weight)}, 0


def _asked_by_anyone(stop: StopRequest, world: RankContext) -> Callable[[], int]:
    """Sends whether this rank was asked to stop, which goes to all while the next forward runs; what reads the highest
    number of a request, or 0."""
    most = torch.tensor(float(stop.number), device=world.device)
    work = dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)

    def arrived() -> int:
        if work is not None:
            with collective_region():
                work.wait()
        return int(most)

    return arrived
